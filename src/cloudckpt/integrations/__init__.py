"""Adapters for training frameworks, each using the extension points that the framework documents.

Importing a module here imports its framework, or says what to install if that is missing. No
framework is a dependency of cloudckpt.
"""
