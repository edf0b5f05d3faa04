"""The body of a commit object: an inventory in bytes, without a pickle, and bounded when read.

It has the records of the data objects, a table over the names, and columns over the chunks and over
the values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorProperties

from cloudckpt.checkpoint.columns import deflated, inflated, packed_column, unfilled, unpack_column
from cloudckpt.checkpoint.index import KINDS, kind_of
from cloudckpt.checkpoint.inventory import Chunks, Entry, Inventory, Paths, rows_of
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checkpoint.written import RECORD, Extents, WrittenObject
from cloudckpt.checksum import ChecksumAlgorithm
from cloudckpt.errors import CheckpointCorruptError
from cloudckpt.gc_pause import paused_gc

__all__ = ["Body", "body_of", "to_json", "without_columns"]

_MAGIC = b"ckptbdy\1"
_HEADER = struct.Struct("<8s8sB?2xI8Q")
_END = 1 << 63

_LEAST = 1 << 20
_TIMES = 16
"""A body may take this many bytes in memory, or that many times those of the pickle before it."""

_LAYOUTS = {str(kind).removeprefix("torch."): kind for kind in (torch.strided,)}
_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "preserve_format": torch.preserve_format,
}


def body_of(inventory: Inventory, attempt: str, pickle_size: int) -> bytes | None:
    """The body of an inventory.

    Args:
        inventory: What it says.
        attempt: The random name of the save.
        pickle_size: Bytes of the pickle that will stand before it.

    Returns:
        The bytes; None if the inventory has what the format has no room for.
    """
    try:
        table = _table(inventory)
    except (KeyError, ValueError):
        return None
    values_from, extents = inventory.values_from, inventory.extents.columns
    columns = bytearray()
    for column in extents:
        columns += packed_column(column[:values_from])
    for chunks in inventory.chunks.values():
        for matrix in (chunks.offsets, chunks.sizes):
            for dim in matrix.unbind(1):
                columns += packed_column(dim.contiguous())
    values = b"".join(packed_column(column[values_from:]) for column in extents)
    streams = (table, bytes(columns), values)
    if sum(map(len, streams)) > _bound(pickle_size):
        return None
    packed = list(map(deflated, streams))
    header = _HEADER.pack(
        _MAGIC,
        bytes.fromhex(attempt),
        kind_of(inventory.checksum),
        True,
        len(inventory.objects),
        values_from,
        len(inventory.extents) - values_from,
        *(len(one) for both in zip(packed, streams, strict=True) for one in both),
    )
    return b"".join((header, *(one.pack() for one in inventory.objects), *packed))


def without_columns(
    attempt: str, objects: Sequence[WrittenObject], checksum: ChecksumAlgorithm, more: bytes
) -> bytes:
    """The body of metadata that only their pickle can express; ``more`` is the structure."""
    table, nothing = deflated(more), deflated(b"")
    header = _HEADER.pack(
        _MAGIC,
        bytes.fromhex(attempt),
        kind_of(checksum),
        False,
        len(objects),
        *(0, 0, len(table), len(more), len(nothing), 0, len(nothing), 0),
    )
    return b"".join((header, *(one.pack() for one in objects), table, nothing, nothing))


def _bound(pickle_size: int) -> int:
    return max(_LEAST, _TIMES * pickle_size)


@dataclass(frozen=True)
class Body:
    """What was read of a body.

    Attributes:
        attempt: The random name of the save.
        objects: The data objects.
        checksum: The algorithm of all checksums.
        structure: What torch's paths do not say.
        inventory: The columns; None if only the pickle has what they would.
    """

    attempt: str
    objects: tuple[WrittenObject, ...]
    checksum: ChecksumAlgorithm
    structure: Structure
    inventory: Inventory | None

    def by_pickle(self) -> Body:
        """The same for metadata that say themselves where everything is."""
        return dataclasses.replace(self, inventory=None)

    @staticmethod
    def has_columns(data: memoryview) -> bool:
        """Whether a body has columns, as far as its first bytes say."""
        return len(data) < _HEADER.size or bool(_HEADER.unpack_from(data)[3])

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview, pickle_size: int, uri: str) -> Body:
        """Reads a body whose checksum is right.

        Raises:
            CheckpointCorruptError: If it makes no sense all the same.
        """
        with _made_sense_of(uri), paused_gc():
            return _parse(memoryview(data), pickle_size)

    @staticmethod
    def objects_in(data: memoryview, uri: str) -> tuple[WrittenObject, ...]:
        """The data objects of a body whose checksum is right; nothing else is read.

        Raises:
            CheckpointCorruptError: If it makes no sense all the same.
        """
        with _made_sense_of(uri):
            magic, _, _, _, count, *_ = _HEADER.unpack_from(data)
            if magic != _MAGIC or _HEADER.size + RECORD.size * count > len(data):
                raise ValueError("it is of a version that this cloudckpt does not know, or cut off")
            return WrittenObject.unpack_all(data[_HEADER.size :][: RECORD.size * count])


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


def _parse(data: memoryview, pickle_size: int) -> Body:
    magic, attempt, kind, has_columns, count, *numbers = _HEADER.unpack_from(data)
    chunks, values, *sizes = numbers
    if magic != _MAGIC:
        raise ValueError("it is of a version that this cloudckpt does not know")
    if sum(sizes[1::2]) > _bound(pickle_size) or _HEADER.size + RECORD.size * count > len(data):
        raise ValueError("it says that it is larger than it can be")
    stops = list(itertools.accumulate((RECORD.size * count, *sizes[::2]), initial=_HEADER.size))
    if stops[-1] != len(data):
        raise ValueError("it is of another length than it says")
    parts = [data[start:stop] for start, stop in itertools.pairwise(stops)]
    objects = WrittenObject.unpack_all(parts[0])
    table, columns, places = (
        inflated(part, size) for part, size in zip(parts[1:], sizes[1::2], strict=True)
    )
    checksum = KINDS[kind]
    document = json.loads(str(table, "utf-8", "surrogatepass"), parse_constant=_no_number)
    found = document.get("structure")
    structure = Structure() if found is None else Structure.from_json(found)
    if not has_columns:
        return Body(attempt.hex(), objects, checksum, structure, None)
    entries, properties = _entries(document, chunks, values)
    extents, of_dims = _columns(columns, places, entries.values(), chunks, values)
    del columns, places  # as large as a third of what they have become
    inventory = Inventory(
        entries,
        properties,
        of_dims,
        extents,
        objects,
        checksum,
        _paths(document["paths"]),
        structure,
    )
    inventory.check()
    return Body(attempt.hex(), objects, checksum, structure, inventory)


def _columns(
    of_chunks: bytearray,
    of_values: bytearray,
    entries: Iterable[Entry],
    chunks: int,
    values: int,
) -> tuple[Extents, dict[int, Chunks]]:
    """Where the rows lie, and which parts the chunks are."""
    extents = unfilled(3, chunks + values)
    first, last = _Reading(of_chunks), _Reading(of_values)
    first.fill(extents[:, :chunks])
    last.fill(extents[:, chunks:])
    last.end()
    return Extents(*extents.unbind(0)), first.chunks(entries)


class _Reading:
    """Columns, one after the other."""

    def __init__(self, data: bytearray) -> None:
        self._data = data
        self._at = 0

    def fill(self, columns: torch.Tensor) -> None:
        """Reads the next columns: a row of ``columns`` each."""
        for column in columns.unbind(0):
            self._at = unpack_column(self._data, self._at, column)

    def end(self) -> None:
        """Refuses what follows."""
        if self._at != len(self._data):
            raise ValueError("there are more columns than there are numbers")

    def chunks(self, entries: Iterable[Entry]) -> dict[int, Chunks]:
        """Which parts of their tensors the chunks are, by number of dimensions."""
        tensors = [entry for entry in entries if entry.shape is not None]
        found: dict[int, Chunks] = {}
        for dims in sorted({len(entry.shape or ()) for entry in tensors}):
            rows = rows_of(tensors, dims)
            both = unfilled(2, dims, rows.numel())
            self.fill(both.flatten(0, 1))
            offsets, sizes = both.unbind(0)
            found[dims] = Chunks(rows, offsets.t(), sizes.t())
        self.end()
        return found


def _table(inventory: Inventory) -> bytes:
    entries = inventory.entries.values()
    names = {name: number for number, name in enumerate(inventory.entries)}
    document: dict[str, Any] = {
        "names": list(names),
        "shapes": [entry.shape for entry in entries],
        "properties": [entry.properties for entry in entries],
        "chunks": [entry.count for entry in entries],
        "kinds": [_described(properties) for properties in inventory.properties],
        "paths": None if inventory.paths is None else list(map(list, inventory.paths.items())),
    }
    if inventory.structure:
        document["structure"] = inventory.structure.to_json()
    return to_json(document)


def to_json(document: Any) -> bytes:
    """UTF-8 without insignificant spaces; names may have halves of pairs in them."""
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
    document: dict[str, Any], chunks: int, values: int
) -> tuple[dict[str, Entry], list[TensorProperties]]:
    properties = [_properties(one) for one in document["kinds"]]
    known = len(properties)
    entries: dict[str, Entry] = {}
    places: dict[int, int] = {}
    row, value = 0, chunks
    for name, shape, kind, count in zip(
        *(document[column] for column in ("names", "shapes", "properties", "chunks")), strict=True
    ):
        if type(name) is not str or type(count) is not int or type(kind) is not int:
            raise ValueError("a name, or a number of chunks, that is none")
        if shape is None:
            if (count, kind) != (1, 0):
                raise ValueError("a value with properties")
            entries[name] = Entry(value, 1, None, 0, 0)
            value += 1
            continue
        if not 0 <= kind < known or not 0 <= count <= chunks - row:
            raise ValueError(f"{name[:200]} has chunks or properties that are not there")
        _check_shape(shape, properties[kind].dtype.itemsize)
        place = places.get(len(shape), 0)
        entries[name] = Entry(row, count, tuple(shape), kind, place)
        row += count
        places[len(shape)] = place + count
    if (row, value) != (chunks, chunks + values) or len(entries) != len(document["names"]):
        raise ValueError("there are other chunks or values than there are names for")
    return entries, properties


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
        for element in path:
            if type(element) is not str and (type(element) is not int or not 0 <= element < _END):
                raise ValueError("a path with an element that is neither key nor index")
        paths[name] = tuple(path)
    return paths


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number of the format")
