"""``.metadata``: torch's pickle, with a checksum behind it, read without running it.

A pickle ends where it says so; torch's readers do not look at what follows. There stand the notes
of the checkpoint (:mod:`cloudckpt.checkpoint.notes`), and a trailer with the lengths and the CRC32C
of the pickle and of the notes, so that a damaged commit object is noticed.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import struct
from collections.abc import Iterable
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

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
    "add_safe_metadata_globals",
    "dump_metadata",
    "load_metadata",
    "notes_at_end",
]

_MAGIC = b"cloudckpt-metadata\0\1"
_TRAILER = struct.Struct(f"<{len(_MAGIC)}sQIQI")

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


def dump_metadata(metadata: Metadata, notes: bytes = b"") -> bytes:
    """The bytes of ``.metadata``, with notes behind the pickle."""
    shared: dict[tuple[Any, ...], TensorProperties] = {}

    def lean(entry: Any) -> Any:
        """The entry with properties that equal ones share: the pickle has them but once."""
        if type(entry) is not TensorStorageMetadata:
            return entry
        properties = entry.properties
        one = shared.setdefault(properties.__getstate__(), properties)  # type: ignore[no-untyped-call]
        return TensorStorageMetadata(one, entry.size, entry.chunks)

    with paused_gc():
        entries = {fqn: lean(entry) for fqn, entry in metadata.state_dict_metadata.items()}
        metadata = dataclasses.replace(metadata, state_dict_metadata=entries)
        data = pickle.dumps(metadata, protocol=pickle.HIGHEST_PROTOCOL)
    trailer = _TRAILER.pack(_MAGIC, len(data), CRC32C.of(data), len(notes), CRC32C.of(notes))
    return data + notes + trailer


@dataclasses.dataclass(frozen=True)
class _Trailer:
    """Lengths in bytes and checksums: of the pickle, and of the notes."""

    size: int
    crc: int
    notes_size: int
    notes_crc: int

    @classmethod
    def at_end_of(cls, data: bytes | bytearray) -> _Trailer | None:
        """That of cloudckpt; None if another writer has written this."""
        if len(data) < _TRAILER.size:
            return None
        magic, *fields = _TRAILER.unpack_from(data, len(data) - _TRAILER.size)
        return cls(*fields) if magic == _MAGIC else None


def notes_at_end(tail: bytes | bytearray, uri: str) -> bytes:
    """The notes in ``.metadata``; empty if another writer has written it.

    Args:
        tail: Its last :data:`TAIL` bytes, or all if it has less.
        uri: For the message.

    Raises:
        CheckpointCorruptError: If they are damaged.
    """
    if (trailer := _Trailer.at_end_of(tail)) is None:
        return b""
    end = len(tail) - _TRAILER.size
    start = end - trailer.notes_size
    if start < 0 or CRC32C.of(notes := bytes(tail[start:end])) != trailer.notes_crc:
        raise CheckpointCorruptError("the notes do not match their checksum", uri=uri)
    return notes


def load_metadata(data: bytes | bytearray, uri: str, *, trust_pickle: bool = False) -> Metadata:
    """Reads ``.metadata``, ours or of another writer.

    Raises:
        UntrustedPickleError: If it names a class or function that is not on the allow-list.
        CheckpointCorruptError: If it is damaged, or no metadata.
    """
    body = memoryview(data)
    if (trailer := _Trailer.at_end_of(data)) is not None:
        body, notes = body[: trailer.size], body[trailer.size : -_TRAILER.size]
        is_whole = body.nbytes == trailer.size and notes.nbytes == trailer.notes_size
        if not (
            is_whole and CRC32C.of(body) == trailer.crc and CRC32C.of(notes) == trailer.notes_crc
        ):
            raise CheckpointCorruptError(
                "the metadata does not match its checksum: restore it, or load an older checkpoint",
                uri=uri,
            )
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
