"""The structure of a saved state without its data: where tensors lie, and how they are put back."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["NotPlainError", "Place", "has_tensors", "new_storage", "replace_tensors"]

_VALUES = (
    *(int, float, complex, bool, str, bytes, bytearray, type(None)),
    *(torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_DICTS = (dict, OrderedDict, defaultdict, Counter)


class NotPlainError(Exception):
    """The structure holds something that only ``torch.load`` can build."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a file of ``torch.save``.

    Attributes:
        storage_offset: The first byte of its storage in the file.
        storage_nbytes: The bytes of its storage.
        dtype: Its element type.
        first: Its first element in the storage.
        shape: Its shape.
        stride: Its strides, in elements.
        requires_grad: Whether it does.
        is_parameter: Whether it is an ``nn.Parameter``.
    """

    storage_offset: int
    storage_nbytes: int
    dtype: torch.dtype
    first: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    is_parameter: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Place | None:
        """The place of a tensor that was loaded to ``meta``; None unless it is a plain one."""
        if (
            type(tensor) not in (torch.Tensor, torch.nn.Parameter)
            or tensor.layout != torch.strided
            or not tensor.is_meta
            or tensor.is_quantized
            or tensor.is_nested
            or tensor.is_neg()
            or tensor.is_conj()
            or vars(tensor)
        ):
            return None
        storage = tensor.untyped_storage()
        offset = getattr(storage, "_checkpoint_offset", None)  # torch's own readers use it too
        if not isinstance(offset, int):
            return None
        place = cls(
            storage_offset=offset,
            storage_nbytes=storage.nbytes(),
            dtype=tensor.dtype,
            first=int(tensor.storage_offset()),
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            requires_grad=tensor.requires_grad,
            is_parameter=type(tensor) is torch.nn.Parameter,
        )
        return place if 0 <= place.extent[0] <= place.extent[1] <= place.storage_nbytes else None

    @property
    def name(self) -> str:
        """For messages."""
        return f"storage at byte {self.storage_offset}"

    @property
    def extent(self) -> tuple[int, int]:
        """The bytes of the storage from its first element to behind its last one."""
        start = self.first * self.dtype.itemsize
        if 0 in self.shape:
            return start, start
        steps = zip(self.shape, self.stride, strict=True)
        last = self.first + sum((size - 1) * stride for size, stride in steps)
        return start, (last + 1) * self.dtype.itemsize

    @property
    def is_row_major(self) -> bool:
        """Whether its elements stand in row-major order without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return 0 in self.shape
            expected *= max(size, 1)
        return True

    def view(self, storage: torch.UntypedStorage, skipped: int = 0) -> torch.Tensor:
        """The tensor over ``storage``, which lacks the first ``skipped`` bytes of the saved one."""
        first = self.first - skipped // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor = empty.set_(storage, first, self.shape, self.stride)
        if self.is_parameter:
            return torch.nn.Parameter(tensor, requires_grad=self.requires_grad)
        return tensor.requires_grad_(self.requires_grad)


def new_storage(nbytes: int) -> torch.UntypedStorage:
    """Memory without content."""
    return torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]


class _FoundError(Exception):
    pass


def has_tensors(value: Any) -> bool:
    """Whether there is a tensor in ``value``.

    Raises:
        NotPlainError: If there is an object that may hide some.
    """

    def found(tensor: torch.Tensor) -> torch.Tensor:
        raise _FoundError

    try:
        replace_tensors(value, found)
    except _FoundError:
        return True
    return False


def replace_tensors(value: Any, replace: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with its tensors replaced; dicts and lists are changed in place.

    What occurs several times is replaced once, so that it goes on being the same object.

    Raises:
        NotPlainError: If there is anything but tensors, plain values, dicts, lists and tuples.
    """
    return _Replacement(replace).of(value)


class _Replacement:
    """One walk through a value. Two functions within another would hold each other, and tensors."""

    def __init__(self, replace: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._replace = replace
        # by identifier, with the original, whose identifier must stay taken
        self._replaced: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        if type(value) in _VALUES:
            return value
        if id(value) in self._replaced:
            return self._replaced[id(value)][1]
        if isinstance(value, torch.Tensor):
            new: Any = self._replace(value)
        elif type(value) is tuple:
            new = tuple(self.of(entry) for entry in value)
        elif type(value) in (set, frozenset) and all(type(entry) in _VALUES for entry in value):
            new = value
        else:
            return self._in_place(value)
        self._replaced[id(value)] = (value, new)
        return new

    def _in_place(self, value: Any) -> Any:
        self._replaced[id(value)] = (value, value)
        if type(value) is list:
            value[:] = [self.of(entry) for entry in value]
        elif type(value) in _DICTS:
            for key, entry in value.items():
                if type(key) not in _VALUES:
                    raise NotPlainError
                value[key] = self.of(entry)
            attributes = getattr(value, "__dict__", {})  # state_dict()._metadata
            for name, entry in attributes.items():
                attributes[name] = self.of(entry)
        else:
            raise NotPlainError
        return value
