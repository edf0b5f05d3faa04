"""Unpickles into stubs, without importing or calling anything that the pickle names.

A pickle is a program that imports, calls and changes whatever it names. Here each name of a class
or function becomes a stub class that exists for one load; a call or an instance becomes a stub that
keeps its arguments. :mod:`cloudckpt.checkpoint.building` builds known values from stubs.

So no code runs, and no existing object changes. Python's unpickler itself does not limit the memory
that a pickle takes, nor the depth of keys: a hostile file may end the process that reads it.
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
    """Normalizes a module's name to be the same in all versions of Python and all processes.

    Python 3.13 has the classes of ``pathlib`` in another module, and in a saving process the
    training script has another name.
    """
    return _HOMES.get(module, module)


def full_name(module: str, name: str) -> str:
    """Returns ``module.name`` of a class or function, with the module's name by :func:`home`."""
    return f"{home(module)}.{name}"


class Stub:
    """An instance of a class, or the result of a call, that a pickle describes.

    Attributes:
        name: The full name of the class or function; empty for an object of a persistent id.
        arguments: The positional arguments of the call.
        keywords: The keyword arguments of the call.
        is_call: Whether the class or function itself was called, not its ``__new__``.
        state: The state for ``__setstate__`` or ``__dict__``; None if the pickle sets no state.
        contents: The entries to add: of a list, or pairs of a dict.
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
        """Adds an entry, as to a list."""
        self.contents.append(entry)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, *, persistent: bool) -> None:
        super().__init__(file)
        self._persistent = persistent
        self._stubs: dict[str, type[Stub]] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = full_name(module, name)
        if full == "torch.Size":
            return torch.Size  # it and OrderedDict and dtypes can't be modified by a pickle
        if full == "collections.OrderedDict":
            return OrderedDict
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        return self._attribute if full == "builtins.getattr" else self._stub(full)

    @property
    def _attribute(self) -> Any:
        """The stub of ``getattr``, by which older protocols write inner classes
        and enum members.
        """
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
    """Unpickles into plain containers and values, with stubs for everything else.

    Args:
        data: The pickle.
        persistent: Whether persistent ids are allowed, as ``torch.save`` writes them for storages.

    Raises:
        ValueError: If the pickle is damaged, or does what no pickler does.
    """
    try:
        return _Unpickler(io.BytesIO(data), persistent=persistent).load()
    except (MemoryError, RecursionError, Warning):
        raise
    except Exception as exc:  # invalid opcodes may raise any error
        raise ValueError(str(exc) or type(exc).__name__) from exc
