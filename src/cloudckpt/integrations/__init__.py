"""Adapters for training frameworks, each using the extension points that the framework documents.

Importing a module of this package imports its framework; if that is not installed, it raises a
MissingDependencyError that names the package to install. cloudckpt depends on no framework.
"""
