"""Builds torch's metadata from what a pickle describes, once every field of it has been checked."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
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

from cloudckpt.checkpoint.described import Building, DescriptionError, UnknownNameError
from cloudckpt.checkpoint.inert_pickle import NO_STATE, Called, Dict, Global, describe
from cloudckpt.checkpoint.torch_private import OldTensorProperties, StorageInfo, with_strides

__all__ = ["build"]

_new = object.__new__
_NONE = type(None)

_SHARED = 8
"""How many entries a byte of the pickle may stand for, where containers occur several times."""

_END = 1 << 63
_DCP = "torch.distributed.checkpoint.metadata"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
_INDEX = f"{_DCP}.MetadataIndex"
_CHUNK = f"{_DCP}.ChunkStorageMetadata"
_PLACE = ["relative_path", "offset", "length"]
_INDEX_FIELDS = ["fqn", "index", "offset"]
_CHUNK_FIELDS = ["offsets", "sizes"]
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


def build(data: bytes | bytearray, end: int, allowed: Mapping[str, Any]) -> Any:
    """What the pickle in the first ``end`` bytes of ``data`` describes.

    Args:
        data: Where the pickle is.
        end: Where it must have ended.
        allowed: The classes of the user, by their full names.

    Raises:
        UnknownNameError: If it names what is neither known here nor allowed.
        RefusedError: If it does what no writer does.
        ValueError: If it is damaged, or makes no sense.
    """
    described = describe(data, end, {"torch.Size": _size})
    return _MetadataBuilding(allowed, _SHARED * end).value(described)


def _size(arguments: Any) -> torch.Size:
    (dims,) = arguments
    if type(dims) is not tuple:
        raise ValueError("a size of what is no tuple")
    for dim in dims:
        if type(dim) is not int or not 0 <= dim < _END:
            raise ValueError("a size of what is no number, or out of range")
    return torch.Size(dims)


class _MetadataBuilding(Building):
    """Builds torch's metadata, once every field of it has been checked."""

    def __init__(self, allowed: Mapping[str, Any], entries: int) -> None:
        super().__init__(allowed, entries)
        self._known: dict[str, Callable[[Called], Any]] = {
            f"{_DCP}.Metadata": self._metadata,
            f"{_DCP}.StorageMeta": self._storage_meta,
            f"{_DCP}.TensorStorageMetadata": self._tensor,
            f"{_DCP}.BytesStorageMetadata": self._no_tensor,
            _CHUNK: self._chunk,
            _INDEX: self._index,
            "torch.distributed.checkpoint.filesystem._StorageInfo": self._place,
            **dict.fromkeys(_PROPERTIES, self._properties),
        }

    def instance(self, name: str, called: Called) -> Any:
        if called.form != "new" or name not in self._known:
            raise UnknownNameError(name)
        return self._known[name](called)

    def _metadata(self, called: Called) -> Metadata:
        fields = _fields(called)
        entries = self._items(fields.pop("state_dict_metadata", None))
        metadata = Metadata(entries, storage_data=self._places(fields.pop("storage_data", None)))
        for name, described in fields.items():  # libraries keep more there than torch does
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

    def _storage_meta(self, called: Called) -> StorageMeta:
        meta = StorageMeta()
        for name, described in _fields(called).items():
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
        """Where items are. Other libraries, such as OLMo-core, have classes of their own with the
        fields of torch's; as nothing but the fields is used, their names do not matter.
        """
        if type(described) is not Dict:
            return self.value(described)
        pairs = described.pairs
        self.spend(len(pairs) + 1)
        places = {}
        is_place: Any = None  # a function whose calls make places; mostly there is one
        for key, entry in zip(pairs[::2], pairs[1::2], strict=True):
            index = self._index(key) if _is_a(_INDEX, key) else self.value(key)
            if type(entry) is not Called or entry.function is not is_place:
                if not self._is_place(entry):
                    places[index] = self.value(entry)
                    continue
                is_place = entry.function
            places[index] = self._place(entry)
        if len(places) != len(pairs) // 2:
            raise DescriptionError("storage_data has an item twice")
        return places

    def _is_place(self, described: Any) -> bool:
        if type(described) is not Called or described.form != "new":
            return False
        state = described.state
        if type(state) is not Dict or state.pairs[:6:2] != _PLACE:
            return False
        return self.name(described.function) not in self.allowed

    def _place(self, called: Called) -> StorageInfo:
        path, offset, length, transforms = _values(called, _PLACE, "transform_descriptors")
        if type(path) is not str or type(offset) is not int or type(length) is not int:
            raise DescriptionError("an item's place has fields of wrong types")
        if not (0 <= offset < _END and 0 <= length < _END - offset):
            raise DescriptionError(f"an item's place in {path[:200]!r} is out of range")
        if transforms is None:
            return StorageInfo(path, offset, length)
        transforms = self.value(transforms)
        _expect(transforms, (list, tuple), "transform_descriptors")
        for transform in transforms:
            _expect(transform, (str,), "transform_descriptors")
        return StorageInfo(path, offset, length, transforms)

    def _index(self, called: Called) -> MetadataIndex:
        fqn, hint, offset = _values(called, _INDEX_FIELDS)
        if type(fqn) is not str or not (offset is None or type(offset) is torch.Size):
            raise DescriptionError("an item's index has fields of wrong types")
        if hint is not None and (type(hint) is not int or not 0 <= hint < _END):
            raise DescriptionError(f"the index of {fqn[:200]} is out of range")
        index = _new(MetadataIndex)
        fields = vars(index)  # its constructor sets each, past its being frozen, four times as long
        fields["fqn"], fields["index"] = fqn, hint
        if offset is not None:
            fields["offset"] = offset
        return index

    def _tensor(self, called: Called) -> TensorStorageMetadata:
        described, size, chunks = _values(called, ["properties", "size", "chunks"])
        properties = self.value(described)
        _expect(properties, tuple(_PROPERTIES.values()), "properties")
        _expect(size, (torch.Size,), "size")
        _expect(chunks, (list,), "chunks")
        if math.prod(size) * properties.dtype.itemsize >= _END:
            raise DescriptionError("a tensor is larger than any memory")
        self.spend(len(chunks) + 1)
        built = [
            self._chunk(chunk) if _is_a(_CHUNK, chunk) else self.value(chunk) for chunk in chunks
        ]
        rank = len(size)
        for chunk in built:
            if type(chunk) is not ChunkStorageMetadata:
                raise DescriptionError("a chunk of a tensor is none")
            if len(chunk.offsets) != rank or len(chunk.sizes) != rank:
                raise DescriptionError("a chunk has another number of dimensions than its tensor")
        return TensorStorageMetadata(properties, size, built)

    def _no_tensor(self, called: Called) -> BytesStorageMetadata:
        _values(called, [])
        return BytesStorageMetadata()

    def _chunk(self, called: Called) -> ChunkStorageMetadata:
        offsets, sizes = _values(called, _CHUNK_FIELDS)
        if type(offsets) is not torch.Size or type(sizes) is not torch.Size:
            raise DescriptionError("a chunk has fields of wrong types")
        return ChunkStorageMetadata(offsets, sizes)

    def _properties(self, called: Called) -> Any:
        state = called.state
        if type(state) is not tuple or not 5 <= len(state) <= 6:
            raise DescriptionError("the properties of a tensor are not five or six")
        if called.arguments or called.contents:
            raise DescriptionError("the properties of a tensor are not those of torch")
        encoding = self._memory_format(state[3])
        dtype, layout, requires_grad, pin_memory = map(self.value, (*state[:3], state[4]))
        strides = self.value(state[5]) if len(state) == 6 else None
        if strides is not None and not (
            type(strides) is tuple and all(type(stride) is int for stride in strides)
        ):
            raise DescriptionError("the strides of a tensor are no numbers")
        made = with_strides(
            _PROPERTIES[self.name(called.function)](
                dtype, layout, requires_grad, encoding, pin_memory
            ),
            strides,
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
        """Of the member of an enum, by its number, or by its name as of Python 3.11.0."""
        _expect(described, (Called,), "memory_format")
        if described.state is not NO_STATE or described.contents is not None:
            raise DescriptionError("it changes a memory format")
        name = self.name(described.function)
        if name in _ENCODINGS:
            (number,) = described.arguments
            _expect(number, (int,), "memory_format")
            return dict(enumerate(_FORMATS.values()))[number]
        outer, _, member = self.name(described).rpartition(".")
        if outer not in _ENCODINGS:
            raise UnknownNameError(f"{outer}.{member}")
        return _FORMATS[member]


def _is_a(name: str, described: Any) -> bool:
    return (
        type(described) is Called
        and described.form == "new"
        and type(described.function) is Global
        and described.function.name == name
    )


def _fields(called: Called) -> dict[str, Any]:
    """The fields of an instance, as they are described."""
    state = called.state
    if state is NO_STATE or state is None:
        state = Dict()
    if type(state) is not Dict or called.arguments or called.contents is not None:
        raise DescriptionError("an instance does not consist of fields")
    names, pairs = state.pairs[::2], state.pairs
    for name in names:
        if type(name) is not str or name.startswith("__"):
            raise DescriptionError("an instance has a field without a name")
    return dict(zip(names, pairs[1::2], strict=True))


def _values(called: Called, names: list[str], *more: str) -> list[Any]:
    """The values of fields, None for those that are missing.

    Raises:
        DescriptionError: If there are others.
    """
    state = called.state
    if type(state) is Dict and state.pairs[::2] == names and not called.arguments:
        return state.pairs[1::2] + [None] * len(more)
    fields = _fields(called)
    values = [fields.pop(name, None) for name in (*names, *more)]
    if fields:
        raise DescriptionError(
            f"there are fields that this version does not know ({', '.join(fields)[:200]}): was it "
            "written by a newer torch?"
        )
    return values


def _check_fields(made: Any, **kinds: tuple[type[Any], ...]) -> None:
    for name, of in kinds.items():
        _expect(getattr(made, name), of, name)


def _expect(value: Any, kinds: tuple[type[Any], ...], what: str) -> None:
    if not isinstance(value, kinds) or (type(value) is bool and bool not in kinds):
        raise DescriptionError(f"{what} is a {type(value).__name__}")
