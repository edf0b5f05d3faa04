"""Tensors as plain bytes, without a copy."""

from __future__ import annotations

import ctypes

import torch

__all__ = ["bytes_of", "is_plain"]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the elements lie in host memory, in row-major order, exactly as they are to be read.

    A tensor with the conjugate or negative bit shows other values than its memory holds.
    """
    return (
        tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not (tensor.is_complex() and tensor.is_conj())
    )


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a plain tensor; it is only valid as long as the caller keeps the tensor."""
    size = tensor.numel() * tensor.itemsize
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
