"""What is in a checkpoint, as columns: names, and which part of its tensor each chunk is.

torch's metadata has three Python objects for each chunk of each tensor of each rank: half a million
chunks take a gigabyte and seconds. Here there is a table of names and columns of numbers for the
chunks, from which torch's objects are made on demand.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from cloudckpt.checkpoint.columns import column_of, counted, matrix_of, repeated

__all__ = ["Chunks", "Entry", "Paths", "Table", "dims_of", "entries_of", "rows_of"]

Paths = Mapping[str, tuple["str | int", ...]]
"""``planner_data`` of torch's metadata: the path of each name in the state dict."""

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
class Table:
    """Names and chunks of what one rank, or all ranks, write.

    Rows are the chunks of tensors and the values, in the order of the names.

    Attributes:
        entries: By name, in the order of the metadata.
        properties: The distinct properties of tensors.
        chunks: By number of dimensions.
        paths: ``planner_data``, or None.
    """

    entries: Mapping[str, Entry]
    properties: Sequence[TensorProperties]
    chunks: Mapping[int, Chunks]
    paths: Paths | None = None

    @property
    def count(self) -> int:
        """The number of rows."""
        return sum(entry.count for entry in self.entries.values())

    def rows(self, indices: Sequence[MetadataIndex]) -> torch.Tensor:
        """The rows of items, or -1; hints count only if they lead to the right offsets."""
        found: list[int] = []
        by_dims: dict[int, list[tuple[int, Entry, int]]] = {}
        for number, index in enumerate(indices):
            entry, dims = self.entries.get(index.fqn), dims_of(index.offset)
            if entry is None or dims_of(entry.shape) != dims or not entry.count:
                found.append(-1)
                continue
            hint = index.index if index.index is not None and dims >= 0 else 0
            hint = hint if 0 <= hint < entry.count else 0
            found.append(entry.first + hint)
            if dims > 0:
                by_dims.setdefault(dims, []).append((number, entry, entry.place + hint))
        rows = column_of(found)
        for dims, items in by_dims.items():
            flat = array("q")
            for number, _, _ in items:
                flat.extend(indices[number].offset or ())
            wanted, chunks = matrix_of(flat, dims, len(items)), self.chunks[dims]
            at = column_of([place for _, _, place in items])
            for item in (chunks.offsets[at] != wanted).any(1).nonzero().view(-1).tolist():
                number, entry, _ = items[item]
                offsets = chunks.offsets[entry.place : entry.place + entry.count]
                places = (offsets == wanted[item]).all(1).nonzero()
                rows[number] = entry.first + int(places[0]) if places.numel() else -1
        return rows

    def name_of(self, row: int) -> str:
        """The name that a row belongs to."""
        firsts, names = self._names
        return names[bisect.bisect_right(firsts, row) - 1]

    @functools.cached_property
    def _names(self) -> tuple[list[int], list[str]]:
        """Parallel lists of first rows and names, sorted, for bisecting."""
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

    def check_chunks(self) -> None:
        """Checks that all chunks are inside their tensors.

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
                    raise ValueError(
                        f"invalid metadata: a chunk of {name[:200]} lies outside of the tensor"
                    )


def entries_of(
    names: Iterable[tuple[str, tuple[int, ...] | None, int, int]],
) -> dict[str, Entry]:
    """Entries with their first rows and places.

    Args:
        names: In the order of the rows: the name, the shape of its tensor or None, the number of
            its properties, and how many chunks it has.

    Raises:
        ValueError: If a name is there twice.
    """
    made: dict[str, Entry] = {}
    row, places = 0, dict[int, int]()
    for name, shape, properties, count in names:
        if name in made:
            raise ValueError(f"invalid metadata: {name[:200]} is listed twice")
        place = 0 if shape is None else places.get(len(shape), 0)
        made[name] = Entry(row, count, shape, properties, place)
        row += count
        if shape is not None:
            places[len(shape)] = place + count
    return made


def dims_of(sizes: Sequence[int] | None) -> int:
    """The number of dimensions of a shape, or of offsets; -1 if it is not a tensor's."""
    return -1 if sizes is None else len(sizes)


def rows_of(entries: Mapping[str, Entry]) -> dict[int, torch.Tensor]:
    """By number of dimensions, in ascending order: the rows of the chunks of such tensors."""
    by_dims: dict[int, list[Entry]] = {}
    for entry in entries.values():
        if entry.shape is not None:
            by_dims.setdefault(len(entry.shape), []).append(entry)
    made: dict[int, torch.Tensor] = {}
    for dims, tensors in sorted(by_dims.items()):
        firsts = column_of([entry.first - entry.place for entry in tensors])
        counts = column_of([entry.count for entry in tensors])
        made[dims] = repeated(firsts, counts) + counted(0, int(counts.sum()))
    return made
