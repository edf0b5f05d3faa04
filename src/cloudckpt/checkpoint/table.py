"""The contents of a checkpoint as columns: names, and the position of each chunk in its tensor.

torch's metadata has three Python objects for each chunk of each tensor of each rank: half a million
chunks take a gigabyte and seconds. A :class:`Table` has the names, their few distinct forms (shape
and element type), and columns of numbers for names and chunks. torch's objects are made from it on
demand. A *value* is anything under a name that is not a tensor; it is pickled as a whole.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from cloudckpt.checkpoint.columns import NotInColumnsError, column_of, counted, matrix_of, repeated

__all__ = ["VALUE", "Chunks", "Entry", "Form", "Paths", "Table", "numbered", "rows_by_dims"]

Paths = Mapping[str, tuple["str | int", ...]]
"""``planner_data`` of torch's metadata: the path of each name in the state dict."""

_AT_ONCE = 1 << 16  # rows processed together: their data stays in the caches
_END = 1 << 63
_MOST_DIMS = 64  # numpy's limit; columns are walked once for each number of dimensions


class Form(NamedTuple):
    """The shape, element type and ``requires_grad`` of a named tensor.

    Of torch's ``TensorProperties``, the layout, the memory format and whether a tensor was pinned
    are left out: they describe the tensor in memory, and no reader uses them.

    Attributes:
        shape: The shape of the whole tensor; None for a value, for which the other fields mean
            nothing.
        dtype: The element type.
        requires_grad: Whether the tensor required gradients.
    """

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    requires_grad: bool = False

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, requires_grad: bool) -> Form:
        """Returns the form of a tensor, after checking its numbers.

        Raises:
            NotInColumnsError: If there are more than 64 dimensions, one of them is not an integer
                or is out of range, or the tensor has 2**63 bytes or more.
        """
        if len(shape) > _MOST_DIMS:
            raise NotInColumnsError(f"the shape has more than {_MOST_DIMS} dimensions")
        if not all(type(n) is int and 0 <= n < _END for n in shape):
            raise NotInColumnsError(f"shape {shape!r:.99} is not of integers from 0 to 2**63 - 1")
        if math.prod(shape) * dtype.itemsize >= _END:
            raise NotInColumnsError(f"a tensor of shape {shape!r:.99} has 2**63 bytes or more")
        return cls(tuple(shape), dtype, requires_grad)

    @property
    def dims(self) -> int:
        """The number of dimensions; -1 for a value, which has none."""
        return -1 if self.shape is None else len(self.shape)

    @property
    def properties(self) -> TensorProperties:
        """The tensor's properties, in torch's own class."""
        return TensorProperties(self.dtype, requires_grad=self.requires_grad)


VALUE = Form()


class Entry(NamedTuple):
    """A name's entry in a table: its form, its rows, and its chunks.

    Attributes:
        form: The form of the tensor or value.
        count: How many chunks the tensor has; 1 for a value.
        first: The row of the first chunk, or of the value, in the table.
        place: The row of the first chunk in ``Table.chunks[form.dims]``, which has the chunks of
            all tensors with that number of dimensions; 0 for a value.
    """

    form: Form
    count: int  # type: ignore[assignment]  # and not what tuples have of this name
    first: int
    place: int

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the whole tensor; None for a value."""
        return self.form.shape


@dataclass(frozen=True)
class Chunks:
    """The offsets and sizes of all chunks of tensors that have the same number of dimensions.

    Attributes:
        offsets: Each chunk's first element in its tensor: one row per chunk, one column per
            dimension.
        sizes: The size of each chunk, in the same layout.
    """

    offsets: torch.Tensor
    sizes: torch.Tensor


@dataclass(frozen=True, eq=False)
class Table:
    """The names and chunks of the items that one rank, or all ranks, write.

    A table has a row for each item: each chunk of a tensor, and each value. Rows are numbered in
    the order of the names, and within a name in the order of its chunks.

    Attributes:
        names: The number of each name, from 0, in the order of the metadata.
        forms: The distinct forms of the names.
        form_of: For each name, the index of its form in ``forms``.
        counts: For each name, how many rows it has.
        chunks: The chunks by number of dimensions, in ascending order.
        paths: ``planner_data`` of torch's metadata, or None if it is None there.
    """

    names: Mapping[str, int]
    forms: Sequence[Form]
    form_of: torch.Tensor
    counts: torch.Tensor
    chunks: dict[int, Chunks]
    paths: Paths | None = None

    @functools.cached_property
    def count(self) -> int:
        """The number of rows."""
        return int(self.counts.sum())

    @functools.cached_property
    def dims(self) -> torch.Tensor:
        """The number of dimensions of each name; -1 for values."""
        return column_of([form.dims for form in self.forms])[self.form_of]

    @functools.cached_property
    def firsts(self) -> torch.Tensor:
        """The first row of each name."""
        return self.counts.cumsum(0) - self.counts

    @functools.cached_property
    def places(self) -> torch.Tensor:
        """For each tensor, the number of its first chunk in ``chunks[dims]``; for a value 0.

        ``dims`` is the number of dimensions of the tensor.
        """
        places = torch.zeros_like(self.counts)
        for dims in self.chunks:
            counts = self.counts[of_dims := self.dims == dims]
            places[of_dims] = counts.cumsum(0) - counts
        return places

    @functools.cached_property
    def chunk_rows(self) -> dict[int, torch.Tensor]:
        """For each number of dimensions, the rows that hold the chunks in ``chunks``."""
        return rows_by_dims(self.dims, self.counts, self.chunks)

    @functools.cached_property
    def _numbers(self) -> tuple[memoryview, ...]:
        """The columns ``form_of``, ``counts``, ``firsts`` and ``places`` as memoryviews.

        Reading a number from a memoryview makes no tensor.
        """
        columns = (self.form_of, self.counts, self.firsts, self.places)
        return tuple(column.numpy().data for column in columns)

    def get(self, name: str) -> Entry | None:
        """Returns the entry of a name; None if the table does not have the name."""
        if (number := self.names.get(name)) is None:
            return None
        forms, counts, firsts, places = self._numbers
        return Entry(self.forms[forms[number]], counts[number], firsts[number], places[number])

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Yields all names with their entries."""
        for name, form, *numbers in zip(self.names, *self._numbers, strict=True):
            yield name, Entry(self.forms[form], *numbers)

    def rows(self, indices: Sequence[MetadataIndex]) -> torch.Tensor:
        """Returns the row of each item, or -1 for an item that the table does not have.

        An item is found faster if its ``MetadataIndex.index`` is the number of its chunk.
        """
        found: list[int] = []
        by_dims: dict[int, list[tuple[int, Entry, int]]] = {}
        for number, index in enumerate(indices):
            entry, dims = self.get(index.fqn), -1 if index.offset is None else len(index.offset)
            if entry is None or entry.form.dims != dims or not entry.count:
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

    def name_at(self, number: int) -> str:
        """Returns the name with this number."""
        return next(islice(self.names, number, None))

    def name_of(self, row: int) -> str:
        """Returns the name to which a row belongs."""
        ends = self.counts.cumsum(0)
        return self.name_at(int(torch.searchsorted(ends, column_of([row]), right=True)))

    def shapes(self, rows: torch.Tensor) -> list[tuple[int, ...]]:
        """Returns the shape of the chunk in each of these rows; ``()`` for scalars and values."""
        found: list[tuple[int, ...]] = [()] * rows.numel()
        for dims, known in self.chunk_rows.items():
            if not known.numel():
                continue
            places = torch.searchsorted(known, rows).clamp(max=known.numel() - 1)
            items = (known[places] == rows).nonzero().view(-1)
            sizes = self.chunks[dims].sizes[places[items]].tolist()
            for item, size in zip(items.tolist(), sizes, strict=True):
                found[item] = tuple(size)
        return found

    def metadata_of(self, name: str) -> TensorStorageMetadata | BytesStorageMetadata:
        """Returns the entry of a name in ``state_dict_metadata`` of torch's metadata.

        Raises:
            KeyError: If the table does not have the name.
        """
        if (entry := self.get(name)) is None:
            raise KeyError(name)
        if entry.shape is None:
            return BytesStorageMetadata()
        chunks, stop = self.chunks[entry.form.dims], entry.place + entry.count
        parts = zip(
            chunks.offsets[entry.place : stop].tolist(),
            chunks.sizes[entry.place : stop].tolist(),
            strict=True,
        )
        size = torch.Size
        made = [ChunkStorageMetadata(size(offsets), size(sizes)) for offsets, sizes in parts]
        return TensorStorageMetadata(entry.form.properties, size(entry.shape), made)

    def check_names(self) -> None:
        """Checks ``form_of`` and ``counts``.

        Raises:
            NotInColumnsError: If the number of a form is out of range, a count is negative, a value
                does not have exactly one row, or a scalar has several.
        """
        numbers, counts = self.form_of, self.counts
        if bool(((numbers < 0) | (numbers >= len(self.forms))).any()):
            raise NotInColumnsError("invalid metadata: the number of a form is out of range")
        if bool((counts < 0).any()):
            raise NotInColumnsError("invalid metadata: a count of chunks is negative")
        too_many = ((self.dims == -1) & (counts != 1)) | ((self.dims == 0) & (counts > 1))
        if bool(too_many.any()):
            name = self.name_at(number := int(too_many.nonzero()[0]))[:200]
            raise NotInColumnsError(
                f"invalid metadata: {name} has {int(counts[number])} chunks, but must have one"
            )

    def check_chunks(self) -> None:
        """Checks that all chunks are within their tensors.

        Raises:
            NotInColumnsError: If a chunk is not within its tensor.
        """
        forms = column_of([form.dims for form in self.forms])
        for dims, chunks in self.chunks.items():
            if not dims:
                continue
            shapes = column_of([form.shape for form in self.forms if form.dims == dims])
            of_dims = (self.dims == dims).nonzero().view(-1)
            # for each name, the number of its form among the forms with as many dimensions
            shape_of = ((forms == dims).cumsum(0) - 1)[self.form_of[of_dims]]
            ends = self.counts[of_dims].cumsum(0)
            for start in range(0, len(chunks.sizes), _AT_ONCE):  # in slices, to save memory
                offsets = chunks.offsets[start : start + _AT_ONCE]
                sizes = chunks.sizes[start : start + _AT_ONCE]
                numbers = torch.searchsorted(ends, counted(start, start + len(sizes)), right=True)
                limits = shapes[shape_of[numbers]]
                inside = (sizes >= 0) & (offsets >= 0) & (sizes <= limits)
                inside &= offsets <= limits.sub_(sizes)
                if not bool(inside.all()):
                    number = int(numbers[int((~inside).any(1).nonzero()[0])])
                    name = self.name_at(int(of_dims[number]))
                    raise NotInColumnsError(
                        f"invalid metadata: a chunk of {name[:200]} lies outside of the tensor"
                    )


def numbered(names: Sequence[str]) -> dict[str, int]:
    """Returns the number of each name: its position in ``names``.

    Raises:
        NotInColumnsError: If a name occurs twice.
    """
    found = dict(zip(names, range(len(names)), strict=True))
    if len(found) != len(names):
        twice = next(name for number, name in enumerate(names) if found[name] != number)
        raise NotInColumnsError(f"invalid metadata: {twice[:200]} is listed twice")
    return found


def rows_by_dims(
    dims: torch.Tensor, counts: torch.Tensor, wanted: Iterable[int]
) -> dict[int, torch.Tensor]:
    """Returns the rows of tensors' chunks, by the tensors' number of dimensions.

    Args:
        dims: The number of dimensions of each name; -1 for a value.
        counts: The number of rows of each name.
        wanted: The numbers of dimensions for which to return rows.
    """
    of_rows = repeated(dims, counts)
    return {one: (of_rows == one).nonzero().view(-1) for one in wanted}
