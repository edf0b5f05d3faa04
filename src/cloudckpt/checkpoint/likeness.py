"""Computes digests by which ranks compare the values that they have under the same name.

Equal values have equal digests on all ranks. Pickles of equal values may differ, as they depend on
which objects are shared, and on the order of sets, which differs between processes. So a value is
digested by its contents. Of a tensor of 64 KiB or more, only some pages of 1 KiB are read: 16, and
one more for each MiB. Unrelated tensors differ in these pages; with ``samples=False`` the whole
tensor is read, so that any difference is detected.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cloudckpt.checkpoint.base import type_prefix
from cloudckpt.transfer.memory import PLAIN, bytes_of, has_memory, is_plain, settled

__all__ = ["digest_of_all"]

_SAMPLED_FROM = 64 * 1024
"""Size in bytes of the smallest tensor of which only a sample is read."""

_PAGE = 1024  # bytes of a tensor that are read together
_LEAST_PAGES = 16
_EVERY = 1024 * 1024  # bytes of a tensor for which one more page is read
_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element
_AT_ONCE = 64 * 1024 * 1024  # maximum bytes of a tensor that are copied at a time
# hashed by one repr for a whole container, which may have millions
_ATOMS_AT_ONCE = frozenset((type(None), bool, int, float, str))
_ATOMS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)


def digest_of_all(values: Iterable[Any], *, samples: bool = True) -> int:
    """Returns one 64-bit digest of several values, in their order.

    Args:
        values: The values.
        samples: Whether to read only a sample of a large tensor.
    """
    hash_ = xxhash.xxh3_64()
    for value in values:
        _Digest(hash_, samples=samples).add(value)
    return hash_.intdigest()


class _Digest:
    """Adds values to a hash, including the values that they contain.

    An object that occurs several times is visited once, and its digest is reused: objects may refer
    to each other in any way, also in cycles.

    Args:
        hash_: The hash that the value is added to.
        samples: Whether to read only a sample of a large tensor.
    """

    __slots__ = ("_hash", "_known", "_samples")

    def __init__(self, hash_: xxhash.xxh3_64, *, samples: bool) -> None:
        self._hash, self._samples = hash_, samples
        # by id; the object is kept alive: a new one would get its id otherwise
        self._known: dict[int, tuple[bytes, object]] = {}

    def add(self, value: Any) -> None:
        """Adds a value to the hash; if its contents can't be read, the name of its class."""
        kind = type(value)
        if kind in _ATOMS:
            self._put(f"{kind.__name__} {value!r}")
        else:
            self._hash.update(self._digest_of(value))

    def _digest_of(self, value: Any) -> bytes:
        if id(value) not in self._known:
            outer, self._hash = self._hash, xxhash.xxh3_64()
            self._known[id(value)] = b"within itself", value
            try:
                self._add(value)
            except Exception:  # noqa: BLE001 - of somebody's class; the rank that saves it raises it
                self._put(f"of {type(value).__module__}.{type(value).__qualname__}")
            self._known[id(value)] = self._hash.digest(), value
            self._hash = outer
        return self._known[id(value)][0]

    def _add(self, value: Any) -> None:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            self._add_tensor(value)
        elif isinstance(value, (bytes, bytearray)):
            self._put(f"bytes {len(value)}")
            self._hash.update(value)
        elif isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
            self._put(f"{value.__module__}.{value.__qualname__}")
        elif isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
            self._put(f"array {value.dtype.str} {value.shape}")
            self._hash.update(value.tobytes())
        elif isinstance(value, (list, tuple)):
            self._put(f"{kind.__qualname__} {len(value)}")
            if _ATOMS_AT_ONCE.issuperset(map(type, value)):
                self._put(repr([*value]))
            else:
                self._add_each(value)
        elif isinstance(value, (Mapping, set, frozenset)):  # in any order
            self._put(f"{kind.__qualname__} {len(value)}")
            entries = value.items() if isinstance(value, Mapping) else ((each,) for each in value)
            self._hash.update(b"".join(sorted(map(self._digest_of, entries))))
        else:
            parts = value.__reduce_ex__(4)  # what a pickle of the object would consist of
            parts = (parts,) if isinstance(parts, str) else parts
            self._put(f"object of {len(parts)} parts")
            self._add_each(list(part) if isinstance(part, Iterator) else part for part in parts)

    def _add_each(self, parts: Iterable[Any]) -> None:
        for part in parts:
            self.add(part)

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        if type(tensor) not in PLAIN:
            tensor = settled(tensor).detach()
            wrapped: Any = tensor  # mypy does not know that a class can be both tensor and wrapper
            if is_traceable_wrapper_subclass(wrapped):
                self._add_each(getattr(wrapped, name) for name in wrapped.__tensor_flatten__()[0])
                return
            tensor = tensor.as_subclass(torch.Tensor)
        self._hash.update(type_prefix(tensor.dtype, tensor.shape))
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            return  # the rank that saves it raises the error
        if tensor.is_meta or not has_memory(tensor):
            return
        samples = self._samples and tensor.nbytes >= _SAMPLED_FROM
        for piece in [_sample(tensor.detach())] if samples else _slices(tensor.detach()):
            self._hash.update(bytes_of(piece))

    def _put(self, text: str) -> None:
        self._hash.update(f"{text}\0".encode("utf-8", "surrogatepass"))


def _slices(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields a tensor's elements in row-major order, as contiguous tensors in host memory.

    A tensor that has this form already is yielded itself. Any other is divided along its first
    dimension into slices of at most 64 MiB (or of one index), which are copied where necessary.
    """
    if is_plain(tensor):
        yield tensor
    elif tensor.nbytes > _AT_ONCE and tensor.shape[0] > 1:
        rows = max(1, _AT_ONCE * tensor.shape[0] // tensor.nbytes)
        for first in range(0, tensor.shape[0], rows):
            yield from _slices(tensor[first : first + rows])
    elif tensor.numel():
        yield tensor.resolve_conj().resolve_neg().contiguous().cpu()


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a sample of a tensor's elements; it does not depend on the memory layout."""
    count, size = tensor.numel(), tensor.itemsize
    page = max(1, _PAGE // size)
    pages = _LEAST_PAGES + tensor.nbytes // _EVERY
    step = (count - page) // (pages - 1)  # so that the first page and the last are read
    is_view = tensor.is_neg() or (tensor.is_complex() and tensor.is_conj())
    if not is_view and size in _NUMBERS:
        tensor = tensor.view(_NUMBERS[size])
    if tensor.is_contiguous():
        found = tensor.as_strided((pages, page), (step, 1), tensor.storage_offset())
    else:
        starts = torch.arange(pages, device=tensor.device).unsqueeze(1) * step
        found = tensor.take(starts + torch.arange(page, device=tensor.device))
    return found.resolve_conj().resolve_neg().contiguous().cpu()
