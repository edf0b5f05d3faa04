"""The parts of a model's files, and which rank sends each. No I/O.

Parts follow what lies together: a shard's rows are parts of their own, which its rank sends from
where they are, and which a store copies from a checkpoint. What is smaller than a part may be, and
tensors that are cut in columns, are collected by one rank, the owner of the file. Others hand their
bytes to it in rounds, in each of which a rank assembles at most one part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from cloudckpt.config import MIB, Config
from cloudckpt.hf.layout import Chunk, FilePlan, TensorPlan
from cloudckpt.stores.capabilities import Capabilities
from cloudckpt.transfer.boxes import ALIGNMENT, Box, aligned, row_major_strides
from cloudckpt.transfer.parts import choose_part_size

__all__ = [
    "Elements",
    "Extent",
    "FilePart",
    "Gift",
    "Held",
    "Range",
    "RankWork",
    "Round",
    "cut_equally",
    "cut_into_parts",
    "elements_needed",
    "least_part",
    "plan_work",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Extent(Generic[T]):
    """Bytes that follow one another in a file.

    Attributes:
        source: Where they come from.
        nbytes: The number of bytes.
        grain: They may be cut at multiples of so many bytes.
        is_scattered: Whether they lie in another order, or apart: all of them have to be collected
            before any can be sent.
    """

    source: T
    nbytes: int
    grain: int = 1
    is_scattered: bool = False


@dataclass(frozen=True, slots=True)
class Range(Generic[T]):
    """Bytes ``start`` to ``stop`` of an extent."""

    extent: Extent[T]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Held:
    """A source in the memory of ranks: a tensor, or a part of it, and the chunks that it is of."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Sequence[Chunk]


Content = Range[T] | list[bytes | Range[T]]
"""A part: a range that is sent, or copied, from where it is; or what is to be put together."""


@dataclass(frozen=True, slots=True)
class FilePart:
    """A part of a file, by the number that the store knows it by."""

    file: int
    number: int
    content: Content[Held]

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return _nbytes(self.content)


@dataclass(frozen=True, slots=True)
class Elements:
    """Elements of a chunk, counted in row-major order, and the type that they are stored as."""

    chunk: Chunk
    start: int
    stop: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return (self.stop - self.start) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Gift:
    """What a rank hands to another."""

    to: int
    elements: Elements


@dataclass
class Round:
    """A rank's work in a round: what it hands to others, and the parts that it then assembles.

    They are more than one if a tensor that is collected fills several.
    """

    parts: list[FilePart] = field(default_factory=list)
    gifts: list[Gift] = field(default_factory=list)


@dataclass(frozen=True)
class RankWork:
    """A rank's work: rounds, the same number on all ranks, and parts that are only its own."""

    rounds: Sequence[Round]
    own: Sequence[FilePart]

    @property
    def largest(self) -> int:
        """Bytes of the largest part."""
        parts = [*self.own, *(part for each in self.rounds for part in each.parts)]
        return max((part.nbytes for part in parts), default=0)


def plan_work(
    files: Sequence[FilePlan],
    ranks: int,
    config: Config,
    limits: Capabilities,
    *,
    by_position: bool,
) -> tuple[list[int], list[RankWork]]:
    """The part size to begin the upload of each file with, and the work of each rank.

    Args:
        files: The files.
        ranks: The number of ranks.
        config: Options.
        limits: The limits of the store.
        by_position: Whether a part's number says where it begins, as in a local file.
    """
    own: list[list[FilePart]] = [[] for _ in range(ranks)]
    queues: list[list[list[FilePart]]] = [[] for _ in range(ranks)]  # of parts that need others
    owned: Counter[int] = Counter()
    sizes: list[int] = []
    for index, file in enumerate(files):
        shares: Counter[int] = Counter()
        for tensor in file.tensors:
            for chunk in tensor.chunks:
                shares[chunk.rank] += chunk.numel * tensor.dtype.itemsize
        owner = max(range(ranks), key=lambda rank: (shares[rank], -owned[rank], -rank))
        owned[owner] += file.size
        size, cut = _cutter(file, config, limits)
        sizes.append(1 if by_position else size)
        position = 0
        for count, content in enumerate(cut, 1):
            part = FilePart(index, position + 1 if by_position else count, content)
            position += part.nbytes
            if isinstance(content, Range):
                own[content.extent.source.chunks[0].rank].append(part)
            elif _ranks_of(content) <= {owner}:
                own[owner].append(part)
            elif any(one.chunk.rank != owner for one in elements_needed(content)):
                queues[owner].append([part])
            else:  # more of what was collected for the last part
                queues[owner][-1].append(part)
    return sizes, _in_rounds(queues, own)


def _in_rounds(
    queues: Sequence[Sequence[list[FilePart]]], own: Sequence[Sequence[FilePart]]
) -> list[RankWork]:
    rounds = [[Round() for _ in queues] for _ in range(max(map(len, queues)))]
    for owner, queue in enumerate(queues):
        for each, parts in zip(rounds, queue, strict=False):
            each[owner].parts = parts
            for elements in (one for part in parts for one in elements_needed(part.content)):
                if elements.chunk.rank != owner:
                    each[elements.chunk.rank].gifts.append(Gift(owner, elements))
    return [RankWork([each[rank] for each in rounds], mine) for rank, mine in enumerate(own)]


def _ranks_of(content: Sequence[bytes | Range[Held]]) -> set[int]:
    ranges = [one for one in content if isinstance(one, Range)]
    return {chunk.rank for one in ranges for chunk in one.extent.source.chunks}


def elements_needed(content: Content[Held]) -> Iterator[Elements]:
    """What a part is put together from, in the order of use.

    A scattered extent is collected as a whole with its first bytes.
    """
    for one in content if isinstance(content, list) else [content]:
        if isinstance(one, bytes):
            continue
        held = one.extent.source
        if one.extent.is_scattered:
            for chunk in held.chunks if one.start == 0 else ():
                yield Elements(chunk, 0, chunk.numel, held.dtype)
        else:
            size = held.dtype.itemsize
            yield Elements(held.chunks[0], one.start // size, one.stop // size, held.dtype)


def _cutter(
    file: FilePlan, config: Config, limits: Capabilities
) -> tuple[int, Iterable[Content[Held]]]:
    """The part size of a file, and its parts."""
    size = choose_part_size(
        file.size,
        config.part_size,
        limits,
        connections=config.most_connections,
        copied=config.memory_budget,
    )
    extents = [one for tensor in file.tensors for one in _extents(tensor)]
    if limits.equal_parts:
        size = aligned(max(size, -(-file.size // limits.max_parts)), ALIGNMENT)
        return size, cut_equally(file.header, extents, size)
    least = least_part(file.size, limits)
    size = aligned(max(size, 2 * least), ALIGNMENT)
    return size, cut_into_parts(file.header, extents, least=least, most=size)


def least_part(size: int, limits: Capabilities) -> int:
    """Minimum bytes of a part of a file of so many bytes: it may have only so many parts."""
    return max(limits.min_part_size, MIB, -(-size // (limits.max_parts - 1)))


def _extents(tensor: TensorPlan) -> Iterator[Extent[Held]]:
    """What a tensor lies in: its chunks, or all of it if these are not ranges of the file."""
    chunks = [chunk for chunk in tensor.chunks if chunk.numel]
    itemsize = tensor.dtype.itemsize
    if not all(_is_range(chunk.box, tensor.shape) for chunk in chunks):
        held = Held(tensor.name, tensor.dtype, tensor.shape, chunks)
        yield Extent(held, tensor.nbytes, itemsize, is_scattered=True)
        return
    strides = row_major_strides(tensor.shape)

    def first(chunk: Chunk) -> int:
        return sum(start * stride for (start, _), stride in zip(chunk.box, strides, strict=True))

    for chunk in sorted(chunks, key=first):
        shape = tuple(length for _, length in chunk.box)
        held = Held(tensor.name, tensor.dtype, shape, [chunk])
        yield Extent(held, chunk.numel * itemsize, itemsize)


def _is_range(box: Box, shape: Sequence[int]) -> bool:
    """Whether the elements of a box follow one another in a row-major tensor."""
    axis = 0
    while axis < len(shape) and box[axis][1] == 1:
        axis += 1
    return [length for _, length in box[axis + 1 :]] == list(shape[axis + 1 :])


def cut_into_parts(
    header: bytes, extents: Iterable[Extent[T]], *, least: int, most: int
) -> Iterator[Content[T]]:
    """The parts of a file, of at least ``least`` bytes but for the last.

    Args:
        header: The bytes at the start.
        extents: The rest, in order.
        least: Minimum bytes of a part.
        most: Maximum bytes of a range that is sent or copied from where it is; at least twice
            ``least``.
    """
    mixed: list[bytes | Range[T]] = [header]
    size = len(header)
    for extent in extents:
        rest, at = extent.nbytes, 0
        while rest:
            taken = min(aligned(max(least - size, 0), extent.grain), rest) if size else 0
            if extent.is_scattered:
                taken = min(most, rest)
            elif rest - taken < least:
                taken = rest
            if taken:
                mixed.append(Range(extent, at, at + taken))
                size, at, rest = size + taken, at + taken, rest - taken
            if size >= least:
                yield mixed
                mixed, size = [], 0
            if rest and not extent.is_scattered:
                yield from _equal_ranges(extent, at, most)
                break
    if size:
        yield mixed


def _equal_ranges(extent: Extent[T], at: int, most: int) -> Iterator[Range[T]]:
    """The bytes of an extent from ``at`` on, in ranges of about the same size."""
    count = -(-(extent.nbytes - at) // most)
    step = max((extent.nbytes - at) // count // extent.grain * extent.grain, extent.grain)
    starts = [at + number * step for number in range(count)]
    for start, stop in zip(starts, [*starts[1:], extent.nbytes], strict=True):
        yield Range(extent, start, stop)


def cut_equally(
    header: bytes, extents: Iterable[Extent[T]], size: int
) -> Iterator[list[bytes | Range[T]]]:
    """The parts of a file, all of ``size`` bytes but for the last, to be put together."""
    mixed: list[bytes | Range[T]] = []
    room = size
    for start in range(0, len(header), size):
        mixed.append(header[start : start + size])
        room = size - len(header[start : start + size])
        if not room:
            yield mixed
            mixed, room = [], size
    for extent in extents:
        at = 0
        while at < extent.nbytes:
            count = min(room, extent.nbytes - at)
            mixed.append(Range(extent, at, at + count))
            at, room = at + count, room - count
            if not room:
                yield mixed
                mixed, room = [], size
    if mixed:
        yield mixed


def _nbytes(content: Content[T]) -> int:
    parts = content if isinstance(content, list) else [content]
    return sum(len(one) if isinstance(one, bytes) else one.nbytes for one in parts)
