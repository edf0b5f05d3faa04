"""Host memory on loan, bounded, for bytes that can't be sent or received where they lie.

An upload copies tensors of accelerators and strided ones into slabs of a :class:`StagingPool`,
slice after slice, so that the memory in use does not depend on the size of a tensor. A download
borrows from a :class:`ScratchPool`.
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
    """Slabs that tensors of any device and strides are copied into."""

    def __init__(self, budget: int, cancellation: Cancellation) -> None:
        super().__init__(budget, cancellation)
        self._streams: dict[torch.device, torch.Stream] = {}
        self._pinned = False

    def memory(self) -> tuple[Any, memoryview]:
        memory = host_buffer(self.slab_bytes, pinned=self._pinned)
        return memory, bytes_of(memory)

    def pieces(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Iterator[Piece]:
        """The row-major bytes of any strided tensor, slice after slice, each in a slab.

        The last use of a piece must release its lease.

        Args:
            tensor: The tensor.
            dtype: What its elements are converted to, if that is another type.
        """
        dtype = dtype or tensor.dtype
        # not before: pinning starts CUDA, which a process may do without, and must after a fork
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
                owner=tensor,  # its memory must not be reused before the copy has been made
                ready=ready,
            )

    def _side_stream(self, device: torch.device) -> torch.Stream | None:
        """The stream of an accelerator that copies beside what it computes."""
        if device.type == "cpu":
            return None
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.accelerator.current_stream(device))  # what makes the tensor
        return stream


class ScratchPool:
    """Lends buffers of ``limit`` bytes in total; whoever wants more waits.

    A single loan above the limit is granted when nothing else is out: one item that is larger than
    the limit must still move.
    """

    def __init__(self, limit: int, cancellation: Cancellation) -> None:
        self._limit = limit
        self._cancellation = cancellation
        self._changed = threading.Condition()
        self._free: list[torch.Tensor] = []
        self._lent = 0

    @contextmanager
    def borrowed(self, nbytes: int, *, pinned: bool) -> Iterator[torch.Tensor]:
        """A buffer of at least ``nbytes`` bytes for the time of the block.

        Args:
            nbytes: The size.
            pinned: Whether page-locked memory makes it faster; the pool is then all pinned.
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
        """Waits for room; returns a free buffer that is large enough, or None to make one."""
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
