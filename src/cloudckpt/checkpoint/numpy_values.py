"""numpy's arrays, scalars and dtypes, rebuilt from what a pickle describes.

numpy's own functions must not be let loose on a pickle of a stranger: the state of a dtype may say
that its fields lie outside of its memory, that its bytes are pointers to objects, or give an array
any size. Here a dtype is made by its public constructor, and must then be one that numpy itself
would describe in exactly the same way; an array is exactly as large as its bytes in the file.
Whatever passes is harmless to numpy's own functions too.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cloudckpt.checkpoint.inert_pickle import NO_STATE

__all__ = ["numpy_calls", "numpy_classes"]

_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")  # before numpy 2, and since
_CODE = re.compile(r"b1|[iu][1248]|f(2|4|8|12|16)|c(8|16|24|32)|[mM]8|[SUV][0-9]{1,9}|O[48]")
_UNIT = re.compile(rb"generic|[YMWDhms]|[munpfa]s")
_ALIGNED = 128  # the flag of a dtype that was made with align=True


def numpy_calls() -> Mapping[str, Callable[[Sequence[Any], Any], Any]]:
    """By the names of functions, what makes values of arguments and a state; empty without numpy.

    It raises ``UnpicklingError`` for what numpy does not write.
    """
    if not numpy_classes():
        return {}
    calls: dict[str, Callable[[Sequence[Any], Any], Any]] = {"numpy.dtype": _dtype}
    for module in _MODULES:
        calls[f"{module}._reconstruct"] = _array
        calls[f"{module}.scalar"] = _scalar
    return calls


def numpy_classes() -> Mapping[str, type[Any]]:
    """Classes that may be values themselves, by their names."""
    try:
        numpy = _numpy()
    except ImportError:
        return {}
    return {"numpy.ndarray": numpy.ndarray, "numpy.dtype": numpy.dtype}


def _expect(condition: object, what: str) -> None:
    if not condition:
        raise pickle.UnpicklingError(f"{what}: numpy does not pickle plain values so")


def _numpy() -> Any:
    import numpy  # torch works without it

    return numpy


def _array(arguments: Sequence[Any], state: Any) -> Any:
    numpy = _numpy()
    usual = len(arguments) == 3 and arguments[0] is numpy.ndarray
    _expect(usual and tuple(arguments[1:]) == ((0,), b"b"), "an array of another class")
    _expect(type(state) is tuple and len(state) == 5, "the state of an array")
    version, shape, dtype, is_fortran, content = state
    _expect(type(version) is int and version == 1, f"version {version!r} of an array")
    _expect(type(shape) is tuple and len(shape) <= 64, "the shape of an array")
    _expect(all(type(size) is int and 0 <= size < 1 << 62 for size in shape), "a negative size")
    _expect(isinstance(dtype, numpy.dtype) and type(is_fortran) is bool, "the dtype of an array")
    numel, order = math.prod(shape), "F" if is_fortran else "C"
    if not dtype.hasobject:
        nbytes = numel * dtype.itemsize
        _expect(type(content) is bytes and len(content) == nbytes, "the bytes of an array")
        return numpy.ndarray(shape, dtype, content, order=order).copy(order="A")
    _expect(type(content) is list and len(content) == numel, "the content of an array")
    flat = numpy.empty(numel, object)
    for index, entry in enumerate(content):
        flat[index] = entry
    # numpy writes objects in the order of rows, however the array lies in memory
    return numpy.array(flat.reshape(shape), order=order)


def _scalar(arguments: Sequence[Any], state: Any) -> Any:
    numpy = _numpy()
    _expect(len(arguments) == 2 and state is NO_STATE, "the arguments of a scalar")
    dtype, content = arguments
    _expect(isinstance(dtype, numpy.dtype), "the dtype of a scalar")
    _expect(not dtype.hasobject and dtype.subdtype is None, "a scalar that is an object")
    _expect(type(content) is bytes and len(content) == dtype.itemsize, "the bytes of a scalar")
    return numpy.ndarray((), dtype, content).copy()[()]


def _dtype(arguments: Sequence[Any], state: Any) -> Any:
    code, *copies = arguments
    _expect(type(code) is str and _CODE.fullmatch(code), f"the dtype {code!r}")
    _expect(copies in ([], [False, True]), "the arguments of a dtype")
    if state is NO_STATE:
        return _made(code)
    _expect(type(state) is tuple and len(state) in (8, 9), "the state of a dtype")
    version, order, inner, names, fields, size, _, flags = state[:8]
    _expect(type(version) is int and version in (3, 4), f"version {version!r} of a dtype")
    _expect(type(flags) is int, "the flags of a dtype")
    if code[0] in "mM":
        made = _made(code + _unit(state[8:]))
    elif fields is not None:
        made = _structure(names, fields, size, aligned=bool(flags & _ALIGNED))
    elif inner is not None:
        _expect(type(inner) is tuple and len(inner) == 2, "an inner array")
        _expect(isinstance(inner[0], _numpy().dtype) and type(inner[1]) is tuple, "an inner array")
        made = _made(inner)
    else:
        made = _made(code)
    if order in ("<", ">"):
        made = made.newbyteorder(order)
    _, (usual_code, *_), usual_state = made.__reduce__()[:3]
    same_flags = not (usual_state[7] ^ flags) & 0xFF  # a signed byte before numpy 2
    usual = usual_code == code and usual_state[1:7] == state[1:7] and same_flags
    _expect(usual, f"the state {state[1:8]!r}")
    _expect(code[0] == "O" or not made.hasobject, "a dtype with objects in it")
    metadata = (state[8][0] if code[0] in "mM" else state[8]) if len(state) == 9 else None
    if not metadata:
        return made
    _expect(type(metadata) is dict, "the metadata of a dtype")
    return _numpy().dtype(made, metadata=metadata)


def _made(code: Any, align: bool = False) -> Any:
    try:
        return _numpy().dtype(code, align)
    except (TypeError, ValueError, OverflowError) as exc:
        raise pickle.UnpicklingError(f"the dtype {code!r} is not allowed: {exc}") from None


def _unit(more: Any) -> str:
    """The unit of times, as it stands in the name of their dtype."""
    _expect(len(more) == 1 and type(more[0]) is tuple and len(more[0]) == 2, "a time without unit")
    _, unit = more[0]
    _expect(type(unit) is tuple and len(unit) == 4, "the unit of a time")
    name, *numbers = unit
    _expect(type(name) is bytes and _UNIT.fullmatch(name), f"the unit {name!r}")
    _expect(all(type(number) is int for number in numbers), "the unit of a time")
    _expect(0 < numbers[0] < 1 << 31 and numbers[1:] == [1, 1], "the unit of a time")
    return "" if name == b"generic" else f"[{numbers[0]}{name.decode()}]"


def _structure(names: Any, fields: Any, size: Any, *, aligned: bool) -> Any:
    _expect(type(fields) is dict and type(names) is tuple and type(size) is int, "a structure")
    _expect(fields.keys() == set(names) and len(fields) == len(names), "a field with a title")
    for field in fields.values():
        _expect(type(field) is tuple and len(field) == 2, "a field with a title")
        _expect(isinstance(field[0], _numpy().dtype) and type(field[1]) is int, "a field")
    layout = {
        "names": list(names),
        "formats": [fields[name][0] for name in names],
        "offsets": [fields[name][1] for name in names],
        "itemsize": size,
    }
    return _made(layout, aligned)
