"""Reads and writes the end of a commit object: record, notes, and a trailer with checksums.

A pickle marks its own end, and torch's readers ignore what follows. After it are the record, the
only part that cloudckpt's readers need (:mod:`cloudckpt.checkpoint.record`), the notes of the
checkpoint (:mod:`cloudckpt.checkpoint.notes`), and a trailer with the lengths and the CRC32C of
pickle, record and notes, so that damage to the commit object is detected.
"""

from __future__ import annotations

import dataclasses
import struct

from cloudckpt.checksum import CRC32C
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointReplacedError,
    ObjectNotFoundError,
    PreconditionFailedError,
    RangeNotSatisfiableError,
)
from cloudckpt.stores.base import ObjectInfo, ObjectStore

__all__ = [
    "MOST_NOTES",
    "TAIL",
    "Trailer",
    "notes_at_end",
    "pickle_in",
    "read_range",
    "record_in",
    "with_trailer",
]

_MAGIC = b"cloudckpt-metadata\0\1"  # its last byte is the version
_TRAILER = struct.Struct(f"<QIQIQI{len(_MAGIC)}s")
_END = b"b."  # the last bytes of a pickled object with attributes, as torch's metadata is

MOST_NOTES = 64 * 1024
"""Maximum bytes of notes: they and the trailer are read by one request."""

TAIL = MOST_NOTES + _TRAILER.size
"""How many bytes to read from the end of ``.metadata``, so that they include all notes."""


def with_trailer(pickled: bytes | bytearray, body: bytes, notes: bytes) -> list[memoryview]:
    """Returns all bytes of a commit object: torch's pickle, record, notes, and trailer."""
    parts = (pickled, body, notes)
    numbers = [number for part in parts for number in (len(part), CRC32C.of(part))]
    return [memoryview(part) for part in (*parts, _TRAILER.pack(*numbers, _MAGIC)) if len(part)]


_PIECE = 64 * 1024 * 1024
"""Maximum bytes of a read request, to limit the memory that a wrong object size can cost."""


def read_range(store: ObjectStore, info: ObjectInfo, start: int, stop: int) -> bytearray:
    """Returns bytes ``start`` to before ``stop`` of a commit object, in version ``info.version``.

    Raises:
        CheckpointReplacedError: If the object was replaced or deleted meanwhile.
        StoreError: If the store refuses or stays unreachable.
    """
    data = bytearray()
    for at in range(start, stop, _PIECE):
        piece = bytearray(min(_PIECE, stop - at))
        try:
            store.get_range(info.key, at, [memoryview(piece)], if_version=info.version)
        except (PreconditionFailedError, ObjectNotFoundError, RangeNotSatisfiableError) as error:
            raise CheckpointReplacedError(
                "the checkpoint was replaced or deleted while its metadata was read; try again",
                uri=store.uri(info.key.rpartition("/")[0]),
                cause=error,
            ) from error
        data += piece
    return data


@dataclasses.dataclass(frozen=True)
class Trailer:
    """The last bytes of a commit object: the lengths and checksums of the parts before them.

    Attributes:
        size: Bytes of torch's pickle.
        crc: CRC32C of the pickle.
        body_size: Bytes of the record; 0 in a copy of another writer's checkpoint, which has none.
        body_crc: CRC32C of the record.
        notes_size: Bytes of the notes; 0 if there are none.
        notes_crc: CRC32C of the notes.
    """

    size: int
    crc: int
    body_size: int
    body_crc: int
    notes_size: int
    notes_crc: int

    @classmethod
    def at_end_of(cls, data: bytes | bytearray, uri: str) -> Trailer | None:
        """Returns the trailer at the end of ``data``; None if there is none.

        Commit objects of other libraries have none.

        Raises:
            CheckpointCorruptError: If the version of the format is unknown, as that of a newer
                cloudckpt, or the trailer is cut off.
        """
        if data[-len(_MAGIC) : -1] != _MAGIC[:-1]:
            return None
        if data[-1] != _MAGIC[-1] or len(data) < _TRAILER.size:
            raise CheckpointCorruptError(
                f"the checkpoint's format is not version {_MAGIC[-1]}: it was written by a newer "
                "cloudckpt, so install a newer version; or it is damaged: load an older checkpoint",
                uri=uri,
            )
        *fields, _ = _TRAILER.unpack_from(data, len(data) - _TRAILER.size)
        return cls(*fields)

    @property
    def size_after_pickle(self) -> int:
        """Bytes of the commit object after the pickle."""
        return self.body_size + self.notes_size + _TRAILER.size


def notes_at_end(tail: bytes | bytearray, uri: str) -> bytes:
    """Returns the notes in ``.metadata``; empty if there are none, or another writer wrote it.

    Args:
        tail: The last :data:`TAIL` or more bytes of ``.metadata``, or all if it has fewer.
        uri: The object, for messages.

    Raises:
        CheckpointCorruptError: If the notes are damaged, or cut off, as a file system may leave
            them.
    """
    if (trailer := Trailer.at_end_of(tail, uri)) is None:
        if not tail.endswith(_END):
            raise _damaged(uri)
        return b""
    stop = len(tail) - _TRAILER.size
    return bytes(_part(tail, stop - trailer.notes_size, stop, trailer.notes_crc, uri))


def record_in(data: bytes | bytearray, trailer: Trailer, uri: str) -> memoryview:
    """Returns the record in the last bytes of ``.metadata``, which must include it.

    Raises:
        CheckpointCorruptError: If it is damaged.
    """
    start = len(data) - trailer.size_after_pickle
    return _part(data, start, start + trailer.body_size, trailer.body_crc, uri)


def pickle_in(data: bytes | bytearray, uri: str) -> memoryview:
    """Returns the pickle in ``.metadata``, of cloudckpt or of another writer.

    Args:
        data: All bytes of ``.metadata``.
        uri: The object, for messages.

    Raises:
        CheckpointCorruptError: If it does not match its checksum. Another writer's pickle has none,
            and is returned unchecked.
    """
    if (trailer := Trailer.at_end_of(data, uri)) is None:
        return memoryview(data)
    stop = len(data) - trailer.size_after_pickle
    return _part(data, stop - trailer.size, stop, trailer.crc, uri, first=True)


def _part(
    data: bytes | bytearray, start: int, stop: int, crc: int, uri: str, *, first: bool = False
) -> memoryview:
    part = memoryview(data)[max(start, 0) : max(stop, 0)]
    if start < 0 or (first and start) or CRC32C.of(part) != crc:
        raise _damaged(uri)
    return part


def _damaged(uri: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        "the metadata is cut off, or does not match its checksum: restore the object from a "
        "backup, or load an older checkpoint",
        uri=uri,
    )
