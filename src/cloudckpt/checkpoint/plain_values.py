"""Values that may be loaded beyond those that torch allows, since rebuilding them is harmless.

numpy's arrays, scalars and dtypes (in :mod:`numpy_values`), paths, times, ``io.BytesIO``, empty
``bytes``, ``frozenset``. A pickle does not get hold of their classes but of what stands for them,
which takes only what such a value is pickled with: some planners unpickle an item that has passed
once more, without restrictions.
"""

from __future__ import annotations

import datetime
import io
import pathlib
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import IO, Any

import torch

from cloudckpt.checkpoint.numpy_values import Array, Made, StandIn, numpy_names
from cloudckpt.checkpoint.torch_private import load_restricted

__all__ = ["load_plain", "plain_names"]

_DAY = (int, bytes, str, type(None), datetime.timedelta, datetime.timezone)
_TIMES = (datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone)
_PATHS = (pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path()))
_DICTS = (dict, OrderedDict, Counter)


def load_plain(file: IO[bytes], map_location: Any = "cpu") -> Any:
    """``torch.load`` with ``weights_only``, which takes the values of this module too.

    Raises:
        pickle.UnpicklingError: If the file needs any other code.
    """
    start = file.tell()
    try:
        # whatever torch.utils.serialization.config says of mmap: this is no path
        return torch.load(file, map_location=map_location, weights_only=True, mmap=False)
    except pickle.UnpicklingError as refused:
        file.seek(start)
        if file.read(4) != b"PK\3\4":
            raise
        file.seek(start)
        made: list[Made] = []
        try:
            value = load_restricted(file, map_location, plain_names(made))
        except NotImplementedError:
            raise refused from None
    return _Finishing(made).of(value)


def plain_names(made: list[Made]) -> Mapping[str, Any]:
    """What a pickle gets, by the full name that it asks for; ``made`` is as in ``numpy_names``."""
    names: dict[str, Any] = {
        "_io.BytesIO": io.BytesIO,  # its state is bytes, a position, and attributes
        "builtins.bytes": StandIn(bytes, _checked(bytes)),
        "builtins.frozenset": StandIn(frozenset, _checked(frozenset, list)),
    }
    for time in _TIMES:
        names[f"datetime.{time.__name__}"] = StandIn(time, _checked(time, *[_DAY] * 8))
    for path in _PATHS:
        of_path = StandIn(path, _checked(path, *[str] * 1000))
        for module in ("pathlib", "pathlib._local"):  # the latter in Python 3.13
            names[f"{module}.{path.__name__}"] = of_path
    return {**names, **numpy_names(made)}


def _checked(kind: Any, *accepted: Any) -> Callable[..., Any]:
    """Calls ``kind`` with arguments of these classes, or with fewer."""

    def call(*arguments: Any) -> Any:
        fits = len(arguments) <= len(accepted) and all(
            isinstance(argument, of) for argument, of in zip(arguments, accepted, strict=False)
        )
        if not fits:
            raise pickle.UnpicklingError(f"{kind.__name__} with such arguments is not allowed")
        return kind(*arguments)

    return call


class _Finishing:
    """Puts arrays, dtypes and classes in the places of what stands for them."""

    def __init__(self, made: list[Made]) -> None:
        self._waiting = {id(entry) for entry in made}
        self._made = made  # so that their identifiers stay taken
        self._seen: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        """The finished value.

        Raises:
            UnpicklingError: If an array is where it can't be replaced.
        """
        finished = self._of(value)
        if self._waiting & {id(entry) for entry in self._made if isinstance(entry, Array)}:
            raise pickle.UnpicklingError(
                "an array is not allowed in anything but dicts, lists, tuples and sets"
            )
        return finished

    def _of(self, value: Any) -> Any:
        if isinstance(value, StandIn):
            return value.kind
        kind = type(value)
        if not isinstance(value, Made) and kind not in (*_DICTS, list, tuple, set, frozenset):
            return value
        if id(value) in self._seen:
            return self._seen[id(value)][1]
        self._seen[id(value)] = value, value
        new = value
        if isinstance(value, Made):
            self._waiting.discard(id(value))
            if isinstance(value, Array):
                self._in_place(value.objects)
            new = value.value
        elif kind in (list, set) or kind in _DICTS:
            self._in_place(value)
        else:
            entries = [self._of(entry) for entry in value]
            if any(one is not other for one, other in zip(entries, value, strict=True)):
                new = kind(entries)
        self._seen[id(value)] = value, new
        return new

    def _in_place(self, value: Any) -> None:
        if isinstance(value, list):
            value[:] = [self._of(entry) for entry in value]
        elif isinstance(value, set):
            entries = [self._of(entry) for entry in value]
            value.clear()
            value.update(entries)
        else:
            items = [(self._of(key), self._of(entry)) for key, entry in value.items()]
            value.clear()
            for key, entry in items:
                value[key] = entry
