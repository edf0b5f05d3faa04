"""Memory for downloads that can't go straight into their target: bounded, and used again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cloudckpt.transfer.group import Cancellation
from cloudckpt.transfer.memory import host_buffer

__all__ = ["ScratchPool"]

_UNIT = 1024 * 1024


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
        size = -(-nbytes // _UNIT) * _UNIT
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
