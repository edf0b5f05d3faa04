"""Digests by which ranks find out whether they have the same under one name.

Equal values have equal digests on all ranks. Their pickles don't: these depend on which objects are
shared, and on the order of sets, which differs between processes. So a value is digested by what it
consists of. Of a tensor of 64 KiB or more, a few pages are read, of 1 KiB each: 16, and one more
for each MiB. Tensors that have nothing to do with each other differ there; to find any difference,
all of them is read.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cloudckpt.checkpoint.base import kind_of
from cloudckpt.transfer.memory import bytes_of, has_memory, is_plain, settled

__all__ = ["digest_of_all"]

_SAMPLED_FROM = 64 * 1024
"""Bytes from which on a tensor is sampled."""

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_PAGE = 1024  # bytes of a tensor that are read at a place
_LEAST_PAGES = 16
_EVERY = 1024 * 1024  # bytes of a tensor for which there is a further page
_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes
_AT_ONCE = 64 * 1024 * 1024  # bytes of a tensor that are copied at a time
_ATOMS_AT_ONCE = frozenset((type(None), bool, int, float, str))  # of which there may be millions
_ATOMS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)


def digest_of_all(values: Iterable[Any], *, samples: bool = True) -> int:
    """The digest, of 64 bits, of several values, in their order.

    Args:
        values: The values.
        samples: Whether only a sample of a large tensor counts.
    """
    hash_ = xxhash.xxh3_64()
    for value in values:
        _Digest(hash_, samples=samples).add(value)
    return hash_.intdigest()


class _Digest:
    """Takes one value apart.

    An object that is there several times is visited once, and its digest taken again: it may refer
    to others in any way.

    Args:
        hash_: Takes what tells the value from others.
        samples: Whether only a sample of a large tensor counts.
    """

    __slots__ = ("_hash", "_known", "_open", "_samples", "_visited")

    def __init__(self, hash_: xxhash.xxh3_64, *, samples: bool) -> None:
        self._hash, self._samples = hash_, samples
        self._known: dict[int, bytes] = {}
        self._open: set[int] = set()
        self._visited: list[object] = []  # another one would get its id otherwise

    def add(self, value: Any) -> None:
        """Adds a value; of one that can't be taken apart, its class."""
        kind = type(value)
        if kind in _ATOMS:
            self._put(f"{kind.__name__} {value!r}")
        elif kind in _PLAIN:
            self._add_or_name(self._add_tensor, value)
        else:
            self._hash.update(self._digest_of(value))

    def _digest_of(self, value: Any) -> bytes:
        if id(value) in self._open:
            return b"within itself"
        if id(value) in self._known:
            return self._known[id(value)]
        outer, self._hash = self._hash, xxhash.xxh3_64()
        self._open.add(id(value))
        self._visited.append(value)
        self._add_or_name(self._add, value)
        made, self._hash = self._hash.digest(), outer
        self._open.discard(id(value))
        self._known[id(value)] = made
        return made

    def _add_or_name(self, add: Callable[[Any], None], value: Any) -> None:
        try:
            add(value)
        except Exception:  # noqa: BLE001 - of somebody's class; the rank that saves it will tell
            self._put(f"of {type(value).__module__}.{type(value).__qualname__}")

    def _add(self, value: Any) -> None:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            self._add_tensor(value)
        elif isinstance(value, (bytes, bytearray)):
            self._put(f"bytes {len(value)}")
            self._hash.update(value)
        elif isinstance(value, enum.Enum):
            self._put(f"{kind.__qualname__}.{value.name}")
        elif isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
            self._put(f"{value.__module__}.{value.__qualname__}")
        elif isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
            self._put(f"array {value.dtype.str} {value.shape}")
            self._hash.update(value.tobytes())
        elif isinstance(value, Mapping):
            self._put(f"{kind.__qualname__} {len(value)}")
            has_plain_keys = {*map(type, value)} <= {str}
            if has_plain_keys and _ATOMS_AT_ONCE.issuperset(map(type, value.values())):
                self._put(repr(sorted(value.items())))  # no key is there twice
            else:
                self._hash.update(b"".join(sorted(map(self._digest_of, value.items()))))
        elif isinstance(value, (set, frozenset)):
            self._put(f"set {len(value)}")
            self._hash.update(b"".join(sorted(self._digest_of((each,)) for each in value)))
        elif isinstance(value, (list, tuple)):
            self._put(f"{kind.__qualname__} {len(value)}")
            if _ATOMS_AT_ONCE.issuperset(map(type, value)):
                self._put(repr([*value]))
            else:
                self._add_each(value)
        else:
            self._add_parts(value)

    def _add_parts(self, value: Any) -> None:
        """What a pickle would consist of."""
        parts = value.__reduce_ex__(4)
        if isinstance(parts, str):
            self._put(f"global {parts}")
            return
        self._put(f"object of {len(parts)} parts")
        self._add_each([list(part) if isinstance(part, Iterator) else part for part in parts])

    def _add_each(self, parts: Iterable[Any]) -> None:
        for part in parts:
            self.add(part)

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        if type(tensor) not in _PLAIN:
            tensor = settled(tensor).detach()
            wrapped: Any = tensor  # mypy knows no class that is a tensor and a wrapper
            if is_traceable_wrapper_subclass(wrapped):
                parts = (getattr(wrapped, name) for name in wrapped.__tensor_flatten__()[0])
                self._add_each([part for part in parts if isinstance(part, torch.Tensor)])
                return
            tensor = tensor.as_subclass(torch.Tensor)
        self._hash.update(kind_of(tensor.dtype, tensor.shape))
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            return  # the rank that saves it will tell
        if tensor.is_meta or not has_memory(tensor):
            return
        samples = self._samples and tensor.nbytes >= _SAMPLED_FROM
        if not samples and is_plain(tensor):
            self._hash.update(bytes_of(tensor))
            return
        for piece in [_sample(tensor.detach())] if samples else _slices(tensor.detach()):
            self._hash.update(bytes_of(piece))

    def _put(self, text: str) -> None:
        self._hash.update(f"{text}\0".encode("utf-8", "surrogatepass"))


def _slices(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """All bytes of a tensor, in row-major order, without a copy of all of it at a time."""
    if not tensor.numel():
        return
    if tensor.nbytes > _AT_ONCE and tensor.shape[0] > 1:
        rows = max(1, _AT_ONCE // (tensor.nbytes // tensor.shape[0]))
        for first in range(0, tensor.shape[0], rows):
            yield from _slices(tensor[first : first + rows])
        return
    yield tensor.resolve_conj().resolve_neg().contiguous().cpu()


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Elements at the same places of a tensor's row-major order however it lies in memory."""
    count, size = tensor.numel(), tensor.itemsize
    page = max(1, _PAGE // size)
    pages = _LEAST_PAGES + tensor.nbytes // _EVERY
    step = (count - page) // (pages - 1)  # the first page and the last are read, too
    is_view = tensor.is_neg() or (tensor.is_complex() and tensor.is_conj())
    if not is_view and size in _NUMBERS:
        tensor = tensor.view(_NUMBERS[size])
    if tensor.is_contiguous():
        found = tensor.as_strided((pages, page), (step, 1), tensor.storage_offset())
    else:
        starts = torch.arange(pages, device=tensor.device).unsqueeze(1) * step
        found = tensor.take(starts + torch.arange(page, device=tensor.device))
    return found.resolve_conj().resolve_neg().contiguous().cpu()
