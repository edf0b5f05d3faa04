"""Loads values that are not plain tensors without running code of the checkpoint's author.

``torch.load`` with ``weights_only`` reads most of them. Some more are loaded because rebuilding
them is harmless: numpy's arrays, scalars and dtypes of plain numbers, texts and times, paths,
``datetime``, ``io.BytesIO``, empty ``bytes``, ``frozenset``. They are unpickled into stubs, and
built only from the arguments with which such a value is pickled: some planners unpickle an accepted
item once more, without restrictions.
"""

from __future__ import annotations

import datetime
import io
import logging
import math
import pathlib
import pickle
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, ClassVar, TypeVar

import torch
from torch.distributed.checkpoint.stateful import Stateful

from cloudckpt.checkpoint.building import Building, DescriptionError, UnknownNameError, made_of
from cloudckpt.checkpoint.envelope import unwarned
from cloudckpt.checkpoint.stubs import Stub, full_name, unpickle
from cloudckpt.checkpoint.torch_private import load_with
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    UnsupportedValueError,
    UntrustedPickleError,
)

__all__ = [
    "Unloadable",
    "check_trusted",
    "load_item",
    "load_plain",
    "load_saved",
    "load_tensor",
    "untrusted",
]

_Loaded = TypeVar("_Loaded")


def load_saved(file: IO[bytes], map_location: Any = "cpu", *, trust: bool = False) -> Any:
    """Loads a value that ``torch.save`` has written, from the current position of ``file``.

    A warning of torch does not count as damage, even if warnings are errors.

    Args:
        file: A seekable file.
        map_location: As in ``torch.load``.
        trust: Whether its pickle may run any code.

    Raises:
        pickle.UnpicklingError: If ``trust`` is False, and it needs code that is not allowed.
    """
    start = file.tell()

    def load() -> Any:
        file.seek(start)
        if not trust:
            return load_plain(file, map_location)
        # mmap needs a path: overrides torch.utils.serialization.config
        return torch.load(file, map_location=map_location, weights_only=False, mmap=False)

    try:
        return load()
    except Warning:
        with unwarned():
            return load()


def untrusted(
    what: str, cause: pickle.UnpicklingError, uri: str, item: str | None = None
) -> UntrustedPickleError:
    """Returns the error for a value that needs code that is not allowed."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(cause))
    named = re.search(r"GLOBAL (\S+)", text)
    return UntrustedPickleError(
        f"{what} can't be loaded without running code that is not on torch's allow-list: if you "
        "trust everyone who can write to this location, pass trust_pickle=True, or allow the "
        "class by torch.serialization.add_safe_globals([...])",
        uri=uri,
        item=item,
        cause=f"{named[1]} is not allowed" if named else text.partition("\n")[0],
    )


def check_trusted(data: bytes | bytearray | memoryview, item: str, uri: str) -> None:
    """Checks that ``torch.load`` of a non-tensor item would run only allowed code.

    Raises:
        UntrustedPickleError: If its pickle names anything else.
        CheckpointCorruptError: If it can't be read.
    """
    load_item(data, item, uri, map_location="cpu")


def load_item(
    data: bytes | bytearray | memoryview,
    item: str,
    uri: str,
    *,
    map_location: Any,
    trust: bool = False,
) -> Any:
    """Loads a value that was written by ``torch.save``.

    Args:
        data: The bytes of the item.
        item: The name of the item, for messages.
        uri: The checkpoint, for messages.
        map_location: As in ``torch.load``.
        trust: Whether its pickle may run any code.

    Raises:
        UntrustedPickleError: If it needs code that is not allowed.
        CheckpointCorruptError: If it can't be read.
        CheckpointError: If this machine lacks the device that ``map_location`` or the item names.
    """
    try:
        return load_saved(io.BytesIO(data), map_location, trust=trust)
    except Exception as exc:
        if isinstance(exc, pickle.UnpicklingError) and not trust:
            raise untrusted(item, exc, uri, item) from None
        if map_location != "cpu":
            check_trusted(data, item, uri)  # raises, too, if the item itself can't be read
            raise CheckpointError(
                f"{item} contains tensors of a device that this machine does not have: load it "
                'without a state dict and with default_map_location="cpu"',
                uri=uri,
                item=item,
                cause=exc,
            ) from exc
        raise CheckpointCorruptError(
            f"{item} can't be unpickled: it is damaged, or its class has changed; load an older "
            "checkpoint, or leave it out of the state dict",
            uri=uri,
            item=item,
            cause=exc,
        ) from exc


def load_tensor(
    data: bytes | bytearray | memoryview, item: str, uri: str, *, trust: bool
) -> torch.Tensor:
    """Loads a tensor that was written by ``torch.save`` and is not a plain tensor.

    Raises:
        UntrustedPickleError: If it needs code that torch does not allow.
        CheckpointCorruptError: If it can't be read, or is not a tensor.
    """
    loaded = load_item(data, item, uri, map_location="cpu", trust=trust)
    if not isinstance(loaded, torch.Tensor):
        raise CheckpointCorruptError(
            f"{item} is a {type(loaded).__name__}, although the metadata describes it as a "
            "tensor: load an older checkpoint",
            uri=uri,
            item=item,
        )
    return loaded


_DAY = (int, bytes, str, type(None), datetime.timedelta, datetime.timezone)
_TIMES = (datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone)
_PATHS = (pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path()))


def load_plain(file: IO[bytes], map_location: Any = "cpu") -> Any:
    """Loads like ``torch.load`` with ``weights_only``, and accepts this module's values as well.

    Raises:
        pickle.UnpicklingError: If the file needs any other code.
    """
    start = file.tell()
    try:
        # mmap needs a path: overrides torch.utils.serialization.config
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
    """Builds the value that ``data.pkl`` of a file describes.

    Raises:
        pickle.UnpicklingError: If neither this module nor torch nor the user allows its classes.
    """
    try:
        stubs = unpickle(data, persistent=True)
        return _ItemBuilding(of_torch, of_the_user, persistent_load).value(stubs)
    except UnknownNameError as unknown:
        raise pickle.UnpicklingError(f"GLOBAL {unknown} is not allowed") from None
    except ValueError as exc:
        raise pickle.UnpicklingError(str(exc)) from exc


class _ItemBuilding(Building):
    """Builds the value of an item from classes that this module, torch or the user allows.

    Args:
        of_torch: The classes, functions and constants that torch allows, by their names.
        of_the_user: The classes that the user allows, by their names.
        persistent_load: Makes a storage from its persistent id.
    """

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
        super().__init__(of_the_user)
        self._of_torch = of_torch
        self._constants = {**of_torch, **self.classes, **_numpy_classes(), **of_the_user}
        self._persistent_load = persistent_load

    def constant(self, name: str) -> Any:
        return self._constants[name] if name in self._constants else super().constant(name)

    def instance(self, stub: Stub) -> Any:
        arguments = [self.value(argument) for argument in stub.arguments]
        if not stub.name:
            return self._persistent_load(*arguments)
        if stub.contents or stub.keywords:
            raise DescriptionError(f"invalid pickle: unexpected contents of {stub.name}")
        state = self.value(stub.state)
        if stub.name == "_io.BytesIO" and not arguments:
            made: Any = io.BytesIO()
            made.__setstate__(state)
            return made
        if stub.is_call and stub.name in _NUMPY and _numpy_classes():
            return _NUMPY[stub.name](arguments, state)
        if stub.is_call and stub.name in self._of_torch and state is None:
            return self._of_torch[stub.name](*arguments)
        raise UnknownNameError(stub.name)


# An untrusted pickle must not call numpy's own functions: the state of a dtype may say that its
# bytes are pointers. Here a dtype is made by its public constructor, and must then be one that
# numpy describes in exactly the same way; an array is as large as its bytes in the file.
_CODE = re.compile(r"b1|[iu][1248]|f(2|4|8|12|16)|c(8|16|24|32)|[mM]8|[SUV][0-9]{1,9}")
_UNIT = re.compile(rb"generic|[YMWDhms]|[munpfa]s")


def _numpy_classes() -> Mapping[str, type[Any]]:
    """Returns the numpy classes that may be values themselves; empty without numpy."""
    try:
        import numpy  # torch works without it
    except ImportError:
        return {}
    return {"numpy.ndarray": numpy.ndarray, "numpy.dtype": numpy.dtype}


def _expect(condition: object, what: str) -> None:
    if not condition:
        raise DescriptionError(
            f"invalid pickle: unexpected {what}, which numpy does not write for plain values"
        )


def _dtype(arguments: Sequence[Any], state: Any) -> Any:
    import numpy

    code, *copies = arguments
    _expect(type(code) is str and _CODE.fullmatch(code), f"dtype {code!r}")
    _expect(copies in ([], [False, True]), "arguments of a dtype")
    if state is None:
        return numpy.dtype(code)
    _expect(
        type(state) is tuple and len(state) in (8, 9) and state[0] in (3, 4), "state of a dtype"
    )
    made = numpy.dtype(code + (_unit(state[8:]) if code[0] in "mM" else ""))
    if state[1] in ("<", ">"):
        made = made.newbyteorder(state[1])
    _, (usual_code, *_), usual = made.__reduce__()[:3]
    same = (code, *state[1:8]) == (usual_code, *usual[1:8])  # neither fields nor an inner array
    _expect(same and (len(state) == 8 or code[0] in "mM"), f"state of a dtype {state[1:]!r}")
    return made


def _unit(more: Any) -> str:
    """Returns the unit of times, as numpy writes it in the name of a dtype."""
    is_pair = len(more) == 1 and type(more[0]) is tuple and len(more[0]) == 2 and not more[0][0]
    _expect(is_pair and type(more[0][1]) is tuple and len(more[0][1]) == 4, "unit of a time")
    name, *numbers = more[0][1]
    _expect(type(name) is bytes and _UNIT.fullmatch(name), f"unit of a time {name!r}")
    _expect(all(type(number) is int for number in numbers), "unit of a time")
    _expect(0 < numbers[0] < 1 << 31 and numbers[1:] == [1, 1], "unit of a time")
    return "" if name == b"generic" else f"[{numbers[0]}{name.decode()}]"


def _array(arguments: Sequence[Any], state: Any) -> Any:
    import numpy

    usual = len(arguments) == 3 and arguments[0] is numpy.ndarray
    _expect(usual and tuple(arguments[1:]) == ((0,), b"b"), "class of an array")
    _expect(type(state) is tuple and len(state) == 5 and state[0] == 1, "state of an array")
    _, shape, dtype, is_fortran, content = state
    _expect(type(shape) is tuple and len(shape) <= 64, "shape of an array")
    _expect(all(type(size) is int and 0 <= size < 1 << 62 for size in shape), "negative size")
    _expect(isinstance(dtype, numpy.dtype) and type(is_fortran) is bool, "dtype of an array")
    nbytes = math.prod(shape) * dtype.itemsize
    _expect(type(content) is bytes and len(content) == nbytes, "bytes of an array")
    found = numpy.ndarray(shape, dtype, content, order="F" if is_fortran else "C")
    return found.copy(order="A")


def _scalar(arguments: Sequence[Any], state: Any) -> Any:
    import numpy

    _expect(len(arguments) == 2 and state is None, "arguments of a scalar")
    dtype, content = arguments
    _expect(isinstance(dtype, numpy.dtype), "dtype of a scalar")
    _expect(type(content) is bytes and len(content) == dtype.itemsize, "bytes of a scalar")
    return numpy.ndarray((), dtype, content).copy()[()]


_NUMPY: Mapping[str, Callable[[Sequence[Any], Any], Any]] = {
    "numpy.dtype": _dtype,
    **{f"numpy.{core}.multiarray._reconstruct": _array for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
}


logger = logging.getLogger("cloudckpt")

_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_SMALL = 4096  # bytes
# bytes of the largest item with numpy values that is loaded to test whether it can be
_TRIED = 1 << 20
_told: set[tuple[str, type]] = set()  # items and types that this process has checked


class Unloadable:
    """Collects the values of a save that ``load`` would refuse.

    Args:
        uri: The checkpoint.
        setting: ``refuse`` refuses all of them; ``warn`` logs each item and type once; ``auto``
            refuses only an object that holds another one whose ``load_state_dict`` a load would not
            call.
    """

    def __init__(self, uri: str, setting: str) -> None:
        self.uri, self._setting = uri, setting
        self._refused: dict[str, str] = {}

    def look(self, data: bytes, item: str, kind: type) -> None:
        """Checks an item, almost for free if it is of a plain type.

        Args:
            data: The item, as ``torch.save`` writes it.
            item: The name of the item.
            kind: The class of its value.
        """
        # each name in a pickle has two line ends, and one more line end follows
        if kind in _PLAIN or (len(data) < _SMALL and data.count(b"\n") < 3):
            return
        if (item, kind) in _told and self._setting != "refuse":
            return
        why, others = _refused(data)
        if why and self._setting != "warn" and (held := next(filter(_has_a_state, others), "")):
            why = f"the state of the {held} in it would not be loaded; put that into a dict or list"
            self._refused[item] = f"{item} ({kind.__name__}): {why}"
        elif why and self._setting == "refuse":
            self._refused[item] = f"{item} ({kind.__name__}): {why}"
        else:
            _told.add((item, kind))
            if why:
                logger.warning(
                    "%s: %s (%s) is saved, but load will refuse it: %s. Pass trust_pickle=True to "
                    "load, allow its classes by torch.serialization.add_safe_globals([...]), or "
                    "save its plain values instead", self.uri, item, kind.__name__, why,
                )  # fmt: skip

    def check(self) -> None:
        """Raises an error if a checked item was refused.

        Raises:
            UnsupportedValueError: If items were refused; it names all of them.
        """
        if self._refused:
            raise UnsupportedValueError(
                f"{len(self._refused)} of the values would not load: "
                f"{'; '.join(self._refused.values())}. Save plain values instead; or allow their "
                "classes by torch.serialization.add_safe_globals([...]); or, to load them with "
                "trust_pickle=True, save with Config(unloadable='warn')",
                uri=self.uri,
                item=next(iter(self._refused)),
            )


def _has_a_state(name: str) -> bool:
    """Whether the named class has a state dict, as modules do; False if it can't be imported."""
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        return False
    return isinstance(found, type) and issubclass(found, Stateful)


def _refused(data: bytes) -> tuple[str, Sequence[str]]:
    """Returns why the default load refuses an item, and the refused names; empty if it does not."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
        known = {*_ItemBuilding.calls, *_ItemBuilding.classes, *_NUMPY, *_numpy_classes()}
        others = sorted({full_name(*name.rpartition(".")[::2]) for name in names} - known)
        if names and not others and len(data) <= _TRIED:
            load_plain(io.BytesIO(data))
    except pickle.UnpicklingError as exc:
        return str(untrusted("", exc, "").cause), ()
    except Exception:  # noqa: BLE001 - a save does not fail because of a warning
        return "", ()
    return f"{', '.join(others)} is not allowed" if others else "", others
