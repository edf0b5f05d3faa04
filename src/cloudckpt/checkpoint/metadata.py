"""``.metadata``: torch's pickle, with a checksum behind it, read without running it.

A pickle ends where it says so; torch's readers do not look at what follows. There stand the notes
of the checkpoint (:mod:`cloudckpt.checkpoint.notes`), and a trailer with the lengths and the CRC32C
of the pickle and of the notes, so that a damaged commit object is noticed.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
import pickle
import struct
from collections.abc import Callable, Iterable, Mapping
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
from cloudckpt.checkpoint.inert_pickle import (
    NO_STATE,
    Called,
    Dict,
    Global,
    RefusedError,
    describe,
    full_name,
    home,
)
from cloudckpt.checkpoint.torch_private import OldTensorProperties, StorageInfo
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
                described = describe(data, body.nbytes, {"torch.Size": _size})
                metadata = _MetadataBuilding(allowed, _SHARED * body.nbytes).value(described)
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
        if type(state) is not tuple or len(state) != 5 or called.arguments or called.contents:
            raise DescriptionError("the properties of a tensor are not five")
        encoding = self._memory_format(state[3])
        dtype, layout, requires_grad, pin_memory = map(self.value, (*state[:3], state[4]))
        made = _PROPERTIES[self.name(called.function)](
            dtype, layout, requires_grad, encoding, pin_memory
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
