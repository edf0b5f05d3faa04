"""``.metadata``: torch's pickle, with a checksum behind it, read through an allow-list.

A pickle ends where it says so; torch's readers do not look at what follows. There stands a trailer
with the length and the CRC32C of the pickle, so that a damaged commit object is noticed.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import pickle
import struct
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from cloudckpt.checksum import CRC32C
from cloudckpt.errors import CheckpointCorruptError, UntrustedPickleError
from cloudckpt.gc_pause import paused_gc

__all__ = ["add_safe_metadata_globals", "dump_metadata", "load_metadata"]

_MAGIC = b"cloudckpt-metadata\0\1"
_TRAILER = struct.Struct(f"<{len(_MAGIC)}sQI")

_DCP = "torch.distributed.checkpoint"
_SAFE = {
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "BytesStorageMetadata"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "StorageMeta"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "PosixPath"),
}
_safe_lock = threading.Lock()


def _home(module: str) -> str:
    """Where all versions of Python have the classes of a module: 3.13 names its paths otherwise."""
    return "pathlib" if module == "pathlib._local" else module


def add_safe_metadata_globals(classes: Iterable[type[Any]]) -> None:
    """Lets ``.metadata`` hold instances of these classes, for custom planners and writers.

    Only name classes whose construction from arbitrary arguments is harmless.
    """
    with _safe_lock:
        for cls in classes:
            _SAFE.add((_home(cls.__module__), cls.__qualname__))


class _TrustingUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(_home(module), name)


class _AllowListUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes | memoryview, uri: str) -> None:
        super().__init__(io.BytesIO(data))
        self._uri = uri
        self._before: dict[type[Any], dict[str, Any]] = {}

    def load(self) -> Any:
        """As in the base class; a pickle that sets attributes of classes has no effect on them."""
        try:
            return super().load()
        finally:
            if any(_reverted(cls, before) for cls, before in self._before.items()):
                raise UntrustedPickleError(
                    "the checkpoint's metadata tries to change classes of torch: do not load "
                    "anything from this location",
                    uri=self._uri,
                )

    def find_class(self, module: str, name: str) -> Any:
        module = _home(module)
        if (module, name) in _SAFE:
            found = super().find_class(module, name)
            if not isinstance(found, type):
                return functools.partial(found)  # what a pickle sets on this is of no consequence
            if found not in self._before:
                self._before[found] = dict(vars(found))
            return found
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise UntrustedPickleError(
            f"the checkpoint's metadata names {module}.{name}, which is not on the allow-list: if "
            "you trust whoever can write to this location, pass trust_pickle=True, or allow the "
            "class by cloudckpt.add_safe_metadata_globals([...])",
            uri=self._uri,
        )


def _reverted(cls: type[Any], before: Mapping[str, Any]) -> bool:
    """Undoes changes of a class; returns whether there were any."""
    now = dict(vars(cls))
    added = now.keys() - before.keys()
    changed = [name for name, value in before.items() if now.get(name, _reverted) is not value]
    for name in added:
        delattr(cls, name)
    for name in changed:
        setattr(cls, name, before[name])
    return bool(added or changed)


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
        unpickler = (
            _TrustingUnpickler(io.BytesIO(body)) if trust_pickle else _AllowListUnpickler(body, uri)
        )
        with paused_gc():
            metadata = unpickler.load()
    except (UntrustedPickleError, Warning):  # warnings that the user has turned into errors
        raise
    except Exception as exc:  # a damaged pickle may raise anything
        raise CheckpointCorruptError(
            "the metadata can't be read: it is damaged or no checkpoint's", uri=uri, cause=exc
        ) from exc
    if not isinstance(metadata, Metadata):
        raise CheckpointCorruptError(
            f"the metadata is a {type(metadata).__name__}, not torch's Metadata", uri=uri
        )
    return metadata
