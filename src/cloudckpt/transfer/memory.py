"""Tensors as plain bytes, without a copy, and which of them share memory."""

from __future__ import annotations

import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from cloudckpt.transfer.boxes import Box, reach
from cloudckpt.transfer.packing import WRITABLE, memory_at

__all__ = [
    "PLAIN",
    "Claims",
    "bytes_of",
    "extent",
    "has_memory",
    "host_buffer",
    "is_plain",
    "memory_of",
    "narrow",
    "settled",
    "shows_its_memory",
    "why_not_filled",
]


PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))
"""The classes of tensors that are bytes in memory and nothing else."""


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; if a collective is still filling it, waits and returns its memory."""
    if type(tensor) is not AsyncCollectiveTensor:
        return tensor
    wait: Any = tensor.trigger_wait
    result: torch.Tensor = wait()
    return result


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the elements lie in host memory, in row-major order, with their actual values."""
    return tensor.is_cpu and tensor.is_contiguous() and shows_its_memory(tensor)


def shows_its_memory(tensor: torch.Tensor) -> bool:
    """Whether the values are those in memory, unlike in a conjugated or negated view."""
    return not tensor.is_neg() and not (tensor.is_complex() and tensor.is_conj())


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether all elements have memory: False if it was freed or shrunk, or is fake."""
    return tensor.numel() == 0 or memory_of(tensor) is not None


def memory_of(tensor: torch.Tensor) -> tuple[torch.UntypedStorage, int, int] | None:
    """The storage of a tensor that is not empty, and the bytes of it that it shows.

    None if they were freed or shrunk, or only pretend to exist.
    """
    storage = tensor.untyped_storage()
    try:
        if storage.device.type == "meta" or storage.data_ptr() == 0:  # a fake tensor's is meta
            return None
    except RuntimeError:  # torch's zero tensors
        return None
    first, end = extent(tensor)
    return (storage, first, end) if storage.nbytes() >= end else None


def why_not_filled(tensor: torch.Tensor) -> str:
    """Why nothing can be loaded into a tensor, for messages; empty if it can."""
    if tensor.layout != torch.strided:
        return (
            f"it has the layout {tensor.layout}: load into a dense tensor, and convert it "
            "afterwards"
        )
    if tensor.is_meta:
        return "it is a meta tensor, without memory: call model.to_empty(device=...) first"
    if not has_memory(tensor):
        return "its memory was freed or never allocated: allocate it before the load"
    if not tensor.is_contiguous() and _may_overlap(tensor.shape, tensor.stride()):
        return "several of its elements share memory: load into tensor.contiguous()"
    return ""


def _may_overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements share memory, or might: no step is beyond all that smaller steps reach."""
    steps = sorted((s, size) for s, size in zip(strides, shape, strict=True) if size > 1)
    return any(
        step < reach([size for _, size in steps[:n]], [s for s, _ in steps[:n]])
        for n, (step, _) in enumerate(steps)
    )


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that a non-empty tensor shows: the first, and behind the last."""
    itemsize = tensor.itemsize
    first = int(tensor.storage_offset()) * itemsize
    if tensor.is_contiguous():  # nearly all are, and small ones may be many
        return first, first + tensor.numel() * itemsize
    return first, first + reach(tensor.shape, tensor.stride()) * itemsize


def narrow(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The view of a box."""
    for axis, (start, length) in enumerate(box):
        if length != tensor.shape[axis]:
            tensor = tensor.narrow(axis, start, length)
    return tensor


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a plain tensor; it is only valid as long as the caller keeps the tensor."""
    size = tensor.numel() * tensor.itemsize
    if size == 0:
        return memoryview(b"")
    view: memoryview = memory_at(tensor.data_ptr(), size, WRITABLE)
    return view


def host_buffer(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Allocates host memory that returns to the system as soon as it is unused.

    It is a separate mapping, not malloc's, which keeps what one thread has freed from other threads
    and from the system.

    Args:
        nbytes: How many; not 0.
        pinned: Whether they are page-locked; torch keeps such memory for the next buffer.
    """
    if pinned:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Claims:
    """Ranges of memory, each of an owner, of which none overlaps another owner's.

    What lies in between the first and the last byte of a view counts as the view's. Views of one
    owner, such as the boxes of one tensor, are the owner's to keep apart.
    """

    def __init__(self) -> None:
        self._taken: dict[torch.device, _Ranges] = {}

    def overlap(self, tensor: torch.Tensor, owner: Hashable) -> bool:
        """Whether a tensor shares memory with one that was added for another owner."""
        ranges = self._taken.get(tensor.device)
        if ranges is None or not tensor.numel():
            return False
        first, stop = ranges.within(*_range_of(tensor))
        return any(other != owner for other in ranges.owners[first:stop])

    def add(self, tensor: torch.Tensor, owner: Hashable) -> None:
        """Adds a tensor, which overlaps none of another owner that was added before."""
        if tensor.numel():
            self._taken.setdefault(tensor.device, _Ranges()).add(*_range_of(tensor), owner)


def _range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte that a tensor shows, and behind the last."""
    first, end = extent(tensor)
    start = tensor.data_ptr()
    return start, start + end - first


class _Ranges:
    """Ranges in order, which do not overlap."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.stops: list[int] = []
        self.owners: list[Hashable] = []

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """The first of the ranges that have bytes of a range, and behind the last."""
        return bisect_right(self.stops, start), bisect_left(self.starts, stop)

    def add(self, start: int, stop: int, owner: Hashable) -> None:
        """Adds a range; those that it overlaps, which are the owner's, become one with it."""
        first, last = self.within(start, stop)
        joined = slice(first, last)
        self.starts[joined] = [min([start, *self.starts[joined]])]
        self.stops[joined] = [max([stop, *self.stops[joined]])]
        self.owners[joined] = [owner]
