"""Adapters for training frameworks, each by the seams that the framework documents.

A module imports its framework when it is imported itself, and says what to install if that is not
there. None of them is a dependency of cloudckpt.
"""
