"""An inventory in bytes: what ranks exchange, and what follows the pickle in ``.metadata``.

One JSON document with everything that is not a column (names, shapes, element types, paths), and
columns of integers: the objects, the locations of the rows, and which part of its tensor each chunk
is. Both are compressed. Nothing in it is a pickle, and the memory needed to read it is bounded
beforehand.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorProperties

from cloudckpt.checkpoint.columns import (
    Inflating,
    column_of,
    deflated,
    inflated,
    packed_column,
    unfilled,
    unpack_column,
)
from cloudckpt.checkpoint.index import KINDS, kind_of
from cloudckpt.checkpoint.inventory import Chunks, Entry, Inventory, Paths, rows_of
from cloudckpt.checkpoint.objects import WrittenObject, check_folder
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checkpoint.written import Extents
from cloudckpt.checksum import ChecksumAlgorithm
from cloudckpt.errors import CheckpointCorruptError
from cloudckpt.gc_pause import paused_gc

__all__ = ["Heads", "Record", "bound"]

_MAGIC = b"ckptrec\1"
_HEADER = struct.Struct(
    "<8s?3xIQQQ"
)  # whether it has an inventory; bytes of both parts, packed and unpacked
_END = 1 << 63
_HALF = 1 << 64

_LEAST = 1 << 20
_TIMES = 16
_UNWRITTEN = 1 << 24  # rows allowed without columns: plans of scalars and values only

_LAYOUTS = {str(kind).removeprefix("torch."): kind for kind in (torch.strided,)}
_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "preserve_format": torch.preserve_format,
}


def bound(pickle_size: int) -> int:
    """Bytes that a record may take in memory if the pickle before it has this many bytes."""
    return max(_LEAST, _TIMES * pickle_size)


@dataclass(frozen=True)
class Record:
    """What one rank, or all ranks, have written or are to write.

    Attributes:
        attempt: The random name of the save; empty if nothing was written yet.
        objects: The data objects.
        checksum: The algorithm of all checksums.
        structure: The nesting that torch's paths do not express.
        inventory: Names, chunks and locations; None if only a pickle has them.
        whole: The numbers of the names of which no other rank may have a part.
    """

    attempt: str
    objects: Sequence[WrittenObject]
    checksum: ChecksumAlgorithm
    structure: Structure = field(default_factory=Structure)
    inventory: Inventory | None = None
    whole: Sequence[int] = ()

    @classmethod
    def of(cls, inventory: Inventory, attempt: str = "", whole: Sequence[int] = ()) -> Record:
        """The record of an inventory."""
        kept = inventory.structure
        return cls(attempt, inventory.objects, inventory.checksum, kept, inventory, whole)

    def without_inventory(self) -> Record:
        """The same without the inventory, for metadata that say themselves where everything is."""
        return Record(self.attempt, self.objects, self.checksum, self.structure)

    def to_bytes(self, most: int | None = None) -> bytes:
        """The record as bytes.

        Args:
            most: Bytes that it may take in memory when it is read.

        Raises:
            ValueError: If the format has no room for it, or readers refuse it.
        """
        folders = list(dict.fromkeys(one.folder for one in self.objects if one.folder))
        for folder in folders:
            check_folder(folder)
        document = {
            "attempt": self.attempt,
            "checksum": kind_of(self.checksum),
            "objects": len(self.objects),
            "folders": folders,
            "structure": self.structure.to_json() if self.structure else None,
        }
        columns = _columns_of(self.objects, folders)
        if self.inventory is not None:
            document |= _table(self.inventory, self.whole)
            columns += _columns(self.inventory)
        parts = _json(document), b"".join(map(packed_column, columns))
        if most is not None and sum(map(len, parts)) > most:
            raise ValueError("it would be larger than readers allow")
        packed = list(map(deflated, parts))
        sizes = (len(packed[0]), len(parts[0]), len(packed[1]), len(parts[1]))
        header = _HEADER.pack(_MAGIC, self.inventory is not None, *sizes)
        return b"".join((header, *packed))

    @staticmethod
    def is_one(data: bytes) -> bool:
        """Whether bytes are a record, as opposed to anything else that ranks exchange."""
        return data.startswith(_MAGIC)

    @staticmethod
    def has_inventory(data: memoryview) -> bool:
        """Whether a record has an inventory, according to its first bytes."""
        return len(data) < _HEADER.size or bool(_HEADER.unpack_from(data)[1])

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
        with _made_sense_of(uri), paused_gc():
            return _parse(memoryview(data), most, {} if known is None else known)


_SENSELESS = (
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    AttributeError,
    RuntimeError,
    struct.error,
)


@contextlib.contextmanager
def _made_sense_of(uri: str) -> Iterator[None]:
    try:
        yield
    except _SENSELESS as exc:
        raise CheckpointCorruptError(
            "the metadata make no sense: they are not as cloudckpt writes them, or a newer "
            "cloudckpt has written them, which can read them",
            uri=uri,
            cause=exc,
        ) from exc


def _parse(data: memoryview, most: int | None, known: Heads) -> Record:
    magic, has_inventory, *sizes = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError("it is of a version that this cloudckpt does not know")
    packed, size, packed_columns, columns_size = sizes
    if most is not None and size + columns_size > most:
        raise ValueError("it says that it is larger than it can be")
    middle, end = _HEADER.size + packed, _HEADER.size + packed + packed_columns
    if end != len(data):
        raise ValueError("it is of another length than it says")
    document = data[_HEADER.size : middle]
    digest = hashlib.sha256(document).digest() + size.to_bytes(8, "big")
    if (head := known.get(digest)) is None:
        head = known[digest] = _head(document, size)
    reading = _Reading(data[middle:], columns_size)
    objects = reading.objects(head.objects, head.folders)
    if not has_inventory:
        reading.end()
        return Record(head.attempt, objects, head.checksum, head.structure)
    if head.rows > max(columns_size, _UNWRITTEN):
        raise ValueError("it has fewer columns than rows")
    rows = head.rows if head.is_written else 0
    extents = unfilled(5 if head.has_digests else 3, rows)
    reading.fill(extents)
    chunks = reading.chunks(head.rows_of)
    inventory = Inventory(
        head.entries,
        head.properties,
        chunks,
        Extents(*extents.unbind(0)),
        objects,
        head.checksum,
        head.paths,
        head.structure,
    )
    if most is not None:
        inventory.check()
    return Record(head.attempt, objects, head.checksum, head.structure, inventory, head.whole)


@dataclass(frozen=True)
class _Head:
    """The document of a record."""

    attempt: str
    objects: int
    checksum: ChecksumAlgorithm
    structure: Structure
    folders: Sequence[str] = ()
    is_written: bool = True
    has_digests: bool = False
    rows: int = 0
    entries: Mapping[str, Entry] = field(default_factory=dict)
    properties: Sequence[TensorProperties] = ()
    paths: Paths | None = None
    whole: Sequence[int] = ()

    @functools.cached_property
    def rows_of(self) -> dict[int, torch.Tensor]:
        """By number of dimensions, the rows of the chunks of such tensors."""
        tensors = [entry for entry in self.entries.values() if entry.shape is not None]
        dims = sorted({len(entry.shape or ()) for entry in tensors})
        return {count: rows_of(tensors, count) for count in dims}


Heads = dict[bytes, _Head]
"""The documents of the records of one plan, by digest."""


def _head(packed: memoryview, size: int) -> _Head:
    text = str(inflated(packed, size), "utf-8", "surrogatepass")
    document = json.loads(text, parse_constant=_no_number)
    attempt, objects = document["attempt"], document["objects"]
    if type(attempt) is not str or type(objects) is not int or objects < 0:
        raise ValueError("a name of a save, or a number of objects, that is none")
    found = document["structure"]
    structure = Structure() if found is None else Structure.from_json(found)
    folders = document["folders"]
    for folder in folders:
        check_folder(folder)
    known = _Head(attempt, objects, KINDS[document["checksum"]], structure, tuple(folders))
    if "names" not in document:
        return known
    entries, properties, rows = _entries(document)
    whole = document["whole"]
    if not all(type(number) is int and 0 <= number < len(entries) for number in whole):
        raise ValueError("the number of no name")
    return _Head(
        attempt,
        objects,
        known.checksum,
        structure,
        known.folders,
        document["written"] is True,
        document["digests"] is True,
        rows,
        entries,
        properties,
        _paths(document["paths"]),
        whole,
    )


class _Reading:
    """Reads columns one after the other."""

    def __init__(self, packed: memoryview, size: int) -> None:
        self._data = Inflating(packed, size)

    def fill(self, columns: torch.Tensor) -> None:
        """Reads the next columns into the rows of ``columns``."""
        for column in columns.unbind(0):
            unpack_column(self._data, column)

    def objects(self, count: int, folders: Sequence[str]) -> tuple[WrittenObject, ...]:
        """Reads data objects, which are in the checkpoint itself or in one of ``folders``.

        Raises:
            ValueError: If their sizes are invalid.
        """
        if count > self._data.left:
            raise ValueError("there are fewer objects than it says")
        columns = unfilled(len(_OBJECT), count)
        self.fill(columns)
        found = []
        for rank, ordinal, attempt, size, checksum, index_size, crc, number in columns.t().tolist():
            if min(rank, ordinal, crc) < 0 or not 0 <= index_size <= size:
                raise ValueError("an object is smaller than its index, or of no size")
            if not 0 <= number <= len(folders):
                raise ValueError("an object of a checkpoint that is not named")
            name = (attempt % _HALF).to_bytes(8, "big").hex()
            folder = folders[number - 1] if number else ""
            found.append(
                WrittenObject(rank, ordinal, name, size, checksum % _HALF, index_size, crc, folder)
            )
        return tuple(found)

    def end(self) -> None:
        """Refuses any remaining bytes."""
        self._data.end()

    def chunks(self, rows_of: Mapping[int, torch.Tensor]) -> dict[int, Chunks]:
        """By number of dimensions, which parts of their tensors the chunks are."""
        found: dict[int, Chunks] = {}
        for dims, rows in rows_of.items():
            both = unfilled(2, dims, rows.numel())
            self.fill(both.flatten(0, 1))
            offsets, sizes = both.unbind(0)
            found[dims] = Chunks(rows, offsets.t(), sizes.t())
        self.end()
        return found


_OBJECT = ("rank", "ordinal", "attempt", "size", "checksum", "index_size", "index_crc", "folder")


def _columns_of(objects: Sequence[WrittenObject], folders: Sequence[str]) -> list[torch.Tensor]:
    """Data objects as columns; unsigned 64-bit numbers become the int64 with the same bits."""
    numbers = {folder: number for number, folder in enumerate(["", *folders])}
    rows = [
        (
            one.rank,
            one.ordinal,
            _signed(int(one.attempt, 16)),
            one.size,
            _signed(one.checksum),
            one.index_size,
            one.index_crc,
            numbers[one.folder],
        )
        for one in objects
    ]
    table = column_of(rows).reshape(-1, len(_OBJECT))
    return [column.contiguous() for column in table.unbind(1)]


def _signed(number: int) -> int:
    return number - _HALF if number >= _END else number


def _columns(inventory: Inventory) -> list[torch.Tensor]:
    """The columns of an inventory's rows."""
    columns = list(inventory.extents.all_columns)
    for chunks in inventory.chunks.values():
        for matrix in (chunks.offsets, chunks.sizes):
            columns += [dim.contiguous() for dim in matrix.unbind(1)]
    return columns


def _table(inventory: Inventory, whole: Sequence[int]) -> dict[str, Any]:
    entries = inventory.entries.values()
    rows = sum(entry.count for entry in entries)
    return {
        "written": len(inventory.extents) == rows,
        "digests": inventory.extents.has_digests,
        "names": list(inventory.entries),
        "shapes": [entry.shape for entry in entries],
        "properties": [entry.properties for entry in entries],
        "chunks": [entry.count for entry in entries],
        "kinds": [_described(properties) for properties in inventory.properties],
        "paths": None if inventory.paths is None else list(map(list, inventory.paths.items())),
        "whole": list(whole),
    }


def _json(document: Any) -> bytes:
    """UTF-8 without insignificant spaces; names may contain lone surrogates."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")


def _described(properties: TensorProperties) -> list[Any]:
    layouts = {kind: name for name, kind in _LAYOUTS.items()}
    formats = {kind: name for name, kind in _FORMATS.items()}
    dtype = str(properties.dtype).removeprefix("torch.")
    if getattr(torch, dtype, None) is not properties.dtype:
        raise ValueError(f"torch has no type of the name {dtype}")
    flags = (properties.requires_grad, properties.pin_memory)
    if not all(type(flag) is bool for flag in flags):
        raise ValueError("a flag that is none")
    return [dtype, layouts[properties.layout], formats[properties.memory_format], *flags]


def _properties(described: Any) -> TensorProperties:
    name, layout, memory_format, requires_grad, pinned = described
    dtype = getattr(torch, name) if type(name) is str else None
    if not isinstance(dtype, torch.dtype) or type(requires_grad) is not bool:
        raise ValueError(f"this torch does not know the element type {name!r}")
    if type(pinned) is not bool:
        raise ValueError("a flag that is none")
    return TensorProperties(dtype, _LAYOUTS[layout], requires_grad, _FORMATS[memory_format], pinned)


def _entries(
    document: dict[str, Any],
) -> tuple[dict[str, Entry], list[TensorProperties], int]:
    """Names, the properties that tensors have, and the number of rows."""
    properties = [_properties(one) for one in document["kinds"]]
    known = len(properties)
    entries: dict[str, Entry] = {}
    shapes: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}  # few are different
    places: dict[int, int] = {}
    row = 0
    for name, shape, kind, count in zip(
        *(document[column] for column in ("names", "shapes", "properties", "chunks")), strict=True
    ):
        if type(name) is not str or type(count) is not int or type(kind) is not int:
            raise ValueError("a name, or a number of chunks, that is none")
        if shape is None:
            if (count, kind) != (1, 0):
                raise ValueError("a value with properties")
            entries[name] = Entry(row, 1, None, 0, 0)
            row += 1
            continue
        if not 0 <= kind < known or not 0 <= count < _END:
            raise ValueError(f"{name[:200]} has chunks or properties that are not there")
        if (found := shapes.get(key := (kind, tuple(shape)))) is None:
            _check_shape(shape, properties[kind].dtype.itemsize)
            found = shapes[key] = key[1]
        place = places.get(len(shape), 0)
        entries[name] = Entry(row, count, found, kind, place)
        row += count
        places[len(shape)] = place + count
    if len(entries) != len(document["names"]):
        raise ValueError("a name that is there twice")
    return entries, properties, row


def _check_shape(shape: Any, itemsize: int) -> None:
    size = itemsize
    if type(shape) is not list:
        raise ValueError("a shape that is none")
    for dim in shape:
        if type(dim) is not int or not 0 <= dim < _END:
            raise ValueError("a size that is out of range")
        size *= dim
    if size >= _END:
        raise ValueError("a tensor is larger than any memory")


def _paths(described: Any) -> Paths | None:
    if described is None:
        return None
    paths: dict[str, tuple[str | int, ...]] = {}
    for name, path in described:
        if type(name) is not str or type(path) is not list:
            raise ValueError("a path of no name")
        if not set(map(type, path)) <= {str}:
            _check_indices(path)
        paths[name] = tuple(path)
    return paths


def _check_indices(path: list[Any]) -> None:
    for element in path:
        if type(element) is not str and (type(element) is not int or not 0 <= element < _END):
            raise ValueError("a path with an element that is neither key nor index")


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number of the format")
