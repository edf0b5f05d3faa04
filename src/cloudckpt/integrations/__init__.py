"""Adapters for training frameworks, each using the extension points that the framework documents.

Importing the module of a framework imports that framework; if it is not installed, this raises a
MissingDependencyError that names the package to install. cloudckpt depends on no framework.
"""
