"""``.metadata``: torch's pickle, with a checksum behind it, read without running it.

A pickle ends where it says so; torch's readers do not look at what follows. There stands a trailer
with the length and the CRC32C of the pickle, so that a damaged commit object is noticed.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import struct
from collections.abc import Iterable
from typing import Any

from torch.distributed.checkpoint.metadata import (
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from cloudckpt.checkpoint.described import Name, home
from cloudckpt.checkpoint.metadata_fields import build
from cloudckpt.checksum import CRC32C
from cloudckpt.errors import CheckpointCorruptError, CloudCheckpointError
from cloudckpt.fork import ModuleLock
from cloudckpt.gc_pause import paused_gc

__all__ = ["add_safe_metadata_globals", "dump_metadata", "load_metadata"]

_MAGIC = b"cloudckpt-metadata\0\1"
_TRAILER = struct.Struct(f"<{len(_MAGIC)}sQI")

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


def _name(cls: type[Any]) -> Name:
    return home(cls.__module__, cls.__qualname__)


class _TrustingUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(*home(module, name))


def dump_metadata(metadata: Metadata) -> bytes:
    """The bytes of ``.metadata``."""
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
    return data + _TRAILER.pack(_MAGIC, len(data), CRC32C.of(data))


def load_metadata(data: bytes | bytearray, uri: str, *, trust_pickle: bool = False) -> Metadata:
    """Reads ``.metadata``, ours or of another writer.

    Raises:
        UntrustedPickleError: If it names a class or function that is not on the allow-list.
        CheckpointCorruptError: If it is damaged, or no metadata.
    """
    body = memoryview(data)
    if len(data) >= _TRAILER.size:
        magic, size, crc = _TRAILER.unpack_from(data, len(data) - _TRAILER.size)
        if magic == _MAGIC:
            body = body[: -_TRAILER.size]
            if body.nbytes != size or CRC32C.of(body) != crc:
                raise CheckpointCorruptError(
                    "the metadata does not match its checksum: restore it, or load an older "
                    "checkpoint",
                    uri=uri,
                )
    try:
        with paused_gc():
            if trust_pickle:
                metadata = _TrustingUnpickler(io.BytesIO(body)).load()
            else:
                with _safe_lock:
                    allowed = {_name(cls): cls for cls in _SAFE}
                metadata = build(data, body.nbytes, uri, allowed)
    except (CloudCheckpointError, MemoryError, Warning):
        raise
    except Exception as exc:  # classes of the user, and where all are trusted, may raise anything
        raise CheckpointCorruptError(
            "the metadata can't be read: it is damaged or no checkpoint's", uri=uri, cause=exc
        ) from exc
    if not isinstance(metadata, Metadata):
        raise CheckpointCorruptError(
            f"the metadata is a {type(metadata).__name__}, not torch's Metadata", uri=uri
        )
    return metadata
