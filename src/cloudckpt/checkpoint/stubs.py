"""Unpickles into stubs: what a pickle names is not imported, and what it calls is not run.

A pickle is a program that imports, calls and changes whatever it names. Here each name of a class
or function becomes a class of stubs that lives for one load; a call or an instance becomes a stub
that keeps what it was given. :mod:`cloudckpt.checkpoint.building` makes of them what it knows.

So no code runs and nothing that was there before changes. Python's unpickler itself trusts the
pickle with memory and with the depth of keys: a hostile file may end the process that reads it.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from typing import Any, ClassVar

import torch

__all__ = ["Stub", "full_name", "home", "unpickle"]

_HOMES = {"pathlib._local": "pathlib", "__builtin__": "builtins", "__mp_main__": "__main__"}


def home(module: str) -> str:
    """What a module is called in all versions of Python: 3.13 has its paths in another one.

    The script that trains has another name in its saving process.
    """
    return _HOMES.get(module, module)


def full_name(module: str, name: str) -> str:
    """The name of a class or function with that of its module."""
    return f"{home(module)}.{name}"


class Stub:
    """An instance of a class, or the result of a call, that a pickle describes.

    Attributes:
        name: The full name of the class or function; empty for what the reader is asked for.
        arguments: What it was called with.
        keywords: The same by name.
        is_call: Whether it was called itself, and not its ``__new__``.
        state: What ``__setstate__`` or ``__dict__`` was to be given; None without one.
        contents: What was to be put into it: entries of a list, or pairs of a dict.
    """

    __slots__ = ("arguments", "contents", "is_call", "keywords", "state")
    name: ClassVar[str] = ""

    arguments: tuple[Any, ...]
    contents: list[Any]
    is_call: bool
    keywords: dict[str, Any]
    state: Any

    def __new__(cls, *arguments: Any, **keywords: Any) -> Stub:
        made = object.__new__(cls)
        made.arguments, made.keywords, made.contents = arguments, keywords, []
        made.is_call, made.state = False, None
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        self.is_call = True

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.contents.append((key, value))

    def append(self, entry: Any) -> None:
        """Takes an entry, as of a list."""
        self.contents.append(entry)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, *, persistent: bool) -> None:
        super().__init__(file)
        self._persistent = persistent
        self._stubs: dict[str, type[Stub]] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = full_name(module, name)
        if full == "torch.Size":
            return torch.Size  # like the other two it is no class or value that can be changed
        if full == "collections.OrderedDict":
            return OrderedDict
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        return self._attribute if full == "builtins.getattr" else self._stub(full)

    @property
    def _attribute(self) -> Any:
        """``getattr``, by which older protocols write inner classes and members of enums."""
        return lambda outer, name: self._stub(f"{outer.name}.{name}")

    def _stub(self, name: str) -> type[Stub]:
        if (found := self._stubs.get(name)) is None:
            found = self._stubs[name] = type("Stub", (Stub,), {"__slots__": (), "name": name})
        return found

    def persistent_load(self, pid: Any) -> Any:
        if not self._persistent:
            raise pickle.UnpicklingError(
                "invalid pickle: it refers to an object outside of itself (a persistent ID)"
            )
        return Stub(pid)


def unpickle(data: bytes | bytearray | memoryview, *, persistent: bool = False) -> Any:
    """What a pickle describes, in plain containers and values, with stubs for all else.

    Args:
        data: The pickle.
        persistent: Whether it may ask whoever reads it for objects, as ``torch.save`` does for
            storages.

    Raises:
        ValueError: If it is damaged, or does what no pickler does.
    """
    try:
        return _Unpickler(io.BytesIO(data), persistent=persistent).load()
    except (MemoryError, RecursionError, Warning):
        raise
    except Exception as exc:  # whatever comes of an opcode that makes no sense
        raise ValueError(str(exc) or type(exc).__name__) from exc
