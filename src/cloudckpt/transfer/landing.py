"""The memory that a download is received into, and what it is received for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cloudckpt.checksum import Blocks
from cloudckpt.transfer.memory import bytes_of
from cloudckpt.transfer.ranges import Span
from cloudckpt.transfer.sinks import Sink

__all__ = ["Bad", "Landing", "Segment", "Source", "Wanted"]

_DIRECT = 64 * 1024  # fewer bytes are cheaper to copy than to receive in a call of their own
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Source:
    """Raw data of an item in an object.

    Attributes:
        key: The object.
        offset: The first byte of the raw data in the object.
        nbytes: Its length.
        blocks: What its blocks must be, or None if that is unknown.
        object_size: What the object's size must be, or None if that is unknown.
        item: The item's name, for messages.
    """

    key: str
    offset: int
    nbytes: int
    blocks: Blocks | None
    object_size: int | None
    item: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """Bytes ``start`` to ``stop`` of a source's raw data, and who takes them.

    Attributes:
        source: The raw data.
        start: The first byte.
        stop: Behind the last one.
        sink: The taker.
        divisible: Whether the sink accepts the bytes in several deliveries.
    """

    source: Source
    start: int
    stop: int
    sink: Sink
    divisible: bool


@dataclass(frozen=True)
class Bad:
    """Bytes of an object that do not match their checksum."""

    item: str
    start: int
    stop: int


class Segment:
    """One span of a request: what is wanted of it, and where its bytes land."""

    __slots__ = (
        *("span", "want", "start", "stop", "before", "behind"),
        *("target", "is_direct", "views", "landed"),
    )

    def __init__(self, span: Span, want: Wanted) -> None:
        self.span = span
        self.want = want
        origin = want.source.offset
        self.start = max(want.start, span.start - origin)  # wanted, relative to the raw data
        self.stop = min(want.stop, span.stop - origin)
        self.before = self.start - (span.start - origin)  # bytes read for their block's sake
        self.behind = (span.stop - origin) - self.stop
        begin = self.start - want.start
        self.target = want.sink.direct(begin, begin + self.stop - self.start)
        self.is_direct = self.target is not None and self.target.nbytes >= _DIRECT
        self.views: list[memoryview] = []
        self.landed: torch.Tensor | None = None

    def deliver(self) -> None:
        """Hands over what landed in scratch memory."""
        if self.landed is None:
            return
        if self.target is not None:
            self.target[:] = bytes_of(self.landed)
        else:
            self.want.sink.deliver(self.start - self.want.start, self.landed)


class Landing:
    """The memory that one request is received into.

    Large plain targets receive their bytes themselves. All else (small targets, targets that need
    a copy, the rest of a block, gaps between spans) lies in one piece of scratch memory, at the
    object's own alignment.
    """

    def __init__(self, spans: Sequence[Span], wanted: Sequence[Wanted]) -> None:
        self.segments = [Segment(span, wanted[span.owner]) for span in spans]
        self._places: list[tuple[int, int, Segment | None, memoryview | None]] = []
        self.scratch_bytes = 0
        self._lay_out()

    @property
    def size(self) -> int:
        """Bytes that are received."""
        return sum(segment.span.stop - segment.span.start for segment in self.segments)

    def _lay_out(self) -> None:
        position = self.segments[0].span.start
        for segment in self.segments:
            span = segment.span
            if span.start > position:
                self._scratch(position, span.start - position, None)
            if segment.is_direct:
                self._scratch(span.start, segment.before, segment)
                self._places.append((0, 0, segment, segment.target))
                self._scratch(span.stop - segment.behind, segment.behind, segment)
            else:
                self._scratch(span.start, span.stop - span.start, segment)
            position = span.stop

    def _scratch(self, position: int, count: int, segment: Segment | None) -> None:
        if count == 0:
            return
        if not self._places or self._places[-1][3] is not None:
            self.scratch_bytes += (position - self.scratch_bytes) % _ALIGNMENT
        self._places.append((self.scratch_bytes, count, segment, None))
        self.scratch_bytes += count

    @property
    def pinned(self) -> bool:
        """Whether page-locked memory helps to deliver."""
        return any(segment.want.sink.pinned for segment in self.segments)

    def place(self, scratch: torch.Tensor) -> list[memoryview]:
        """The views to receive into, those that are neighbours in memory made one."""
        memory = bytes_of(scratch)
        merged: list[memoryview] = []
        run: tuple[int, int] | None = None
        for at, count, segment, target in self._places:
            if target is not None:
                view = target
                if run is not None:
                    merged.append(memory[run[0] : run[1]])
                    run = None
                merged.append(target)
            else:
                view = memory[at : at + count]
                run = (at, at + count) if run is None else (run[0], at + count)
                if segment is not None and not segment.is_direct:
                    first = at + segment.before
                    segment.landed = scratch[first : first + segment.stop - segment.start]
            if segment is not None:
                segment.views.append(view)
        if run is not None:
            merged.append(memory[run[0] : run[1]])
        return merged

    def first_bad(self) -> Bad | None:
        """The first block that does not match its checksum."""
        for segment in self.segments:
            source = segment.want.source
            blocks = source.blocks
            if blocks is None:
                continue
            first = (segment.span.start - source.offset) // blocks.size
            bad = blocks.first_bad(first, segment.views)
            if bad is not None:
                start = source.offset + bad * blocks.size
                stop = min(start + blocks.size, source.offset + source.nbytes)
                return Bad(source.item, start, stop)
        return None

    def deliver(self) -> None:
        """Hands over what did not land in its target by itself."""
        for segment in self.segments:
            segment.deliver()
