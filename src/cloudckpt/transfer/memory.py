"""Tensors as plain bytes, without a copy."""

from __future__ import annotations

import ctypes

import torch

__all__ = ["bytes_of", "extent", "has_memory", "is_plain", "shows_its_memory"]


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
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
