"""What a rank has written, or all ranks have: objects, and where in them the rows of a table lie.

There is one encoding, :meth:`Record.to_bytes`. Ranks exchange it (a plan is a record without
locations, a report one without a table), a saving process leaves it, and what all ranks have
written follows the pickle in ``.metadata``: one JSON document with everything that is not a column
(names, shapes, element types, paths, objects), and columns of integers. Both are compressed.
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
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import TensorProperties

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
from cloudckpt.checkpoint.table import Chunks, Entry, Paths, Table, entries_of, rows_of
from cloudckpt.checksum import CRC32C, ChecksumAlgorithm
from cloudckpt.errors import CheckpointCorruptError
from cloudckpt.gc_pause import paused_gc

__all__ = ["Extents", "Heads", "Record", "bound", "no_times"]

_MAGIC = b"ckptrec\1"
_HEADER = struct.Struct("<8s4Q")  # bytes of both parts, each packed and unpacked
_END = 1 << 63

_LEAST = 1 << 20
_TIMES = 16
_UNWRITTEN = 1 << 24  # rows allowed without columns: plans of scalars and values only
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
    whole: Sequence[int] = ()
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
            "whole": list(self.whole),
        }
        columns = [*self.extents.all_columns, *self.times.unbind(1)]
        if self.table is not None:
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
    """The document of a record, with its table but for the chunks.

    Attributes:
        record: What does not depend on the columns.
        counts: Rows, columns for each row, and ranks.
        table: The table; None if there is none.
        rows_of: By number of dimensions, the rows of the chunks of such tensors.
    """

    record: Record
    counts: tuple[int, int, int]
    table: Table | None
    rows_of: Mapping[int, torch.Tensor]


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
        head = known[digest] = _head(document, size, columns_size)
    rows, wide, ranks = head.counts
    per_dims = {dims: of_dims.numel() for dims, of_dims in head.rows_of.items()}
    numbers = rows * wide + ranks * 5 + sum(2 * dims * n for dims, n in per_dims.items())
    if numbers > columns_size:
        raise ValueError("invalid metadata record: it has fewer numbers than items")
    extents, times = unfilled(wide, rows), unfilled(5, ranks)
    boxes = {dims: unfilled(2, dims, count) for dims, count in per_dims.items()}
    columns = [*extents, *times, *(one for box in boxes.values() for one in box.flatten(0, 1))]
    unpack_columns(inflated(data[middle:end], columns_size), columns)
    table = head.table
    if table is not None:
        chunks = {
            dims: Chunks(head.rows_of[dims], *(matrix.t() for matrix in box))
            for dims, box in boxes.items()
        }
        table = dataclasses.replace(table, chunks=chunks)
    made = dataclasses.replace(head.record, table=table, extents=Extents(*extents), times=times.t())
    if most is not None and table is not None:
        table.check_chunks()
        made.check_extents()
    return made


def _head(packed: memoryview, size: int, columns_size: int) -> _Head:
    text = str(inflated(packed, size), "utf-8", "surrogatepass")
    document = json.loads(text, parse_constant=_no_number)
    texts = tuple(document[name] for name in ("attempt", "location", "unmoved"))
    numbers = tuple(document[name] for name in ("rows", "ranks", "committing"))
    if any(type(one) is not str for one in texts) or any(
        type(one) is not int or not 0 <= one < _END for one in numbers
    ):
        raise ValueError("invalid metadata record: a field has the wrong type or is out of range")
    if texts[0]:
        check_attempt(texts[0])
    rows, ranks, committing = numbers
    described, structure = document["structure"], Structure()
    if described is not None:
        structure = Structure.from_json(described)
    objects = tuple(map(WrittenObject.from_json, document["objects"]))
    table, rows_of_chunks = None, dict[int, torch.Tensor]()
    whole = document["whole"]
    if document["table"] is not None:
        table = _table(document["table"])
        if rows not in (0, table.count):
            raise ValueError("invalid metadata record: it has not as many locations as chunks")
        if table.count > max(columns_size, _UNWRITTEN):
            raise ValueError("invalid metadata record: it has fewer numbers than items")
        rows_of_chunks = rows_of(table.entries)
        if not all(type(number) is int and 0 <= number < len(table.entries) for number in whole):
            raise ValueError("invalid metadata record: the number of a name is out of range")
    record = Record(
        objects=objects,
        checksum=KINDS[document["checksum"]],
        structure=structure,
        attempt=texts[0],
        location=texts[1],
        unmoved=texts[2],
        whole=tuple(whole),
        committing=committing,
    )
    wide = 5 if document["digests"] is True else 3
    return _Head(record, (rows, wide, ranks), table, rows_of_chunks)


def _described(table: Table) -> dict[str, Any]:
    entries = table.entries.values()
    return {
        "names": list(table.entries),
        "shapes": [entry.shape for entry in entries],
        "properties": [entry.properties for entry in entries],
        "chunks": [entry.count for entry in entries],
        "kinds": list(map(_described_properties, table.properties)),
        "paths": None if table.paths is None else list(map(list, table.paths.items())),
    }


def _table(document: Mapping[str, Any]) -> Table:
    """The table that a document describes, without chunks."""
    properties = [_properties(one) for one in document["kinds"]]
    columns = (document[column] for column in ("names", "shapes", "properties", "chunks"))
    shapes: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}  # few are different

    def checked(name: Any, shape: Any, kind: Any, count: Any) -> tuple[Any, Any, int, int]:
        if type(name) is not str or type(count) is not int or type(kind) is not int:
            raise ValueError(
                "invalid metadata record: the name of an item is not a string, or its count of "
                "chunks not an integer"
            )
        if shape is None:
            if (count, kind) != (1, 0):
                raise ValueError(
                    "invalid metadata record: an item that is not a tensor has tensor properties"
                )
            return name, None, 0, 1
        if not 0 <= kind < len(properties) or not 0 <= count < _END:
            raise ValueError(
                "invalid metadata record: the properties or the count of chunks of "
                f"{name[:200]} are out of range"
            )
        if (found := shapes.get(key := (kind, tuple(shape)))) is None:
            _check_shape(shape, properties[kind].dtype.itemsize)
            found = shapes[key] = key[1]
        return name, found, kind, count

    entries: Mapping[str, Entry] = entries_of(map(checked, *_alike(list(columns))))
    return Table(entries, properties, {}, _paths(document["paths"]))


def _alike(columns: list[Any]) -> list[Any]:
    if {*map(type, columns)} != {list} or len({*map(len, columns)}) != 1:
        raise ValueError(
            "invalid metadata record: the columns of names, shapes and properties differ in length"
        )
    return columns


def _described_properties(properties: TensorProperties) -> list[Any]:
    layouts = {kind: name for name, kind in _LAYOUTS.items()}
    formats = {kind: name for name, kind in _FORMATS.items()}
    dtype = str(properties.dtype).removeprefix("torch.")
    if getattr(torch, dtype, None) is not properties.dtype:
        raise ValueError(f"the element type {dtype} is not an attribute of torch")
    flags = (properties.requires_grad, properties.pin_memory)
    if not all(type(flag) is bool for flag in flags):
        raise ValueError("requires_grad or pin_memory is not a bool")
    return [dtype, layouts[properties.layout], formats[properties.memory_format], *flags]


def _properties(described: Any) -> TensorProperties:
    name, layout, memory_format, requires_grad, pinned = described
    dtype = getattr(torch, name) if type(name) is str else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"this torch does not know the element type {name!r}: install a newer torch"
        )
    if {type(requires_grad), type(pinned)} != {bool}:
        raise ValueError("invalid metadata record: requires_grad or pin_memory is not a bool")
    return TensorProperties(dtype, _LAYOUTS[layout], requires_grad, _FORMATS[memory_format], pinned)


def _check_shape(shape: Any, itemsize: int) -> None:
    size = itemsize
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


def _paths(described: Any) -> Paths | None:
    if described is None:
        return None
    paths: dict[str, tuple[str | int, ...]] = {}
    for name, path in described:
        if type(name) is not str or type(path) is not list:
            raise ValueError("invalid metadata record: a path is not a list, or has no name")
        if not set(map(type, path)) <= {str} and not all(
            type(one) is str or (type(one) is int and 0 <= one < _END) for one in path
        ):
            raise ValueError(
                "invalid metadata record: a path has an element that is neither a key nor an index"
            )
        paths[name] = tuple(path)
    return paths


def _no_number(text: str) -> float:
    raise ValueError(f"invalid metadata record: unexpected number {text}")
