"""A memory pool through which strided tensors, and tensors on accelerators, are copied."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cloudckpt.transfer.boxes import row_major_slices
from cloudckpt.transfer.group import Cancellation
from cloudckpt.transfer.memory import bytes_of, narrow
from cloudckpt.transfer.parts import Piece
from cloudckpt.transfer.pool import MemoryPool

__all__ = ["StagingPool"]


class StagingPool(MemoryPool):
    """A :class:`MemoryPool` whose blocks are tensors.

    Tensors of any device and strides are copied into the blocks slice by slice, so that the memory
    in use does not depend on the size of a tensor.
    """

    def __init__(self, budget: int, cancellation: Cancellation) -> None:
        super().__init__(budget, cancellation)
        self._streams: dict[torch.device, torch.Stream] = {}
        self._pinned = False

    def allocate(self, nbytes: int, *, pinned: bool) -> tuple[Any, memoryview]:
        if pinned or self._pinned:
            memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        else:
            mapped, _ = super().allocate(nbytes, pinned=False)
            memory = torch.frombuffer(mapped, dtype=torch.uint8)
        return memory, bytes_of(memory)

    def pieces(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Iterator[Piece]:
        """Copies a strided tensor slice by slice; yields its row-major bytes as pieces.

        The last user of a piece must release its lease.

        Args:
            tensor: The tensor.
            dtype: The type that the elements are converted to; None for no conversion.

        Raises:
            TransferCancelledError: If the transfer was cancelled while this waited for memory.
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
        """Returns a stream for copies from an accelerator; None for the CPU.

        Copies on it wait for the kernels that were launched before this call on the current stream
        of the device, but not for later ones.
        """
        if device.type == "cpu":
            return None
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.accelerator.current_stream(device))
        return stream
