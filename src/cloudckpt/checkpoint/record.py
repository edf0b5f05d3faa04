"""What a rank has written, or all ranks have: objects, and where in them the rows of a table lie.

There is one encoding, :meth:`Record.to_bytes`. Ranks exchange it (a plan is a record without
locations, a report one without a table), a saving process leaves it, and what all ranks have
written follows the pickle in ``.metadata``: one JSON document with everything that is not a column
(names, distinct shapes and element types, paths, objects), and columns of integers. Both are
compressed.
Nothing in it is a pickle, and the memory needed to read it is bounded beforehand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch

from cloudckpt.checkpoint.columns import (
    column_of,
    deflated,
    inflated,
    pack_columns,
    raw_bytes,
    unfilled,
    unpack_columns,
)
from cloudckpt.checkpoint.index import KINDS, kind_of
from cloudckpt.checkpoint.objects import WrittenObject, check_attempt
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checkpoint.table import VALUE, Chunks, Form, Paths, Table, numbered
from cloudckpt.checksum import CRC32C, ChecksumAlgorithm
from cloudckpt.errors import CheckpointCorruptError
from cloudckpt.gc_pause import paused_gc

__all__ = ["Extents", "Heads", "Record", "bound", "no_times"]

_MAGIC = b"ckptrec\2"
_HEADER = struct.Struct("<8s4Q")  # bytes of both parts, each packed and unpacked
_END = 1 << 63

_LEAST = 1 << 20
_TIMES = 16
_AT_ONCE = 1 << 16  # rows processed together: their data stays in the caches

_LAYOUTS = {str(kind).removeprefix("torch."): kind for kind in (torch.strided,)}
_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "preserve_format": torch.preserve_format,
}


def bound(pickle_size: int) -> int:
    """Bytes that a record may take in memory if the pickle before it has this many bytes."""
    return max(_LEAST, _TIMES * pickle_size)


@dataclass(frozen=True, eq=False)
class Extents:
    """Where rows lie, as columns of int64.

    Attributes:
        objects: The numbers of their objects.
        offsets: Their first bytes in these, envelopes included.
        lengths: Their bytes, envelopes included.
        high: The first halves of the rows' digests (:mod:`cloudckpt.checkpoint.base`); None if
            digests were not requested.
        low: The second halves.
    """

    objects: torch.Tensor
    offsets: torch.Tensor
    lengths: torch.Tensor
    high: torch.Tensor | None = None
    low: torch.Tensor | None = None

    @classmethod
    def none(cls, *, digests: bool = False) -> Extents:
        """Extents of no rows; ``digests``: with empty columns for digests."""
        return cls(*(unfilled(0) for _ in range(5 if digests else 3)))

    def __len__(self) -> int:
        return self.objects.numel()

    @property
    def columns(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The columns of the locations."""
        return self.objects, self.offsets, self.lengths

    @property
    def has_digests(self) -> bool:
        """Whether there are digests."""
        return self.high is not None and self.low is not None

    @property
    def all_columns(self) -> tuple[torch.Tensor, ...]:
        """The columns of the locations, and of the digests if there are any."""
        if self.high is None or self.low is None:
            return self.columns
        return (*self.columns, self.high, self.low)

    def digest(self) -> str:
        """A digest of all extents, in their order."""
        made = hashlib.blake2b(digest_size=16)
        for column in self.all_columns:
            made.update(raw_bytes(column))
        return made.hexdigest()

    def at(self, rows: torch.Tensor) -> Extents:
        """The extents of some rows."""
        return Extents(*(column[rows] for column in self.all_columns))


def no_times() -> torch.Tensor:
    """Times of no rank; see :class:`Record`."""
    return unfilled(0, 5)


@dataclass(frozen=True, eq=False, kw_only=True)
class Record:
    """What one rank, or all ranks, have written or are to write.

    Attributes:
        table: The names and chunks of the rows; None in a report by a plan that is known.
        extents: Where the rows lie; empty in a plan.
        objects: The data objects: those of the save, then those of earlier ones that it refers to.
        checksum: The algorithm of all checksums.
        structure: The nesting that torch's paths do not express.
        attempt: The random name of the save; empty until it is committed.
        location: The checkpoint that a rank has written to; empty once it is committed.
        unmoved: The digest of the extents if they are those of the rank's previous save; then
            ``extents`` is empty.
        whole: In a plan, the numbers of the names of which no other rank may have a part.
        times: How long the save took, a row for each rank: its number, when it began to plan, when
            its first byte went out, when the store had all of its data, and how many bytes it sent.
            Times are milliseconds since 1970, by the rank's own clock.
        committing: When all ranks had written, in the same way; 0 in the record of one.
    """

    table: Table | None = None
    extents: Extents = field(default_factory=Extents.none)
    objects: Sequence[WrittenObject] = ()
    checksum: ChecksumAlgorithm = CRC32C
    structure: Structure = field(default_factory=Structure)
    attempt: str = ""
    location: str = ""
    unmoved: str = ""
    whole: torch.Tensor = field(default_factory=lambda: unfilled(0))
    times: torch.Tensor = field(default_factory=no_times)
    committing: int = 0

    def seen_from(self, folder: str) -> Record:
        """The same for the checkpoint in ``folder``: see :meth:`WrittenObject.seen_from`."""
        objects = tuple(one.seen_from(folder) for one in self.objects)
        return dataclasses.replace(self, objects=objects)

    def without(self, earlier: Extents) -> Record:
        """A copy without the extents if they equal ``earlier``."""
        columns, known = self.extents.all_columns, earlier.all_columns
        if len(columns) != len(known) or not all(map(torch.equal, columns, known)):
            return self
        return dataclasses.replace(self, extents=Extents.none(), unmoved=earlier.digest())

    def completed(self, earlier: Extents) -> Record:
        """The reverse of :meth:`without`.

        Raises:
            ValueError: If it was called with another ``earlier``.
        """
        if not self.unmoved:
            return self
        if earlier.digest() != self.unmoved:
            raise ValueError("the items are not where the earlier save wrote them")
        return dataclasses.replace(self, extents=earlier, unmoved="")

    def extent_of(self, row: int) -> tuple[WrittenObject, int, int]:
        """The object of a row, its first byte there, and its bytes."""
        number, offset, length = (int(column[row]) for column in self.extents.columns)
        return self.objects[number], offset, length

    def check_extents(self) -> None:
        """Checks that all extents are inside their objects.

        Raises:
            ValueError: If one is not.
        """
        assert self.table is not None
        extents, count = self.extents, len(self.objects)
        ends = column_of([one.size - one.index_size for one in self.objects] or [0])
        for start in range(0, len(extents), _AT_ONCE):
            numbers, offsets, lengths = (
                column[start : start + _AT_ONCE] for column in extents.columns
            )
            is_inside = (numbers >= 0) & (numbers < count) & (offsets >= 0) & (lengths >= 0)
            limits = ends[numbers.where(is_inside, 0)]
            is_inside &= lengths <= limits
            is_inside &= offsets <= limits.sub_(lengths)
            if not bool(is_inside.all()):
                name = self.table.name_of(start + int((~is_inside).nonzero()[0]))
                raise ValueError(
                    f"invalid metadata record: {name[:200]} lies outside of its object"
                )

    def to_bytes(self, most: int | None = None) -> bytes:
        """The record as bytes.

        Args:
            most: Bytes that it may take in memory when it is read.

        Raises:
            ValueError: If the format has no room for it, or readers refuse it.
        """
        document = {
            "attempt": self.attempt,
            "location": self.location,
            "unmoved": self.unmoved,
            "committing": self.committing,
            "checksum": kind_of(self.checksum),
            "objects": [one.to_json() for one in self.objects],
            "structure": self.structure.to_json() if self.structure else None,
            "rows": len(self.extents),
            "digests": self.extents.has_digests,
            "ranks": len(self.times),
            "table": None if self.table is None else _described(self.table),
            "whole": self.whole.numel(),
        }
        columns = [*self.extents.all_columns, *self.times.unbind(1), self.whole]
        if self.table is not None:
            columns += [self.table.form_of, self.table.counts]
            for chunks in self.table.chunks.values():
                columns += [*chunks.offsets.unbind(1), *chunks.sizes.unbind(1)]
        text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
        parts = text.encode("utf-8", "surrogatepass"), pack_columns(columns)
        if most is not None and sum(map(len, parts)) > most:
            raise ValueError(
                "the metadata record would be larger than readers accept; save fewer, larger "
                "tensors"
            )
        packed = list(map(deflated, parts))
        sizes = (len(packed[0]), len(parts[0]), len(packed[1]), len(parts[1]))
        return b"".join((_HEADER.pack(_MAGIC, *sizes), *packed))

    @classmethod
    def parse(
        cls,
        data: bytes | bytearray | memoryview,
        uri: str,
        most: int | None = None,
        known: Heads | None = None,
    ) -> Record:
        """Reads a record; if it comes from a store, its checksum has been verified.

        Args:
            data: The result of :meth:`to_bytes`.
            uri: The checkpoint, for messages.
            most: Bytes that it may take in memory; None if it was made by a rank of this job, whose
                numbers are trusted.
            known: What is shared by the records of ranks that have the same names; it is added to.

        Raises:
            CheckpointCorruptError: If it is inconsistent all the same.
        """
        with _senseless_is_corrupt(uri), paused_gc():
            return _parse(memoryview(data), most, {} if known is None else known)

    def __reduce__(self) -> tuple[Any, ...]:
        return Record.parse, (self.to_bytes(), self.location)


@contextlib.contextmanager
def _senseless_is_corrupt(uri: str) -> Iterator[None]:
    kinds = (KeyError, TypeError, IndexError, AttributeError, RuntimeError, struct.error)
    try:
        yield
    except (ValueError, *kinds) as exc:
        raise CheckpointCorruptError(
            "the metadata is invalid: it is damaged, or was written by a newer cloudckpt; "
            "install that, or load an older checkpoint",
            uri=uri,
            cause=exc,
        ) from exc


class _Head(NamedTuple):
    """The document of a record.

    Attributes:
        record: What does not depend on the columns.
        counts: Rows, columns for each row, ranks, and whole tensors.
        table: The table without columns; None if there is none.
    """

    record: Record
    counts: tuple[int, int, int, int]
    table: Table | None


Heads = dict[bytes, _Head]
"""The documents of the records of one plan, by digest."""


def _parse(data: memoryview, most: int | None, known: Heads) -> Record:
    magic, packed, size, packed_columns, columns_size = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError("the metadata record has a version that this cloudckpt does not know")
    if most is not None and size + columns_size > most:
        raise ValueError(
            "invalid metadata record: the size in its header is larger than the commit object "
            "allows"
        )
    middle, end = _HEADER.size + packed, _HEADER.size + packed + packed_columns
    if end != len(data):
        raise ValueError("invalid metadata record: its length does not match its header")
    document = data[_HEADER.size : middle]
    digest = hashlib.sha256(document).digest() + size.to_bytes(8, "big")
    if (head := known.get(digest)) is None:
        head = known[digest] = _head(document, size)
    made = _with_columns(head, inflated(data[middle:end], columns_size))
    if most is not None and made.table is not None:
        made.table.check_chunks()
        made.check_extents()
    return made


def _with_columns(head: _Head, data: bytes) -> Record:
    """A record with its columns. Each number takes a byte at least, and memory only if it is there.

    Raises:
        ValueError: If the columns are others than the document says.
    """
    rows, wide, ranks, wholes = head.counts
    names = 0 if head.table is None else len(head.table.names)
    room = len(data) - rows * wide - ranks * 5 - wholes - names * 2
    if room < 0:
        raise ValueError("invalid metadata record: it has fewer numbers than items")
    extents, times, whole = unfilled(wide, rows), unfilled(5, ranks), unfilled(wholes)
    form_of, counts = unfilled(2, names)
    boxes: dict[int, torch.Tensor] = {}
    table = None
    if head.table is not None:
        table = dataclasses.replace(head.table, form_of=form_of, counts=counts, chunks={})

    def columns() -> Iterator[torch.Tensor]:
        yield from (*extents, *times, whole)
        if table is None:
            return
        yield from (form_of, counts)
        table.check_names()
        if bool(((counts > room) & (table.dims > 0)).any()):
            raise ValueError("invalid metadata record: it has fewer numbers than chunks")
        per_dims = {
            dims: int(counts[table.dims == dims].sum())
            for dims in sorted({form.dims for form in table.forms} - {-1})
        }
        if sum(2 * dims * count for dims, count in per_dims.items()) > room:
            raise ValueError("invalid metadata record: it has fewer numbers than chunks")
        boxes.update((dims, unfilled(2, dims, count)) for dims, count in per_dims.items())
        yield from (column for box in boxes.values() for column in box.flatten(0, 1))

    unpack_columns(data, columns())
    if table is not None:
        chunks = {dims: Chunks(*(matrix.t() for matrix in box)) for dims, box in boxes.items()}
        table = dataclasses.replace(table, chunks=chunks)
        if rows not in (0, table.count):
            raise ValueError("invalid metadata record: it has not as many locations as chunks")
        if bool(((whole < 0) | (whole >= names)).any()):
            raise ValueError("invalid metadata record: the number of a name is out of range")
    return dataclasses.replace(
        head.record, table=table, extents=Extents(*extents), times=times.t(), whole=whole
    )


def _head(packed: memoryview, size: int) -> _Head:
    text = str(inflated(packed, size), "utf-8", "surrogatepass")
    document = json.loads(text, parse_constant=_no_number)
    texts = tuple(document[name] for name in ("attempt", "location", "unmoved"))
    numbers = tuple(document[name] for name in ("rows", "ranks", "whole", "committing"))
    if any(type(one) is not str for one in texts) or any(
        type(one) is not int or not 0 <= one < _END for one in numbers
    ):
        raise ValueError("invalid metadata record: a field has the wrong type or is out of range")
    if texts[0]:
        check_attempt(texts[0])
    rows, ranks, wholes, committing = numbers
    described, structure = document["structure"], Structure()
    if described is not None:
        structure = Structure.from_json(described)
    record = Record(
        objects=tuple(map(WrittenObject.from_json, document["objects"])),
        checksum=KINDS[document["checksum"]],
        structure=structure,
        attempt=texts[0],
        location=texts[1],
        unmoved=texts[2],
        committing=committing,
    )
    wide = 5 if document["digests"] is True else 3
    table = None if document["table"] is None else _table(document["table"])
    return _Head(record, (rows, wide, ranks, wholes), table)


def _described(table: Table) -> dict[str, Any]:
    names, paths = list(table.names), table.paths
    return {
        "names": names,
        "forms": list(map(_described_form, table.forms)),
        "paths": None if paths is None else list(paths.values()),
        "of": None if paths is None or list(paths) == names else list(paths),
    }


def _table(document: Mapping[str, Any]) -> Table:
    """The table that a document describes, without columns."""
    names = _strings(document["names"])
    forms = list(map(_form, document["forms"]))
    of = names if document["of"] is None else _strings(document["of"])
    paths = None if document["paths"] is None else _paths(of, document["paths"])
    return Table(numbered(names), forms, unfilled(0), unfilled(0), {}, paths)


def _strings(listed: Any) -> list[str]:
    if type(listed) is not list or not {*map(type, listed)} <= {str}:
        raise ValueError("invalid metadata record: the name of an item is not a string")
    return listed


def _described_form(form: Form) -> list[Any] | None:
    if form.shape is None:
        return None
    layouts = {kind: name for name, kind in _LAYOUTS.items()}
    formats = {kind: name for name, kind in _FORMATS.items()}
    dtype = str(form.dtype).removeprefix("torch.")
    if getattr(torch, dtype, None) is not form.dtype:
        raise ValueError(f"the element type {dtype} is not an attribute of torch")
    flags = (form.requires_grad, form.pin_memory)
    if not all(type(flag) is bool for flag in flags):
        raise ValueError("requires_grad or pin_memory is not a bool")
    return [form.shape, dtype, layouts[form.layout], formats[form.memory_format], *flags]


def _form(described: Any) -> Form:
    if described is None:
        return VALUE
    shape, name, layout, memory_format, requires_grad, pinned = described
    dtype = getattr(torch, name) if type(name) is str else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"this torch does not know the element type {name!r}: install a newer torch"
        )
    if {type(requires_grad), type(pinned)} != {bool}:
        raise ValueError("invalid metadata record: requires_grad or pin_memory is not a bool")
    size = dtype.itemsize
    if type(shape) is not list:
        raise ValueError("invalid metadata record: the shape of a tensor is not a list")
    for dim in shape:
        if type(dim) is not int or not 0 <= dim < _END:
            raise ValueError(
                "invalid metadata record: a size in the shape of a tensor is negative, too "
                "large, or not an integer"
            )
        size *= dim
    if size >= _END:
        raise ValueError(
            "invalid metadata record: a tensor has more bytes than a 64-bit number can count"
        )
    formats = _FORMATS[memory_format]
    return Form(tuple(shape), dtype, _LAYOUTS[layout], requires_grad, formats, pinned)


def _paths(names: Sequence[str], described: Any) -> Paths:
    if type(described) is not list or not {*map(type, described)} <= {list}:
        raise ValueError("invalid metadata record: a path is not a list")
    elements = list(chain.from_iterable(described))
    kinds = {*map(type, elements)}
    indices = (one for one in elements if type(one) is int) if int in kinds else ()
    if not kinds <= {str, int} or not all(0 <= one < _END for one in indices):
        raise ValueError(
            "invalid metadata record: a path has an element that is neither a key nor an index"
        )
    return dict(zip(names, map(tuple, described), strict=True))


def _no_number(text: str) -> float:
    raise ValueError(f"invalid metadata record: unexpected number {text}")
