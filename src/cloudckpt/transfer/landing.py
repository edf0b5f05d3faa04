"""The destinations of downloaded bytes: a tensor's own memory if possible, else scratch memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cloudckpt.checksum import Blocks
from cloudckpt.errors import Damage
from cloudckpt.transfer.boxes import ALIGNMENT, row_major_strides
from cloudckpt.transfer.memory import bytes_of, is_plain
from cloudckpt.transfer.pool import Lease

__all__ = [
    "BytesSink",
    "ScatterPlan",
    "Sink",
    "Segment",
    "StoredBytes",
    "TensorSink",
    "Wanted",
    "copy_into",
]

_DIRECT = 64 * 1024  # bytes; less is cheaper to copy than to receive in a separate call
_MAPPED = 1024 * 1024  # bytes; more are memory-mapped


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

    Attributes:
        data: The bytes: a bytearray, or a memoryview of mapped memory for 1 MiB and more.

    Raises:
        MemoryError: If the memory can't be mapped.
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
                    f"{nbytes} bytes of memory could not be allocated for a value of the "
                    "checkpoint: free memory; or, if that size is wrong, load another checkpoint"
                ) from error
        super().__init__(memoryview(self.data))


class TensorSink(Sink):
    """A tensor, or a part of one, that receives the stored elements of a range.

    A contiguous tensor whose elements fill the range may be delivered in several pieces, any other
    tensor only as a whole.
    """

    __slots__ = ("_dtype", "_strides", "_target")

    def __init__(
        self,
        target: torch.Tensor,
        dtype: torch.dtype,
        source_shape: Sequence[int] | None = None,
        *,
        direct: bool = True,
    ) -> None:
        """Prepares a sink.

        Args:
            target: The tensor.
            dtype: The type of the stored elements.
            source_shape: The shape of the stored tensor, if the target is a box of that tensor, and
                the range also has elements that are not in the box; else None.
            direct: Whether the bytes may be received in the target's memory.
        """
        fits = direct and source_shape is None and target.dtype == dtype and is_plain(target)
        super().__init__(bytes_of(target) if fits else None, pinned=target.is_cuda)
        self._target = target
        self._dtype = dtype
        self._strides = None if source_shape is None else row_major_strides(source_shape)

    def deliver(self, start: int, data: torch.Tensor) -> None:
        if self.memory is not None:
            super().deliver(start, data)
            return
        if data.storage_offset() % self._dtype.itemsize:
            data = data.clone()
        elements, target = data.view(self._dtype), self._target
        if self._strides is not None:
            elements = elements.as_strided(target.shape, self._strides, elements.storage_offset())
        elif elements.numel() == target.numel():
            elements = elements.view(target.shape)
        else:
            first = start // self._dtype.itemsize
            target = target.view(-1)[first : first + elements.numel()]
        copy_into(target, elements)


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies `source` into `target` without autograd, in inference mode if necessary."""
    with torch.inference_mode() if target.is_inference() else torch.no_grad():
        target.copy_(source)


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
        row: Bytes of a row of the stored tensor, if only parts of its rows are needed; else 1.
            Whole rows are then requested, so that ranks that need different parts of them request
            the same bytes and can share them.
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
        want: The range needed; the segment may be only a part of it, but is extended to whole rows
            and blocks.
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
        """Returns the segment in two parts; None if it can't be cut at or before `limit`.

        Args:
            limit: An offset in the object; the cut is at the last permitted offset up to it.
        """
        if self.grain == 0:
            return None
        origin = self.want.source.offset
        at = origin + (limit - origin) // self.grain * self.grain
        if not self.start < at < self.stop:
            return None
        head = Segment(self.want, self.start, at, self.grain)
        return head, Segment(self.want, at, self.stop, self.grain)


class _Landed:
    """A segment, and the memory that its bytes are received into."""

    __slots__ = ("data", "first", "segment", "start", "stop", "target", "views")

    def __init__(self, segment: Segment) -> None:
        want, origin = segment.want, segment.want.source.offset
        self.segment = segment
        # the needed bytes; others are requested only to complete the first and the last block
        self.start = max(origin + want.start, segment.start)
        self.stop = min(origin + want.stop, segment.stop)
        self.first = self.start - origin - want.start  # offset in the sink's range
        # receives the needed bytes directly; None: scratch memory does
        self.target: memoryview | None = None
        if want.sink.memory is not None and self.stop - self.start >= _DIRECT:
            self.target = want.sink.memory[self.first : self.first + self.stop - self.start]
        self.views: list[memoryview] = []  # all bytes of the segment, in order
        self.data: torch.Tensor | None = None  # the needed bytes, if they are in scratch memory


class ScatterPlan:
    """Decides into which memory each byte of a response is received.

    Targets of contiguous host memory that get 64 KiB or more receive their bytes directly.
    Everything else (smaller targets, targets that need a copy, the rest of a block, gaps between
    segments) is received into one scratch buffer, in which a byte's address modulo 64 equals that
    of its offset in the object, so that tensors are aligned as they are stored.

    Attributes:
        size: The bytes of all segments, without the gaps between them.
        scratch_bytes: The size that the scratch buffer must have; 0 if none is needed.
        pinned: Whether page-locked scratch memory makes delivery faster.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._landed = [_Landed(segment) for segment in segments]
        self._begin, self._end = segments[0].start, segments[-1].stop
        self.size = sum(segment.stop - segment.start for segment in segments)
        self.pinned = any(segment.want.sink.pinned for segment in segments)
        direct = [one.target.nbytes for one in self._landed if one.target is not None]
        self.scratch_bytes = self._end - self._begin - sum(direct)
        if self.scratch_bytes:  # each run of scratch memory is aligned
            self.scratch_bytes += ALIGNMENT * (len(direct) + 1)

    def place(self, scratch: Lease | None) -> list[memoryview]:
        """Returns the views to receive into, in the order of the object's bytes.

        Args:
            scratch: Memory of ``scratch_bytes``, from a pool of tensors; None if that is 0.
        """
        memory = memoryview(b"") if scratch is None else scratch.view
        order: list[memoryview] = []
        begin = self._begin  # of a run of the object's bytes that are received into scratch memory
        shift = begin % ALIGNMENT - begin  # from an offset in the object to that in scratch memory
        for landed in self._landed:
            segment, target = landed.segment, landed.target
            if target is None:
                landed.views = [memory[segment.start + shift : segment.stop + shift]]
                assert scratch is not None
                landed.data = scratch.memory[landed.start + shift : landed.stop + shift]
                continue
            end = landed.start + shift
            before = memory[segment.start + shift : end]
            order += [memory[begin + shift : end], target]
            begin = landed.stop
            shift = end + (begin - end) % ALIGNMENT - begin
            after = memory[begin + shift : segment.stop + shift]
            landed.views = [view for view in (before, target, after) if view.nbytes]
        order.append(memory[begin + shift : self._end + shift])
        return [view for view in order if view.nbytes]

    def damages(self, uri: Callable[[str], str]) -> list[Damage]:
        """Returns the blocks that do not match their checksums; `uri` returns the URI of a key."""
        damages: list[Damage] = []
        for landed in self._landed:
            source = landed.segment.want.source
            blocks = source.blocks
            if blocks is None:
                continue
            first = (landed.segment.start - source.offset) // blocks.size
            for bad in blocks.bad(first, landed.views):
                start = source.offset + bad * blocks.size
                stop = min(start + blocks.size, source.offset + source.nbytes)
                what = "does not match its checksum"
                damages.append(Damage(uri(source.key), source.item, what, start, stop))
        return damages

    def deliver(self) -> None:
        """Passes the bytes that were received into scratch memory to their sinks."""
        for landed in self._landed:
            if landed.data is not None:
                landed.segment.want.sink.deliver(landed.first, landed.data)
