"""numpy's arrays, scalars and dtypes in pickles, rebuilt from checked numbers and bytes.

numpy's own functions must not be let loose on a pickle of a stranger: the state of a dtype may say
that its fields lie outside of its memory, that its bytes are pointers to objects, or give an array
any size. What stands here for them takes only what numpy itself writes, and such arrays are exactly
as large as their bytes in the file. Whatever passes is harmless to numpy's own functions too.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["Made", "StandIn", "numpy_names"]

_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")  # before numpy 2, and since
_CODE = re.compile(r"b1|[iu][1248]|f(2|4|8|12|16)|c(8|16|24|32)|[mM]8|[SUV][0-9]{1,9}|O[48]")
_UNIT = re.compile(rb"generic|[YMWDhms]|[munpfa]s")
_ALIGNED = 128  # the flag of a dtype that was made with align=True


def _expect(condition: object, what: str) -> None:
    if not condition:
        raise pickle.UnpicklingError(f"{what}: numpy does not pickle plain values so")


class StandIn:
    """What a pickle gets instead of a class or a function, and what it may call it with."""

    def __init__(self, kind: Any, call: Any) -> None:
        self.kind = kind
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)


class Made:
    """An array or a dtype while its pickle is read; BUILD gives it its state, once."""

    complete = False

    @property
    def value(self) -> Any:
        """The array or the dtype itself."""
        raise NotImplementedError

    def __setstate__(self, state: Any) -> None:
        _expect(not self.complete, f"a second state of {type(self).__name__}")
        self.complete = True
        self._take(state)

    def _take(self, state: Any) -> None:
        raise NotImplementedError


class Dtype(Made):
    """Stands for a dtype."""

    def __init__(self, code: Any = None, align: Any = False, copy: Any = True) -> None:
        _expect(type(code) is str and _CODE.fullmatch(code), f"the dtype {code!r}")
        _expect(type(align) is bool and type(copy) is bool, "an argument of a dtype")
        self._code: str = code
        self._value: Any = _dtype(code)

    @property
    def value(self) -> Any:
        self.complete = True  # it is in use: a state that came later would change what uses it
        return self._value

    def _take(self, state: Any) -> None:
        _expect(type(state) is tuple and len(state) in (8, 9), "the state of a dtype")
        version, order, sub, names, fields, size, alignment, flags = state[:8]
        more = state[8] if len(state) == 9 else None
        _expect(type(version) is int and version in (3, 4), f"version {version!r} of a dtype")
        _expect(order in ("<", ">", "|", "="), f"the byte order {order!r}")
        _expect(type(flags) is int, "the flags of a dtype")
        if self._code[0] in "mM":
            self._value = _dtype(self._code + _unit(more))
        else:
            _expect(more is None or type(more) is dict, "metadata of a dtype")
        if sub is not None or fields is not None:
            _expect(self._code[0] == "V", f"a structure of {self._code!r}")
            if fields is None:
                self._value = _array_of(sub)
            else:
                self._value = _structure(names, fields, size, aligned=bool(flags & _ALIGNED))
        else:
            _expect(names is None, "names without fields")
        if order in "<>":
            self._value = self._value.newbyteorder(order)
        of_code = int(self._code[1:]) * (4 if self._code[0] == "U" else 1)
        _expect(size == -1 or size == of_code == self._value.itemsize, f"the size {size!r}")
        _expect(alignment in (-1, 1, 2, 4, 8, 16), f"the alignment {alignment!r}")
        _expect(flags == self._value.flags, f"the flags {flags!r} of a dtype")


class Array(Made):
    """Stands for an array."""

    def __init__(self, kind: Any = None, shape: Any = None, code: Any = None) -> None:
        whole = isinstance(kind, StandIn) and kind.kind is _numpy().ndarray
        usual = type(shape) is tuple and shape == (0,) and code == b"b"
        _expect(whole and usual, "an array of another class")
        self._value: Any = None

    def _take(self, state: Any) -> None:
        _expect(type(state) is tuple and len(state) == 5, "the state of an array")
        version, shape, dtype, is_fortran, content = state
        _expect(type(version) is int and version == 1, f"version {version!r} of an array")
        _expect(type(shape) is tuple and len(shape) <= 64, "the shape of an array")
        _expect(all(type(size) is int and 0 <= size < 1 << 62 for size in shape), "a negative size")
        _expect(isinstance(dtype, Dtype) and type(is_fortran) is bool, "the dtype of an array")
        kind, numel = dtype.value, math.prod(shape)
        if kind.hasobject:
            _expect(type(content) is list and len(content) == numel, "the content of an array")
        else:
            nbytes = numel * kind.itemsize
            _expect(type(content) is bytes and len(content) == nbytes, "the bytes of an array")
        self._value = kind, shape, "F" if is_fortran else "C", content

    @property
    def value(self) -> Any:
        numpy = _numpy()
        if self._value is None:
            return numpy.empty(0, "i1")
        kind, shape, order, content = self._value
        if not kind.hasobject:
            return numpy.ndarray(shape, kind, content, order=order).copy(order="A")
        flat = numpy.empty(len(content), object)
        for index, entry in enumerate(content):
            flat[index] = entry
        # numpy writes objects in the order of rows, however the array lies in memory
        return numpy.array(flat.reshape(shape), order=order)

    @property
    def objects(self) -> list[Any]:
        """What it holds, if it holds objects: they may have to be finished, too."""
        content = self._value[3] if self._value is not None else ()
        return content if type(content) is list else []


def numpy_names(made: list[Made]) -> Mapping[str, Any]:
    """What a pickle gets, by the full name that it asks for; nothing if there is no numpy.

    Args:
        made: Receives what is made meanwhile, which stands for arrays and dtypes.
    """
    try:
        numpy = _numpy()
    except ImportError:
        return {}

    def noted(kind: type[Made]) -> Any:
        def call(*arguments: Any) -> Made:
            made.append(kind(*arguments))
            return made[-1]

        return call

    names = {
        "numpy.ndarray": StandIn(numpy.ndarray, _refuse),
        "numpy.dtype": StandIn(numpy.dtype, noted(Dtype)),
        # BUILD looks whether the class is here; names in pickles have dots
        "array": Array,
        "dtype": Dtype,
    }
    for module in _MODULES:
        names[f"{module}._reconstruct"] = StandIn(None, noted(Array))
        names[f"{module}.scalar"] = StandIn(None, _scalar)
    return names


def _refuse(*arguments: Any) -> Any:
    raise pickle.UnpicklingError("a call of numpy.ndarray is not allowed")


def _scalar(dtype: Any = None, content: Any = None) -> Any:
    _expect(isinstance(dtype, Dtype), "the dtype of a scalar")
    kind = dtype.value
    _expect(not kind.hasobject and kind.subdtype is None, "a scalar that is an object")
    _expect(type(content) is bytes and len(content) == kind.itemsize, "the bytes of a scalar")
    return _numpy().ndarray((), kind, content).copy()[()]


def _numpy() -> Any:
    import numpy  # torch works without it

    return numpy


def _dtype(code: Any, align: bool = False) -> Any:
    try:
        return _numpy().dtype(code, align)
    except (TypeError, ValueError, OverflowError) as exc:
        raise pickle.UnpicklingError(f"the dtype {code!r} is not allowed: {exc}") from None


def _unit(metadata: Any) -> str:
    """The unit of times, as it stands in the name of their dtype."""
    _expect(type(metadata) is tuple and len(metadata) == 2, "the metadata of a time")
    others, unit = metadata
    _expect(others is None or type(others) is dict, "the metadata of a time")
    _expect(type(unit) is tuple and len(unit) == 4, "the unit of a time")
    name, *numbers = unit
    _expect(type(name) is bytes and _UNIT.fullmatch(name), f"the unit {name!r}")
    _expect(all(type(number) is int for number in numbers), "the unit of a time")
    _expect(0 < numbers[0] < 1 << 31 and numbers[1:] == [1, 1], "the unit of a time")
    return "" if name == b"generic" else f"[{numbers[0]}{name.decode()}]"


def _array_of(sub: Any) -> Any:
    _expect(type(sub) is tuple and len(sub) == 2 and isinstance(sub[0], Dtype), "an inner array")
    kind, shape = sub[0].value, sub[1]
    _expect(not kind.hasobject, "an inner array of objects")
    _expect(type(shape) is tuple and all(type(size) is int for size in shape), "an inner array")
    return _dtype((kind, shape))


def _structure(names: Any, fields: Any, size: Any, *, aligned: bool) -> Any:
    _expect(type(fields) is dict and type(names) is tuple and type(size) is int, "a structure")
    _expect(fields.keys() == set(names) and len(fields) == len(names), "a field with a title")
    kinds, offsets = [], []
    for name in names:
        field = fields[name]
        _expect(type(name) is str and type(field) is tuple and len(field) == 2, "a field")
        _expect(isinstance(field[0], Dtype) and type(field[1]) is int, "a field")
        kinds.append(field[0].value)
        offsets.append(field[1])
        _expect(offsets[-1] >= 0, "a field before the first byte")
        _expect(not kinds[-1].hasobject, "a field of objects")
    layout = {"names": list(names), "formats": kinds, "offsets": offsets, "itemsize": size}
    return _dtype(layout, aligned)
