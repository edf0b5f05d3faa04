"""What is expected of a framework, and what stands in it where it looks otherwise: refusals.

An unknown framework would make a local folder named ``s3:`` of a URI, report success, and be lost
with the machine. What of it is still known can't be trusted to be all. So whatever in its modules
may take a path refuses URIs by name then; paths go the framework's way.
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
"""In names of functions and parameters that may have to do with paths; texts and tensors are given
to others."""


class UnknownShapeError(Exception):
    """What was not found in a framework; its users hear of it when they give a URI."""


def function(owner: Any, path: str, *parameters: str) -> Callable[..., Any]:
    """A function of a module, or a method of a class, be it inherited.

    Args:
        owner: A module or a class.
        path: The name, behind the name of its class if ``owner`` is a module that has that.
        *parameters: What it has to take by name.

    Raises:
        UnknownShapeError: If there is none, or it takes no such parameters.
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
    """What stands in a module of an unknown framework, so that its functions refuse URIs.

    Args:
        module: The framework's.
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
    """Its public methods and its constructor, those included that a base in the package has; and
    likewise of the classes within it.
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
    """The function, with the framework and its version: known when that is all there."""
    package = original.__module__.partition(".")[0]
    version = getattr(sys.modules.get(package), "__version__", None)
    if version is None:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            version = "of an unknown version"
    return f"{original.__qualname__} of {package} {version}"
