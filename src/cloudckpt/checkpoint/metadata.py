"""``.metadata``: torch's pickle, with more behind it; a pickle is read without running it.

A pickle ends where it says so; torch's readers do not look at what follows. There stand the body,
from which our readers take all (:mod:`cloudckpt.checkpoint.body`), the notes of the checkpoint
(:mod:`cloudckpt.checkpoint.notes`), and a trailer with the lengths and the CRC32C of the three, so
that a damaged commit object is noticed.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import struct
from collections.abc import Iterable
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from cloudckpt.checkpoint.described import UnknownNameError
from cloudckpt.checkpoint.inert_pickle import RefusedError, full_name, home
from cloudckpt.checkpoint.metadata_fields import build
from cloudckpt.checksum import CRC32C
from cloudckpt.errors import CheckpointCorruptError, UntrustedPickleError
from cloudckpt.fork import ModuleLock
from cloudckpt.gc_pause import paused_gc

__all__ = [
    "MOST_NOTES",
    "TAIL",
    "Trailer",
    "add_safe_metadata_globals",
    "load_metadata",
    "notes_at_end",
    "pickle_in",
    "with_trailer",
]

_MAGIC = b"cloudckpt-metadata\0\1"  # its last byte is the version
_TRAILER = struct.Struct(f"<QIQIQI{len(_MAGIC)}s")

MOST_NOTES = 64 * 1024
"""Bytes that notes may have: they are read by one request, with what stands behind them."""

TAIL = MOST_NOTES + _TRAILER.size
"""Bytes at the end of ``.metadata`` among which its notes are."""

_SAFE: set[type[Any]] = set()
_safe_lock = ModuleLock()


def add_safe_metadata_globals(classes: Iterable[type[Any]]) -> None:
    """Lets ``.metadata`` hold instances of these classes, for custom planners and writers.

    Only name classes whose construction from arbitrary arguments is harmless.
    """
    with _safe_lock:
        by_name = {_name(cls): cls for cls in (*_SAFE, *classes)}  # a class made anew replaces
        _SAFE.clear()
        _SAFE.update(by_name.values())


def _name(cls: type[Any]) -> str:
    return full_name(cls.__module__, cls.__qualname__)


class _TrustingUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(home(module), name)


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
                f"the checkpoint's format is not version {_MAGIC[-1]}: unless it is damaged, it "
                "was written by a newer cloudckpt, which can read it",
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
        CheckpointCorruptError: If they are damaged.
    """
    if (trailer := Trailer.at_end_of(tail, uri)) is None:
        return b""
    end = len(tail) - _TRAILER.size
    start = end - trailer.notes_size
    if start < 0 or CRC32C.of(notes := bytes(tail[start:end])) != trailer.notes_crc:
        raise CheckpointCorruptError("the notes do not match their checksum", uri=uri)
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
                "the metadata does not match its checksum: restore it, or load an older checkpoint",
                uri=uri,
            )
    return pickled


def load_metadata(data: bytes | bytearray, uri: str, *, trust_pickle: bool = False) -> Metadata:
    """Reads the pickle in ``.metadata``, ours or of another writer.

    Raises:
        UntrustedPickleError: If it names a class or function that is not on the allow-list.
        CheckpointCorruptError: If it is damaged, or no metadata.
    """
    body = pickle_in(data, uri)
    try:
        with paused_gc():
            if trust_pickle:
                metadata = _TrustingUnpickler(io.BytesIO(body)).load()
            else:
                with _safe_lock:
                    allowed = {_name(cls): cls for cls in _SAFE}
                metadata = build(data, body.nbytes, allowed)
    except (MemoryError, Warning):
        raise
    except UnknownNameError as unknown:
        raise UntrustedPickleError(
            f"the checkpoint's metadata names {unknown}, which is not on the allow-list: if you "
            "trust whoever can write to this location, pass trust_pickle=True, or allow the class "
            "by cloudckpt.add_safe_metadata_globals([...])",
            uri=uri,
        ) from None
    except RefusedError as refused:
        raise UntrustedPickleError(
            f"the checkpoint's metadata {refused}, as no writer of checkpoints does: load nothing "
            "from this location, unless you trust whoever can write to it and pass "
            "trust_pickle=True",
            uri=uri,
        ) from None
    except Exception as exc:  # classes of the user, and where all are trusted, may raise anything
        raise CheckpointCorruptError(
            "the metadata can't be read: it is damaged or no checkpoint's", uri=uri, cause=exc
        ) from exc
    if not isinstance(metadata, Metadata):
        raise CheckpointCorruptError(
            f"the metadata is a {type(metadata).__name__}, not torch's Metadata", uri=uri
        )
    return metadata
