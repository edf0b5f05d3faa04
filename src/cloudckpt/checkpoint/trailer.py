"""The end of a commit object: the notes of the checkpoint, and a trailer behind all.

A pickle ends where it says so; torch's readers do not look at what follows. There stand the record,
from which our readers take all (:mod:`cloudckpt.checkpoint.record`), the notes of the checkpoint
(:mod:`cloudckpt.checkpoint.notes`), and a trailer with the lengths and the CRC32C of the three, so
that a damaged commit object is noticed.
"""

from __future__ import annotations

import dataclasses
import struct

from cloudckpt.checksum import CRC32C
from cloudckpt.errors import CheckpointCorruptError

__all__ = ["MOST_NOTES", "TAIL", "Trailer", "notes_at_end", "pickle_in", "with_trailer"]

_MAGIC = b"cloudckpt-metadata\0\1"  # its last byte is the version
_TRAILER = struct.Struct(f"<QIQIQI{len(_MAGIC)}s")
_END = b"b."  # of a pickled object with attributes, as torch's metadata are

MOST_NOTES = 64 * 1024
"""Bytes that notes may have: they are read by one request, with what stands behind them."""

TAIL = MOST_NOTES + _TRAILER.size
"""Bytes at the end of ``.metadata`` among which its notes are."""


def with_trailer(pickled: bytes | bytearray, body: bytes, notes: bytes) -> list[memoryview]:
    """All bytes of a commit object: torch's pickle, our body, the notes, and the trailer."""
    parts = (pickled, body, notes)
    numbers = [number for part in parts for number in (len(part), CRC32C.of(part))]
    return [memoryview(part) for part in (*parts, _TRAILER.pack(*numbers, _MAGIC)) if len(part)]


@dataclasses.dataclass(frozen=True)
class Trailer:
    """Lengths in bytes and checksums: of the pickle, of the body, and of the notes."""

    size: int
    crc: int
    body_size: int
    body_crc: int
    notes_size: int
    notes_crc: int

    @classmethod
    def at_end_of(cls, data: bytes | bytearray, uri: str) -> Trailer | None:
        """That of cloudckpt; None if another writer has written this.

        Raises:
            CheckpointCorruptError: If a newer cloudckpt has.
        """
        if data[-len(_MAGIC) : -1] != _MAGIC[:-1]:
            return None
        if data[-1] != _MAGIC[-1] or len(data) < _TRAILER.size:
            raise CheckpointCorruptError(
                f"the checkpoint's format is not version {_MAGIC[-1]}: it was written by a "
                "newer cloudckpt, so install that one; or it is damaged",
                uri=uri,
            )
        *fields, _ = _TRAILER.unpack_from(data, len(data) - _TRAILER.size)
        return cls(*fields)

    @property
    def behind_pickle(self) -> int:
        """Bytes of the commit object behind the pickle."""
        return self.body_size + self.notes_size + _TRAILER.size


def notes_at_end(tail: bytes | bytearray, uri: str) -> bytes:
    """The notes in ``.metadata``; empty if another writer has written it.

    Args:
        tail: Its last :data:`TAIL` bytes, or all if it has less.
        uri: For the message.

    Raises:
        CheckpointCorruptError: If they are damaged, or cut off, as a disk may leave them.
    """
    if (trailer := Trailer.at_end_of(tail, uri)) is None:
        if not tail.endswith(_END):
            raise CheckpointCorruptError(
                "the metadata are cut off, or none: restore them, or load an older checkpoint",
                uri=uri,
            )
        return b""
    end = len(tail) - _TRAILER.size
    start = end - trailer.notes_size
    if start < 0 or CRC32C.of(notes := bytes(tail[start:end])) != trailer.notes_crc:
        raise CheckpointCorruptError(
            "the notes do not match their checksum: restore the object, or load an older "
            "checkpoint",
            uri=uri,
        )
    return notes


def pickle_in(data: bytes | bytearray, uri: str) -> memoryview:
    """The pickle in all of ``.metadata``, ours or of another writer.

    Raises:
        CheckpointCorruptError: If it is damaged.
    """
    pickled = memoryview(data)
    if (trailer := Trailer.at_end_of(data, uri)) is not None:
        is_whole = len(data) == trailer.size + trailer.behind_pickle
        pickled = pickled[: trailer.size]
        if not is_whole or CRC32C.of(pickled) != trailer.crc:
            raise CheckpointCorruptError(
                "the metadata does not match its checksum: restore the object, or load an "
                "older checkpoint",
                uri=uri,
            )
    return pickled
