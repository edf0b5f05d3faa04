"""Lends a bounded amount of memory, for bytes that tensor memory can't send or receive directly.

The saving process uses it as well, so this module must not import torch.
"""

from __future__ import annotations

import mmap
import threading
from typing import Any

from cloudckpt.transfer.boxes import ALIGNMENT, aligned
from cloudckpt.transfer.group import Cancellation

__all__ = ["Lease", "MemoryPool"]

_SLABS = 16


class Lease:
    """A block of lent memory, which returns to its pool when every holder has released it.

    As a context manager, it is released at the end of the ``with`` statement.

    Attributes:
        memory: The object that keeps ``view`` valid; a tensor, if the pool makes tensors.
        view: The bytes.
        used: Bytes at the beginning that are reserved; see :meth:`MemoryPool.reserve`.
    """

    def __init__(self, pool: MemoryPool, memory: Any, view: memoryview) -> None:
        self.memory = memory
        self.view = view
        self.used = 0
        self._pool = pool
        self._holders = 1
        self._lock = threading.Lock()

    def retain(self) -> None:
        """Adds a holder."""
        with self._lock:
            self._holders += 1

    def release(self) -> None:
        """Removes a holder, which must not use the memory any more; the last one returns it."""
        with self._lock:
            self._holders -= 1
            is_free = self._holders == 0
        if is_free:
            self._pool.take_back(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class MemoryPool:
    """Lends host memory, at most `budget` bytes at a time; borrowers wait for free memory.

    A single block may be larger than `budget` if no other block is lent.

    Attributes:
        slab_bytes: The most bytes that :meth:`reserve` can reserve.
    """

    def __init__(self, budget: int, cancellation: Cancellation) -> None:
        self.slab_bytes = budget // _SLABS // ALIGNMENT * ALIGNMENT
        self._budget = budget
        self._cancellation = cancellation
        self._changed = threading.Condition()
        self._free: list[tuple[Any, memoryview]] = []
        self._lent = 0
        self._current: Lease | None = None
        self._closed = False

    def allocate(self, nbytes: int, *, pinned: bool) -> tuple[Any, memoryview]:
        """Allocates a block; returns the object that owns its memory, and a view of it.

        `pinned` is ignored here: a derived class may page-lock the memory. The memory is a mapping
        of its own, which returns to the system once unused: malloc would keep memory freed by one
        thread from other threads and from the system.
        """
        mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return mapped, memoryview(mapped)

    def take(self, nbytes: int, *, pinned: bool = False) -> Lease:
        """Lends a block of at least `nbytes` bytes, with one holder.

        A block larger than the budget is lent alone: an item of any size must be transferable.

        Args:
            nbytes: The size; not 0.
            pinned: Whether newly allocated memory is page-locked, if the class supports that;
                reused memory stays as it is.

        Raises:
            TransferCancelledError: If the transfer was cancelled while this waited.
        """
        with self._changed:
            while self._lent and self._lent + nbytes > self._budget:
                self._changed.wait(0.2)
                self._cancellation.check()
            memory, view = self._fitting(nbytes) or self.allocate(nbytes, pinned=pinned)
            self._lent += view.nbytes
        return Lease(self, memory, view)

    def _fitting(self, nbytes: int) -> tuple[Any, memoryview] | None:
        """Returns the smallest free block that fits; None, after making room for a new one."""
        at = min(
            (n for n, (_, view) in enumerate(self._free) if view.nbytes >= nbytes),
            key=lambda n: self._free[n][1].nbytes,
            default=None,
        )
        most = max(self._budget, nbytes)
        if at is not None and self._lent + self._free[at][1].nbytes <= most:
            return self._free.pop(at)
        while self._free and self._lent + nbytes + sum(v.nbytes for _, v in self._free) > most:
            self._free.pop(0)
        return None

    def take_back(self, lease: Lease) -> None:
        with self._changed:
            self._lent -= lease.view.nbytes
            if not self._closed:
                self._free.append((lease.memory, lease.view))
            self._changed.notify_all()

    def reserve(self, nbytes: int) -> tuple[Lease, int]:
        """Reserves room in a block that is shared by several reservations.

        Args:
            nbytes: The size; at most ``slab_bytes``.

        Returns:
            The block, with a holder for this reservation, and the offset in it: a multiple of 64
            that follows the previous reservation while there is enough room; else 0 in a new block.

        Raises:
            TransferCancelledError: If the transfer was cancelled while this waited for memory.
        """
        slab = self._current
        if slab is None or slab.used + nbytes > self.slab_bytes:
            self._let_go()
            slab = self._current = self.take(self.slab_bytes)
        place = slab.used
        slab.used += aligned(nbytes)
        slab.retain()
        return slab, place

    def _let_go(self) -> None:
        """Releases the pool's own hold on the block in which `reserve` reserves room."""
        if self._current is not None:
            self._current.release()
            self._current = None

    def close(self) -> None:
        """Ends the reservations; each block is freed as soon as it has no holder."""
        self._let_go()
        with self._changed:
            self._closed = True
            self._free.clear()
