"""Loads values that are not plain tensors without running code of the checkpoint's author.

``torch.load`` with ``weights_only`` reads most of them. Some more are loaded because rebuilding
them is harmless: numpy's arrays, scalars and dtypes of plain numbers, texts and times, paths,
``datetime``, ``io.BytesIO``, empty ``bytes``, ``frozenset``. They are unpickled into stubs, and
built if the stubs have the arguments with which Python and numpy pickle such values. Any other
arguments are refused, as some planners unpickle an accepted item once more, without restrictions.
"""

from __future__ import annotations

import datetime
import enum
import functools
import io
import logging
import math
import os
import pickle
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import IO, Any

import numpy
import torch
from torch.distributed.checkpoint.stateful import Stateful

from cloudckpt.checkpoint.envelope import unwarned
from cloudckpt.checkpoint.pickles import (
    CALLS,
    Builder,
    Constructor,
    Stub,
    UnknownNameError,
    Unpickler,
    call_of,
    full_name,
)
from cloudckpt.checkpoint.torch_private import allowed_by_torch, allowed_by_user
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    UnsupportedValueError,
    UntrustedPickleError,
)

__all__ = [
    "Unloadable",
    "load_item",
    "load_plain",
    "load_saved",
    "load_tensor",
    "untrusted",
]


def load_saved(file: IO[bytes], map_location: Any = "cpu", *, trust: bool = False) -> Any:
    """Loads a value that ``torch.save`` has written, from the current position of ``file``.

    A warning of torch does not count as damage, even if warnings are errors.

    Args:
        file: A seekable file.
        map_location: As in ``torch.load``.
        trust: Whether its pickle may run any code.

    Raises:
        pickle.UnpicklingError: If ``trust`` is False, and the value needs code that is not allowed;
            or if its pickle is invalid. Damaged files may also raise other errors.
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
    """Returns the error for a value that needs code that is not allowed.

    Args:
        what: The value, in words.
        cause: The error of the unpickler, whose message names the code if the pickle is valid.
        uri: The checkpoint or file.
        item: The name of the value; None in a file.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(cause))
    named = re.search(r"GLOBAL (\S+)", text)
    problem = "it is damaged (load an older one then), or needs" if named is None else "it needs"
    return UntrustedPickleError(
        f"{what} can't be loaded: {problem} code that is not on torch's allow-list. If you "
        "trust everyone who can write to this location, pass trust_pickle=True (in Lightning "
        "weights_only=False), or allow the class by torch.serialization.add_safe_globals([...])",
        uri=uri,
        item=item,
        cause=f"{named[1]} is not allowed" if named else text.partition("\n")[0],
    )


def load_item(
    data: bytes | bytearray | memoryview,
    item: str,
    uri: str,
    *,
    map_location: Any = "cpu",
    trust: bool = False,
) -> Any:
    """Loads a value that was written by ``torch.save``.

    Args:
        data: The bytes of the item.
        item: The name of the item, for messages.
        uri: The checkpoint, for messages.
        map_location: As in ``torch.load``; None for the devices that the tensors in it were saved
            from.
        trust: Whether its pickle may run any code.

    Raises:
        UntrustedPickleError: If, without ``trust``, the value needs code that is not allowed, or
            its pickle is invalid, which torch reports alike.
        CheckpointCorruptError: If the value can't be read for another reason.
        CheckpointError: If the device that ``map_location`` or the item names can't take the
            tensors in it: this machine lacks the device, or its memory is full.
    """
    try:
        return load_saved(io.BytesIO(data), map_location, trust=trust)
    except Exception as exc:
        if isinstance(exc, pickle.UnpicklingError) and not trust:
            raise untrusted(item, exc, uri, item) from None
        if map_location != "cpu":
            load_item(data, item, uri)  # raises, too, if the item itself can't be read
            raise CheckpointError(
                f"{item} contains tensors that can't be put onto their device: this machine lacks "
                "it, or its memory is full. Use load(uri, default_map_location='cpu') of "
                "cloudckpt.checkpointer.make_sync_checkpointer()",
                uri=uri,
                item=item,
                cause=exc,
            ) from exc
        raise CheckpointCorruptError(
            f"{item} can't be unpickled: if the cause names a module or class, make it importable "
            "as it was; else it is probably damaged: load an older checkpoint, or leave it out",
            uri=uri,
            item=item,
            cause=exc,
        ) from exc


def load_tensor(
    data: bytes | bytearray | memoryview, item: str, uri: str, *, trust: bool
) -> torch.Tensor:
    """Loads a tensor that ``torch.save`` wrote in a form other than a plain tensor's.

    Raises:
        UntrustedPickleError: If, without ``trust``, the tensor needs code that is not allowed, or
            its pickle is invalid.
        CheckpointCorruptError: If the data can't be read for another reason, or is not a tensor.
    """
    loaded = load_item(data, item, uri, trust=trust)
    if not isinstance(loaded, torch.Tensor):
        raise CheckpointCorruptError(
            f"{item} is of class {type(loaded).__name__}, although the metadata describes it as a "
            "tensor: load an older checkpoint",
            uri=uri,
            item=item,
        )
    return loaded


def load_plain(file: IO[bytes], map_location: Any = "cpu") -> Any:
    """Loads a value by ``torch.load`` with ``weights_only``, without running unknown code.

    A zip archive that torch refuses is loaded by this module's own unpickler, which also accepts
    the classes that the module's docstring lists, unless ``TORCH_FORCE_WEIGHTS_ONLY_LOAD`` is set.

    Raises:
        pickle.UnpicklingError: If the file needs any other code, or its pickle is invalid. Damaged
            files may also raise other errors.
    """
    start = file.tell()
    try:
        # mmap needs a path: overrides torch.utils.serialization.config
        return torch.load(file, map_location=map_location, weights_only=True, mmap=False)
    except pickle.UnpicklingError:
        file.seek(start)
        if file.read(4) != b"PK\3\4" or _FORCED in os.environ:
            raise
        file.seek(start)
    module = SimpleNamespace(__name__=__name__, Unpickler=_PlainUnpickler)
    return torch.load(
        file, map_location=map_location, pickle_module=module, weights_only=False, mmap=False
    )


_FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


class _PlainUnpickler(Unpickler):
    """Unpickles ``data.pkl`` for ``torch.load``, making instances of allowed classes only."""

    def load(self) -> Any:
        of_torch = {
            name: functools.partial(_of_torch, found)
            for name, found in allowed_by_torch().items()
            if callable(found)
        }
        constants = {**allowed_by_torch(), **_NUMPY_CLASSES, **allowed_by_user()}
        try:
            stubs = super().load()
            return Builder({**of_torch, **_KNOWN}, constants, _of_the_user).value(stubs)
        except UnknownNameError as unknown:
            raise pickle.UnpicklingError(f"GLOBAL {unknown} is not allowed") from None
        except (AttributeError, LookupError, TypeError, ValueError) as exc:
            raise pickle.UnpicklingError(str(exc)) from exc


def _of_torch(call: Callable[..., Any], arguments: tuple[Any, ...], state: Any) -> Any:
    if state is not None:
        raise ValueError("invalid pickle: it gives a state to the result of a torch function")
    return call(*arguments)


def _of_the_user(builder: Builder, stub: Stub) -> Any:
    """Makes an instance of a class that the user allowed by ``add_safe_globals``, as torch does.

    Raises:
        UnknownNameError: If the class is not allowed.
    """
    cls = allowed_by_user().get(stub.name)
    if not isinstance(cls, type):
        raise UnknownNameError(stub.name)
    arguments = map(builder.value, stub.arguments)
    made: Any = cls(*arguments) if stub.is_call else cls.__new__(cls, *arguments)
    entries, state = map(builder.value, stub.entries or ()), builder.value(stub.state)
    for entry in entries:
        made.__setitem__(*entry) if isinstance(made, dict) else made.append(entry)
    if state is not None and hasattr(made, "__setstate__"):
        made.__setstate__(state)
    elif state is not None and not isinstance(made, (type, enum.Enum)):
        fields, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
        if fields:
            vars(made).update(fields)
        for name, value in (slots or {}).items():
            setattr(made, name, value)
    return made


def _buffer(arguments: tuple[Any, ...], state: Any) -> io.BytesIO:
    made: Any = io.BytesIO(*arguments)
    made.__setstate__(state)
    return made  # type: ignore[no-any-return]


# An untrusted pickle must not call numpy's own functions: the state of a dtype may say that its
# bytes are pointers. Here a dtype is made by its public constructor, and must then be one that
# numpy describes in exactly the same way; an array is as large as its bytes in the file.
_CODE = re.compile(
    r"b1|[iu][1248]|f(2|4|8|12|16)|c(8|16|24|32)|[SUV][0-9]{1,9}|[mM]8(\[[0-9]{1,9}[A-Za-z]{1,2}\])?"
)


def _expect(condition: object, what: str) -> None:
    if not condition:
        raise ValueError(f"numpy: {what} is not valid, or not that of plain values")


def _dtype(arguments: tuple[Any, ...], state: Any) -> Any:
    code, order = arguments[0], "="
    if state is not None:
        order = state[1]
        if len(state) == 9 and state[8][1][0] != b"generic":  # the unit of times
            code += f"[{state[8][1][1]}{state[8][1][0].decode()}]"
    _expect(
        type(code) is str and _CODE.fullmatch(code) and order in tuple("<>|="), f"dtype {code!r}"
    )
    made = numpy.dtype(code).newbyteorder(order)
    _expect(state in (None, made.__reduce__()[2]), f"dtype {code!r}")
    return made


def _array(arguments: tuple[Any, ...], state: Any) -> Any:
    _expect(arguments == (numpy.ndarray, (0,), b"b"), "an array's class")
    version, shape, dtype, is_fortran, content = state
    _expect(version == 1 and isinstance(dtype, numpy.dtype), "an array's dtype")
    _expect(len(content) == math.prod(shape) * dtype.itemsize, "an array's size")
    found = numpy.ndarray(shape, dtype, content, order="F" if is_fortran else "C")
    return found.copy(order="A")


def _scalar(arguments: tuple[Any, ...], state: Any) -> Any:
    dtype, content = arguments
    _expect(isinstance(dtype, numpy.dtype) and len(content) == dtype.itemsize, "a scalar's size")
    return numpy.ndarray((), dtype, content).copy()[()]


_NUMPY_CLASSES = {"numpy.ndarray": numpy.ndarray, "numpy.dtype": numpy.dtype}
_DAY = (int, bytes, str, type(None), datetime.timedelta, datetime.timezone)
_TIMES = (datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone)
_KNOWN: Mapping[str, Constructor] = {
    **CALLS,
    **{f"datetime.{kind.__name__}": call_of(kind, *_DAY) for kind in _TIMES},
    "_io.BytesIO": _buffer,
    "numpy.dtype": _dtype,
    **{f"numpy.{core}.multiarray._reconstruct": _array for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
}

logger = logging.getLogger("cloudckpt")

_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_SMALL = 4096  # bytes
# bytes of the largest item with numpy values that is loaded to test whether it can be
_TRIED = 1 << 20
_checked: set[tuple[str, type]] = set()  # items and types that this process has checked


class Unloadable:
    """Finds the values of a save that ``load`` would refuse; logs them, or refuses the save.

    Args:
        uri: The checkpoint.
        setting: ``refuse`` refuses all of them; ``warn`` logs each item and type once; ``auto``
            refuses only a value that contains a ``Stateful``, whose ``load_state_dict`` a load
            would not call, and logs the others.
    """

    def __init__(self, uri: str, setting: str) -> None:
        self.uri, self._setting = uri, setting
        self._refused: dict[str, str] = {}

    def look(self, data: bytes, item: str, kind: type) -> None:
        """Checks whether a load would refuse an item; logs this, or notes it for :meth:`check`.

        It takes almost no time for plain types.

        Args:
            data: The item, as ``torch.save`` writes it.
            item: The name of the item.
            kind: The class of its value.
        """
        # each name in a pickle has two line ends, and one more line end follows
        if kind in _PLAIN or (len(data) < _SMALL and data.count(b"\n") < 3):
            return
        if (item, kind) in _checked and self._setting != "refuse":
            return
        why, others = _refused(data)
        held = next(filter(_has_a_state, others), "") if self._setting != "warn" else ""
        if held:
            why = f"the state of the {held} in it would not be loaded; put that into a dict or list"
        if held or (why and self._setting == "refuse"):
            self._refused[item] = f"{item} ({kind.__name__}): {why}"
        else:
            _checked.add((item, kind))
            if why:
                logger.warning(
                    "%s: %s (%s) is saved, but load will refuse it: %s. Pass trust_pickle=True to "
                    "load, allow its classes by torch.serialization.add_safe_globals([...]), or "
                    "save its plain values instead", self.uri, item, kind.__name__, why,
                )  # fmt: skip

    def check(self) -> None:
        """Refuses the save if :meth:`look` has refused items.

        Raises:
            UnsupportedValueError: If :meth:`look` has refused items; the message names all of them.
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
    """Returns whether a class of this full name is ``Stateful``; False if it can't be imported."""
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        return False
    return isinstance(found, type) and issubclass(found, Stateful)


def _refused(data: bytes) -> tuple[str, Sequence[str]]:
    """Returns why a load without ``trust_pickle`` refuses an item, and the names it refuses.

    Args:
        data: The item, as ``torch.save`` writes it.

    Returns:
        The reason, which is empty if the item is not refused or this can't be tested; and the full
        names of the classes and functions that are not allowed, if there are any.
    """
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
        known = {*_KNOWN, *_NUMPY_CLASSES}
        others = sorted({full_name(*name.rpartition(".")[::2]) for name in names} - known)
        if names and not others and len(data) <= _TRIED:
            load_plain(io.BytesIO(data))
    except pickle.UnpicklingError as exc:
        return str(untrusted("", exc, "").cause), ()
    except Exception:  # noqa: BLE001 - a save does not fail because of a warning
        return "", ()
    return f"{', '.join(others)} is not allowed" if others else "", others
