"""Values that are no plain tensors: how they are loaded without running code of a stranger.

``torch.load`` with ``weights_only`` reads most of them. Beyond that, values may be loaded whose
rebuilding is harmless: numpy's arrays, scalars and dtypes (in :mod:`numpy_values`), paths, times,
``io.BytesIO``, empty ``bytes``, ``frozenset``. They are built from a description of the pickle, and
only of what such a value is pickled with: some planners unpickle an item that has passed once more,
without restrictions.
"""

from __future__ import annotations

import datetime
import io
import logging
import pathlib
import pickle
import re
from collections.abc import Callable, Mapping
from typing import IO, Any, ClassVar, TypeVar

import torch

from cloudckpt.checkpoint.described import Building, DescriptionError, UnknownNameError, made_of
from cloudckpt.checkpoint.envelope import unwarned
from cloudckpt.checkpoint.inert_pickle import NO_STATE, Called, RefusedError, describe, full_name
from cloudckpt.checkpoint.numpy_values import numpy_calls, numpy_classes
from cloudckpt.checkpoint.torch_private import load_with
from cloudckpt.errors import CheckpointCorruptError, CheckpointError, UntrustedPickleError

__all__ = [
    "check_trusted",
    "forewarn",
    "load_item",
    "load_plain",
    "load_saved",
    "load_tensor",
    "untrusted",
]

_Loaded = TypeVar("_Loaded")


def load_saved(file: IO[bytes], map_location: Any = "cpu", *, trust: bool = False) -> Any:
    """What ``torch.save`` has written, from where ``file`` stands.

    A warning of torch's is no damage, also where warnings are errors.

    Args:
        file: A seekable file.
        map_location: As in ``torch.load``.
        trust: Whether its pickle may run any code.

    Raises:
        pickle.UnpicklingError: If it may not, and needs code that is not allowed.
    """
    start = file.tell()

    def load() -> Any:
        file.seek(start)
        if not trust:
            return load_plain(file, map_location)
        # whatever torch.utils.serialization.config says of mmap: this is no path
        return torch.load(file, map_location=map_location, weights_only=False, mmap=False)

    try:
        return load()
    except Warning:
        with unwarned():
            return load()


def untrusted(
    what: str, cause: pickle.UnpicklingError, uri: str, item: str | None = None
) -> UntrustedPickleError:
    """The error for what needs code that is not allowed; names the class, if that is known."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(cause))
    named = re.search(r"GLOBAL (\S+)", text)
    return UntrustedPickleError(
        f"{what} can't be loaded without running code that is not on torch's allow-list: if you "
        "trust whoever can write to this location, pass trust_pickle=True, or allow the class by "
        "torch.serialization.add_safe_globals([...])",
        uri=uri,
        item=item,
        cause=f"{named[1]} is not allowed" if named else text.partition("\n")[0],
    )


def check_trusted(data: bytes | bytearray | memoryview, item: str, uri: str) -> None:
    """Whether ``torch.load`` of a non-tensor item would run only what is allowed.

    Raises:
        UntrustedPickleError: If its pickle names anything else.
        CheckpointCorruptError: If it can't be read.
    """
    load_item(data, item, uri, map_location="cpu")


def load_item(
    data: bytes | bytearray | memoryview, item: str, uri: str, *, map_location: Any
) -> Any:
    """A value that was written by ``torch.save``.

    Raises:
        UntrustedPickleError: If it needs code that is not allowed.
        CheckpointCorruptError: If it can't be read.
        CheckpointError: If there is no such device as ``map_location``, or the item, names.
    """
    try:
        return load_saved(io.BytesIO(data), map_location)
    except pickle.UnpicklingError as exc:
        raise untrusted(item, exc, uri, item) from None
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
    try:
        loaded = load_saved(data, trust=trust)
    except Exception as exc:
        if isinstance(exc, pickle.UnpicklingError) and not trust:
            raise untrusted(item, exc, uri, item) from None
        raise CheckpointCorruptError(
            f"{item} can't be read", uri=uri, item=item, cause=exc
        ) from exc
    if not isinstance(loaded, torch.Tensor):
        raise CheckpointCorruptError(
            f"{item} is a {type(loaded).__name__}, not a tensor", uri=uri, item=item
        )
    return loaded


_DAY = (int, bytes, str, type(None), datetime.timedelta, datetime.timezone)
_TIMES = (datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone)
_PATHS = (pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path()))


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
        try:
            return load_with(_built, file, map_location)
        except NotImplementedError:
            raise refused from None


def _built(
    data: bytes,
    of_torch: Mapping[str, Any],
    of_the_user: Mapping[str, Any],
    persistent_load: Callable[[Any], Any],
) -> Any:
    """What ``data.pkl`` of a file describes.

    Raises:
        pickle.UnpicklingError: If that is nothing of this module, of torch's or of the user's.
    """
    try:
        described = describe(data, persistent=True)
        return _ItemBuilding(of_torch, of_the_user, persistent_load).value(described)
    except UnknownNameError as unknown:
        raise pickle.UnpicklingError(f"GLOBAL {unknown} is not allowed") from None
    except (RefusedError, DescriptionError) as exc:
        raise pickle.UnpicklingError(str(exc)) from exc


class _ItemBuilding(Building):
    """Builds the value of an item: ours, those that torch allows, and those of the user.

    Args:
        of_torch: The classes, functions and constants that torch allows, by their names.
        of_the_user: Those that the user allows.
        persistent_load: What makes a storage of what the pickle says of it.
    """

    may_contain_itself = True
    deepest = 100
    calls: ClassVar[Mapping[str, Callable[..., Any]]] = {
        **Building.calls,
        **{f"datetime.{kind.__name__}": made_of(kind, *_DAY) for kind in _TIMES},
    }
    classes: ClassVar[Mapping[str, type[Any]]] = {
        **{f"{kind.__module__}.{kind.__name__}": kind for kind in (bytes, frozenset, *_TIMES)},
        **{f"pathlib.{kind.__name__}": kind for kind in _PATHS},
        "_io.BytesIO": io.BytesIO,
    }

    def __init__(
        self,
        of_torch: Mapping[str, Any],
        of_the_user: Mapping[str, Any],
        persistent_load: Callable[[Any], Any],
    ) -> None:
        super().__init__(of_the_user, entries=1 << 62)  # what is shared stays so
        self._of_torch = of_torch
        self._of_numpy = numpy_calls()
        self._constants = {**of_torch, **self.classes, **numpy_classes(), **of_the_user}
        self._persistent_load = persistent_load

    def constant(self, name: str) -> Any:
        return self._constants[name] if name in self._constants else super().constant(name)

    def instance(self, name: str, called: Called) -> Any:
        if called.form == "persistent":
            return self._persistent_load(self.value(called.arguments))
        if called.contents is not None:
            raise DescriptionError(f"{name} with contents")
        state = self.value(called.state) if called.state is not NO_STATE else NO_STATE
        arguments = self.entries(called.arguments)
        if (name, called.form, arguments) == ("_io.BytesIO", "new", []):
            made: Any = io.BytesIO()
            made.__setstate__(state)
            return made
        if called.form == "call" and name in self._of_numpy:
            return self._of_numpy[name](arguments, state)
        if called.form == "call" and name in self._of_torch and state is NO_STATE:
            return self._of_torch[name](*arguments)
        raise UnknownNameError(name)


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
        known = {*_ItemBuilding.calls, *_ItemBuilding.classes, *numpy_calls(), *numpy_classes()}
        others = sorted({full_name(*name.rpartition(".")[::2]) for name in names} - known)
        if names and not others and len(data) <= _TRIED:
            load_plain(io.BytesIO(data))
    except pickle.UnpicklingError as exc:
        return str(untrusted("", exc, "").cause)
    except Exception:  # noqa: BLE001 - a save does not fail because of a warning
        return ""
    return f"{', '.join(others)} is not allowed" if others else ""
