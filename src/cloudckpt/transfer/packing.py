"""Copies small items next to each other into slabs of memory, as sending each would cost more.

The saving process packs as well, so this module must not import torch.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterable
from typing import Any

from cloudckpt.transfer.boxes import ALIGNMENT, aligned, padding
from cloudckpt.transfer.group import Cancellation
from cloudckpt.transfer.parts import Piece, PieceWriter

__all__ = [
    "PACKED_BELOW",
    "READABLE",
    "WRITABLE",
    "Packer",
    "Slab",
    "SlabPool",
    "memory_at",
    "slab_of",
]

PACKED_BELOW = 64 * 1024
"""Items of fewer bytes are packed; larger ones are sent from their own memory."""

_SLABS = 16
_ZEROS = bytes(ALIGNMENT)

# a ctypes array would need a new class for each size, each a reference cycle
memory_at: Any = ctypes.pythonapi.PyMemoryView_FromMemory
"""Returns a memoryview of the bytes at an address, given address, size and access flag."""
memory_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
memory_at.restype = ctypes.py_object
READABLE, WRITABLE = 0x100, 0x200  # PyBUF_READ, PyBUF_WRITE


class Slab:
    """A block of host memory with a count of its holders."""

    def __init__(self, pool: SlabPool, memory: Any, view: memoryview) -> None:
        """Wraps memory; `memory` is the object that keeps `view` valid."""
        self.memory = memory
        self.view = view
        self.used = 0
        self._pool = pool
        self._holders = 0
        self._lock = threading.Lock()

    def retain(self) -> None:
        with self._lock:
            self._holders += 1

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            free = self._holders == 0
        if free:
            self._pool.take_back(self)


def slab_of(budget: int) -> int:
    """Returns the bytes of each slab of a pool with this budget."""
    return budget // _SLABS // ALIGNMENT * ALIGNMENT


class SlabPool:
    """A pool of slabs of host memory, `budget` bytes in total, used and closed by one save.

    Attributes:
        slab_bytes: Bytes of each slab.
    """

    def __init__(self, budget: int, cancellation: Cancellation) -> None:
        self.slab_bytes = slab_of(budget)
        self._cancellation = cancellation
        self._changed = threading.Condition()
        self._free: list[Slab] = []
        self._made = 0
        self._current: Slab | None = None
        self._closed = False

    def memory(self) -> tuple[Any, memoryview]:
        """Allocates the memory of a new slab; returns the object that keeps it, and its bytes."""
        mapped = mmap.mmap(-1, self.slab_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return mapped, memoryview(mapped)

    def close(self) -> None:
        """Ends the reservations; each slab is freed as soon as it has no holder."""
        self._let_go()
        with self._changed:
            self._closed = True
            self._free.clear()

    def _let_go(self) -> None:
        """Releases the slab that the producer was filling."""
        if self._current is not None:
            self._current.release()
            self._current = None

    def take_back(self, slab: Slab) -> None:
        with self._changed:
            slab.used = 0
            if not self._closed:  # a closed pool keeps no slab: that would be a reference cycle
                self._free.append(slab)
            self._changed.notify_all()

    def reserve(self, nbytes: int) -> tuple[Slab, int]:
        """Reserves `nbytes`; returns a slab, retained once, and the offset of the bytes in it.

        The offset is a multiple of 64, and follows the previous one while the slab has enough room.
        Waits until a slab is free. `nbytes` is at most a sixteenth of the budget.
        """
        slab = self._current
        if slab is None or slab.used + nbytes > self.slab_bytes:
            self._let_go()
            slab = self._current = self._next()
            slab.retain()
        place = slab.used
        slab.used += aligned(nbytes)
        slab.retain()
        return slab, place

    def _next(self) -> Slab:
        with self._changed:
            while not self._free and self._made >= _SLABS:
                self._changed.wait(0.2)
                self._cancellation.check()
            if self._free:
                return self._free.pop()
            self._made += 1
        return Slab(self, *self.memory())


class Packer:
    """Packs items into slabs; call `flush` before writing to the object by other means."""

    def __init__(self, upload: PieceWriter, pool: SlabPool) -> None:
        self._upload = upload
        self._pool = pool
        self._slab: Slab | None = None
        self._start = 0
        self._stop = 0

    def pack(
        self, items: Iterable[tuple[bytes, memoryview, bytes]], checksum: Callable[..., int]
    ) -> list[int]:
        """Appends copies of items, each at the next multiple of 64 of the object.

        Args:
            items: For each item the bytes before it, its own bytes, and those after it.
            checksum: Returns the checksum of a buffer.

        Returns:
            The checksums of the items' own bytes, as copied.
        """
        checksums: list[int] = []
        limit = self._pool.slab_bytes
        slab, view = None, memoryview(b"")
        for head, content, tail in items:
            place, length = self._stop, len(head) + len(content) + len(tail)
            if slab is None or place + length > limit:
                place = self._room(length)
                slab = self._slab
                assert slab is not None
                view = slab.view
            first, stop = place + len(head), place + length
            end = stop - len(tail)
            view[place:first] = head
            view[first:end] = content
            view[end:stop] = tail
            if gap := -stop % ALIGNMENT:
                view[stop : stop + gap] = _ZEROS[:gap]
            slab.used = self._stop = stop + gap
            checksums.append(checksum(view[first:end]))
        return checksums

    def _room(self, nbytes: int) -> int:
        """Reserves room for the next bytes; returns their offset in the slab."""
        slab, place = self._pool.reserve(nbytes)
        if slab is self._slab and place == self._stop:
            slab.release()  # the growing piece needs only one lease
        else:
            self.flush()
            if gap := padding(self._upload.position):
                self._upload.write(Piece(memoryview(_ZEROS)[:gap]))
            self._slab, self._start, self._stop = slab, place, place
        return place

    def flush(self) -> None:
        if self._slab is not None:
            piece = Piece(self._slab.view[self._start : self._stop], lease=self._slab)
            self._slab, self._start, self._stop = None, 0, 0
            if piece.view.nbytes:
                self._upload.write(piece)
            elif piece.lease is not None:
                piece.lease.release()
