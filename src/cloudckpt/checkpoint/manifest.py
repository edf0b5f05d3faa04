"""The manifest: what torch's metadata has no room for, in JSON.

``.metadata`` names it by an id that includes its size and checksum, so that a manifest which is
damaged or belongs to another attempt is not believed.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from cloudckpt.checkpoint.objects import ObjectRecord, checked, manifest_name
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checksum import ALGORITHMS, CRC32C, ChecksumAlgorithm
from cloudckpt.errors import CheckpointCorruptError
from cloudckpt.gc_pause import paused_gc

__all__ = ["ItemKey", "ItemRecord", "Manifest", "ManifestId"]

_FORMAT = "cloudckpt"
_VERSION = 1
_END = 1 << 63
_DTYPES = {name for name, found in vars(torch).items() if isinstance(found, torch.dtype)}

ItemKey = tuple[str, "tuple[int, ...] | None"]
"""Fully qualified name, and the offsets of the chunk in the whole tensor (None if no tensor)."""


@dataclass(frozen=True, slots=True)
class ItemRecord:
    """An item in an object. All offsets count from the object's first byte.

    Attributes:
        object: The object it lies in.
        offset: Its first byte, envelope included: what torch's readers are given.
        length: Its bytes, envelope included.
        raw_offset: The first byte of the data proper: a tensor's elements in row-major order, or
            all of the item if it is no plain tensor.
        raw_length: The bytes of the data proper.
        dtype: The element type without ``torch.``, or None if the item is no plain tensor.
        shape: The shape of the tensor.
        block_size: Bytes of raw data that share a checksum.
        checksums: Of each block, packed.
    """

    object: ObjectRecord
    offset: int
    length: int
    raw_offset: int
    raw_length: int
    dtype: str | None
    shape: tuple[int, ...]
    block_size: int
    checksums: bytes


@dataclass(frozen=True, slots=True)
class ManifestId:
    """What ``StorageMeta.save_id`` says: which manifest belongs to the metadata.

    Attributes:
        attempt: The coordinator's random name of the save.
        size: Bytes of the manifest.
        crc32c: Its checksum.
    """

    attempt: str
    size: int
    crc32c: int

    def __str__(self) -> str:
        return f"{_FORMAT}-{_VERSION}-{self.attempt}-{self.size}-{self.crc32c:08x}"

    @classmethod
    def parse(cls, save_id: object, uri: str) -> ManifestId | None:
        """The id, or None if the checkpoint was not written by cloudckpt.

        Raises:
            CheckpointCorruptError: If it is of a version that this cloudckpt does not know.
        """
        if not isinstance(save_id, str) or not save_id.startswith(f"{_FORMAT}-"):
            return None
        pattern = rf"{_FORMAT}-{_VERSION}-([0-9a-f]+)-([0-9]{{1,18}})-([0-9a-f]{{8}})"
        match = re.fullmatch(pattern, save_id)
        if match is None:
            raise CheckpointCorruptError(
                f"the checkpoint's format is not version {_VERSION} ({save_id[:80]!r}): unless it "
                "is damaged, it was written by a newer cloudckpt, which can read it",
                uri=uri,
            )
        return cls(match[1], int(match[2]), int(match[3], 16))

    @property
    def name(self) -> str:
        """The manifest's object name."""
        return manifest_name(self.attempt)


@dataclass(frozen=True)
class Manifest:
    """All items of a checkpoint, the algorithm of their checksums, and how they were nested."""

    items: Mapping[ItemKey, ItemRecord]
    checksum: ChecksumAlgorithm
    structure: Structure = field(default_factory=Structure)

    def to_json(self) -> bytes:
        """The bytes that are stored."""
        objects: dict[ObjectRecord, int] = {}
        rows: list[list[Any]] = []
        for (fqn, offsets), item in self.items.items():
            where = objects.setdefault(item.object, len(objects))
            checksums = _to_text(item.checksums)
            place = [where, item.offset, item.length, item.raw_offset, item.raw_length]
            rows.append([fqn, offsets, *place, item.dtype, item.shape, item.block_size, checksums])
        document = {
            "format": _FORMAT,
            "version": _VERSION,
            "checksum": self.checksum.name,
            "objects": [
                [entry.name, entry.size, _to_text(self.checksum.pack([entry.checksum]))]
                for entry in objects
            ],
            "items": rows,
        }
        if self.structure:
            document["structure"] = self.structure.to_json()
        return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()

    def identify(self, attempt: str, data: bytes) -> ManifestId:
        """The id of this manifest, stored as ``data``."""
        return ManifestId(attempt, len(data), CRC32C.of(data))

    @classmethod
    def from_json(cls, data: bytes | bytearray, expected: ManifestId, uri: str) -> Manifest:
        """Reads a manifest.

        Raises:
            CheckpointCorruptError: If it is damaged, not the one that the metadata names, or
                written by a newer cloudckpt.
        """
        if len(data) != expected.size or CRC32C.of(data) != expected.crc32c:
            raise CheckpointCorruptError(
                "the manifest is damaged: it has another size or checksum than the metadata says",
                uri=uri,
            )
        try:
            with paused_gc():
                document = json.loads(bytes(data), parse_constant=_no_number)
                return _manifest(document, uri)
        except _NewerError as newer:
            raise CheckpointCorruptError(str(newer), uri=uri) from None
        except (*_SENSELESS, RecursionError) as exc:
            raise CheckpointCorruptError(
                "the manifest makes no sense: it is not as cloudckpt writes it", uri=uri, cause=exc
            ) from exc


_SENSELESS = (ValueError, KeyError, TypeError, IndexError, struct.error)


class _NewerError(Exception):
    pass


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of a manifest")


def _manifest(document: Any, uri: str) -> Manifest:
    """Fields of the document that are not known are of no consequence: a version may add some."""
    if document["format"] != _FORMAT or type(document["version"]) is not int:
        raise ValueError("the document is no manifest")
    if document["version"] > _VERSION:
        raise _NewerError(
            f"the manifest is of version {document['version']}: it was written by a newer "
            f"cloudckpt than this, which reads version {_VERSION}; upgrade to load it"
        )
    if document["version"] != _VERSION:
        raise ValueError(f"there is no version {document['version']}")
    checksum = ALGORITHMS[document["checksum"]]
    objects = []
    for name, size, packed in document["objects"]:
        if type(size) is not int or not 0 <= size < _END:
            raise ValueError(f"the size of {name!r} is out of range")
        (found,) = checksum.unpack(_to_bytes(packed))
        objects.append(ObjectRecord(checked(name, uri), size, found))
    rows = document["items"]
    items = dict(_item(row, objects, checksum) for row in rows)
    if len(items) != len(rows):
        raise ValueError("an item is there twice")
    nested = document.get("structure")
    structure = Structure() if nested is None else Structure.from_json(nested)
    return Manifest(items, checksum, structure)


def _to_text(packed: bytes) -> str:
    return base64.b64encode(packed).decode("ascii")


def _to_bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _item(
    row: list[Any], objects: list[ObjectRecord], checksum: ChecksumAlgorithm
) -> tuple[ItemKey, ItemRecord]:
    fqn, offsets, where, offset, length, raw_offset, raw_length, dtype, shape, block, packed = row
    if type(fqn) is not str:
        raise ValueError("an item has no name")
    if not (
        type(where) is type(offset) is type(length) is int
        and type(raw_offset) is type(raw_length) is type(block) is int
    ):
        raise ValueError(f"{fqn} has a number that is none")
    if where < 0 or block < 1 or block >= _END:
        raise ValueError(f"{fqn} has a number out of range")
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"{fqn} has elements of a type that this torch does not know: {dtype!r}")
    item = ItemRecord(
        object=objects[where],
        offset=offset,
        length=length,
        raw_offset=raw_offset,
        raw_length=raw_length,
        dtype=dtype,
        shape=_dims(shape, fqn),
        block_size=block,
        checksums=_to_bytes(packed),
    )
    raw_end, end = raw_offset + raw_length, offset + length
    if not (0 <= offset <= raw_offset <= raw_end <= end <= item.object.size):
        raise ValueError(f"{fqn} lies outside of its object")
    if len(item.checksums) != checksum.nbytes * -(-raw_length // block):
        raise ValueError(f"{fqn} has a wrong number of checksums")
    return (fqn, None if offsets is None else _dims(offsets, fqn)), item


def _dims(dims: Any, fqn: str) -> tuple[int, ...]:
    if type(dims) is not list:
        raise ValueError(f"{fqn} has a shape or offsets that are none")
    for dim in dims:
        if type(dim) is not int or not 0 <= dim < _END:
            raise ValueError(f"{fqn} has a shape or offsets out of range")
    return tuple(dims)
