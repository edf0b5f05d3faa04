"""Bounded pools of host memory, for bytes that can't be sent or received where they are.

An upload copies strided tensors and those of accelerators into the slabs of a :class:`StagingPool`,
slice by slice, so that the memory in use does not depend on the size of a tensor. A download
borrows buffers from a :class:`ScratchPool`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cloudckpt.config import MIB
from cloudckpt.transfer.boxes import aligned, row_major_slices
from cloudckpt.transfer.group import Cancellation
from cloudckpt.transfer.memory import bytes_of, host_buffer, narrow
from cloudckpt.transfer.packing import SlabPool
from cloudckpt.transfer.parts import Piece

__all__ = ["ScratchPool", "StagingPool"]


class StagingPool(SlabPool):
    """Slabs into which tensors of any device and strides are copied."""

    def __init__(self, budget: int, cancellation: Cancellation) -> None:
        super().__init__(budget, cancellation)
        self._streams: dict[torch.device, torch.Stream] = {}
        self._pinned = False

    def memory(self) -> tuple[Any, memoryview]:
        memory = host_buffer(self.slab_bytes, pinned=self._pinned)
        return memory, bytes_of(memory)

    def pieces(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Iterator[Piece]:
        """Copies a strided tensor into slabs, slice by slice; yields its row-major bytes as pieces.

        The last user of a piece must release its lease.

        Args:
            tensor: The tensor.
            dtype: The type that the elements are converted to; None for no conversion.
        """
        dtype = dtype or tensor.dtype
        # not earlier: pinning initializes CUDA, which a process may never need, and can't use after
        # a fork
        self._pinned = self._pinned or tensor.is_cuda
        stream = self._side_stream(tensor.device)
        for part in row_major_slices(tensor.shape, dtype.itemsize, self.slab_bytes):
            source, nbytes = narrow(tensor, part.box), part.stop - part.start
            slab, first = self.reserve(nbytes)
            memory = slab.memory[first : first + nbytes].view(dtype).view(source.shape)
            ready = None
            if stream is None:
                memory.copy_(source)
            else:
                with stream:
                    memory.copy_(source, non_blocking=True)
                    ready = stream.record_event().synchronize
            yield Piece(
                slab.view[first : first + nbytes],
                start=part.start,
                lease=slab,
                # keeps the tensor's memory from being reused before the copy has been made
                owner=tensor,
                ready=ready,
            )

    def _side_stream(self, device: torch.device) -> torch.Stream | None:
        """Returns the stream on which an accelerator copies while it computes; None for the CPU."""
        if device.type == "cpu":
            return None
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        stream = self._streams[device]
        # waits for the kernels that compute the tensor
        stream.wait_stream(torch.accelerator.current_stream(device))
        return stream


class ScratchPool:
    """Lends buffers of at most `limit` bytes in total; borrowers wait for free memory.

    A single buffer larger than the limit is lent when no other is: an item of any size must be
    transferable.
    """

    def __init__(self, limit: int, cancellation: Cancellation) -> None:
        self._limit = limit
        self._cancellation = cancellation
        self._changed = threading.Condition()
        self._free: list[torch.Tensor] = []
        self._lent = 0

    @contextmanager
    def borrowed(self, nbytes: int, *, pinned: bool) -> Iterator[torch.Tensor]:
        """Lends a buffer of at least `nbytes` bytes for the duration of the block.

        Args:
            nbytes: The size.
            pinned: Whether a newly allocated buffer is page-locked; a reused one stays as it is.
        """
        if nbytes == 0:
            yield torch.empty(0, dtype=torch.uint8, device="cpu")
            return
        size = aligned(nbytes, MIB)
        buffer = self._take(size)
        if buffer is None:
            buffer = host_buffer(size, pinned=pinned)
        try:
            yield buffer
        finally:
            with self._changed:
                self._lent -= buffer.numel()
                self._free.append(buffer)
                self._changed.notify_all()

    def _take(self, size: int) -> torch.Tensor | None:
        """Waits for free memory; returns a free buffer of the size, or None to allocate one."""
        with self._changed:
            while self._lent and self._lent + size > self._limit:
                self._changed.wait(0.2)
                self._cancellation.check()
            fitting = [buffer for buffer in self._free if buffer.numel() >= size]
            best = min(fitting, key=torch.Tensor.numel, default=None)
            if best is not None and self._lent + best.numel() <= max(self._limit, size):
                self._free = [buffer for buffer in self._free if buffer is not best]
                self._lent += best.numel()
                return best
            self._lent += size
            kept = self._lent
            while self._free and kept + sum(map(torch.Tensor.numel, self._free)) > self._limit:
                self._free.pop(0)
            return None
