"""Where downloaded bytes go: straight into a tensor if possible, through memory if not."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from cloudckpt.transfer.memory import bytes_of, is_plain
from cloudckpt.transfer.ranges import Box, row_major_strides

__all__ = ["BoxSink", "BytesSink", "FlatSink", "Sink", "copy_into", "narrow"]


class Sink(Protocol):
    """A consumer of the bytes of one range."""

    pinned: bool
    """Whether pinned memory makes :meth:`deliver` faster."""

    plain: bool
    """Whether bytes can go straight into the target."""

    def direct(self, start: int, stop: int) -> memoryview | None:
        """The memory that bytes ``start`` to ``stop`` of the range belong to, if it is plain."""

    def deliver(self, start: int, data: torch.Tensor) -> None:
        """Takes bytes from ``start`` of the range on, as a tensor of uint8."""


class BytesSink:
    """Keeps the bytes: for items that are not tensors."""

    pinned = False
    plain = True

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)

    def direct(self, start: int, stop: int) -> memoryview | None:
        return memoryview(self.data)[start:stop]

    def deliver(self, start: int, data: torch.Tensor) -> None:
        view = bytes_of(data)
        self.data[start : start + view.nbytes] = view


class FlatSink:
    """A target whose elements lie in the order of the range; the range may come in any cuts."""

    __slots__ = ("_bytes", "_dtype", "_flat", "pinned", "plain")

    def __init__(self, target: torch.Tensor, dtype: torch.dtype) -> None:
        self.pinned = target.device.type == "cuda"
        self._flat = target.reshape(-1) if target.dim() != 1 else target
        self._dtype = dtype
        self.plain = is_plain(target) and target.dtype == dtype
        self._bytes = bytes_of(target) if self.plain else memoryview(b"")

    def direct(self, start: int, stop: int) -> memoryview | None:
        return self._bytes[start:stop] if self.plain else None

    def deliver(self, start: int, data: torch.Tensor) -> None:
        elements = _viewed(data, self._dtype)
        first = start // self._dtype.itemsize
        with _mode_of(self._flat):
            self._flat[first : first + elements.numel()].copy_(elements)


class BoxSink:
    """A box of a target, taken out of a range that also holds other elements, or not in order."""

    plain = False

    def __init__(
        self,
        target: torch.Tensor,
        box: Box,
        dtype: torch.dtype,
        source_shape: tuple[int, ...] | None,
    ) -> None:
        """``source_shape``: that of the stored tensor; None if the range is the box itself."""
        self.pinned = target.device.type == "cuda"
        self._target = narrow(target, box)
        self._dtype = dtype
        self._strides = None if source_shape is None else row_major_strides(source_shape)

    def direct(self, start: int, stop: int) -> memoryview | None:
        return None

    def deliver(self, start: int, data: torch.Tensor) -> None:
        elements = _viewed(data, self._dtype)
        shape = self._target.shape
        if self._strides is None:
            elements = elements.view(shape)
        else:
            elements = elements.as_strided(shape, self._strides, elements.storage_offset())
        copy_into(self._target, elements)


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies, in the mode in which ``target`` may be changed; autograd does not see it."""
    with _mode_of(target):
        target.copy_(source)


def _mode_of(target: torch.Tensor) -> AbstractContextManager[object]:
    """The mode in which a tensor may be changed; each thread has its own."""
    return torch.inference_mode() if target.is_inference() else torch.no_grad()


def narrow(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The view of a box."""
    for axis, (start, length) in enumerate(box):
        if length != tensor.shape[axis]:
            tensor = tensor.narrow(axis, start, length)
    return tensor


def _viewed(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as elements; copied first if they do not lie at a multiple of the element size."""
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)
