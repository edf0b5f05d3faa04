"""A folder of safetensors files, or a single such file, read as a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    claimed_files,
    header_length,
    parse_header,
    parse_index,
)
from cloudckpt.config import Config
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointCorruptError,
    ConfigError,
    KeyCollisionError,
    ObjectNotFoundError,
)
from cloudckpt.stores.base import ObjectInfo, ObjectStore, RangeReader
from cloudckpt.transfer.boxes import are_apart
from cloudckpt.transfer.download import download, raise_it
from cloudckpt.transfer.landing import BytesSink, StoredBytes, Wanted
from cloudckpt.transfer.retry import Retrier, check_unchanged
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.view import View
from cloudckpt.uri import CheckpointURI

__all__ = ["KeyMapping", "ModelFolder", "ModelPlaces", "renamed"]

_FIRST_READ = 128 * 1024  # holds the header of a file of about a thousand tensors
_SHARDS = "shard-"  # prefix of the files that torch's ranks write
_SHARDING = "DCP_SHARDING_INFO"  # in files that torch's HuggingFaceStorageWriter writes by ranks

KeyMapping = Callable[[str], "str | None"]
"""Maps a tensor's name in the files to its name when loaded; None leaves it out."""


def renamed(name: str, mapping: KeyMapping, uri: str) -> str | None:
    """What a mapping calls a tensor.

    Raises:
        ConfigError: If that is not one name: a stack of experts is not split.
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


_Chunk = tuple[tuple[int, ...], StoredTensor]


@dataclass(frozen=True)
class ModelFolder:
    """A model in safetensors files.

    Attributes:
        uri: Its location.
        files: Its files.
        committed: The object that makes it a model: its index, or its only file.
        chunks: By tensor, where its chunks begin, and what is stored there. Only files written by
            torch's ranks have more than one chunk per tensor.
    """

    uri: CheckpointURI
    files: Sequence[ObjectInfo]
    committed: ObjectInfo
    chunks: dict[str, list[_Chunk]]

    @classmethod
    def find(cls, store: ObjectStore, uri: CheckpointURI, config: Config) -> ModelFolder | None:
        """The model at a location; None if there is none.

        As transformers does, it takes ``model.safetensors`` if there is one, else what the index
        names; else the files that torch's HuggingFaceStorageWriter writes by ranks, without an
        index. Other files without an index are those of a save that was interrupted. The location
        may also be a file.

        Raises:
            CheckpointCorruptError: If files are missing or damaged.
            CheckpointReplacedError: If it was replaced or deleted meanwhile.
            ObjectTooLargeError: If what is in the place of the index is larger than any.
            UnsupportedTensorError: If this torch lacks a tensor's type.
        """
        retrier = Retrier(config.retry)
        head = functools.partial(_head, store, retrier)
        single = uri.prefix if uri.prefix.endswith(SUFFIX) else uri.key(SINGLE_FILE)
        if only := head(single):
            return cls._read(store, uri, lambda: [only], only, {}, config)
        if uri.prefix.endswith(SUFFIX):
            return None
        key = uri.key(INDEX)
        try:
            data, committed = retrier.call(lambda: store.get_latest(key, limit=MOST_INDEX_BYTES))
        except ObjectNotFoundError:
            found = _listed(store, uri, retrier)
            return cls._read(store, uri, lambda: found, found[0], {}, config) if found else None
        if claimed_files(data, store.uri(key)) is not None:
            return None
        names = parse_index(data, store.uri(key))

        def look(name: str) -> ObjectInfo:
            info = head(uri.key(name))
            if info is None:
                raise CheckpointCorruptError(
                    f"the model's index lists the file {name}, which does not exist: upload it, "
                    "or save the model again",
                    uri=str(uri),
                )
            return info

        def look_at_all() -> list[ObjectInfo]:
            return View(uri, config).each(look, sorted(set(names.values())))

        return cls._read(store, uri, look_at_all, committed, names, config)

    @classmethod
    def _read(
        cls,
        store: ObjectStore,
        uri: CheckpointURI,
        find: Callable[[], Sequence[ObjectInfo]],
        committed: ObjectInfo,
        names: dict[str, str],
        config: Config,
    ) -> ModelFolder:
        """Finds the files and reads their headers; for each tensor ``names`` may have its file."""
        try:
            files = find()
            return cls(uri, files, committed, cls._chunks(store, uri, files, names, config))
        except CheckpointCorruptError as error:
            check_unchanged(store, committed, str(uri), config.retry, error)
            raise

    @classmethod
    def _chunks(
        cls,
        store: ObjectStore,
        uri: CheckpointURI,
        files: Sequence[ObjectInfo],
        names: dict[str, str],
        config: Config,
    ) -> dict[str, list[_Chunk]]:
        chunks: dict[str, list[_Chunk]] = {}
        for info, header in zip(files, _headers(store, files, config), strict=True):
            offsets, aliases = _sharding(header, store.uri(info.key)), header.aliases()
            for entry in header.tensors:
                if names and uri.key(names.get(entry.name, "")) != info.key:
                    continue
                nbytes = entry.stop - entry.start
                stored = StoredBytes(
                    info.key, entry.start, nbytes, None, info.size, entry.name, info.version
                )
                at = offsets.get(entry.name, (0,) * len(entry.shape))
                chunk = (at, StoredTensor(stored, entry.dtype, entry.shape))
                chunks.setdefault(entry.name, []).append(chunk)
                for alias in aliases.get(entry.name, ()):
                    if alias not in names:  # else the index says where it is
                        chunks.setdefault(alias, []).append(chunk)
        _check(chunks, names, str(uri))
        return chunks

    def renamed(self, mapping: KeyMapping) -> ModelFolder:
        """A copy with other names.

        Raises:
            KeyCollisionError: If two tensors get one name.
        """
        chunks: dict[str, list[_Chunk]] = {}
        for name, found in self.chunks.items():
            wanted = renamed(name, mapping, str(self.uri))
            if wanted in chunks:
                raise KeyCollisionError(
                    f"key_mapping gives {name} the name {wanted}, which another tensor already "
                    "has: return different names",
                    uri=str(self.uri),
                    item=name,
                )
            if wanted is not None:
                chunks[wanted] = found
        return dataclasses.replace(self, chunks=chunks)

    @property
    def metadata(self) -> Metadata:
        """What torch calls the metadata of a checkpoint."""
        entries: dict[str, TensorStorageMetadata] = {}
        for name, chunks in self.chunks.items():
            ends = [
                [at + size for at, size in zip(offsets, stored.shape, strict=True)]
                for offsets, stored in chunks
            ]
            entries[name] = TensorStorageMetadata(
                TensorProperties(dtype=chunks[0][1].dtype),
                torch.Size(max(sizes) for sizes in zip(*ends, strict=True)),
                [
                    ChunkStorageMetadata(torch.Size(offsets), torch.Size(stored.shape))
                    for offsets, stored in chunks
                ],
            )
        return Metadata(state_dict_metadata=dict(entries), storage_data={})


class ModelPlaces(Places):
    """Where the tensors of a model are."""

    def __init__(self, folder: ModelFolder) -> None:
        super().__init__(folder.uri, None)
        self._found = {
            (name, tuple(offsets)): stored
            for name, chunks in folder.chunks.items()
            for offsets, stored in chunks
        }

    def find(
        self,
        indices: Sequence[MetadataIndex],
        store: RangeReader,
        config: Config,
        stats: TransferStats,
    ) -> list[ItemPlace]:
        found = []
        for index in indices:
            stored = self._found.get((index.fqn, tuple(index.offset or ())))
            if stored is None:
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
        return self._found[index.fqn, tuple(index.offset or ())].elements

    def sources(
        self,
        indices: Sequence[MetadataIndex],
        store: RangeReader,
        config: Config,
        damaged: Callable[[CheckpointCorruptError], None] = raise_it,
    ) -> list[StoredBytes]:
        return self.wholes(indices)  # their headers were read; they say all there is


def _head(store: ObjectStore, retrier: Retrier, key: str) -> ObjectInfo | None:
    try:
        return retrier.call(lambda: store.head(key))
    except ObjectNotFoundError:
        return None


def _listed(store: ObjectStore, uri: CheckpointURI, retrier: Retrier) -> list[ObjectInfo]:
    """The files of the ranks of torch's HuggingFaceStorageWriter; none if listing is denied."""
    below = uri.key("")
    try:
        return [
            info
            for info in store.list(below + _SHARDS, retrier.call)
            if info.key.endswith(SUFFIX) and "/" not in info.key.removeprefix(below)
        ]
    except AccessDeniedError:
        return []


def _headers(store: RangeReader, files: Sequence[ObjectInfo], config: Config) -> list[FileHeader]:
    """The headers of files, usually with one request each, concurrently."""
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


def _sharding(header: FileHeader, uri: str) -> dict[str, tuple[int, ...]]:
    """Where the tensors of a file begin in the whole ones, if torch has written it by ranks."""
    text = header.metadata.get(_SHARDING)
    if text is None:
        return {}
    try:
        found = json.loads(text)
        offsets = {entry.name: found[entry.name]["saved_offsets"] for entry in header.tensors}
        for entry in header.tensors:
            at = offsets[entry.name]
            if len(at) != len(entry.shape) or not all(type(n) is int and n >= 0 for n in at):
                raise ValueError(f"the saved_offsets of {entry.name} are invalid")
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise CheckpointCorruptError(
            "invalid description of the shards in the header of the file: download or save the "
            "file again",
            uri=uri,
        ) from exc
    return {name: tuple(at) for name, at in offsets.items()}


def _check(chunks: dict[str, list[_Chunk]], names: dict[str, str], uri: str) -> None:
    missing = names.keys() - chunks.keys()
    if missing:
        first = min(missing)
        raise CheckpointCorruptError(
            f"the model's index says which file contains {first}, but that file does not "
            "contain it: download or save the model again",
            uri=uri,
            item=first,
        )
    for name, found in chunks.items():
        if len(found) == 1 and not any(found[0][0]):
            continue
        kinds = {(stored.dtype, len(stored.shape)) for _, stored in found}
        if len({at for at, _ in found}) < len(found) or len(kinds) > 1:
            raise CheckpointCorruptError(
                f"{name} is in more than one file: add an index (model.safetensors.index.json) "
                "that says which file to read",
                uri=uri,
                item=name,
            )
        ends = [
            [at + size for at, size in zip(offsets, stored.shape, strict=True)]
            for offsets, stored in found
        ]
        whole = math.prod(max(sizes) for sizes in zip(*ends, strict=True))
        boxes = [tuple(zip(at, stored.shape, strict=True)) for at, stored in found]
        filled = sum(math.prod(stored.shape) for _, stored in found)
        if filled != whole or not are_apart(boxes):
            raise CheckpointCorruptError(
                f"the shards of {name} do not make up a whole tensor: files are missing, or "
                "come from two saves",
                uri=uri,
                item=name,
            )
