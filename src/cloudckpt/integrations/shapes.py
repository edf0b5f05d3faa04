"""Checks a framework against the known versions; unknown versions are made to refuse URIs.

An unknown version would make a local folder named ``s3:`` of a URI, report success, and lose the
data with the machine. The parts still recognized may not be all of it. So every function in its
modules that may take a path then refuses URIs; paths are handled by the framework.
"""

from __future__ import annotations

import enum
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from types import FunctionType, ModuleType
from typing import Any

from cloudckpt.dcp.install import Change, our_uri
from cloudckpt.errors import InstallError
from cloudckpt.uri import CheckpointURI, text_of, unfolded

__all__ = ["UnknownShapeError", "function", "refusals"]

_OF_PATHS = re.compile(
    "path|dir|file|folder|ur[il]|location|destination|checkpoint|ckpt|save|load|write|store|dump"
    "|export",
    re.IGNORECASE,
)
"""Matches names of functions and parameters that may concern paths; others take texts and
tensors."""


class UnknownShapeError(Exception):
    """Something expected is missing from a framework; users see it when they pass a URI."""


def function(owner: Any, path: str, *parameters: str) -> Callable[..., Any]:
    """A function of a module, or a method of a class, inherited or not.

    Args:
        owner: A module or a class.
        path: The name, with its class before it if ``owner`` is the class's module.
        *parameters: Parameters that it must accept by name.

    Raises:
        UnknownShapeError: If it does not exist, or does not accept these parameters.
    """
    *outer, name = path.split(".")
    found = owner
    for part in outer:
        found = inspect.getattr_static(found, part, None)
    what = f"{getattr(owner, '__name__', owner)}.{path}"
    found = inspect.getattr_static(found, name, None)
    if not isinstance(found, FunctionType):
        raise UnknownShapeError(f"there is no {what}")
    missing = [one for one in parameters if one not in inspect.signature(found).parameters]
    if missing:
        raise UnknownShapeError(f"{what} has no parameter {missing[0]!r}")
    return found


def refusals(module: ModuleType, why: str) -> Iterator[Change]:
    """The changes that make the functions of an unknown framework's module refuse URIs.

    Args:
        module: The framework's module.
        why: What is unknown.
    """
    seen: set[type] = set()
    for name, value in list(vars(module).items()):
        if getattr(value, "__module__", None) != module.__name__:
            continue  # it is imported from elsewhere
        if isinstance(value, FunctionType):
            if _may_take_paths(value):
                yield module, name, _refusing(value, why)
        elif inspect.isclass(value):
            yield from _of_class(value, module.__name__.partition(".")[0], why, seen)


def _of_class(kind: type, package: str, why: str, seen: set[type]) -> Iterator[Change]:
    """Its constructor and public methods, including those inherited from a base in the package, and
    likewise for its nested classes.
    """
    if kind in seen or issubclass(kind, enum.Enum):
        return
    seen.add(kind)
    for name in dir(kind):
        value = inspect.getattr_static(kind, name, None)
        if str(getattr(value, "__module__", "")).partition(".")[0] != package:
            continue
        if isinstance(value, FunctionType):
            is_entrance = not name.startswith("_") or name in ("__init__", "__post_init__")
            if is_entrance and _may_take_paths(value):
                yield kind, name, _refusing(value, why)
        elif inspect.isclass(value) and value.__qualname__.endswith(f".{value.__name__}"):
            yield from _of_class(value, package, why, seen)


def _may_take_paths(value: FunctionType) -> bool:
    names = [value.__name__, *inspect.signature(value).parameters]
    return any(_OF_PATHS.search(name) for name in names)


def _refusing(original: Callable[..., Any], why: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        for given in (*args, *kwargs.values()):
            uri = _uri_in(given)
            if uri is not None:
                raise InstallError(
                    f"{_named(original)} is given no URIs, since it may make a local folder of "
                    f"them: cloudckpt does not know this version of it ({why}); give a local "
                    "path, call cloudckpt.save and load yourself, or install a version that "
                    "docs/frameworks.md names",
                    uri=uri,
                )
        return original(*args, **kwargs)

    return refusing


def _uri_in(given: object) -> str | None:
    if not isinstance(given, (str, os.PathLike, CheckpointURI)):
        return None
    text = text_of(given)
    return None if text is None else our_uri(text) or unfolded(text)


def _named(original: Callable[..., Any]) -> str:
    """The function's name, with the framework's name and version."""
    package = original.__module__.partition(".")[0]
    version = getattr(sys.modules.get(package), "__version__", None)
    if version is None:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            version = "of an unknown version"
    return f"{original.__qualname__} of {package} {version}"
