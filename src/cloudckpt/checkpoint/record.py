"""The record of a save: the items of one rank or of all ranks, and their locations in objects.

All records have one encoding, :meth:`Record.to_bytes`. Ranks exchange two kinds of records: a
*plan* has no locations, and a *report* of what a rank wrote has no table. A saving process leaves
its record in the store, and the record of all ranks follows the pickle in ``.metadata``. A record
has columns of integers, with an entry for each item, and one JSON document with everything else:
names, distinct shapes and element types, paths, objects. Both are compressed.

A record contains no pickle, and the memory needed to read it is bounded beforehand.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch

from cloudckpt.checkpoint.columns import (
    PackedColumns,
    column_of,
    inflated,
    pack_columns,
    raw_bytes,
    unfilled,
)
from cloudckpt.checkpoint.index import ALGORITHMS, number_of
from cloudckpt.checkpoint.objects import WrittenObject, check_attempt
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checkpoint.table import VALUE, Chunks, Form, Paths, Table, numbered
from cloudckpt.checksum import CRC32C, ChecksumAlgorithm
from cloudckpt.errors import CheckpointCorruptError
from cloudckpt.gc_pause import paused_gc

__all__ = ["Extents", "Heads", "Record", "bound", "no_times"]

_MAGIC = b"ckptrec\3"
# magic; then bytes of the document and of the columns, each packed and unpacked
_HEADER = struct.Struct("<8s4Q")
_END = 1 << 63

_LEAST = 1 << 20
_TIMES = 16
_AT_ONCE = 1 << 16  # rows processed together: their data stays in the caches


def bound(pickle_size: int) -> int:
    """Returns the maximum bytes of an unpacked record, given the bytes of the pickle before it."""
    return max(_LEAST, _TIMES * pickle_size)


@dataclass(frozen=True, eq=False)
class Extents:
    """The locations of items in objects, as int64 columns with an entry for each item.

    The items have the order of a :class:`~cloudckpt.checkpoint.table.Table`.

    Attributes:
        objects: The number of each item's object: its index in :attr:`Record.objects`.
        offsets: The item's first byte in the object, envelope included.
        lengths: The item's bytes, envelope included.
        high: The first half of the item's digest (:mod:`cloudckpt.checkpoint.base`); None if
            digests were not requested.
        low: The second half of the digest; None if digests were not requested.
    """

    objects: torch.Tensor
    offsets: torch.Tensor
    lengths: torch.Tensor
    high: torch.Tensor | None = None
    low: torch.Tensor | None = None

    @classmethod
    def none(cls, *, digests: bool = False) -> Extents:
        """Returns columns without entries; ``digests`` adds the two columns of digests."""
        return cls(*(unfilled(0) for _ in range(5 if digests else 3)))

    def __len__(self) -> int:
        return self.objects.numel()

    @property
    def has_digests(self) -> bool:
        """Whether there are columns for digests."""
        return self.high is not None and self.low is not None

    @property
    def columns(self) -> tuple[torch.Tensor, ...]:
        """The columns that are not None, in the order of the attributes."""
        columns = self.objects, self.offsets, self.lengths, self.high, self.low
        return tuple(column for column in columns if column is not None)

    def digest(self) -> str:
        """Returns a hash of all columns, as hexadecimal digits."""
        made = hashlib.blake2b(digest_size=16)
        for column in self.columns:
            made.update(raw_bytes(column))
        return made.hexdigest()

    def at(self, rows: torch.Tensor) -> Extents:
        """Returns the locations of the items with these row numbers, in their order."""
        return Extents(*(column[rows] for column in self.columns))


def no_times() -> torch.Tensor:
    """Returns an empty matrix for :attr:`Record.times`, without the row of any rank."""
    return unfilled(0, 5)


@dataclass(frozen=True, eq=False, kw_only=True)
class Record:
    """The items that one rank, or all ranks, have written or are to write, with their locations.

    Attributes:
        table: The names and chunks of the items; None in a rank's report, as its plan has them.
        extents: The locations of the items; empty in a plan.
        objects: The data objects: the save's own, and those of earlier saves that it refers to.
        checksum: The algorithm of all checksums.
        structure: The keys and empty dicts of the state dict that torch's paths do not express.
        attempt: The random name of the save; empty in the record of one rank.
        location: In a rank's report, the checkpoint that it has written to; otherwise empty.
        unmoved: If not empty, the digest of the extents, which equal those of the rank's previous
            save; ``extents`` is then empty.
        whole: In a plan, the numbers in ``table.names`` of the tensors that the rank saves whole,
            so that no other rank may have a part of them.
        times: A matrix with a row for each rank: its number, when it began to plan, when its first
            byte was sent, when the store had all of its data (each in milliseconds since 1970, by
            the rank's own clock), and the bytes that it sent.
        committing: When all ranks had written, in milliseconds since 1970; 0 in the record of one
            rank.
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
        """Returns the record with its objects as the checkpoint in ``folder`` refers to them.

        The objects in that folder itself get an empty ``folder``.
        """
        objects = tuple(one.seen_from(folder) for one in self.objects)
        return dataclasses.replace(self, objects=objects)

    def without(self, earlier: Extents) -> Record:
        """Returns the record without its extents if they equal ``earlier``, else unchanged."""
        columns, known = self.extents.columns, earlier.columns
        if len(columns) != len(known) or not all(map(torch.equal, columns, known)):
            return self
        return dataclasses.replace(self, extents=Extents.none(), unmoved=earlier.digest())

    def completed(self, earlier: Extents) -> Record:
        """Undoes :meth:`without`: returns the record with its extents.

        A record whose extents were not removed is returned unchanged.

        Raises:
            ValueError: If extents were removed, and ``earlier`` differs from them.
        """
        if not self.unmoved:
            return self
        if earlier.digest() != self.unmoved:
            raise ValueError("the rank's item locations kept here are not those of its last save")
        return dataclasses.replace(self, extents=earlier, unmoved="")

    def extent_of(self, row: int) -> tuple[WrittenObject, int, int]:
        """Returns an item's object, its first byte in that object, and its length in bytes.

        Args:
            row: The row of the item in the table.
        """
        number, offset, length = (int(column[row]) for column in self.extents.columns[:3])
        return self.objects[number], offset, length

    def check_extents(self) -> None:
        """Checks that each item lies within its object, in front of the object's index.

        Raises:
            ValueError: If an item is not.
        """
        assert self.table is not None
        extents, count = self.extents, len(self.objects)
        ends = column_of([one.size - one.index_size for one in self.objects] or [0])
        for start in range(0, len(extents), _AT_ONCE):
            numbers, offsets, lengths = (
                column[start : start + _AT_ONCE] for column in extents.columns[:3]
            )
            is_inside = (numbers >= 0) & (numbers < count) & (offsets >= 0) & (lengths >= 0)
            limits = ends[numbers.where(is_inside, 0)]
            is_inside &= lengths <= limits
            is_inside &= offsets <= limits.sub_(lengths)
            if not bool(is_inside.all()):
                name = self.table.name_of(start + int((~is_inside).nonzero()[0]))
                raise ValueError(
                    f"invalid metadata record: {name[:200]} lies outside of its object, or its "
                    "object is not listed"
                )

    def to_bytes(self, most: int | None = None) -> bytes:
        """Returns the bytes of the record, for :meth:`parse`.

        Args:
            most: Maximum bytes of the unpacked record, as readers enforce it; None for no limit.

        Raises:
            ValueError: If the format can't express the record, or it is larger than ``most``.
        """
        document = {
            "attempt": self.attempt,
            "location": self.location,
            "unmoved": self.unmoved,
            "committing": self.committing,
            "checksum": number_of(self.checksum),
            "objects": [one.to_json() for one in self.objects],
            "structure": self.structure.to_json() if self.structure else None,
            "rows": len(self.extents),
            "digests": self.extents.has_digests,
            "ranks": len(self.times),
            "table": None if self.table is None else _described(self.table),
            "whole": self.whole.numel(),
        }
        columns = [*self.extents.columns, *self.times.unbind(1), self.whole]
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
        packed = [zlib.compress(part, 1) for part in parts]  # the fastest level
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
        """Parses a record, whose checksum was verified before if it comes from a store.

        Args:
            data: The result of :meth:`to_bytes`.
            uri: The checkpoint, for messages.
            most: Maximum bytes of the unpacked record; None if a rank of this job made it, whose
                numbers are trusted.
            known: A cache of parsed JSON documents, to which new documents are added: records of
                ranks with the same names have the same document. None for no cache.

        Raises:
            CheckpointCorruptError: If the record is inconsistent.
        """
        try:
            with paused_gc():
                return _parse(memoryview(data), most, {} if known is None else known)
        except (
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
            struct.error,
        ) as exc:
            raise CheckpointCorruptError(
                "the metadata is invalid: if a newer cloudckpt or torch wrote it, install that "
                "version; otherwise it is damaged, so load an older checkpoint",
                uri=uri,
                cause=exc,
            ) from exc

    def __reduce__(self) -> tuple[Any, ...]:
        return Record.parse, (self.to_bytes(), self.location)


class _Head(NamedTuple):
    """The parsed JSON document of a record.

    Attributes:
        record: The record without its columns.
        counts: The number of locations, of their columns, of ranks in ``times``, and of entries in
            ``whole``.
        table: The table without columns; None if the record has no table.
    """

    record: Record
    counts: tuple[int, int, int, int]
    table: Table | None


Heads = dict[bytes, _Head]
"""A cache of the parsed JSON documents of records, by the digest and size of each document."""


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
    made = _with_columns(head, PackedColumns(inflated(data[middle:end], columns_size)))
    if most is not None and made.table is not None:
        made.table.check_chunks()
        made.check_extents()
    return made


def _with_columns(head: _Head, packed: PackedColumns) -> Record:
    """Returns a record, made from its parsed document and its packed columns.

    Raises:
        ValueError: If the columns do not fit the document.
    """
    rows, wide, ranks, wholes = head.counts
    extents = Extents(*(packed.take(rows) for _ in range(wide)))
    times, whole = packed.matrix(ranks, 5), packed.take(wholes)
    table = head.table
    if table is not None:
        names = len(table.names)
        table = dataclasses.replace(
            table, form_of=packed.take(names), counts=packed.take(names), chunks={}
        )
        table.check_names()
        if bool((table.counts > max(1, packed.left)).any()):  # so that their sum can't overflow
            raise ValueError("invalid metadata record: it lists more chunks than it has data for")
        for dims in sorted({form.dims for form in table.forms} - {-1}):
            count = int(table.counts[table.dims == dims].sum())
            offsets = packed.matrix(count, dims)
            table.chunks[dims] = Chunks(offsets, packed.matrix(count, dims))
        if rows not in (0, table.count):
            raise ValueError(
                "invalid metadata record: it has a location for some of its rows, but not for all"
            )
        if bool(((whole < 0) | (whole >= names)).any()):
            raise ValueError("invalid metadata record: the number of a name is out of range")
    if packed.left:
        raise ValueError("invalid metadata record: it has bytes after its last column")
    return dataclasses.replace(head.record, table=table, extents=extents, times=times, whole=whole)


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
        checksum=ALGORITHMS[document["checksum"]],
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
    """Returns the table that a record's JSON document describes, with empty columns."""
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
    described = [form.shape, str(form.dtype).removeprefix("torch."), form.requires_grad]
    if _form(described).dtype is not form.dtype:  # raises if it can't be read
        raise ValueError(f"{form.dtype} is not in torch by this name: save tensors of another type")
    return described


def _form(described: Any) -> Form:
    if described is None:
        return VALUE
    shape, name, requires_grad = described
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"this torch does not know the element type {name!r}: install a newer torch"
        )
    if type(requires_grad) is not bool:
        raise ValueError("invalid metadata record: requires_grad is not a bool")
    return Form.of(shape, dtype, requires_grad)


def _paths(names: Sequence[str], described: Any) -> Paths:
    elements = list(chain.from_iterable(described))
    kinds = {*map(type, elements)}
    indices = (one for one in elements if type(one) is int) if int in kinds else ()
    is_listed = {*map(type, described)} <= {list} and kinds <= {str, int}
    if not is_listed or not all(0 <= one < _END for one in indices):
        raise ValueError("invalid metadata record: a path is not a list of keys and indices")
    return dict(zip(names, map(tuple, described), strict=True))


def _no_number(text: str) -> float:
    raise ValueError(f"invalid metadata record: unexpected number {text}")
