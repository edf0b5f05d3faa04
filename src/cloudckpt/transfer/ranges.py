"""The plan of a download: which bytes of which object, in how many requests. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Box", "BoxRead", "Span", "pack_requests", "plan_boxes", "row_major_strides"]

Box = tuple[tuple[int, int], ...]
"""``(start, length)`` for each dimension."""


@dataclass(frozen=True, slots=True)
class BoxRead:
    """A box of the wanted region and the bytes that hold it.

    Attributes:
        box: The box, relative to the wanted region.
        start: The first byte, relative to the raw data.
        stop: Behind the last byte.
        contiguous: Whether the bytes are the box in row-major order; otherwise the box's elements
            stand among others, at the strides of the source.
    """

    box: Box
    start: int
    stop: int
    contiguous: bool


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a row-major tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def plan_boxes(
    shape: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    itemsize: int,
    *,
    limit: int,
    merge_gap: int,
) -> Iterator[BoxRead]:
    """How to read a region of a row-major tensor.

    Rows that follow each other are one range. A strided region is read by the cheaper way at each
    level: with the bytes in between, if those are at most ``merge_gap``, or else range by range.

    Args:
        shape: The shape of the stored tensor.
        offsets: Where the wanted region begins in it.
        lengths: The shape of the wanted region.
        itemsize: Bytes of an element.
        limit: Most bytes of a range that is not contiguous, so that its detour through memory stays
            small. Contiguous ranges have any size: they can be cut later.
        merge_gap: Bytes that are rather read than skipped.
    """
    if 0 in lengths:
        return
    strides = row_major_strides(shape)
    axis = len(shape)  # dimensions from here on are taken whole
    while axis > 0 and lengths[axis - 1] == shape[axis - 1]:
        axis -= 1
    run = max(axis - 1, 0)  # from here on the elements are contiguous
    # extent[a]: elements from the region's first to behind its last, at a fixed index before a
    extent = [1] * (len(shape) + 1)
    for a in range(len(shape) - 1, -1, -1):
        extent[a] = extent[a + 1] + (lengths[a] - 1) * strides[a]
    cover = run
    while cover > 0:
        gap = (strides[cover - 1] - extent[cover]) * itemsize
        if lengths[cover - 1] > 1 and gap > merge_gap:
            break
        cover -= 1

    def walk(a: int, prefix: Box, first: int) -> Iterator[BoxRead]:
        """Boxes at the indices ``prefix`` of the dimensions before ``a``."""
        rest = tuple((0, length) for length in lengths[a:])
        contiguous = a >= run or all(length == 1 for length in lengths[a:run])
        if a >= cover and (contiguous or extent[a] * itemsize <= limit):
            stop = first + extent[a]
            yield BoxRead((*prefix, *rest), first * itemsize, stop * itemsize, contiguous)
            return
        rows = 1
        if a >= cover and extent[a + 1] * itemsize <= limit:
            rows = 1 + (limit // itemsize - extent[a + 1]) // strides[a]
        for start in range(0, lengths[a], rows):
            count = min(rows, lengths[a] - start)
            at = first + start * strides[a]
            if rows == 1:
                yield from walk(a + 1, (*prefix, (start, 1)), at)
            else:
                stop = at + (count - 1) * strides[a] + extent[a + 1]
                box = (*prefix, (start, count), *rest[1:])
                dense = stop - at == math.prod(length for _, length in box)
                yield BoxRead(box, at * itemsize, stop * itemsize, dense)

    origin = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    yield from walk(0, (), origin)


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of one object that are wanted for one purpose.

    Attributes:
        start: The first byte, relative to the object.
        stop: Behind the last byte.
        grain: The span may be cut every ``grain`` bytes; 0 if it may not.
        origin: A place where it may be cut.
        owner: What the bytes are for: an index into the caller's list.
    """

    start: int
    stop: int
    grain: int
    origin: int
    owner: int

    def cut(self, limit: int) -> tuple[Span, Span] | None:
        """The longest head that ends by ``limit``, and the rest; None if there is none."""
        if self.grain == 0:
            return None
        at = self.origin + (limit - self.origin) // self.grain * self.grain
        if not self.start < at < self.stop:
            return None
        head = Span(self.start, at, self.grain, self.origin, self.owner)
        return head, Span(at, self.stop, self.grain, self.origin, self.owner)


def pack_requests(spans: Sequence[Span], *, limit: int, merge_gap: int) -> Iterator[list[Span]]:
    """Groups the spans of one object into requests, in the order of their bytes.

    Neighbours at most ``merge_gap`` bytes apart share a request until it has ``limit`` bytes; a
    span that crosses the limit is cut there. Spans that overlap are read twice. A single span that
    can't be cut may exceed the limit.
    """
    request: list[Span] = []
    waiting = sorted(spans, key=lambda span: (span.start, span.stop), reverse=True)
    while waiting:
        span = waiting.pop()
        begin = request[0].start if request else span.start
        if request and not 0 <= span.start - request[-1].stop <= merge_gap:
            yield request
            request, begin = [], span.start
        if span.stop - begin > limit:
            parts = span.cut(begin + limit)
            if parts is not None:
                head, rest = parts
                yield [*request, head]
                request = []
                waiting.append(rest)
                continue
            if request:
                yield request
                request = []
                waiting.append(span)
                continue
        request.append(span)
    if request:
        yield request
