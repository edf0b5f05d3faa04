"""The destinations of downloaded bytes: a tensor's own memory if possible, else scratch memory."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from cloudckpt.checksum import Blocks
from cloudckpt.transfer.boxes import ALIGNMENT, Box, row_major_strides
from cloudckpt.transfer.memory import bytes_of, is_plain, narrow

__all__ = [
    "Bad",
    "BoxSink",
    "BytesSink",
    "FlatSink",
    "ScatterPlan",
    "Sink",
    "Segment",
    "StoredBytes",
    "Wanted",
    "copy_into",
]

_DIRECT = 64 * 1024  # bytes; less is cheaper to copy than to receive in a separate call


_MAPPED = 1024 * 1024


class Sink:
    """Receives the bytes of one range.

    Attributes:
        memory: The destination, if the bytes can be received there unchanged; else None.
        pinned: Whether pinned memory makes :meth:`deliver` faster.
    """

    __slots__ = ("memory", "pinned")

    def __init__(self, memory: memoryview | None, *, pinned: bool = False) -> None:
        self.memory = memory
        self.pinned = pinned

    def deliver(self, start: int, data: torch.Tensor) -> None:
        """Stores bytes of the range, beginning at its byte `start`; `data` has dtype uint8."""
        assert self.memory is not None  # subclasses without memory override this
        view = bytes_of(data)
        self.memory[start : start + view.nbytes] = view


class BytesSink(Sink):
    """Keeps the bytes, for items that are not tensors.

    Large items are memory-mapped, so that the system commits memory only as bytes arrive: damaged
    metadata may claim any size.
    """

    __slots__ = ("data",)

    def __init__(self, nbytes: int) -> None:
        self.data: bytearray | memoryview
        if nbytes < _MAPPED:
            self.data = bytearray(nbytes)
        else:
            try:
                self.data = memoryview(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            except (OSError, OverflowError, ValueError) as error:
                raise MemoryError(
                    f"{nbytes} bytes of memory could not be allocated for a part of the "
                    "checkpoint: free memory, or lower Config(memory_budget=...)"
                ) from error
        super().__init__(memoryview(self.data))


class FlatSink(Sink):
    """A tensor whose elements have the order of the range, which may be delivered in any pieces."""

    __slots__ = ("_dtype", "_flat")

    def __init__(self, target: torch.Tensor, dtype: torch.dtype) -> None:
        fits = is_plain(target) and target.dtype == dtype
        super().__init__(bytes_of(target) if fits else None, pinned=target.is_cuda)
        self._flat = target.reshape(-1) if target.dim() != 1 else target
        self._dtype = dtype

    def deliver(self, start: int, data: torch.Tensor) -> None:
        if self.memory is not None:
            super().deliver(start, data)
            return
        elements = _viewed(data, self._dtype)
        first = start // self._dtype.itemsize
        with _mode_of(self._flat):
            self._flat[first : first + elements.numel()].copy_(elements)


class BoxSink(Sink):
    """A box of a tensor, filled from a range with other elements in between or in another order."""

    __slots__ = ("_dtype", "_strides", "_target")

    def __init__(
        self,
        target: torch.Tensor,
        box: Box,
        dtype: torch.dtype,
        source_shape: tuple[int, ...] | None,
    ) -> None:
        """Prepares the box; `source_shape` is the stored tensor's; None if the range is the box."""
        super().__init__(None, pinned=target.is_cuda)
        self._target = narrow(target, box)
        self._dtype = dtype
        self._strides = None if source_shape is None else row_major_strides(source_shape)

    def deliver(self, start: int, data: torch.Tensor) -> None:
        elements = _viewed(data, self._dtype)
        shape = self._target.shape
        if self._strides is None:
            elements = elements.view(shape)
        else:
            elements = elements.as_strided(shape, self._strides, elements.storage_offset())
        copy_into(self._target, elements)


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies `source` into `target` without autograd, in inference mode if necessary."""
    with _mode_of(target):
        target.copy_(source)


def _mode_of(target: torch.Tensor) -> AbstractContextManager[object]:
    """Returns the mode in which a tensor may be changed; the mode is per thread."""
    return torch.inference_mode() if target.is_inference() else torch.no_grad()


def _viewed(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns bytes as elements of `dtype`; copies them first if they are misaligned."""
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """An item's raw data within an object.

    Attributes:
        key: The key of the object.
        offset: The offset of the raw data in the object, in bytes.
        nbytes: The length of the raw data, in bytes.
        blocks: The expected checksums of its blocks; None if unknown.
        object_size: The object's expected size in bytes; None if unknown.
        item: The item's name, for messages.
        version: The object's expected version; None if unknown: then all ranges read from the
            object must be of the same version.
    """

    key: str
    offset: int
    nbytes: int
    blocks: Blocks | None
    object_size: int | None
    item: str
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """A byte range of a source's raw data, and the sink that receives it.

    Attributes:
        source: The raw data.
        start: The offset of the first byte.
        stop: The offset after the last byte.
        sink: The receiver of the bytes.
        divisible: Whether the sink accepts the bytes in several deliveries.
        row: Bytes of a row, if only some columns of rows are needed. Whole rows are then requested,
            so that ranks that need different columns request the same bytes and can share them.
    """

    source: StoredBytes
    start: int
    stop: int
    sink: Sink
    divisible: bool
    row: int = 1


@dataclass(frozen=True, slots=True)
class Segment:
    """A byte range of an object that is requested for a ``Wanted``.

    Attributes:
        want: The range needed; the segment may be only a part of it, but is extended to whole
            blocks.
        start: The offset of the first byte in the object.
        stop: The offset after the last byte.
        grain: The segment may be cut at multiples of this many bytes of the raw data; 0: not at
            all.
    """

    want: Wanted
    start: int
    stop: int
    grain: int

    def cut(self, limit: int) -> tuple[Segment, Segment] | None:
        """Splits the segment at its last permitted cut up to `limit`; None if it has none."""
        if self.grain == 0:
            return None
        origin = self.want.source.offset
        at = origin + (limit - origin) // self.grain * self.grain
        if not self.start < at < self.stop:
            return None
        head = Segment(self.want, self.start, at, self.grain)
        return head, Segment(self.want, at, self.stop, self.grain)


@dataclass(frozen=True)
class Bad:
    """Bytes of an object that do not match their checksum."""

    item: str
    start: int
    stop: int


class _Landed:
    """A segment, and the memory that its bytes are received into."""

    __slots__ = ("at", "before", "behind", "data", "first", "rest_at", "segment", "target", "views")

    def __init__(self, segment: Segment) -> None:
        want, origin = segment.want, segment.want.source.offset
        start = max(origin + want.start, segment.start)
        stop = min(origin + want.stop, segment.stop)
        self.segment = segment
        self.before = start - segment.start  # bytes requested only to complete the first block
        self.behind = segment.stop - stop
        self.first = start - origin - want.start  # offset in the sink's range
        # receives the bytes directly; None: scratch memory does
        self.target: memoryview | None = None
        if want.sink.memory is not None and stop - start >= _DIRECT:
            self.target = want.sink.memory[self.first : self.first + stop - start]
        # offsets in scratch memory: of all or the leading bytes; of those after target
        self.at = self.rest_at = 0
        self.views: list[memoryview] = []
        self.data: torch.Tensor | None = None  # the needed bytes, if they are in scratch memory

    def place(self, scratch: torch.Tensor, memory: memoryview) -> None:
        """Assigns the segment's bytes in scratch memory, of which `memory` is a view."""
        if self.target is None:
            stop = self.at + self.segment.stop - self.segment.start
            self.views = [memory[self.at : stop]]
            self.data = scratch[self.at + self.before : stop - self.behind]
        else:
            before = memory[self.at : self.at + self.before]
            behind = memory[self.rest_at : self.rest_at + self.behind]
            self.views = [view for view in (before, self.target, behind) if view.nbytes]

    def deliver(self) -> None:
        """Passes the bytes that were received into scratch memory to the sink."""
        if self.data is not None:
            self.segment.want.sink.deliver(self.first, self.data)


class ScatterPlan:
    """The memory that one request is received into.

    Large plain targets receive their bytes directly. Everything else (small targets, targets that
    need a copy, the rest of a block, gaps between segments) is received into one scratch buffer, at
    the object's own alignment.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._landed = [_Landed(segment) for segment in segments]
        self._order: list[
            memoryview | tuple[int, int]
        ] = []  # in the object's order: targets, and ranges of scratch memory
        self.scratch_bytes = 0
        position = segments[0].start
        for landed in self._landed:
            segment = landed.segment
            self._scratch(position, segment.start - position)
            if landed.target is None:
                landed.at = self._scratch(segment.start, segment.stop - segment.start)
            else:
                landed.at = self._scratch(segment.start, landed.before)
                self._order.append(landed.target)
                landed.rest_at = self._scratch(segment.stop - landed.behind, landed.behind)
            position = segment.stop

    def _scratch(self, position: int, count: int) -> int:
        """Reserves scratch memory for `count` bytes at `position`; returns the offset there."""
        if count == 0:
            return 0
        run = self._order[-1] if self._order else None
        if isinstance(run, tuple):
            at = run[1]
            self._order[-1] = (run[0], at + count)
        else:
            at = self.scratch_bytes + (position - self.scratch_bytes) % ALIGNMENT
            self._order.append((at, at + count))
        self.scratch_bytes = at + count
        return at

    @property
    def size(self) -> int:
        """The bytes of all segments, without the gaps between them."""
        return sum(landed.segment.stop - landed.segment.start for landed in self._landed)

    @property
    def pinned(self) -> bool:
        """Whether page-locked scratch memory makes delivery faster."""
        return any(landed.segment.want.sink.pinned for landed in self._landed)

    def place(self, scratch: torch.Tensor) -> list[memoryview]:
        """Returns the views to receive into, in the order of the object's bytes."""
        memory = bytes_of(scratch)
        for landed in self._landed:
            landed.place(scratch, memory)
        return [
            memory[part[0] : part[1]] if isinstance(part, tuple) else part for part in self._order
        ]

    def bad(self) -> list[Bad]:
        """Returns the blocks that do not match their checksums."""
        found: list[Bad] = []
        for landed in self._landed:
            source = landed.segment.want.source
            blocks = source.blocks
            if blocks is None:
                continue
            first = (landed.segment.start - source.offset) // blocks.size
            for bad in blocks.bad(first, landed.views):
                start = source.offset + bad * blocks.size
                stop = min(start + blocks.size, source.offset + source.nbytes)
                found.append(Bad(source.item, start, stop))
        return found

    def deliver(self) -> None:
        """Passes the bytes that were received into scratch memory to their sinks."""
        for landed in self._landed:
            landed.deliver()
