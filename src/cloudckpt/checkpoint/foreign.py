"""Parses torch's pickle at the beginning of ``.metadata``, from any writer, with checks."""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from cloudckpt.checkpoint.building import Building, DescriptionError, UnknownNameError
from cloudckpt.checkpoint.stubs import Stub, full_name, home, unpickle
from cloudckpt.checkpoint.torch_private import OldTensorProperties, StorageInfo, with_strides
from cloudckpt.checkpoint.trailer import pickle_in
from cloudckpt.errors import CheckpointCorruptError, UntrustedPickleError
from cloudckpt.fork import module_lock
from cloudckpt.gc_pause import paused_gc

__all__ = ["add_safe_metadata_globals", "load_metadata"]

_SAFE: set[type[Any]] = set()
_safe_lock = module_lock()


def add_safe_metadata_globals(classes: Iterable[type[Any]]) -> None:
    """Allows ``.metadata`` to contain instances of these classes, for custom planners and writers.

    It holds for this process. Only name classes whose construction from arbitrary arguments is
    harmless. A class with the full name of an earlier one replaces it.

    Args:
        classes: The classes to allow.
    """
    with _safe_lock:
        # replaces a class that is defined again
        by_name = {_name(cls): cls for cls in (*_SAFE, *classes)}
        _SAFE.clear()
        _SAFE.update(by_name.values())


def _name(cls: type[Any]) -> str:
    return full_name(cls.__module__, cls.__qualname__)


class _TrustingUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(home(module), name)


def load_metadata(data: bytes | bytearray, uri: str, *, trust_pickle: bool = False) -> Metadata:
    """Parses the pickle in ``.metadata``, of cloudckpt or of another writer.

    Args:
        data: The bytes of the commit object.
        uri: The commit object, for messages.
        trust_pickle: Whether the pickle may run any code, instead of only classes on the
            allow-list.

    Raises:
        UntrustedPickleError: If it names a class or function that is not on the allow-list.
        CheckpointCorruptError: If it is damaged, or not metadata.
    """
    body = pickle_in(data, uri)
    try:
        with paused_gc():
            if trust_pickle:
                metadata = _TrustingUnpickler(io.BytesIO(body)).load()
            else:
                with _safe_lock:
                    allowed = {_name(cls): cls for cls in _SAFE}
                stubs = unpickle(body)
                metadata = _MetadataBuilding(allowed).value(stubs)
    except Warning:
        raise
    except UnknownNameError as unknown:
        raise UntrustedPickleError(
            f"the checkpoint's metadata needs the class {unknown}, which is not on the "
            "allow-list: if you trust everyone who can write to this location, pass "
            "trust_pickle=True, or allow the class by "
            "cloudckpt.format_utils.add_safe_metadata_globals([...])",
            uri=uri,
        ) from None
    except Exception as exc:  # the user's classes, or any if all are trusted, may raise anything
        raise CheckpointCorruptError(
            "the metadata can't be read: it is damaged, or not the metadata of a checkpoint",
            uri=uri,
            cause=exc,
        ) from exc
    if not isinstance(metadata, Metadata):
        raise CheckpointCorruptError(
            f"the metadata is a {type(metadata).__name__}, not torch's Metadata: this is not a "
            "checkpoint, or it is damaged",
            uri=uri,
        )
    return metadata


_new = object.__new__
_NONE = type(None)
_END = 1 << 63
_DCP = "torch.distributed.checkpoint.metadata"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
_PLACE = ["relative_path", "offset", "length"]
_PROPERTIES: Mapping[str, type[Any]] = {
    f"{_DCP}.TensorProperties": TensorProperties,
    f"{_OLD}.TensorProperties": OldTensorProperties,
}
_ENCODINGS = (f"{_DCP}._MEM_FORMAT_ENCODING", f"{_OLD}.MEM_FORMAT_ENCODING")
_FORMATS = {
    "TORCH_CONTIGUOUS_FORMAT": torch.contiguous_format,
    "TORCH_CHANNELS_LAST": torch.channels_last,
    "TORCH_PRESERVE_FORMAT": torch.preserve_format,
}


class _MetadataBuilding(Building):
    """Builds torch's metadata from stubs, after checking every field."""

    def __init__(self, allowed: Mapping[str, Any]) -> None:
        super().__init__(allowed)
        self._known = {
            f"{_DCP}.Metadata": self._metadata,
            f"{_DCP}.StorageMeta": self._storage_meta,
            f"{_DCP}.TensorStorageMetadata": self._tensor,
            f"{_DCP}.BytesStorageMetadata": self._no_tensor,
            f"{_DCP}.ChunkStorageMetadata": self._chunk,
            f"{_DCP}.MetadataIndex": self._index,
            "torch.distributed.checkpoint.filesystem._StorageInfo": self._place,
            **dict.fromkeys(_PROPERTIES, self._properties),
        }

    def instance(self, stub: Stub) -> Any:
        if stub.is_call or stub.name not in self._known:
            raise UnknownNameError(stub.name)
        return self._known[stub.name](stub)

    def _metadata(self, stub: Stub) -> Metadata:
        fields = dict(_fields(stub))
        entries = self._items(fields.pop("state_dict_metadata", None))
        metadata = Metadata(entries, storage_data=self._places(fields.pop("storage_data", None)))
        for name, described in fields.items():  # libraries add fields that torch does not have
            setattr(metadata, name, self.value(described))
        _check_fields(metadata, storage_meta=(StorageMeta, _NONE), version=(str, _NONE))
        return metadata

    def _items(self, described: Any) -> dict[str, Any]:
        entries: dict[str, Any] = self.value(described)
        _expect(entries, (dict,), "state_dict_metadata")
        of_the_user = [cls for cls in self.allowed.values() if isinstance(cls, type)]
        kinds = (TensorStorageMetadata, BytesStorageMetadata, *of_the_user)
        for fqn, entry in entries.items():
            _expect(fqn, (str,), "the name of an item")
            _expect(entry, kinds, "the metadata of an item")
        return entries

    def _storage_meta(self, stub: Stub) -> StorageMeta:
        meta = StorageMeta()
        for name, described in _fields(stub).items():
            setattr(meta, name, self.value(described))
        _check_fields(
            meta,
            checkpoint_id=(str, os.PathLike, _NONE),
            save_id=(str, _NONE),
            load_id=(str, _NONE),
            modules=(list,),
        )
        return meta

    def _places(self, described: Any) -> Any:
        """Builds ``storage_data``: the location of each item.

        Other libraries, such as OLMo-core, have classes of their own with the fields of torch's.
        Only the fields are used, so the names of these classes do not matter.
        """
        if type(described) is not dict:
            return self.value(described)
        places = {}
        for key, entry in described.items():
            place = self._place(entry) if self._is_place(entry) else self.value(entry)
            places[self.value(key)] = place
        if len(places) != len(described):
            raise DescriptionError("invalid metadata: storage_data contains an item twice")
        return places

    def _is_place(self, entry: Any) -> bool:
        if not isinstance(entry, Stub) or entry.is_call or entry.name in self.allowed:
            return False
        return type(entry.state) is dict and list(entry.state)[:3] == _PLACE

    def _place(self, stub: Stub) -> StorageInfo:
        path, offset, length, transforms = _values(stub, _PLACE, "transform_descriptors")
        if type(path) is not str or type(offset) is not int or type(length) is not int:
            raise DescriptionError(
                "invalid metadata: the location of an item has fields of wrong types"
            )
        if not (0 <= offset < _END and 0 <= length < _END - offset):
            raise DescriptionError(
                f"invalid metadata: the offset or length of an item in {path[:200]!r} is out of "
                "range"
            )
        if transforms is None:
            return StorageInfo(path, offset, length)
        transforms = self.value(transforms)
        _expect(transforms, (list, tuple), "transform_descriptors")
        for transform in transforms:
            _expect(transform, (str,), "transform_descriptors")
        return StorageInfo(path, offset, length, transforms)

    def _index(self, stub: Stub) -> MetadataIndex:
        fqn, hint, offset = _values(stub, ["fqn", "index", "offset"])
        if type(fqn) is not str or not (offset is None or type(offset) is torch.Size):
            raise DescriptionError(
                "invalid metadata: the index of an item has fields of wrong types"
            )
        if hint is not None and (type(hint) is not int or not 0 <= hint < _END):
            raise DescriptionError(f"invalid metadata: the index of {fqn[:200]} is out of range")
        index = _new(MetadataIndex)
        fields = vars(index)  # the constructor of this frozen class takes four times as long
        fields["fqn"], fields["index"] = fqn, hint
        if offset is not None:
            fields["offset"] = _size(offset)
        return index

    def _tensor(self, stub: Stub) -> TensorStorageMetadata:
        described, size, chunks = _values(stub, ["properties", "size", "chunks"])
        properties = self.value(described)
        _expect(properties, tuple(_PROPERTIES.values()), "properties")
        _expect(chunks, (list,), "chunks")
        if math.prod(_size(size)) * properties.dtype.itemsize >= _END:
            raise DescriptionError(
                "invalid metadata: a tensor has more bytes than a 64-bit number can count"
            )
        built = [self.value(chunk) for chunk in chunks]
        rank = len(size)
        for chunk in built:
            if type(chunk) is not ChunkStorageMetadata:
                raise DescriptionError(
                    "invalid metadata: a chunk of a tensor is not a ChunkStorageMetadata"
                )
            if len(chunk.offsets) != rank or len(chunk.sizes) != rank:
                raise DescriptionError(
                    "invalid metadata: a chunk does not have as many dimensions as its tensor"
                )
        return TensorStorageMetadata(properties, size, built)

    def _no_tensor(self, stub: Stub) -> BytesStorageMetadata:
        _values(stub, [])
        return BytesStorageMetadata()

    def _chunk(self, stub: Stub) -> ChunkStorageMetadata:
        offsets, sizes = _values(stub, ["offsets", "sizes"])
        return ChunkStorageMetadata(_size(offsets), _size(sizes))

    def _properties(self, stub: Stub) -> Any:
        state = stub.state
        if type(state) is not tuple or not 5 <= len(state) <= 6 or stub.arguments or stub.contents:
            raise DescriptionError("invalid metadata: a tensor does not have 5 or 6 properties")
        encoding = self._memory_format(state[3])
        dtype, layout, requires_grad, pin_memory = map(self.value, (*state[:3], state[4]))
        strides = self.value(state[5]) if len(state) == 6 else None
        if strides is not None and not (
            type(strides) is tuple and all(type(stride) is int for stride in strides)
        ):
            raise DescriptionError("invalid metadata: the strides of a tensor are not integers")
        made = with_strides(
            _PROPERTIES[stub.name](dtype, layout, requires_grad, encoding, pin_memory), strides
        )
        _check_fields(
            made,
            dtype=(torch.dtype,),
            layout=(torch.layout,),
            requires_grad=(bool,),
            pin_memory=(bool,),
        )
        return made

    def _memory_format(self, described: Any) -> torch.memory_format:
        """Builds a memory format from an enum member's number, or from its name (Python 3.11.0)."""
        if isinstance(described, Stub) and described.name in _ENCODINGS:
            (number,) = described.arguments
            _expect(number, (int,), "memory_format")
            if described.state is not None or described.contents:
                raise DescriptionError("invalid metadata: unexpected state of a memory format")
            return dict(enumerate(_FORMATS.values()))[number]
        outer, _, member = getattr(described, "name", "").rpartition(".")
        if isinstance(described, Stub) or outer not in _ENCODINGS:
            raise DescriptionError("invalid metadata: unknown memory format")
        return _FORMATS[member]


def _size(described: Any) -> torch.Size:
    if type(described) is not torch.Size:
        raise DescriptionError("invalid metadata: a size or an offset is not a torch.Size")
    for dim in described:
        if type(dim) is not int or not 0 <= dim < _END:
            raise DescriptionError(
                "invalid metadata: a size or an offset is negative, too large, or not an integer"
            )
    return described


def _fields(stub: Stub) -> dict[str, Any]:
    """Returns the named fields of an instance, as stubs.

    Raises:
        DescriptionError: If the instance consists of anything else.
    """
    fields = {} if stub.state is None else stub.state
    if type(fields) is not dict or stub.arguments or stub.contents or stub.keywords:
        raise DescriptionError("invalid metadata: an object has more than named fields")
    for name in fields:
        if type(name) is not str or name.startswith("__"):
            raise DescriptionError("invalid metadata: a field of an object has no valid name")
    return fields


def _values(stub: Stub, names: list[str], *more: str) -> list[Any]:
    """Returns the values of these fields, as stubs; None for those of ``more`` that are missing.

    Raises:
        DescriptionError: If the instance has further fields.
    """
    if type(fields := stub.state) is dict and list(fields) == names and not stub.arguments:
        return [*fields.values()] + [None] * len(more)
    fields = dict(_fields(stub))
    values = [fields.pop(name, None) for name in (*names, *more)]
    if fields:
        raise DescriptionError(
            "the metadata has fields that this version does not know "
            f"({', '.join(fields)[:200]}): was it written by a newer torch?"
        )
    return values


def _check_fields(made: Any, **kinds: tuple[type[Any], ...]) -> None:
    for name, of in kinds.items():
        _expect(getattr(made, name), of, name)


def _expect(value: Any, kinds: tuple[type[Any], ...], what: str) -> None:
    if not isinstance(value, kinds) or (type(value) is bool and bool not in kinds):
        raise DescriptionError(
            f"invalid metadata: {what} is a {type(value).__name__}, not "
            f"{' or '.join(kind.__name__ for kind in kinds)}"
        )
