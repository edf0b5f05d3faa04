"""Reads pickles without running their code: into stubs first, then into values known as harmless.

A pickle is a program that imports, calls and changes whatever it names. :class:`Unpickler` replaces
each class and function that the pickle names by a stub class, which exists for one load; the stub's
instances keep the arguments of a call and the state of an object. A :class:`Builder` turns stubs
into values by constructors that are known as harmless. So no code of the pickle's author runs, and
no existing object changes. Neither the memory that a pickle takes nor its depth is limited: a
hostile file may end the process that reads it.
"""

from __future__ import annotations

import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

__all__ = [
    "CALLS",
    "Builder",
    "Constructor",
    "Stub",
    "Unpickler",
    "UnknownNameError",
    "call_of",
    "full_name",
    "home",
]

_HOMES = {"pathlib._local": "pathlib", "__builtin__": "builtins", "__mp_main__": "__main__"}


def home(module: str) -> str:
    """Returns a module's name in the form that all versions of Python and all processes share.

    Python 3.13 has the classes of ``pathlib`` in another module, and in a saving process the
    training script has another name.
    """
    return _HOMES.get(module, module)


def full_name(module: str, name: str) -> str:
    """Returns ``module.name`` of a class or function, with the module's name by :func:`home`."""
    return f"{home(module)}.{name}"


class UnknownNameError(Exception):
    """Raised for a class or function not known as harmless; the message is its full name."""


class Stub:
    """Stands for an instance of a class, or the result of a call, that a pickle describes.

    Attributes:
        name: The full name of the class or function; empty if the pickle refers to the object by a
            persistent id, as to the storage of a tensor.
        arguments: The arguments of the call.
        entries: The list entries, or the pairs of key and value, that the pickle adds to the
            object; None if it adds none.
        is_call: Whether the class or function itself was called, not its ``__new__``.
        state: The state for ``__setstate__`` or ``__dict__``; None if the pickle sets no state.
    """

    __slots__ = ("arguments", "entries", "is_call", "state")
    name: ClassVar[str] = ""

    arguments: tuple[Any, ...]
    entries: list[Any] | None
    is_call: bool
    state: Any

    def __new__(cls, *arguments: Any) -> Stub:
        made = object.__new__(cls)
        made.arguments, made.entries, made.is_call, made.state = arguments, None, False, None
        return made

    def __init__(self, *_: Any) -> None:
        self.is_call = True

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.append((key, value))

    def append(self, entry: Any) -> None:
        """Takes an entry that the pickle adds to a list; called by Python's unpickler."""
        if self.entries is None:
            self.entries = []
        self.entries.append(entry)


class Unpickler(pickle.Unpickler):
    """Python's unpickler, with a stub class for each name, except a few harmless classes.

    A damaged pickle may raise any error.
    """

    def find_class(self, module: str, name: str) -> Any:
        full = full_name(module, name)
        if full == "torch.Size":
            return torch.Size
        if full == "collections.OrderedDict":
            return OrderedDict
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        if full == "builtins.getattr":  # inner classes and members of enums in older protocols
            return lambda outer, inner: _stub_class(f"{outer.name}.{inner}")
        return _stub_class(full)


def _stub_class(name: str) -> type[Stub]:
    return type("Stub", (Stub,), {"__slots__": (), "name": name})


Constructor = Callable[[tuple[Any, ...], Any], Any]
"""Makes a value from its description in a pickle: the arguments of a call, and the state or None.

Raises ValueError or TypeError if arguments or state are not valid for such a value.
"""


def call_of(kind: Callable[..., Any], *kinds: type[Any]) -> Constructor:
    """Returns a constructor for a :class:`Builder` that calls ``kind`` with checked arguments.

    The constructor raises ValueError if the pickle sets a state, or the class of an argument is not
    in ``kinds``; derived classes do not count.

    Args:
        kind: The class or function to call.
        kinds: The classes that arguments may have.
    """

    def make(arguments: tuple[Any, ...], state: Any) -> Any:
        if state is not None or not {*map(type, arguments)} <= {*kinds}:
            raise ValueError("invalid pickle: an object has arguments or state of wrong types")
        return kind(*arguments)

    return make


def _bytes(text: str = "", encoding: str = "latin1") -> bytes:
    """Returns the bytes that pickle protocols below 3 write as Latin-1 text."""
    if encoding != "latin1":
        raise ValueError("invalid pickle: bytes are not given as Latin-1 text")
    return text.encode("latin1")


def _bytearray(content: str | bytes = b"", *encoding: str) -> bytearray:
    return bytearray(_bytes(content, *encoding) if isinstance(content, str) else content)


def _layout(name: str) -> torch.layout:
    found = vars(torch).get(name.removeprefix("torch."))
    if not isinstance(found, torch.layout):
        raise ValueError(f"invalid pickle: {name!r} is not a tensor layout of torch")
    return found


CALLS: Mapping[str, Constructor] = {
    "_codecs.encode": call_of(_bytes, str),
    "builtins.bytearray": call_of(_bytearray, str, bytes),
    "builtins.bytes": call_of(_bytes),
    "builtins.complex": call_of(complex, int, float),
    "builtins.frozenset": call_of(frozenset, list, tuple),
    "builtins.set": call_of(set, list, tuple),
    "pathlib.Path": call_of(pathlib.Path, str),
    "pathlib.PosixPath": call_of(pathlib.Path, str),
    "pathlib.PurePosixPath": call_of(pathlib.PurePosixPath, str),
    "pathlib.PureWindowsPath": call_of(pathlib.PureWindowsPath, str),
    "pathlib.WindowsPath": call_of(pathlib.PureWindowsPath, str),
    "torch.serialization._get_layout": call_of(_layout, str),
}
"""The constructors of values that any pickle may have, by their full names."""


_ATOMS = frozenset((type(None), bool, int, float, str, bytes, torch.Size, torch.dtype))


class Builder:
    """Makes the values that stubs describe (:class:`Stub`), by constructors known as harmless.

    The stubs must live as long as this object. A stub or container that is referenced several times
    is made once.

    Args:
        constructors: The constructors, by the full names of the classes and functions.
        constants: The classes and other constants that may be values, by their full names.
        others: Makes the value of a stub without a constructor, or raises UnknownNameError; None
            if all such stubs are refused.
    """

    def __init__(
        self,
        constructors: Mapping[str, Constructor],
        constants: Mapping[str, Any],
        others: Callable[[Builder, Stub], Any] | None = None,
    ) -> None:
        self._constructors, self._constants, self._others = constructors, constants, others
        self._made: dict[int, Any] = {}  # by id of the stub or container

    def value(self, thing: Any) -> Any:
        """Returns the value of a stub, a container of stubs, or a plain value.

        Raises:
            UnknownNameError: If a class or function is not known.
            ValueError: If the description is inconsistent.
            TypeError: If an argument in it has a wrong type.
        """
        if type(thing) in _ATOMS:
            return thing
        if id(thing) in self._made:
            return self._made[id(thing)]
        value = self.value
        if isinstance(thing, Stub):
            make = self._constructors.get(thing.name)
            if make is not None and thing.entries is None:
                made = make(tuple(map(value, thing.arguments)), value(thing.state))
            elif make is None and self._others is not None:
                made = self._others(self, thing)
            else:
                raise UnknownNameError(thing.name)
        elif type(thing) in (tuple, set, frozenset):
            made = type(thing)(map(value, thing))
        elif type(thing) is list:
            made = self._made[id(thing)] = []
            made += map(value, thing)
        elif type(thing) in (dict, OrderedDict):
            made = self._made[id(thing)] = type(thing)()
            for key, entry in thing.items():
                made[value(key)] = entry if type(entry) in _ATOMS else value(entry)
            if type(thing) is OrderedDict:  # such as _metadata of a state dict
                made.__dict__.update(value(vars(thing)))
        elif isinstance(thing, type) and issubclass(thing, Stub):
            if thing.name not in self._constants:
                raise UnknownNameError(thing.name)
            return self._constants[thing.name]
        else:
            return thing
        self._made[id(thing)] = made
        return made
