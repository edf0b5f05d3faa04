"""Arithmetic of bytes and row-major tensors: alignment, strides, boxes. No I/O, no torch.

All sizes are bytes unless stated as elements. Alignment, strides and the byte ranges of regions are
computed only here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = [
    "ALIGNMENT",
    "Box",
    "BoxBytes",
    "aligned",
    "is_row_major",
    "padding",
    "plan_boxes",
    "reach",
    "row_major_slices",
    "row_major_strides",
]

ALIGNMENT = 64
"""The alignment of items in objects and memory, in bytes: as in torch.save.

It is enough for any dtype.
"""

Box = tuple[tuple[int, int], ...]
"""A region of a tensor: ``(start, length)`` for each dimension."""


def aligned(position: int, to: int = ALIGNMENT) -> int:
    """Returns `position` rounded up to a multiple of `to`."""
    return -(-position // to) * to


def padding(position: int, to: int = ALIGNMENT) -> int:
    """Returns the number of bytes from `position` to the next multiple of `to`; 0 at a multiple."""
    return -position % to


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a row-major tensor in elements; as in torch, size 0 counts as 1."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_row_major(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Returns whether elements are in row-major order without gaps."""
    expected = row_major_strides(shape)
    return all(
        size == 1 or stride == step
        for size, stride, step in zip(shape, strides, expected, strict=True)
    )


def reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Returns how many elements of memory a nonempty tensor spans, from its first to its last."""
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1


@dataclass(frozen=True, slots=True)
class BoxBytes:
    """A box, and the bytes of a row-major tensor that hold it.

    Attributes:
        box: The box.
        start: The offset of the first byte.
        stop: The offset after the last byte.
        contiguous: Whether the bytes are exactly the box in row-major order; otherwise the box's
            elements lie among others, at the tensor's strides.
    """

    box: Box
    start: int
    stop: int
    contiguous: bool


def row_major_slices(shape: Sequence[int], itemsize: int, limit: int) -> Iterator[BoxBytes]:
    """Cuts a tensor into consecutive contiguous boxes, each of at most `limit` bytes.

    A single element may exceed the limit. An empty tensor has no boxes.
    """
    if 0 in shape:
        return
    inner, cut = itemsize, len(shape)
    while cut > 0 and inner * shape[cut - 1] <= limit:
        cut -= 1
        inner *= shape[cut]
    full = tuple((0, size) for size in shape[cut:])
    if cut == 0:
        yield BoxBytes(full, 0, inner, True)
        return
    rows, axis, at = max(1, limit // inner), cut - 1, 0
    for outer in itertools.product(*map(range, shape[:axis])):
        prefix = tuple((index, 1) for index in outer)
        for start in range(0, shape[axis], rows):
            count = min(rows, shape[axis] - start)
            yield BoxBytes((*prefix, (start, count), *full), at, at + count * inner, True)
            at += count * inner


def plan_boxes(
    shape: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    itemsize: int,
    *,
    limit: int,
    merge_gap: int,
) -> Iterator[BoxBytes]:
    """Plans reading a region of a row-major tensor; yields byte ranges with boxes of the region.

    Parts of the region that lie next to each other in the tensor form one range. So do parts with
    gaps of at most `merge_gap` bytes in between, which are read as well. The boxes are relative to
    the region; an empty region has none.

    Args:
        shape: The shape of the stored tensor.
        offsets: The start of the region in the stored tensor.
        lengths: The shape of the region.
        itemsize: Bytes of an element.
        limit: Most bytes of a range that is not contiguous, to bound its scratch memory. Contiguous
            ranges have any size: they can be cut later.
        merge_gap: Gaps of up to this many bytes are read instead of skipped.
    """
    if 0 in lengths:
        return
    strides = row_major_strides(shape)
    axis = len(shape)  # dimensions from this one on are read whole
    while axis > 0 and lengths[axis - 1] == shape[axis - 1]:
        axis -= 1
    run = max(axis - 1, 0)  # elements are contiguous from this dimension on
    # extent[a]: elements from the region's first to after its last, with fixed indices before
    # dimension a
    extent = [1] * (len(shape) + 1)
    for a in range(len(shape) - 1, -1, -1):
        extent[a] = extent[a + 1] + (lengths[a] - 1) * strides[a]
    cover = run
    while cover > 0:
        gap = (strides[cover - 1] - extent[cover]) * itemsize
        if lengths[cover - 1] > 1 and gap > merge_gap:
            break
        cover -= 1

    def walk(a: int, prefix: Box, first: int) -> Iterator[BoxBytes]:
        """Yields the boxes that have the indices `prefix` in the dimensions before `a`."""
        rest = tuple((0, length) for length in lengths[a:])
        contiguous = a >= run or all(length == 1 for length in lengths[a:run])
        if a >= cover and (contiguous or extent[a] * itemsize <= limit):
            stop = first + extent[a]
            yield BoxBytes((*prefix, *rest), first * itemsize, stop * itemsize, contiguous)
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
                yield BoxBytes(box, at * itemsize, stop * itemsize, dense)

    origin = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    yield from walk(0, (), origin)
