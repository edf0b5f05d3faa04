"""Everything in a checkpoint, as columns: for each chunk where it lies and which part it is.

torch's metadata has three Python objects for each chunk of each tensor of each rank: half a million
chunks take a gigabyte and seconds. Here there is a table of names and columns of numbers for the
chunks, from which torch's objects are made on demand.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from cloudckpt.checkpoint.columns import column_of, counted, matrix_of, unfilled
from cloudckpt.checkpoint.objects import WrittenObject
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checkpoint.written import Extents
from cloudckpt.checksum import ChecksumAlgorithm

__all__ = [
    "Chunks",
    "Entry",
    "Inventory",
    "Paths",
    "dims_of",
    "rows_of",
]

Paths = Mapping[str, tuple["str | int", ...]]
"""``planner_data`` of torch's metadata: the path of each name in the state dict."""

_END = 1 << 63
_AT_ONCE = 1 << 16  # rows processed together: their data stays in the caches


class Entry(NamedTuple):
    """The properties of a name.

    Attributes:
        first: The row of its first chunk, or of its value.
        count: How many chunks it has; 1 if it is not a tensor.
        shape: Of the tensor; None if it is not a tensor.
        properties: The number of its properties.
        place: The number of its first chunk among the chunks of tensors with as many dimensions.
    """

    first: int
    count: int  # type: ignore[assignment]  # and not what tuples have of this name
    shape: tuple[int, ...] | None
    properties: int
    place: int


@dataclass(frozen=True)
class Chunks:
    """Which parts of their tensors chunks are, for tensors with as many dimensions.

    Attributes:
        rows: The rows of the chunks.
        offsets: Where in the tensor each begins: one row per chunk, one column per dimension.
        sizes: How large each is, in the same form.
    """

    rows: torch.Tensor
    offsets: torch.Tensor
    sizes: torch.Tensor


@dataclass(frozen=True, eq=False)
class Inventory:
    """Names, chunks and objects of a checkpoint.

    It describes what one or all ranks of a save have written, or, without objects and extents, what
    they are to write. Rows are the chunks of tensors and the values, in the order of the names.

    Attributes:
        entries: By name, in the order of the metadata.
        properties: The distinct properties of tensors.
        chunks: By number of dimensions.
        extents: Where the rows lie.
        objects: The data objects, by rank and ordinal.
        checksum: The algorithm of all checksums.
        paths: ``planner_data``, or None.
        structure: The nesting that the paths do not express.
    """

    entries: Mapping[str, Entry]
    properties: Sequence[TensorProperties]
    chunks: Mapping[int, Chunks]
    extents: Extents
    objects: Sequence[WrittenObject]
    checksum: ChecksumAlgorithm
    paths: Paths | None = None
    structure: Structure = field(default_factory=Structure)

    @property
    def count(self) -> int:
        """The number of rows."""
        return sum(entry.count for entry in self.entries.values())

    def row_of(self, index: MetadataIndex) -> int | None:
        """The row of an item; its hint is used only if it leads to the right offsets."""
        entry = self.entries.get(index.fqn)
        if entry is None or (entry.shape is None) != (index.offset is None):
            return None
        if entry.shape is None or index.offset is None:
            return entry.first
        wanted, hint = tuple(index.offset), index.index
        if len(wanted) != len(entry.shape):
            return None
        chunks = self.chunks[len(wanted)]
        if hint is not None and 0 <= hint < entry.count:
            is_right = tuple(chunks.offsets[entry.place + hint].tolist()) == wanted
            if is_right:
                return entry.first + hint
        row = _search(entry, chunks, column_of(wanted))
        return row if row >= 0 else None

    @functools.cached_property
    def _finder(self) -> _RowFinder:
        return _RowFinder(self.entries, self.chunks)

    def rows(self, indices: Sequence[MetadataIndex]) -> torch.Tensor:
        """The rows of many items; -1 where there is no such item."""
        return self._finder.rows(indices)

    def name_of(self, row: int) -> str:
        """The name that a row belongs to."""
        firsts, names = self._names
        return names[bisect.bisect_right(firsts, row) - 1]

    @functools.cached_property
    def _names(self) -> tuple[list[int], list[str]]:
        """The first rows of all names that have rows, in ascending order, and these names."""
        found = sorted((entry.first, name) for name, entry in self.entries.items() if entry.count)
        return [first for first, _ in found], [name for _, name in found]

    def shapes(self, rows: torch.Tensor) -> list[tuple[int, ...]]:
        """The shapes of rows; values have no dimensions."""
        found: list[tuple[int, ...]] = [()] * rows.numel()
        for chunks in self.chunks.values():
            places = torch.searchsorted(chunks.rows, rows).clamp(max=chunks.rows.numel() - 1)
            items = (chunks.rows[places] == rows).nonzero().view(-1)
            sizes = chunks.sizes[places[items]].tolist()
            for item, size in zip(items.tolist(), sizes, strict=True):
                found[item] = tuple(size)
        return found

    def extent_of(self, row: int) -> tuple[WrittenObject, int, int]:
        """The object of a row, its first byte there, and its bytes."""
        objects, offset, length = (int(column[row]) for column in self.extents.columns)
        return self.objects[objects], offset, length

    def metadata_of(self, name: str) -> TensorStorageMetadata | BytesStorageMetadata:
        """What torch's metadata say of a name."""
        entry = self.entries[name]
        if entry.shape is None:
            return BytesStorageMetadata()
        chunks, stop = self.chunks[len(entry.shape)], entry.place + entry.count
        parts = zip(
            chunks.offsets[entry.place : stop].tolist(),
            chunks.sizes[entry.place : stop].tolist(),
            strict=True,
        )
        size = torch.Size
        made = [ChunkStorageMetadata(size(offsets), size(sizes)) for offsets, sizes in parts]
        properties = dataclasses.replace(self.properties[entry.properties])
        return TensorStorageMetadata(properties, size(entry.shape), made)

    def check(self) -> None:
        """Checks that all numbers are within their bounds.

        Raises:
            ValueError: If one is not.
        """
        self.check_extents()
        self.check_chunks()

    def check_chunks(self) -> None:
        """Whether all chunks are inside of their tensors.

        Raises:
            ValueError: If one is not.
        """
        for dims, chunks in self.chunks.items():
            named = [
                (name, e)
                for name, e in self.entries.items()
                if dims_of(e.shape) == dims and e.count
            ]
            if not named or not dims:
                continue
            shapes = column_of([entry.shape for _, entry in named])
            ends = column_of([entry.place + entry.count for _, entry in named])
            for start in range(0, chunks.rows.numel(), _AT_ONCE):  # one by one, to save memory
                offsets = chunks.offsets[start : start + _AT_ONCE]
                sizes = chunks.sizes[start : start + _AT_ONCE]
                numbers = torch.searchsorted(ends, counted(start, start + len(sizes)), right=True)
                inside = (sizes >= 0) & (offsets >= 0) & (sizes <= (limits := shapes[numbers]))
                inside &= offsets <= limits.sub_(sizes)
                if not bool(inside.all()):
                    name, _ = named[int(numbers[int((~inside).any(1).nonzero()[0])])]
                    raise ValueError(f"a chunk of {name[:200]} lies outside of it")

    def check_extents(self) -> None:
        """Checks that all extents are inside their objects.

        Raises:
            ValueError: If one is not.
        """
        extents, objects = self.extents, self.objects
        if not len(extents):
            return
        ends = column_of([one.size - one.index_size for one in objects])
        for start in range(0, len(extents), _AT_ONCE):
            numbers, offsets, lengths = (
                column[start : start + _AT_ONCE] for column in extents.columns
            )
            somewhere = (numbers >= 0) & (numbers < len(objects))
            if not bool(somewhere.all()):
                raise ValueError(f"{self._first_not(somewhere, start)} lies in no object")
            limits = ends[numbers]
            inside = (offsets >= 0) & (lengths >= 0) & (lengths <= limits)
            inside &= offsets <= limits.sub_(lengths)
            if not bool(inside.all()):
                raise ValueError(f"{self._first_not(inside, start)} lies outside of its object")

    def _first_not(self, true: torch.Tensor, start: int) -> str:
        """The name of the first row where ``true`` is false; rows begin at ``start``."""
        return self.name_of(start + int((~true).nonzero()[0]))[:200]


class _RowFinder:
    """Finds the rows of many items at once."""

    def __init__(self, entries: Mapping[str, Entry], chunks: Mapping[int, Chunks]) -> None:
        self._chunks = chunks
        self._numbers = {name: number for number, name in enumerate(entries)}
        self._entries = list(entries.values())
        self._firsts = column_of([entry.first for entry in self._entries])
        self._counts = column_of([entry.count for entry in self._entries])
        self._places = column_of([entry.place for entry in self._entries])
        self._dims = column_of([dims_of(entry.shape) for entry in self._entries])

    def rows(self, indices: Sequence[MetadataIndex]) -> torch.Tensor:
        """The row of each, or -1; hints count only if they lead to the right offsets."""
        if not indices or not self._entries:
            return unfilled(len(indices)).fill_(-1)
        numbers = column_of([self._numbers.get(index.fqn, -1) for index in indices])
        offsets = [index.offset for index in indices]
        dims = column_of([dims_of(offset) for offset in offsets])
        known = numbers.clamp(min=0)
        counts = self._counts[known]
        is_known = (numbers >= 0) & (self._dims[known] == dims) & (counts > 0)
        hints = column_of([_hint(index.index) for index in indices])
        hints = hints * (hints < counts)
        rows = (self._firsts[known] + hints).where(is_known, -1)
        for wanted_dims, chunks in self._chunks.items():
            items = (is_known & (dims == wanted_dims)).nonzero().view(-1)
            if not items.numel():
                continue
            flat = array("q")
            flat.extend(itertools.chain.from_iterable(offsets[n] or () for n in items.tolist()))
            wanted = matrix_of(flat, wanted_dims, items.numel())
            at = self._places[known[items]] + hints[items]
            wrong = (chunks.offsets[at] != wanted).any(1).nonzero().view(-1)
            for number in wrong.tolist():
                entry = self._entries[int(known[items[number]])]
                rows[items[number]] = _search(entry, chunks, wanted[number])
        return rows


def _search(entry: Entry, chunks: Chunks, wanted: torch.Tensor) -> int:
    """The row of the chunk with these offsets; -1 if there is none."""
    offsets = chunks.offsets[entry.place : entry.place + entry.count]
    found = (offsets == wanted).all(1).nonzero()
    return entry.first + int(found[0]) if found.numel() else -1


def dims_of(sizes: Sequence[int] | None) -> int:
    """The number of dimensions of a shape, or of offsets; -1 of what is no tensor."""
    return -1 if sizes is None else len(sizes)


def _hint(hint: int | None) -> int:
    return hint if hint is not None and 0 <= hint < _END else 0


def rows_of(tensors: Iterable[Entry], dims: int) -> torch.Tensor:
    """The rows of the chunks of all tensors with ``dims`` dimensions."""
    of_dims = [e for e in tensors if e.shape is not None and len(e.shape) == dims and e.count]
    if not of_dims:
        return unfilled(0)
    firsts = column_of([entry.first for entry in of_dims])
    counts = column_of([entry.count for entry in of_dims])
    # each row is the previous one plus 1, except where a tensor begins
    steps = unfilled(int(counts.sum())).fill_(1)
    begins = firsts.clone()
    begins[1:] -= firsts[:-1] + counts[:-1] - 1
    steps[column_of([entry.place for entry in of_dims])] = begins
    return steps.cumsum_(0)
