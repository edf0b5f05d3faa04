"""Small items, copied next to each other into slabs of memory: a call each would cost more.

A saving process packs, too, so that nothing here is of torch.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from cloudckpt.transfer.boxes import ALIGNMENT, aligned, padding
from cloudckpt.transfer.group import Cancellation
from cloudckpt.transfer.parts import Piece, PieceWriter

__all__ = [
    "PACKED_BELOW",
    "READABLE",
    "WRITABLE",
    "Form",
    "Packer",
    "Packing",
    "Slab",
    "SlabPool",
    "memory_at",
    "slab_of",
]

PACKED_BELOW = 64 * 1024
"""Bytes from which on an item is sent from where it lies."""

_SLABS = 16
_ZEROS = bytes(ALIGNMENT)

# not a ctypes array: each size would be a class of its own, and a cycle for the garbage collector
memory_at: Any = ctypes.pythonapi.PyMemoryView_FromMemory
"""The memory at an address, so many bytes of it, as the third argument says."""
memory_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
memory_at.restype = ctypes.py_object
READABLE, WRITABLE = 0x100, 0x200  # PyBUF_READ, PyBUF_WRITE


class Slab:
    """A piece of host memory and the number of those who use it."""

    def __init__(self, pool: SlabPool, memory: Any, view: memoryview) -> None:
        """``memory`` is what keeps ``view`` valid."""
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
    """Bytes of a slab of a pool."""
    return budget // _SLABS // ALIGNMENT * ALIGNMENT


class SlabPool:
    """Slabs of host memory, ``budget`` bytes in all, in use by one save, which closes it.

    Attributes:
        slab_bytes: Bytes of each.
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
        """The memory of a new slab: what keeps it, and its bytes."""
        mapped = mmap.mmap(-1, self.slab_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return mapped, memoryview(mapped)

    def close(self) -> None:
        """Says that no more room is needed; slabs are freed as soon as nobody holds them."""
        self._let_go()
        with self._changed:
            self._closed = True
            self._free.clear()

    def _let_go(self) -> None:
        """Ends the producer's hold on the slab that it was filling."""
        if self._current is not None:
            self._current.release()
            self._current = None

    def take_back(self, slab: Slab) -> None:
        with self._changed:
            slab.used = 0
            if not self._closed:  # else it would hold its holder: a cycle
                self._free.append(slab)
            self._changed.notify_all()

    def reserve(self, nbytes: int) -> tuple[Slab, int]:
        """Room for ``nbytes``: a slab, retained once, and the place in it.

        The place is a multiple of 64, and follows the previous one as long as a slab has room.
        Waits until a slab is free. ``nbytes`` is at most a sixteenth of the budget.
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


class Form(Protocol):
    """What an item is like in an object: bytes before it, its size, bytes and zeros behind it.

    All of it together is a multiple of 64 bytes.
    """

    @property
    def head(self) -> bytes: ...
    @property
    def size(self) -> int: ...
    @property
    def tail(self) -> bytes: ...


class Packing(Protocol):
    """Appends small items to an object; whoever writes to the object otherwise must flush first.

    Attributes:
        position: Bytes of the object so far, those not flushed included.
    """

    @property
    def position(self) -> int: ...

    def append(self, buffers: Sequence[bytes | memoryview], nbytes: int) -> tuple[int, memoryview]:
        """Copies ``buffers``, ``nbytes`` in total, to the next multiple of 64 of the object.

        Returns:
            That position, and the copy, which is there until the next call.
        """

    def append_all(
        self, forms: Sequence[Form], addresses: Sequence[int], checksum: Callable[..., int]
    ) -> tuple[list[int], Sequence[object]]:
        """The same for many items at a time, at a tenth of the cost of one call for each.

        Args:
            forms: What each is like.
            addresses: Where the bytes of each are.
            checksum: Of a buffer.

        Returns:
            Their positions in the object, and the checksums of the copies of their bytes, or what
            stands for them if they are made later.
        """

    def flush(self) -> None:
        """Writes what was packed to the object."""


class Packer:
    """Packs in slabs of a pool."""

    def __init__(self, upload: PieceWriter, pool: SlabPool) -> None:
        self._upload = upload
        self._pool = pool
        self._slab: Slab | None = None
        self._start = 0
        self._stop = 0

    @property
    def position(self) -> int:
        return self._upload.position + self._stop - self._start

    def append(self, buffers: Sequence[bytes | memoryview], nbytes: int) -> tuple[int, memoryview]:
        place = self._room(nbytes)
        position, slab = self.position, self._slab
        assert slab is not None
        view, start = slab.view, place
        for buffer in buffers:
            end = place + len(buffer)
            view[place:end] = buffer
            place = end
        gap = padding(place)
        view[place : place + gap] = _ZEROS[:gap]
        self._stop = place + gap
        return position, view[start : start + nbytes]

    def append_all(
        self, forms: Sequence[Form], addresses: Sequence[int], checksum: Callable[..., int]
    ) -> tuple[list[int], list[int]]:
        return self.append_views(
            (
                (form.head, memory_at(address, form.size, READABLE), form.tail)
                for form, address in zip(forms, addresses, strict=True)
            ),
            checksum,
        )

    def append_views(
        self, items: Iterable[tuple[bytes, memoryview, bytes]], checksum: Callable[..., int]
    ) -> tuple[list[int], list[int]]:
        """As :meth:`append_all`, of the bytes of each with what stands before and behind them."""
        positions: list[int] = []
        checksums: list[int] = []
        limit = self._pool.slab_bytes
        slab, shift = None, 0
        view = memoryview(b"")
        for head, content, tail in items:
            place, length = self._stop, len(head) + len(content) + len(tail)
            if slab is None or place + length > limit:
                place = self._room(length)
                slab = self._slab
                assert slab is not None
                view, shift = slab.view, self._upload.position - self._start
            first, stop = place + len(head), place + length
            end = stop - len(tail)
            view[place:first] = head
            view[first:end] = content
            view[end:stop] = tail
            slab.used = self._stop = stop
            positions.append(shift + place)
            checksums.append(checksum(view[first:end]))
        return positions, checksums

    def _room(self, nbytes: int) -> int:
        """The place in the slab for the next bytes."""
        slab, place = self._pool.reserve(nbytes)
        if slab is self._slab and place == self._stop:
            slab.release()  # one hold is enough for the growing piece
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
