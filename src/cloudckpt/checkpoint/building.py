"""Builds plain values, and instances of classes that the user allows, from unpickled stubs."""

from __future__ import annotations

import enum
import pathlib
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from cloudckpt.checkpoint.stubs import Stub, full_name

__all__ = ["Building", "DescriptionError", "UnknownNameError", "made_of"]

_SCALARS = frozenset((type(None), bool, int, float, str, bytes, bytearray, torch.Size, torch.dtype))


class DescriptionError(ValueError):
    """An unpickled description that is inconsistent; the message says why."""


class UnknownNameError(Exception):
    """A class that is neither known nor on the allow-list; the message is its name."""


def made_of(kind: Callable[..., Any], *kinds: type[Any]) -> Callable[..., Any]:
    """Wraps ``kind`` to raise ValueError unless all arguments are exactly of these classes."""

    def make(*arguments: Any) -> Any:
        if not all(type(argument) in kinds for argument in arguments):
            raise ValueError("unexpected types of arguments")
        return kind(*arguments)

    return make


def _bytes(text: str = "", encoding: str = "latin1") -> bytes:
    """Decodes bytes from Latin-1 text, as pickle protocols below 3 write them."""
    if type(text) is not str or encoding != "latin1":
        raise ValueError("bytes are not given as Latin-1 text")
    return text.encode("latin1")


def _bytearray(content: Any = b"", encoding: str = "latin1") -> bytearray:
    return bytearray(content if type(content) is bytes else _bytes(content, encoding))


def _layout(name: Any) -> torch.layout:
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise ValueError(f"{name!r} is not a tensor layout of torch")
    return found


_CALLS: Mapping[str, Callable[..., Any]] = {
    "_codecs.encode": _bytes,
    "builtins.bytearray": _bytearray,
    "builtins.bytes": lambda: b"",
    "builtins.complex": lambda real, imaginary: complex(float(real), float(imaginary)),
    "builtins.frozenset": made_of(frozenset, list, tuple),
    "builtins.set": made_of(set, list, tuple),
    "pathlib.Path": made_of(pathlib.Path, str),
    "pathlib.PosixPath": made_of(pathlib.Path, str),
    "pathlib.PurePosixPath": made_of(pathlib.PurePosixPath, str),
    "pathlib.PureWindowsPath": made_of(pathlib.PureWindowsPath, str),
    "pathlib.WindowsPath": made_of(pathlib.PureWindowsPath, str),
    "torch.serialization._get_layout": _layout,
}


class Building:
    """Builds values from stubs, in one walk; the stubs must be kept alive as long as this object.

    A stub that is referenced several times is built once. No attribute is set on an object that
    existed before.

    Args:
        allowed: The classes of the allow-list, by their full names.

    Attributes:
        deepest: How many levels of containers may be nested.
        calls: The functions that may be called, by their full names. Each takes only the arguments
            that pickle writes for its type, and raises ValueError or TypeError for others.
    """

    deepest: ClassVar[int] = 100
    calls: ClassVar[Mapping[str, Callable[..., Any]]] = _CALLS

    def __init__(self, allowed: Mapping[str, Any]) -> None:
        self.allowed = allowed
        self._depth = 0
        self._built: dict[int, Any] = {}  # by id of the stub or container

    def value(self, thing: Any) -> Any:
        """Returns the value of a stub, a container of stubs, or a scalar.

        Raises:
            UnknownNameError: If a class is neither known here nor allowed.
            DescriptionError: If the description is inconsistent.
        """
        if type(thing) in _SCALARS:
            return thing
        if isinstance(thing, type):
            name = full_name(thing.__module__, thing.__name__)
            return self.constant(thing.name if issubclass(thing, Stub) else name)
        if id(thing) not in self._built:
            if self._depth == self.deepest:
                raise DescriptionError(
                    f"invalid pickle: it is nested more than {self.deepest} levels deep"
                )
            self._depth += 1
            built = self._stub(thing) if isinstance(thing, Stub) else self._container(thing)
            self._depth -= 1
            self._built[id(thing)] = built
        return self._built[id(thing)]

    def instance(self, stub: Stub) -> Any:
        """Builds an instance of a class that a subclass of ``Building`` knows.

        Raises:
            UnknownNameError: If the subclass does not know the class.
        """
        raise UnknownNameError(stub.name)

    def constant(self, name: str) -> Any:
        """Returns an allowed class, or a member of an allowed enum, by its full name."""
        if name in self.allowed:
            return self.allowed[name]
        outer, _, member = name.rpartition(".")
        if isinstance(cls := self.allowed.get(outer), enum.EnumMeta):
            return cls[member]
        raise UnknownNameError(name)

    def _container(self, thing: Any) -> Any:
        if isinstance(thing, dict):
            built = self._built[id(thing)] = OrderedDict() if type(thing) is OrderedDict else {}
            built.update((self.value(key), self.value(value)) for key, value in thing.items())
            if isinstance(built, OrderedDict):  # such as _metadata of a state dict
                vars(built).update(self.value(vars(thing)))
            return built
        if type(thing) is list:
            entries = self._built[id(thing)] = list[Any]()
            entries += map(self.value, thing)
            return entries
        if type(thing) in (tuple, set, frozenset):
            return type(thing)(map(self.value, thing))
        raise DescriptionError(f"invalid pickle: unexpected {type(thing).__name__}")

    def _stub(self, stub: Stub) -> Any:
        if stub.name in self.allowed:
            return self._of_the_user(self.allowed[stub.name], stub)
        if not stub.is_call or stub.name not in self.calls:
            return self.instance(stub)
        if stub.state is not None or stub.contents or stub.keywords:
            raise DescriptionError(f"invalid pickle: unexpected contents or state of {stub.name}")
        try:
            return self.calls[stub.name](*map(self.value, stub.arguments))
        except (TypeError, ValueError, OverflowError) as exc:
            raise DescriptionError(f"invalid pickle: {stub.name} can't be called: {exc}") from exc

    def _of_the_user(self, cls: Any, stub: Stub) -> Any:
        """Builds an instance of an allowed class as pickle would."""
        arguments = list(map(self.value, stub.arguments))
        if stub.is_call:
            built = cls(*arguments)
        else:
            built = cls.__new__(cls, *arguments, **self.value(stub.keywords))
        contents = [self.value(entry) for entry in stub.contents]
        if contents and isinstance(built, dict):
            built.update(contents)
        elif contents:
            built.extend(contents)
        if stub.state is not None:
            if isinstance(built, (type, enum.Enum, types.ModuleType, types.FunctionType)):
                raise DescriptionError(
                    f"invalid pickle: it modifies {built}, which it has not created"
                )
            _restore(built, self.value(stub.state))
        return built


def _restore(built: Any, state: Any) -> None:
    """Sets an instance's state as pickle does; refuses attributes that begin with ``__``."""
    if hasattr(built, "__setstate__"):
        built.__setstate__(state)
        return
    fields, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    for name in (*(fields or ()), *(slots or ())):
        if type(name) is not str or name.startswith("__"):
            raise DescriptionError(
                f"invalid pickle: it sets the attribute {name!r} of a {type(built).__name__}"
            )
    if fields:
        vars(built).update(fields)
    for name, value in (slots or {}).items():
        setattr(built, name, value)
