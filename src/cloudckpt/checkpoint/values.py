"""Values that are no plain tensors: how they are loaded without running code of a stranger.

``torch.load`` with ``weights_only`` reads most of them. Beyond that, values may be loaded whose
rebuilding is harmless: numpy's arrays, scalars and dtypes (in :mod:`numpy_values`), paths, times,
``io.BytesIO``, empty ``bytes``, ``frozenset``. A pickle does not get hold of their classes but of
what stands for them, which takes only what such a value is pickled with: some planners unpickle an
item that has passed once more, without restrictions.
"""

from __future__ import annotations

import datetime
import io
import logging
import pathlib
import pickle
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import IO, Any, TypeVar

import torch

from cloudckpt.checkpoint.envelope import unwarned
from cloudckpt.checkpoint.numpy_values import Array, Made, StandIn, numpy_names
from cloudckpt.checkpoint.torch_private import load_restricted
from cloudckpt.errors import CheckpointCorruptError, CheckpointError, UntrustedPickleError

__all__ = [
    "check_trusted",
    "forewarn",
    "load_item",
    "load_plain",
    "load_tensor",
    "plain_names",
    "refused",
    "whatever_it_warns",
]

_Loaded = TypeVar("_Loaded")


def whatever_it_warns(load: Callable[[], _Loaded]) -> _Loaded:
    """What ``load`` returns, also where warnings are errors: one of torch's is no damage."""
    try:
        return load()
    except Warning:
        with unwarned():
            return load()


def check_trusted(data: bytes | bytearray, item: str, uri: str) -> None:
    """Whether ``torch.load`` of a non-tensor item would run only what is allowed.

    Raises:
        UntrustedPickleError: If its pickle names anything else.
        CheckpointCorruptError: If it can't be read.
    """
    load_item(data, item, uri, map_location="cpu")


def load_item(data: bytes | bytearray, item: str, uri: str, *, map_location: Any) -> Any:
    """A value that was written by ``torch.save``.

    Raises:
        UntrustedPickleError: If it needs code that is not allowed.
        CheckpointCorruptError: If it can't be read.
        CheckpointError: If there is no such device as ``map_location``, or the item, names.
    """
    try:
        return whatever_it_warns(lambda: load_plain(io.BytesIO(data), map_location))
    except pickle.UnpicklingError as exc:
        raise UntrustedPickleError(
            f"{item} can't be loaded without running code that is not on torch's allow-list: if "
            "you trust whoever can write to this location, pass trust_pickle=True, or allow the "
            "class by torch.serialization.add_safe_globals([...])",
            uri=uri,
            item=item,
            cause=refused(exc),
        ) from None
    except Exception as exc:
        if map_location != "cpu":
            check_trusted(data, item, uri)  # which fails, too, if it is the item that can't be read
            raise CheckpointError(
                f"{item} holds tensors of a device that is not here: load it without a state dict, "
                'with default_map_location="cpu"',
                uri=uri,
                item=item,
                cause=exc,
            ) from exc
        raise CheckpointCorruptError(
            f"{item} can't be read", uri=uri, item=item, cause=exc
        ) from exc


def load_tensor(data: io.BytesIO, item: str, uri: str, *, trust: bool) -> torch.Tensor:
    """A tensor that was written by ``torch.save`` and is no plain one.

    Raises:
        UntrustedPickleError: If it needs code that torch does not allow.
        CheckpointCorruptError: If it can't be read, or is no tensor.
    """
    start = data.tell()

    def load() -> Any:
        data.seek(start)
        if not trust:
            return load_plain(data)
        return torch.load(data, map_location="cpu", weights_only=False, mmap=False)

    try:
        loaded = whatever_it_warns(load)
    except pickle.UnpicklingError as exc:
        raise UntrustedPickleError(
            f"{item} needs a class that is not on torch's allow-list: allow it by "
            "torch.serialization.add_safe_globals([...]), or pass trust_pickle=True",
            uri=uri,
            item=item,
            cause=refused(exc),
        ) from None
    except Exception as exc:
        raise CheckpointCorruptError(
            f"{item} can't be read", uri=uri, item=item, cause=exc
        ) from exc
    if not isinstance(loaded, torch.Tensor):
        raise CheckpointCorruptError(
            f"{item} is a {type(loaded).__name__}, not a tensor", uri=uri, item=item
        )
    return loaded


def refused(exc: pickle.UnpicklingError) -> str:
    """What torch did not allow: the name of the class, if its long message has one."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(exc))
    named = re.search(r"GLOBAL (\S+)", text)
    return f"{named[1]} is not allowed" if named else text.partition("\n")[0]


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


logger = logging.getLogger("cloudckpt")

_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_SMALL = 4096  # bytes
_TRIED = 1 << 20  # the largest item of numpy's that is loaded to see whether it can be
_told: set[tuple[str, type]] = set()  # items and types that this process has looked at


def forewarn(data: bytes, item: str, kind: type, uri: str) -> None:
    """Warns once for each item and type, by the logger ``cloudckpt``, of what ``load`` refuses.

    Values of plain types cost next to nothing.

    Args:
        data: The item, as ``torch.save`` writes it.
        item: Its name.
        kind: The class of its value.
        uri: The checkpoint.
    """
    # a name in the pickle takes two ends of lines, and there is one behind it
    if kind in _PLAIN or (len(data) < _SMALL and data.count(b"\n") < 3):
        return
    if (item, kind) in _told:
        return
    _told.add((item, kind))
    needed = _refused(data)
    if needed:
        logger.warning(
            "%s: %s (%s) is saved, but load will refuse it: %s. Pass trust_pickle=True to load, "
            "allow its classes by torch.serialization.add_safe_globals([...]), or save its plain "
            "values instead", uri, item, kind.__name__, needed,
        )  # fmt: skip


def _refused(data: bytes) -> str:
    """What the default load does not allow; empty if it allows all."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
        others = sorted(set(names).difference(plain_names([]))) if names else []
        if names and not others and len(data) <= _TRIED:
            load_plain(io.BytesIO(data))
    except pickle.UnpicklingError as exc:
        return refused(exc)
    except Exception:  # noqa: BLE001 - a save does not fail because of a warning
        return ""
    return f"{', '.join(others)} is not allowed" if others else ""
