"""Accesses tensors as bytes without copying, and finds those whose memory overlaps."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Sequence
from typing import Any, cast

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from cloudckpt.transfer.boxes import Box, reach

__all__ = [
    "PLAIN",
    "READABLE",
    "bytes_of",
    "extent",
    "has_memory",
    "is_plain",
    "memory_at",
    "memory_of",
    "narrow",
    "settled",
    "sharing_memory",
    "shows_its_memory",
    "why_not_filled",
]

# a ctypes array would need a new class for each size, each a reference cycle
memory_at: Any = ctypes.pythonapi.PyMemoryView_FromMemory
"""Returns a memoryview of the bytes at an address, given address, size and access flag."""
memory_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
memory_at.restype = ctypes.py_object
READABLE, _WRITABLE = 0x100, 0x200  # PyBUF_READ, PyBUF_WRITE

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))
"""The tensor classes whose values are just the bytes in their memory."""


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor; if a collective is still filling it, waits and returns the result."""
    if type(tensor) is not AsyncCollectiveTensor:
        return tensor
    return cast(torch.Tensor, cast(Any, tensor).trigger_wait())


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether the values lie in host memory, row-major, neither negated nor conjugate."""
    return tensor.is_cpu and tensor.is_contiguous() and shows_its_memory(tensor)


def shows_its_memory(tensor: torch.Tensor) -> bool:
    """Returns whether the values equal those in memory, unlike in conjugate or negated views."""
    return not tensor.is_neg() and not (tensor.is_complex() and tensor.is_conj())


def has_memory(tensor: torch.Tensor) -> bool:
    """Returns whether all elements have memory: False if it was freed, or the tensor is fake."""
    return tensor.numel() == 0 or memory_of(tensor) is not None


def memory_of(tensor: torch.Tensor) -> tuple[torch.UntypedStorage, int, int] | None:
    """Returns the storage of a nonempty tensor, and where its memory begins and ends there.

    Both are offsets in bytes. None if the memory was freed or shrunk, or the tensor is fake.
    """
    storage = tensor.untyped_storage()
    try:
        # a fake tensor's storage is on meta
        if storage.device.type == "meta" or storage.data_ptr() == 0:
            return None
    except RuntimeError:  # raised for torch's zero tensors
        return None
    first, end = extent(tensor)
    return (storage, first, end) if storage.nbytes() >= end else None


def why_not_filled(tensor: torch.Tensor) -> str:
    """Returns why nothing can be loaded into a tensor, for messages; empty if it is possible."""
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
    """Returns whether a tensor's elements may share memory.

    They may if a dimension's stride is less than what the dimensions of smaller strides span.
    """
    steps = sorted((s, size) for s, size in zip(strides, shape, strict=True) if size > 1)
    return any(
        step < reach([size for _, size in steps[:n]], [s for s, _ in steps[:n]])
        for n, (step, _) in enumerate(steps)
    )


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns where a nonempty tensor's memory begins and ends in its storage, in bytes."""
    itemsize = tensor.itemsize
    first = int(tensor.storage_offset()) * itemsize
    if tensor.is_contiguous():  # the usual case, and small tensors may be many
        return first, first + tensor.numel() * itemsize
    return first, first + reach(tensor.shape, tensor.stride()) * itemsize


def narrow(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Returns a view of the part of a tensor that a box describes."""
    for axis, (start, length) in enumerate(box):
        if length != tensor.shape[axis]:
            tensor = tensor.narrow(axis, start, length)
    return tensor


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous CPU tensor; valid only while the tensor is kept."""
    size = tensor.numel() * tensor.itemsize
    if size == 0:
        return memoryview(b"")
    return cast(memoryview, memory_at(tensor.data_ptr(), size, _WRITABLE))


def sharing_memory(
    entries: Sequence[tuple[Hashable, Sequence[torch.Tensor]]],
) -> dict[int, int]:
    """Finds entries whose memory overlaps that of other owners, and divides them into rounds.

    A tensor's memory extends from its first to its last byte, including gaps. Within a round, the
    tensors of different owners do not overlap.

    Args:
        entries: For each entry its owner (entries of one owner may overlap in a round), and the
            nonempty tensors in memory that it consists of.

    Returns:
        For each entry that overlaps one of another owner, directly or through further entries, the
        number of its round, from 0. The keys are the entries' numbers in ``entries``; an entry that
        overlaps none of another owner has no key.
    """
    ranges: list[tuple[str, int, int, int]] = []
    for number, (_, tensors) in enumerate(entries):
        for tensor in tensors:
            (first, end), start = extent(tensor), tensor.data_ptr()
            ranges.append((str(tensor.device), start, start + end - first, number))
    groups: list[dict[int, int]] = []  # of entries that overlap
    rounds: list[tuple[int, Hashable]] = []  # the end of the last range of each, and its owner
    before, reached = "", 0
    for device, start, stop, number in sorted(ranges):
        if device != before or start >= reached:
            groups.append({})
            rounds, before, reached = [], device, 0
        owner = entries[number][0]
        free = (at for at, (end, last) in enumerate(rounds) if end <= start or last == owner)
        if (at := next(free, len(rounds))) == len(rounds):
            rounds.append((0, owner))
        rounds[at] = max(stop, rounds[at][0]), owner
        groups[-1][number] = at
        reached = max(reached, stop)
    found = {number: at for group in groups if any(group.values()) for number, at in group.items()}
    several = (number for number in found if len(entries[number][1]) > 1)
    # one of several tensors may be in several groups: it gets a round of its own
    return found | {number: at for at, number in enumerate(several, max((0, *found.values())) + 1)}
