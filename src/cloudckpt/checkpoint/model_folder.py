"""Reads a folder of safetensors files, or a single such file, as a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from cloudckpt.checkpoint.archives import StoredTensor
from cloudckpt.checkpoint.places import ItemPlace, Places
from cloudckpt.checkpoint.safetensors import (
    INDEX,
    LENGTH_BYTES,
    MOST_INDEX_BYTES,
    SINGLE_FILE,
    SUFFIX,
    FileHeader,
    header_length,
    is_claim,
    parse_header,
    parse_index,
)
from cloudckpt.config import Config
from cloudckpt.errors import (
    CheckpointCorruptError,
    ConfigError,
    KeyCollisionError,
    ObjectNotFoundError,
)
from cloudckpt.stores.base import ObjectInfo, ObjectStore, RangeReader
from cloudckpt.transfer.download import download, raise_it
from cloudckpt.transfer.landing import BytesSink, StoredBytes, Wanted
from cloudckpt.transfer.retry import Retrier, check_unchanged
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.view import View
from cloudckpt.uri import CheckpointURI

__all__ = ["KeyMapping", "ModelFolder", "ModelPlaces", "renamed"]

_FIRST_READ = 128 * 1024  # bytes; they hold the header of a file of about a thousand tensors

KeyMapping = Callable[[str], "str | None"]
"""Maps a tensor's name in the files to its name when loaded; None leaves the tensor out."""


def renamed(name: str, mapping: KeyMapping, uri: str) -> str | None:
    """Returns the name that a mapping gives to a tensor; None if it leaves the tensor out.

    Raises:
        ConfigError: If the mapping returns anything but one name: a tensor can't be split.
    """
    wanted: object = mapping(name)
    if wanted is None or isinstance(wanted, str):
        return wanted
    raise ConfigError(
        f"key_mapping returned {wanted!r}: return one name for each tensor, or None to leave it "
        "out; to split a tensor, such as a stack of experts, save its parts under their names",
        uri=uri,
        item=name,
    )


@dataclass(frozen=True)
class ModelFolder:
    """A model in safetensors files.

    Attributes:
        uri: The location of the model.
        files: The files that hold its tensors.
        committed: The object whose presence makes the model: its index, or its only file.
        tensors: The stored tensors, by name.
    """

    uri: CheckpointURI
    files: Sequence[ObjectInfo]
    committed: ObjectInfo
    tensors: dict[str, StoredTensor]

    @classmethod
    def find(cls, store: ObjectStore, uri: CheckpointURI, config: Config) -> ModelFolder | None:
        """Reads the description of the model at a location; returns None if there is no model.

        Like transformers, it takes ``model.safetensors`` if that exists, else the files that the
        index names. Other files without an index belong to an interrupted save. The location may
        also be a file.

        Args:
            store: The store of ``uri``.
            uri: The location: a folder, or a safetensors file.
            config: Options.

        Raises:
            CheckpointCorruptError: If files are missing or damaged.
            CheckpointReplacedError: If the model was replaced or deleted meanwhile.
            ObjectTooLargeError: If the index is larger than any valid index.
            UnsupportedTensorError: If this torch lacks a tensor's type.
        """
        retrier = Retrier(config.retry)
        names: dict[str, str] = {}
        single = uri.prefix if uri.prefix.endswith(SUFFIX) else uri.key(SINGLE_FILE)
        committed = only = _head(store, retrier, single)
        if committed is None:
            key = uri.key(INDEX)
            if uri.prefix.endswith(SUFFIX):
                return None
            try:
                data, committed = retrier.call(lambda: store.get(key, limit=MOST_INDEX_BYTES))
            except ObjectNotFoundError:
                return None
            if is_claim(data):
                return None
            names = parse_index(data, store.uri(key))

        def look(name: str) -> ObjectInfo:
            info = _head(store, retrier, uri.key(name))
            if info is None:
                raise CheckpointCorruptError(
                    f"the model's index lists the file {name}, which does not exist: upload it, "
                    "or save the model again",
                    uri=str(uri),
                )
            return info

        try:
            listed = sorted(set(names.values()))
            files = View(uri, config).each(look, listed) if only is None else [only]
            return cls(uri, files, committed, cls._tensors(store, uri, files, names, config))
        except CheckpointCorruptError as error:
            check_unchanged(store, committed, str(uri), config.retry, error)
            raise

    @classmethod
    def _tensors(
        cls,
        store: ObjectStore,
        uri: CheckpointURI,
        files: Sequence[ObjectInfo],
        names: dict[str, str],
        config: Config,
    ) -> dict[str, StoredTensor]:
        found: dict[str, StoredTensor] = {}
        for info, header in zip(files, _headers(store, files, config), strict=True):
            aliases = header.aliases()
            for entry in header.tensors:
                if names and uri.key(names.get(entry.name, "")) != info.key:
                    continue
                nbytes = entry.stop - entry.start
                stored = StoredBytes(
                    info.key, entry.start, nbytes, None, info.size, entry.name, info.version
                )
                # aliases for which the index names no file
                others = (name for name in aliases.get(entry.name, ()) if name not in names)
                for name in (entry.name, *others):
                    found[name] = StoredTensor(stored, entry.dtype, entry.shape)
        if missing := names.keys() - found.keys():
            first = min(missing)
            raise CheckpointCorruptError(
                f"the model's index says which file contains {first}, but that file does not "
                "contain it: download or save the model again",
                uri=str(uri),
                item=first,
            )
        return found

    def renamed(self, mapping: KeyMapping) -> ModelFolder:
        """Returns a copy whose tensors have the names that ``mapping`` gives them.

        Raises:
            ConfigError: If the mapping returns anything but one name or None for a tensor.
            KeyCollisionError: If two tensors get the same name.
        """
        tensors: dict[str, StoredTensor] = {}
        for name, found in self.tensors.items():
            wanted = renamed(name, mapping, str(self.uri))
            if wanted in tensors:
                raise KeyCollisionError(
                    f"key_mapping gives {name} the name {wanted}, which another tensor already "
                    "has: return different names",
                    uri=str(self.uri),
                    item=name,
                )
            if wanted is not None:
                tensors[wanted] = found
        return dataclasses.replace(self, tensors=tensors)

    @property
    def metadata(self) -> Metadata:
        """Describes the model in torch's metadata, with each tensor as one chunk."""
        entries: dict[str, Any] = {}
        for name, stored in self.tensors.items():
            size = torch.Size(stored.shape)
            whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            properties = TensorProperties(dtype=stored.dtype)
            entries[name] = TensorStorageMetadata(properties, size, [whole])
        return Metadata(state_dict_metadata=entries, storage_data={})


class ModelPlaces(Places):
    """Locates the tensors of a model."""

    def __init__(self, folder: ModelFolder) -> None:
        super().__init__(folder.uri, None)
        self._tensors = folder.tensors

    def find(
        self,
        indices: Sequence[MetadataIndex],
        store: RangeReader,
        config: Config,
        stats: TransferStats,
    ) -> list[ItemPlace]:
        found = []
        for index in indices:
            stored = self._tensors.get(index.fqn)
            if stored is None or any(index.offset or ()):
                raise self._corrupt(
                    f"{index.fqn} has no shard at offsets {index.offset}: the model's files do "
                    "not fit its metadata; save the model again",
                    index,
                )
            found.append(ItemPlace(stored.elements, stored))
        return found

    def wholes(self, indices: Sequence[MetadataIndex]) -> list[StoredBytes]:
        return [self.whole(index) for index in indices]

    def whole(self, index: MetadataIndex) -> StoredBytes:
        return self._tensors[index.fqn].elements

    def sources(
        self,
        indices: Sequence[MetadataIndex],
        store: RangeReader,
        config: Config,
        damaged: Callable[[CheckpointCorruptError], None] = raise_it,
    ) -> list[StoredBytes]:
        return self.wholes(indices)  # the headers were read, and have all locations


def _head(store: ObjectStore, retrier: Retrier, key: str) -> ObjectInfo | None:
    try:
        return retrier.call(lambda: store.head(key))
    except ObjectNotFoundError:
        return None


def _headers(store: RangeReader, files: Sequence[ObjectInfo], config: Config) -> list[FileHeader]:
    """Reads the headers of files concurrently, usually with one request each."""
    stats = TransferStats()

    def fetched(stops: Sequence[int]) -> list[bytearray]:
        sinks = [BytesSink(stop) for stop in stops]
        wanted = [
            Wanted(
                StoredBytes(info.key, 0, info.size, None, info.size, info.key, info.version),
                0,
                stop,
                to,
                True,
            )
            for info, stop, to in zip(files, stops, sinks, strict=True)
        ]
        download(store, wanted, config, stats)
        return [bytearray(sink.data) for sink in sinks]

    first = fetched([min(info.size, _FIRST_READ) for info in files])
    ends = [
        LENGTH_BYTES + header_length(data[:LENGTH_BYTES], info.size, store.uri(info.key))
        for info, data in zip(files, first, strict=True)
    ]
    if any(end > len(data) for end, data in zip(ends, first, strict=True)):
        first = fetched(ends)
    return [
        parse_header(memoryview(data)[LENGTH_BYTES:end], info.size, store.uri(info.key))
        for info, data, end in zip(files, first, ends, strict=True)
    ]
