"""A bounded pipeline of copies: from accelerators and strided tensors into bytes that can be sent.

What can be sent as it lies is never copied. Everything else passes through slabs of host memory,
slice by slice, so that the memory in use does not depend on the size of a tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from cloudckpt.transfer.group import Cancellation
from cloudckpt.transfer.memory import bytes_of, host_buffer
from cloudckpt.transfer.parts import Piece

__all__ = ["Slab", "StagingPool", "row_major_slices"]

_SLABS = 16
_ALIGNMENT = 64


def row_major_slices(
    shape: tuple[int, ...], itemsize: int, limit: int
) -> Iterator[tuple[tuple[int, int], ...]]:
    """Boxes that follow one another in row-major order, each of at most ``limit`` bytes.

    Yields:
        ``(start, length)`` for each dimension. Together the boxes cover ``shape`` once; each is
        contiguous in a row-major tensor of that shape.
    """
    if 0 in shape:
        return
    inner, cut = itemsize, len(shape)
    while cut > 0 and inner * shape[cut - 1] <= limit:
        cut -= 1
        inner *= shape[cut]
    full = tuple((0, size) for size in shape[cut:])
    if cut == 0:
        yield full
        return
    rows = max(1, limit // inner)
    axis = cut - 1
    for outer in _indices(shape[:axis]):
        prefix = tuple((index, 1) for index in outer)
        for start in range(0, shape[axis], rows):
            yield (*prefix, (start, min(rows, shape[axis] - start)), *full)


def _indices(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not shape:
        yield ()
        return
    for first in range(shape[0]):
        for rest in _indices(shape[1:]):
            yield (first, *rest)


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


@dataclass(frozen=True)
class _Copier:
    """Copies on a side stream of an accelerator, or plainly on a CPU."""

    stream: torch.Stream | None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Event | None:
        if self.stream is None:
            target.copy_(source)
            return None
        with self.stream:
            target.copy_(source, non_blocking=True)
            return self.stream.record_event()


class StagingPool:
    """Slabs of host memory, ``budget`` bytes in all, in use by one save, which closes it.

    Attributes:
        slab_bytes: Bytes of each.
    """

    def __init__(self, budget: int, cancellation: Cancellation) -> None:
        self.slab_bytes = budget // _SLABS // _ALIGNMENT * _ALIGNMENT
        self._cancellation = cancellation
        self._changed = threading.Condition()
        self._free: list[Slab] = []
        self._made = 0
        self._current: Slab | None = None
        self._closed = False
        self._streams: dict[torch.device, torch.Stream] = {}
        self._pinned = False

    def pieces(self, tensor: torch.Tensor) -> Iterator[Piece]:
        """The row-major bytes of any strided tensor, slice after slice, each in a slab.

        The last use of a piece must release its lease.
        """
        # not before: pinning starts CUDA, which a process may do without, and must after a fork
        self._pinned = self._pinned or tensor.is_cuda
        copier = self._copier(tensor.device)
        start = 0
        for box in row_major_slices(tuple(tensor.shape), tensor.itemsize, self.slab_bytes):
            source = tensor
            for axis, (first, length) in enumerate(box):
                source = source.narrow(axis, first, length)
            nbytes = source.numel() * source.itemsize
            slab, first = self.reserve(nbytes)
            memory = slab.memory[first : first + nbytes]
            event = copier.copy(memory.view(tensor.dtype).view(source.shape), source)
            yield Piece(
                slab.view[first : first + nbytes],
                start=start,
                lease=slab,
                owner=tensor,  # its memory must not be reused before the copy has been made
                ready=event.synchronize if event is not None else None,
            )
            start += nbytes

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
        slab.used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
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

    def _copier(self, device: torch.device) -> _Copier:
        if device.type == "cpu":
            return _Copier(None)
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.accelerator.current_stream(device))  # what makes the tensor
        return _Copier(stream)
