"""Which memory is taken by targets that are filled at the same time."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import NamedTuple

import torch

__all__ = ["Claims"]


class Claims:
    """Tensors of any strides, of which none shares memory with another.

    Columns of a matrix lie in between each other and don't overlap. Where that is not plain from
    the strides, tensors whose bytes lie in between each other count as overlapping.
    """

    def __init__(self) -> None:
        self._taken: dict[torch.device, _Regions] = {}

    def overlap(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor shares memory with one that was added."""
        if not tensor.numel():
            return False
        claim = _Claim.of(tensor)
        regions = self._of(tensor)
        first, stop = regions.within(claim.start, claim.stop)
        return any(
            _share_bytes(claim, other)
            for region in regions.claims[first:stop]
            for other in region
            if other.start < claim.stop and claim.start < other.stop
        )

    def add(self, tensor: torch.Tensor) -> None:
        """Adds a tensor, which overlaps none that was added before."""
        if tensor.numel():
            self._of(tensor).add(_Claim.of(tensor))

    def _of(self, tensor: torch.Tensor) -> _Regions:
        return self._taken.setdefault(tensor.device, _Regions([], [], []))


class _Claim(NamedTuple):
    """The memory of a tensor.

    Attributes:
        start: Its first byte.
        stop: Behind its last one.
        steps: Strides, in bytes, and how many steps each takes; the bytes of an element are steps
            of one byte.
    """

    start: int
    stop: int
    steps: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Claim:
        start, itemsize = tensor.data_ptr(), tensor.itemsize
        if tensor.is_contiguous():
            nbytes = tensor.numel() * itemsize
            return cls(start, start + nbytes, ((1, nbytes),))
        sizes = zip(tensor.stride(), tensor.shape, strict=True)
        steps = [(stride * itemsize, size) for stride, size in sizes if size > 1]
        last = sum(stride * (size - 1) for stride, size in steps)
        return cls(start, start + last + itemsize, ((1, itemsize), *steps))


@dataclass
class _Regions:
    """Ranges of memory in order, which do not overlap, and the claims that lie in each."""

    starts: list[int]
    stops: list[int]
    claims: list[list[_Claim]]

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """The first of the regions that have bytes of a range, and behind the last."""
        return bisect_right(self.stops, start), bisect_left(self.starts, stop)

    def add(self, claim: _Claim) -> None:
        """Adds a claim; regions that it touches become one with it."""
        first, stop = self.within(claim.start, claim.stop)
        joined = [claim, *(other for region in self.claims[first:stop] for other in region)]
        self.starts[first:stop] = [min(other.start for other in joined)]
        self.stops[first:stop] = [max(other.stop for other in joined)]
        self.claims[first:stop] = [joined]


def _share_bytes(one: _Claim, other: _Claim) -> bool:
    """Whether two claims share bytes, or might.

    With strides that divide each other, bytes have coordinates, as in a matrix: the steps of each
    stride from the first of the two claims, each fewer than make a step of the next larger stride.
    A claim that stays within these bounds is a box, and boxes apart in one coordinate are disjoint.
    """
    one, other = sorted((one, other))
    sizes, others = dict(one.steps), dict(other.steps)
    strides = sorted({*sizes, *others}, reverse=True)
    unclear = (
        0 in strides
        or len(sizes) < len(one.steps)
        or len(others) < len(other.steps)
        or any(a % b for a, b in itertools.pairwise(strides))
    )
    if unclear:
        return True
    rest, above, apart = other.start - one.start, 0, False
    for stride in strides:
        at, rest = divmod(rest, stride)
        size, size_of_other = sizes.get(stride, 1), others.get(stride, 1)
        if above and max(size, at + size_of_other) > above // stride:
            return True  # it goes on in the next row
        apart = apart or at >= size
        above = stride
    return not apart
