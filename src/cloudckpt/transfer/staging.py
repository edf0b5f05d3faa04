"""Host memory on loan, bounded, for bytes that can't be sent or received where they lie.

An upload copies tensors of accelerators and strided ones into slabs of a :class:`StagingPool`,
slice after slice, so that the memory in use does not depend on the size of a tensor. A
:class:`Packer` copies small items next to each other, since a call of their own would cost more
than the copy. A download borrows from a :class:`ScratchPool`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from cloudckpt.config import MIB
from cloudckpt.transfer.boxes import ALIGNMENT, aligned, padding, row_major_slices
from cloudckpt.transfer.group import Cancellation
from cloudckpt.transfer.memory import bytes_of, host_buffer, narrow
from cloudckpt.transfer.parts import Piece, PieceWriter

__all__ = ["PACKED_BELOW", "Packer", "ScratchPool", "Slab", "StagingPool", "slab_of"]

PACKED_BELOW = 64 * 1024
"""Bytes from which on an item is sent from where it lies."""

_SLABS = 16
_ZEROS = bytes(ALIGNMENT)


class Slab:
    """A piece of host memory and the number of those who use it."""

    def __init__(self, pool: StagingPool, nbytes: int, pinned: bool) -> None:
        self.memory = host_buffer(nbytes, pinned=pinned)
        self.view = bytes_of(self.memory)
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


class StagingPool:
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
        self._streams: dict[torch.device, torch.Stream] = {}
        self._pinned = False

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
        return Slab(self, self.slab_bytes, self._pinned)

    def _side_stream(self, device: torch.device) -> torch.Stream | None:
        """The stream of an accelerator that copies beside what it computes."""
        if device.type == "cpu":
            return None
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.accelerator.current_stream(device))  # what makes the tensor
        return stream


class Packer:
    """Appends small items to an object; whoever writes to the object otherwise must flush first."""

    def __init__(self, upload: PieceWriter, pool: StagingPool) -> None:
        self._upload = upload
        self._pool = pool
        self._slab: Slab | None = None
        self._start = 0
        self._stop = 0

    @property
    def position(self) -> int:
        """Bytes of the object so far, those not flushed included."""
        return self._upload.position + self._stop - self._start

    def append(self, buffers: Sequence[bytes | memoryview], nbytes: int) -> tuple[int, memoryview]:
        """Copies ``buffers``, ``nbytes`` in total, to the next multiple of 64 of the object.

        Returns:
            That position, and the copy, which is there until the next call.
        """
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

    def append_from_memory(
        self, items: Iterable[tuple[bytes, int, int, bytes]], checksum: Callable[..., int]
    ) -> tuple[list[int], list[int]]:
        """The same for many items at a time, at a tenth of the cost of one call for each.

        Args:
            items: Of each what stands before it, its address, its bytes, and what stands behind
                it, filled up with zeros so that all of it is a multiple of 64 bytes.
            checksum: Of a buffer.

        Returns:
            Their positions in the object, and the checksums of the copies of their bytes.
        """
        positions: list[int] = []
        checksums: list[int] = []
        limit, copy = self._pool.slab_bytes, ctypes.memmove
        slab, shift, base = None, 0, 0
        view = memoryview(b"")
        for head, address, size, tail in items:
            length = len(head) + size + len(tail)
            place = self._stop
            if slab is None or place + length > limit:
                place = self._room(length)
                slab = self._slab
                assert slab is not None
                view, base = slab.view, slab.memory.data_ptr()
                shift = self._upload.position - self._start
            first = place + len(head)
            end = first + size
            view[place:first] = head
            copy(base + first, address, size)
            view[end : end + len(tail)] = tail
            slab.used = self._stop = place + length
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
        """Writes what was packed to the object."""
        if self._slab is not None:
            piece = Piece(self._slab.view[self._start : self._stop], lease=self._slab)
            self._slab, self._start, self._stop = None, 0, 0
            if piece.view.nbytes:
                self._upload.write(piece)
            elif piece.lease is not None:
                piece.lease.release()


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
