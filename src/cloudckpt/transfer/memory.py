"""Tensors as plain bytes, without a copy."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

__all__ = [
    "bytes_of",
    "extent",
    "has_memory",
    "host_buffer",
    "is_plain",
    "settled",
    "shows_its_memory",
]

# not a ctypes array: each size would be a class of its own, and a cycle for the garbage collector
_memory_at: Any = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memory_at.restype = ctypes.py_object
_WRITABLE = 0x200  # PyBUF_WRITE


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; if it is what a collective fills meanwhile, its memory when that has ended."""
    if type(tensor) is not AsyncCollectiveTensor:
        return tensor
    wait: Any = tensor.trigger_wait
    result: torch.Tensor = wait()
    return result


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the elements lie in host memory, in row-major order, just as they are to be read."""
    return tensor.is_cpu and tensor.is_contiguous() and shows_its_memory(tensor)


def shows_its_memory(tensor: torch.Tensor) -> bool:
    """Whether the values are those in memory: a conjugated or negated view shows others."""
    return not tensor.is_neg() and not (tensor.is_complex() and tensor.is_conj())


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether all elements have memory: not if it was freed, shrunk, or only pretends to exist."""
    if tensor.numel() == 0:
        return True
    storage = tensor.untyped_storage()
    try:
        if storage.device.type == "meta" or storage.data_ptr() == 0:  # a fake tensor's is meta
            return False
    except RuntimeError:  # torch's zero tensors
        return False
    return bool(storage.nbytes() >= extent(tensor)[1])


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that a non-empty tensor shows: the first, and behind the last."""
    itemsize = tensor.itemsize
    first = tensor.storage_offset() * itemsize
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    end = first + (sum((size - 1) * stride for size, stride in steps) + 1) * itemsize
    return int(first), int(end)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a plain tensor; it is only valid as long as the caller keeps the tensor."""
    size = tensor.numel() * tensor.itemsize
    if size == 0:
        return memoryview(b"")
    view: memoryview = _memory_at(tensor.data_ptr(), size, _WRITABLE)
    return view


def host_buffer(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Bytes of host memory, which the system has back as soon as nobody uses them.

    They are a mapping of their own, and not malloc's, which keeps what one thread has freed from
    the others, and from the system.

    Args:
        nbytes: How many; not 0.
        pinned: Whether they are page-locked; torch keeps such memory for the next buffer.
    """
    if pinned:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
