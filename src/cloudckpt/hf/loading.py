"""``load``: reads a model from a folder of safetensors files, or from one such file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from cloudckpt.api import ToLoad, load_prepared
from cloudckpt.checkpoint.archives import StoredTensor
from cloudckpt.checkpoint.places import ItemPlace, Places
from cloudckpt.config import Config
from cloudckpt.dcp.load_plan import CloudLoadPlanner
from cloudckpt.dcp.meeting import collective
from cloudckpt.dcp.reader import CloudStorageReader, KeyMapping
from cloudckpt.dcp.report import LoadReport
from cloudckpt.errors import (
    CheckpointCorruptError,
    ConfigError,
    KeyCollisionError,
    ObjectNotFoundError,
)
from cloudckpt.hf.safetensors import (
    INDEX,
    LENGTH_BYTES,
    MOST_INDEX_BYTES,
    SINGLE_FILE,
    SUFFIX,
    header_length,
    is_claim,
    parse_header,
    parse_index,
)
from cloudckpt.stores.base import ObjectInfo, ObjectStore
from cloudckpt.transfer.download import Receiver
from cloudckpt.transfer.landing import StoredBytes
from cloudckpt.transfer.retry import Retrier, check_unchanged
from cloudckpt.transfer.view import View
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["ModelFolder", "load", "renamed"]

_FIRST_READ = 128 * 1024  # bytes; they hold the header of a file of about a thousand tensors


@collective("cloudckpt.hf.load")
def load(
    state_dict: dict[str, Any],
    uri: URILike,
    *,
    key_mapping: KeyMapping | None = None,
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    config: Config | None = None,
) -> LoadReport:
    """Loads a model in safetensors files into a state dict, in place.

    All ranks must call it. Each rank reads only the bytes of its shards, directly into tensors that
    are contiguous in host memory, and converts types where they differ. The files have no checksums
    of their own: TLS and the store protect the bytes. This function checks that headers and index
    are valid, and that all ranges of a file are read from one version of the file.

    Args:
        state_dict: The state dict to load into: its keys are the names of the tensors to load, and
            its tensors are filled in place; of a sharded tensor, each rank fills its own shards.
        uri: The folder of the model, or one safetensors file.
        key_mapping: Called with each name in the files; returns the tensor's name in the state
            dict, or None to leave the tensor out.
        strict: Whether it is an error if the model lacks a key, or a tensor does not fit. If False,
            such tensors keep their values, for example tied weights, which most models store once.
        process_group: The ranks that load; None for all.
        no_dist: Whether this process loads alone.
        config: Options; None reads them from the environment.

    Returns:
        A report with the names that were loaded, missing, unexpected, or converted.

    Raises:
        InvalidURIError: If ``uri`` is not a valid location.
        CheckpointNotFoundError: If there is no model at ``uri``.
        MissingKeyError: If the model lacks a key of the state dict, and ``strict`` is on.
        ShapeMismatchError: If a shape differs, and ``strict`` is on.
        KeyCollisionError: If ``key_mapping`` gives two tensors the same name, or tensors that share
            memory have different values in the files.
        ConfigError: If ``key_mapping`` returns anything but one name or None.
        UnsupportedTensorError: If cloudckpt does not know a tensor's element type, or a tensor of
            the state dict can't be filled.
        CheckpointCorruptError: If files are missing, truncated, or violate the format.
        CheckpointReplacedError: If the model was replaced during each of several tries to load it.
        StoreError: If the store refuses or stays unreachable.
        RanksFailedError: If ranks failed for different reasons, or outside of cloudckpt.
        ProcessGroupError: If a rank died or the ranks lost each other.
    """

    def prepare() -> ToLoad:
        reader = CloudStorageReader(uri, config=config, key_mapping=key_mapping)
        return ToLoad(reader, CloudLoadPlanner(reader.checkpoint_id, strict=strict))

    return load_prepared(state_dict, prepare, uri, process_group=process_group, no_dist=no_dist)


def renamed(names: Iterable[str], mapping: KeyMapping | None, uri: CheckpointURI) -> dict[str, str]:
    """Returns a dict from the new name of each tensor, given by a mapping, to its old name.

    Without a mapping, the names stay. Tensors for which the mapping returns None are left out.

    Raises:
        ConfigError: If the mapping returns anything but one name or None: a tensor can't be split.
        KeyCollisionError: If two tensors get the same name.
    """
    new_names: dict[str, str] = {}
    for name in names:
        wanted: object = name if mapping is None else mapping(name)
        if wanted is None:
            continue
        if not isinstance(wanted, str):
            raise ConfigError(
                f"key_mapping returned {wanted!r}: return one name for each tensor, or None to "
                "leave it out; to split a tensor, such as a stack of experts, save its parts "
                "under their names",
                uri=str(uri),
                item=name,
            )
        if wanted in new_names:
            raise KeyCollisionError(
                f"key_mapping gives {name} and {new_names[wanted]} the name {wanted}: return "
                "different names",
                uri=str(uri),
                item=name,
            )
        new_names[wanted] = name
    return new_names


@dataclass(frozen=True)
class ModelFolder:
    """A model in safetensors files; ``CloudStorageReader`` reads it like a checkpoint.

    Attributes:
        uri: The location of the model.
        committed: The object whose presence makes the model: its index, or its only file.
        tensors: The stored tensors, by name.
    """

    uri: CheckpointURI
    committed: ObjectInfo
    tensors: dict[str, StoredTensor]

    @classmethod
    def find(cls, store: ObjectStore, uri: CheckpointURI, config: Config) -> ModelFolder | None:
        """Reads the description of the model at a location; returns None if there is no model.

        In a folder, the model is ``model.safetensors`` if that exists, else the files that the
        index names, as in transformers. Without either, there is no model, whatever other files
        there are: they may be those of an interrupted save. The same applies if a claim is stored
        in place of the index, a text that says that a model is being written.

        Args:
            store: The store of ``uri``.
            uri: The location: a folder, or a safetensors file.
            config: Options.

        Raises:
            CheckpointCorruptError: If files are missing or damaged.
            CheckpointReplacedError: If the model was replaced or deleted meanwhile.
            ObjectTooLargeError: If the index is larger than any valid index.
            StoreError: If the store refuses or stays unreachable.
            UnsupportedTensorError: If cloudckpt does not know a tensor's element type.
        """
        retrier, is_file = Retrier(config.retry), uri.prefix.endswith(SUFFIX)
        single, index = uri.prefix if is_file else uri.key(SINGLE_FILE), uri.key(INDEX)
        names: dict[str, str] = {}
        keys = [single]
        try:
            committed = retrier.call(lambda: store.head(single))
        except ObjectNotFoundError:
            try:
                if is_file:
                    return None
                data, committed = retrier.call(lambda: store.get(index, limit=MOST_INDEX_BYTES))
            except ObjectNotFoundError:
                return None
            if is_claim(data):
                return None
            names = parse_index(data, store.uri(index))
            keys = sorted({uri.key(name) for name in names.values()})
        try:
            files = View(uri, config).each(lambda key: _read_file(store, retrier, key), keys)
            return cls(uri, committed, _tensors(uri, files, names))
        except CheckpointCorruptError as error:
            check_unchanged(store, committed, str(uri), config.retry, error)
            raise

    def renamed(self, mapping: KeyMapping) -> ModelFolder:
        """Returns a copy whose tensors have the names that ``mapping`` gives them.

        Raises:
            ConfigError: If the mapping returns anything but one name or None for a tensor.
            KeyCollisionError: If two tensors get the same name.
        """
        names = renamed(self.tensors, mapping, self.uri)
        tensors = {wanted: self.tensors[name] for wanted, name in names.items()}
        return dataclasses.replace(self, tensors=tensors)

    @property
    def metadata(self) -> Metadata:
        """The metadata of the model in torch's form, in which each tensor is one chunk."""
        entries: dict[str, Any] = {}
        for name, stored in self.tensors.items():
            size = torch.Size(stored.shape)
            whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            properties = TensorProperties(dtype=stored.dtype)
            entries[name] = TensorStorageMetadata(properties, size, [whole])
        return Metadata(state_dict_metadata=entries, storage_data={})

    @property
    def places(self) -> Places:
        """An object that locates the tensors' bytes in the files of the model."""
        return _ModelPlaces(self)


def _read_file(store: ObjectStore, retrier: Retrier, key: str) -> dict[str, StoredTensor]:
    """Returns the tensors of a file by name; reads its header, usually in two requests.

    All bytes are read from one version of the file.

    Raises:
        CheckpointCorruptError: If the file does not exist, was replaced, or is damaged.
        UnsupportedTensorError: If cloudckpt does not know a tensor's element type.
    """
    uri = store.uri(key)
    try:
        info = retrier.call(lambda: store.head(key))
    except ObjectNotFoundError:
        raise CheckpointCorruptError(
            "the model's index lists this file, which does not exist: upload it, or save the "
            "model again",
            uri=uri,
        ) from None
    receiver = Receiver(store, retrier, lambda count: None)

    def first(nbytes: int) -> memoryview:
        view = memoryview(bytearray(min(nbytes, info.size)))
        if view:
            receiver.receive(key, 0, [view], size=info.size, item=key, version=info.version)
        return view

    data = first(_FIRST_READ)
    end = LENGTH_BYTES + header_length(data[:LENGTH_BYTES], info.size, uri)
    data = data if end <= len(data) else first(end)
    return parse_header(data[LENGTH_BYTES:end], info, uri)


def _tensors(
    uri: CheckpointURI, files: Sequence[dict[str, StoredTensor]], names: dict[str, str]
) -> dict[str, StoredTensor]:
    """Returns the tensors of a model by name.

    Args:
        uri: The location of the model.
        files: The tensors of each file, by name.
        names: For each tensor that the index lists, the name of its file; empty without an index.

    Raises:
        CheckpointCorruptError: If a file lacks a tensor that the index says it has.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in file.items():
            # the index may lack tied names
            key = uri.key(names.get(name) or names.get(tensor.elements.item, ""))
            if not names or key == tensor.elements.key:
                tensors[name] = tensor
    if missing := names.keys() - tensors.keys():
        first = min(missing)
        raise CheckpointCorruptError(
            f"the model's index says which file contains {first}, but that file does not "
            "contain it: download or save the model again",
            uri=str(uri),
            item=first,
        )
    return tensors


class _ModelPlaces(Places):
    """Locates the tensors of a model, whose headers were read, without further requests."""

    def __init__(self, folder: ModelFolder) -> None:
        super().__init__(folder.uri, None)
        self._tensors = folder.tensors

    def find(self, indices: Sequence[MetadataIndex], *_: Any, **__: Any) -> list[ItemPlace]:
        return [ItemPlace(one.elements, one) for one in map(self._tensor, indices)]

    def wholes(self, indices: Sequence[MetadataIndex]) -> list[StoredBytes]:
        return [self._tensor(index).elements for index in indices]

    def sources(self, indices: Sequence[MetadataIndex], *_: Any, **__: Any) -> list[StoredBytes]:
        return self.wholes(indices)

    def _tensor(self, index: MetadataIndex) -> StoredTensor:
        if index.fqn not in self._tensors or any(index.offset or ()):
            raise self._corrupt(
                f"{index.fqn} has no shard at offsets {index.offset}: the model's files do not "
                "match the metadata that the load was planned with; load or save the model again",
                index.fqn,
            )
        return self._tensors[index.fqn]
