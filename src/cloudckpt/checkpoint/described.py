"""Builds plain values, and instances of classes that the user allows, from what a pickle describes.

Only constructors that are named are called, and nothing is set on an object that was there before.
What occurs several times is built once.
"""

from __future__ import annotations

import enum
import pathlib
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import torch

from cloudckpt.checkpoint.inert_pickle import NO_STATE, Called, Dict, Global, Set

__all__ = ["Building", "DescriptionError", "UnknownNameError", "made_of"]

T = TypeVar("T")

_SCALARS = frozenset((type(None), bool, int, float, str, bytes, bytearray, torch.Size))


class DescriptionError(ValueError):
    """What is described makes no sense; the text says why."""


class UnknownNameError(Exception):
    """What is described is of a class that is neither known nor allowed; the text is its name."""


def made_of(kind: Callable[..., Any], *kinds: type[Any]) -> Callable[..., Any]:
    """``kind``, called only with arguments that are of exactly these classes."""

    def make(*arguments: Any) -> Any:
        if not all(type(argument) in kinds for argument in arguments):
            raise ValueError("such arguments")
        return kind(*arguments)

    return make


def _bytes(text: str = "", encoding: str = "latin1") -> bytes:
    """Protocols below 3 write bytes as the text that has them in Latin-1."""
    if type(text) is not str or encoding != "latin1":
        raise ValueError("no bytes")
    return text.encode("latin1")


def _bytearray(content: Any = b"", encoding: str = "latin1") -> bytearray:
    return bytearray(content if type(content) is bytes else _bytes(content, encoding))


def _layout(name: Any) -> torch.layout:
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise ValueError(f"{name!r} is no layout")
    return found


_CALLS: Mapping[str, Callable[..., Any]] = {
    "_codecs.encode": _bytes,
    "builtins.bytearray": _bytearray,
    "builtins.bytes": lambda: b"",
    "builtins.complex": lambda real, imaginary: complex(float(real), float(imaginary)),
    "builtins.frozenset": made_of(frozenset, list, tuple),
    "builtins.set": made_of(set, list, tuple),
    "collections.OrderedDict": OrderedDict,
    "pathlib.Path": made_of(pathlib.Path, str),
    "pathlib.PosixPath": made_of(pathlib.Path, str),
    "pathlib.PurePosixPath": made_of(pathlib.PurePosixPath, str),
    "pathlib.PureWindowsPath": made_of(pathlib.PureWindowsPath, str),
    "pathlib.WindowsPath": made_of(pathlib.PureWindowsPath, str),
    "torch.serialization._get_layout": _layout,
}


class Building:
    """One walk over a description, which must be kept as long as this.

    Args:
        allowed: The classes of the user, by their full names.
        entries: How many there may be in the result, as counted by whoever walks through it:
            containers that share others could have more of them than can ever be visited.

    Attributes:
        may_contain_itself: Whether a list or dict may contain itself.
        deepest: How deep containers may be nested: what torch and planners write into metadata has
            less than ten levels.
        calls: What makes values of arguments, by the full names of the functions. A function takes
            only what such a value is pickled with, and raises ValueError or TypeError for the rest.
    """

    may_contain_itself: ClassVar[bool] = False
    deepest: ClassVar[int] = 64
    calls: ClassVar[Mapping[str, Callable[..., Any]]] = _CALLS

    def __init__(self, allowed: Mapping[str, Any], entries: int) -> None:
        self.allowed = allowed
        self._left = entries
        self._depth = 0
        # by identity: what it has become and how many entries it has, or None while it is built
        self._built: dict[int, tuple[Any, int] | None] = {}

    def value(self, thing: Any) -> Any:
        """Whatever it is, built.

        Raises:
            UnknownNameError: If it is of a class that is neither known here nor allowed.
            DescriptionError: If it makes no sense.
        """
        kind = type(thing)
        if kind in _SCALARS:
            return thing
        if kind is Global:
            return self.constant(thing.name)
        if id(thing) in self._built:
            earlier = self._built[id(thing)]
            if earlier is None:
                raise DescriptionError("it contains itself")
            self.spend(earlier[1])
            return earlier[0]
        if self._depth == self.deepest:
            raise DescriptionError(f"it is nested more than {self.deepest} levels deep")
        before = self._left
        self._built[id(thing)] = None
        self._depth += 1
        built = self._called(thing) if kind is Called else self._container(thing)
        self._depth -= 1
        self._built[id(thing)] = built, before - self._left
        return built

    def instance(self, name: str, called: Called) -> Any:
        """An instance of a class that a subclass knows, or what a call of its returns.

        Raises:
            UnknownNameError: If it knows none of this name.
        """
        raise UnknownNameError(name)

    def constant(self, name: str) -> Any:
        """An element type of torch, a class of the user, or a member of an enum of the user."""
        if name in self.allowed:
            return self.allowed[name]
        outer, _, member = name.rpartition(".")
        if outer == "torch" and isinstance(found := vars(torch).get(member), torch.dtype):
            return found
        if isinstance(cls := self.allowed.get(outer), enum.EnumMeta):
            return cls[member]
        raise UnknownNameError(name)

    def spend(self, entries: int) -> None:
        """Counts entries, also those that are shared."""
        self._left -= entries
        if self._left < 0:
            raise DescriptionError("it repeats itself beyond measure")

    def name(self, function: Any) -> str:
        """What a called function is called.

        Inner classes (before protocol 4) and members of enums (by Python 3.11.0) are written as
        calls of ``getattr``.
        """
        if type(function) is Global:
            return function.name
        if type(function) is Called and type(function.function) is Global:
            outer, inner = (*function.arguments, None, None)[:2]
            is_getattr = function.function.name == "builtins.getattr"
            if is_getattr and type(outer) is Global and type(inner) is str:
                return f"{outer.name}.{inner}"
        while type(function) is Called:
            function = function.function
        if type(function) is Global:
            raise UnknownNameError(function.name)
        raise DescriptionError("it calls what is no function")

    def entries(self, things: Any) -> list[Any]:
        """The values of what is described one after the other."""
        self.spend(len(things) + 1)
        return [self.value(thing) for thing in things]

    def fill(self, target: Any, described: Dict) -> Any:
        """``target``, with the keys and values of a dict."""
        pairs = described.pairs
        self.spend(len(pairs) + 1)
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            target[self.value(key)] = self.value(value)
        return target

    def _container(self, thing: Any) -> Any:
        if type(thing) is Dict:
            return self.fill(self._begun(thing, {}), thing)
        if type(thing) is list:
            extended = self._begun(thing, [])
            extended += self.entries(thing)
            return extended
        if type(thing) is Set:
            return (frozenset if thing.is_frozen else set)(self.entries(thing.entries))
        return tuple(self.entries(thing))

    def _begun(self, thing: Any, container: T) -> T:
        """The container that a description is becoming, before it is filled."""
        if self.may_contain_itself:
            self._built[id(thing)] = container, 0
        return container

    def _called(self, called: Called) -> Any:
        name = self.name(called.function) if called.form != "persistent" else ""
        if name == "builtins.getattr":
            if called.state is not NO_STATE or called.contents is not None:
                raise DescriptionError("it changes what was there before")
            return self.constant(self.name(called))
        if name in self.allowed:
            return self._of_the_user(self.allowed[name], called)
        if called.form == "call" and name in self.calls:
            return self._plain(name, called)
        return self.instance(name, called)

    def _plain(self, name: str, called: Called) -> Any:
        self.spend(1)
        try:
            built = self.calls[name](*self.entries(called.arguments))
        except (TypeError, ValueError, OverflowError) as exc:
            raise DescriptionError(f"{name} of {exc}") from exc
        contents, state = called.contents, called.state
        if type(built) is OrderedDict:
            if type(contents) is Dict:
                self.fill(built, contents)
                contents = None
            if type(state) is Dict:  # such as _metadata of a state dict
                vars(built).update(self.value(state))
                state = NO_STATE
        if contents is not None or state is not NO_STATE:
            raise DescriptionError(f"{name} with contents or a state")
        return built

    def _of_the_user(self, cls: Any, called: Called) -> Any:
        """As pickle would make it, of values that are built by now."""
        arguments, keywords = called.arguments, Dict()
        if called.form == "new_ex":
            arguments, keywords = called.arguments
        positional = self.entries(arguments)
        if called.form == "call":
            built = cls(*positional)
        else:
            built = cls.__new__(cls, *positional, **self.fill({}, keywords))
        contents = called.contents
        if type(contents) is Dict:
            self.fill(built, contents)
        elif contents is not None:
            built.extend(self.entries(contents))
        if called.state is not NO_STATE:
            if isinstance(built, (type, enum.Enum, types.ModuleType, types.FunctionType)):
                raise DescriptionError(f"it changes {built}, which was there before")
            _restore(built, self.value(called.state))
        return built


def _restore(built: Any, state: Any) -> None:
    """As pickle does it."""
    if hasattr(built, "__setstate__"):
        built.__setstate__(state)
        return
    fields, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    for name in (*(fields or ()), *(slots or ())):
        if type(name) is not str or name.startswith("__"):
            raise DescriptionError(f"it sets {name!r} of a {type(built).__name__}")
    if fields:
        vars(built).update(fields)
    for name, value in (slots or {}).items():
        setattr(built, name, value)
