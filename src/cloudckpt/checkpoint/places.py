"""Where the items of a loaded checkpoint lie, as its metadata and its objects' indexes say.

Objects of torch and other writers have no index. Each of their items is a zip archive of its own,
whose directory stands in its last bytes and the description of the tensor in its first ones;
reading these few tells where the tensor's bytes are.
"""

from __future__ import annotations

import functools
import io
import logging
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from cloudckpt.checkpoint.committed import CommitObject
from cloudckpt.checkpoint.envelope import unwarned
from cloudckpt.checkpoint.index import IndexItem, ObjectIndex
from cloudckpt.checkpoint.inert_pickle import Called, describe
from cloudckpt.checkpoint.objects import checked
from cloudckpt.checkpoint.torch_private import StorageInfo
from cloudckpt.checkpoint.written import WrittenObject
from cloudckpt.checksum import CRC32C, Blocks, ChecksumAlgorithm
from cloudckpt.config import Config
from cloudckpt.errors import CheckpointCorruptError
from cloudckpt.gc_pause import paused_gc
from cloudckpt.stores.base import RangeReader
from cloudckpt.transfer.boxes import is_row_major
from cloudckpt.transfer.download import download, raise_it
from cloudckpt.transfer.landing import BytesSink, StoredBytes, Wanted
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.uri import CheckpointURI

__all__ = ["ItemPlace", "Places", "StoredTensor", "TensorDescription", "describe_tensor", "locate"]


logger = logging.getLogger("cloudckpt")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A plain tensor in the checkpoint: its elements in row-major order, their type, its shape."""

    elements: StoredBytes
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ItemPlace:
    """An item.

    Attributes:
        whole: All of its bytes.
        tensor: The plain tensor in it, or None: then only ``torch.load`` can read it.
        transforms: The stream transforms (compression) that torch's writer applied to it.
    """

    whole: StoredBytes
    tensor: StoredTensor | None
    transforms: Sequence[str] = ()


_Whole = tuple[str, StoredBytes, Sequence[str]]


class Places:
    """Finds the items of one checkpoint. The indexes that it has read are kept.

    Args:
        uri: The checkpoint.
        commit: What its commit object says; None if nothing was read yet.
    """

    def __init__(self, uri: CheckpointURI, commit: CommitObject | None) -> None:
        self._uri = uri
        self._commit = commit
        self._objects = {one.name: one for one in commit.objects} if commit is not None else {}
        self._indexes: dict[str, ObjectIndex | None] = {}
        self._lost: set[str] = set()  # objects whose index is damaged, which was told

    def find(
        self,
        indices: Sequence[MetadataIndex],
        store: RangeReader,
        config: Config,
        stats: TransferStats,
    ) -> list[ItemPlace]:
        """The places of items, in the same order.

        This reads the indexes of the objects that they are in; without these the edges of the items
        that hold tensors.

        Raises:
            CheckpointCorruptError: If an item has no place, or a contradictory one.
        """
        with paused_gc():
            wholes = self._wholes(indices)
        wanted_by = {name: whole.item for name, whole, _ in reversed(wholes)}
        self._read_indexes(wanted_by, store, config, stats)
        with paused_gc():
            places = self._inside(indices, wholes)
        probed = [
            place.whole
            for index, place, (name, _, _) in zip(indices, places, wholes, strict=True)
            if index.offset is not None and not place.transforms and not self._indexes.get(name)
        ]
        if not probed:
            return places
        found = locate(store, probed, config, stats)
        return [
            replace(place, tensor=found[place.whole]) if place.whole in found else place
            for place in places
        ]

    def read_indexes(
        self,
        store: RangeReader,
        config: Config,
        damaged: Callable[[CheckpointCorruptError], None] = raise_it,
    ) -> None:
        """Reads the indexes of all objects, as far as that was not done yet.

        Args:
            store: Where they are.
            config: Options.
            damaged: Called with what is damaged. If it does not raise, nothing is known of what is
                in that object, and :meth:`wholes` leaves it out.

        Raises:
            CheckpointCorruptError: If one is damaged.
            StoreError: If the store refuses or stays unreachable.
        """
        names = {name: f"the index of {name}" for name in self._objects}
        self._read_indexes(names, store, config, TransferStats(str(self._uri)), damaged)

    def wholes(self, indices: Sequence[MetadataIndex]) -> list[StoredBytes]:
        """The data proper of items with their checksums, if indexes were read; else all of them.

        Raises:
            CheckpointCorruptError: If one has no place, or a contradictory one.
        """
        with paused_gc():
            wholes = self._wholes(indices)
            places = self._inside(indices, wholes)
            pairs = zip(wholes, places, strict=True)
            return [place.whole for (name, _, _), place in pairs if name not in self._lost]

    def between(self, indices: Sequence[MetadataIndex]) -> list[StoredBytes]:
        """What stands around the data proper of all items, as far as its checksums are known.

        That is in objects whose indexes were read; see :meth:`ObjectIndex.between`.
        """
        if not self._objects:
            return []
        with paused_gc():
            objects: dict[str, dict[int, tuple[str, tuple[int, ...]]]] = {}
            wholes = self._wholes(indices)
            for (name, item, _), shape in zip(wholes, self._shapes(indices), strict=True):
                objects.setdefault(name, {})[item.offset] = item.item, shape
            return [
                StoredBytes(
                    self._uri.key(name), start, blocks.size, blocks, self._objects[name].size, what
                )
                for name, items in objects.items()
                if (index := self._indexes.get(name)) is not None
                for start, blocks, what in index.between(items)
            ]

    def length_of(self, index: MetadataIndex) -> int:
        """The bytes of an item.

        Raises:
            CheckpointCorruptError: If it has no place.
        """
        return self._wholes([index])[0][1].nbytes

    def _wholes(self, indices: Sequence[MetadataIndex]) -> list[_Whole]:
        """The objects of items, their bytes, and the transforms that were applied to them."""
        inventory = self._commit.inventory if self._commit is not None else None
        if inventory is None:
            return [self._described(index) for index in indices]
        rows = inventory.rows(indices)
        if bool((rows < 0).any()):
            raise self._nowhere(indices[int((rows < 0).nonzero()[0])])
        named = [(one.name, self._uri.key(one.name), one.size) for one in inventory.objects]
        found: list[_Whole] = []
        columns = (column[rows].tolist() for column in inventory.extents.columns)
        for index, number, offset, length in zip(indices, *columns, strict=True):
            name, key, size = named[number]
            found.append((name, StoredBytes(key, offset, length, None, size, index.fqn), ()))
        return found

    def _described(self, index: MetadataIndex) -> _Whole:
        """The same of one item, as torch's metadata say it."""
        commit = self._commit
        if commit is not None and isinstance(commit.metadata.storage_data, Mapping):
            entry = commit.metadata.storage_data.get(index)
            if isinstance(entry, StorageInfo):
                name = checked(entry.relative_path, str(self._uri))
                key, known = self._uri.key(name), self._objects.get(name)
                size = known.size if known is not None else None
                whole = StoredBytes(key, entry.offset, entry.length, None, size, index.fqn)
                # older versions of torch do not write this field
                return name, whole, getattr(entry, "transform_descriptors", None) or ()
        raise self._nowhere(index)

    def _nowhere(self, index: MetadataIndex) -> CheckpointCorruptError:
        return self._corrupt(
            f"the metadata does not say where {index.fqn} (offsets {index.offset}) is", index
        )

    def _read_indexes(
        self,
        names: Mapping[str, str],
        store: RangeReader,
        config: Config,
        stats: TransferStats,
        damaged: Callable[[CheckpointCorruptError], None] = raise_it,
    ) -> None:
        """Reads the indexes of objects, as far as that was not done; ``names`` also has items."""
        records = [
            self._objects[name]
            for name in sorted(names)
            if name in self._objects and name not in self._indexes
        ]
        sinks = [BytesSink(record.index_size) for record in records]
        wanted = [
            Wanted(self._index_bytes(record, names[record.name]), 0, record.index_size, sink, True)
            for record, sink in zip(records, sinks, strict=True)
        ]
        lost: set[str | None] = set()

        def note(error: CheckpointCorruptError) -> None:
            damaged(error)
            lost.add(error.uri)

        download(store, wanted, config, stats, damaged=note)
        for record, sink in zip(records, sinks, strict=True):
            if store.uri(self._uri.key(record.name)) in lost:
                self._lost.add(record.name)
                continue
            try:
                found = ObjectIndex(sink.data, record, self._checksum, self._uri_of(record))
            except CheckpointCorruptError as error:
                if config.verify:
                    raise
                logger.warning("read without checksums: %s", error)
                self._indexes[record.name] = None  # the edges of its items will do
            else:
                self._indexes[record.name] = found

    def _index_bytes(self, record: WrittenObject, item: str) -> StoredBytes:
        start, size = record.size - record.index_size, record.index_size
        key, blocks = self._uri.key(record.name), Blocks(CRC32C, size, (record.index_crc,))
        return StoredBytes(key, start, size, blocks, record.size, item)

    def _uri_of(self, record: WrittenObject) -> str:
        return f"{self._uri}/{record.name}"

    @property
    def _checksum(self) -> ChecksumAlgorithm:
        assert self._commit is not None
        assert self._commit.body is not None  # it names objects
        return self._commit.body.checksum

    def _inside(
        self, indices: Sequence[MetadataIndex], wholes: Sequence[_Whole]
    ) -> list[ItemPlace]:
        """What is in the items, as the indexes of their objects say that were read."""
        places = [ItemPlace(whole, None, transforms) for _, whole, transforms in wholes]
        by_object: dict[str, list[int]] = {}
        for number, (name, _, _) in enumerate(wholes):
            if self._indexes.get(name) is not None:
                by_object.setdefault(name, []).append(number)
        if not by_object:
            return places
        shapes = self._shapes(indices)
        for name, numbers in by_object.items():
            found = self._indexes[name]
            assert found is not None
            items = [wholes[number][1] for number in numbers]
            described = found.find(
                [item.offset for item in items],
                [item.nbytes for item in items],
                [item.item for item in items],
            )
            for number, whole, item in zip(numbers, items, described, strict=True):
                places[number] = self._place(indices[number], whole, item, shapes[number])
        return places

    def _place(
        self, index: MetadataIndex, whole: StoredBytes, item: IndexItem, shape: tuple[int, ...]
    ) -> ItemPlace:
        offset, key, size = whole.offset + item.head, whole.key, whole.object_size
        raw = StoredBytes(key, offset, item.raw_length, item.blocks, size, whole.item)
        if item.dtype is None:
            return ItemPlace(raw, None)
        if math.prod(shape) * item.dtype.itemsize != item.raw_length:
            raise self._corrupt("index and metadata contradict each other", index)
        return ItemPlace(raw, StoredTensor(raw, item.dtype, shape))

    def _shapes(self, indices: Sequence[MetadataIndex]) -> list[tuple[int, ...]]:
        assert self._commit is not None  # there are indexes of its objects
        inventory = self._commit.inventory
        if inventory is not None:
            return inventory.shapes(inventory.rows(indices))
        return [self._shape(index) for index in indices]

    def _shape(self, index: MetadataIndex) -> tuple[int, ...]:
        assert self._commit is not None
        entry = self._commit.metadata.state_dict_metadata.get(index.fqn)
        chunks = entry.chunks if isinstance(entry, TensorStorageMetadata) else ()
        return next((tuple(chunk.sizes) for chunk in chunks if chunk.offsets == index.offset), ())

    def _corrupt(self, message: str, index: MetadataIndex) -> CheckpointCorruptError:
        return CheckpointCorruptError(message, uri=str(self._uri), item=index.fqn)


_EDGE = 4096
"""Bytes looked at on either side: torch's directory takes about 700, its first records as many."""

_ENCRYPTED = 1  # flag of a record
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")


def locate(
    store: RangeReader, items: Sequence[StoredBytes], config: Config, stats: TransferStats
) -> Mapping[StoredBytes, StoredTensor | None]:
    """The plain tensors in items without an index; None for what only ``torch.load`` can read."""
    edges: dict[StoredBytes, tuple[BytesSink, BytesSink]] = {}
    wanted: list[Wanted] = []
    for item in dict.fromkeys(items):
        edge = min(_EDGE, item.nbytes)
        head, tail = edges[item] = BytesSink(edge), BytesSink(edge)
        wanted.append(Wanted(item, 0, edge, head, True))
        wanted.append(Wanted(item, item.nbytes - edge, item.nbytes, tail, True))
    download(store, wanted, config, stats)
    return {
        item: _parse(item, bytes(head.data), bytes(tail.data))
        for item, (head, tail) in edges.items()
    }


def _parse(item: StoredBytes, head: bytes, tail: bytes) -> StoredTensor | None:
    try:
        return _found(item, head, tail)
    except Exception:  # noqa: BLE001 - zipfile raises errors of many kinds for what is damaged
        return None


def _found(item: StoredBytes, head: bytes, tail: bytes) -> StoredTensor:
    with zipfile.ZipFile(io.BytesIO(tail)) as archive:  # it lacks the records, and reads none
        entries = {info.filename: info for info in archive.infolist()}
    missing = item.nbytes - len(tail)  # from the offsets of the directory, as zipfile tells them

    def start_of(info: zipfile.ZipInfo) -> int:
        at = missing + info.header_offset
        if at < 0 or info.compress_type != zipfile.ZIP_STORED or info.flag_bits & _ENCRYPTED:
            raise ValueError("a record that is compressed, encrypted, or nowhere")
        *_, name_length, extra_length = _LOCAL_HEADER.unpack_from(head, at)
        return int(at + _LOCAL_HEADER.size + name_length + extra_length)

    def content_of(info: zipfile.ZipInfo) -> bytes:
        start = start_of(info)
        content = head[start : start + info.file_size]
        if zlib.crc32(content) != info.CRC:
            raise ValueError("a record that is damaged, or not in the first bytes")
        return content

    pickled = next(name for name in entries if name.endswith("data.pkl"))
    root = pickled.removesuffix("data.pkl")
    order = content_of(entries[f"{root}byteorder"]) if f"{root}byteorder" in entries else b"little"
    described = describe_tensor(content_of(entries[pickled]))
    if described is None or not described.is_row_major or order != b"little":
        raise ValueError("no plain tensor, or of another byte order")
    info = entries[f"{root}data/{described.record}"]
    begin, skipped = start_of(info), described.storage_offset * described.dtype.itemsize
    numel = math.prod(described.shape)
    nbytes = numel * described.dtype.itemsize
    if torch.Size(described.shape).numel() != numel:
        raise ValueError("more elements than torch can count")
    if skipped + nbytes > info.file_size or begin + info.file_size > item.nbytes:
        raise ValueError("a tensor outside of its record")
    elements = replace(item, offset=item.offset + begin + skipped, nbytes=nbytes)
    return StoredTensor(elements, described.dtype, described.shape)


@dataclass(frozen=True)
class TensorDescription:
    """What ``data.pkl`` says of a plain tensor.

    Attributes:
        dtype: Element type.
        record: The name of its storage's record, beneath ``data/``.
        storage_offset: The first element in the storage.
        shape: Its shape.
        stride: Its strides, in elements.
    """

    dtype: torch.dtype
    record: str
    storage_offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def is_row_major(self) -> bool:
        """Whether its elements stand in row-major order without gaps."""
        return is_row_major(self.shape, self.stride)


def describe_tensor(data: bytes) -> TensorDescription | None:
    """Reads ``data.pkl``; None if it describes anything but a plain tensor."""
    try:
        return _plain_tensor(describe(data, persistent=True))
    except Exception:  # noqa: BLE001 - whatever it is, torch.load will tell
        return None


@functools.cache
def _type_of_storage(name: str) -> Any:
    """The element type of a storage class of torch; of a few, none of which is made."""
    if not name.endswith("Storage"):
        raise ValueError(f"{name} is no storage")
    with unwarned():  # such classes are deprecated, and still what torch.save uses
        return getattr(torch, name.rpartition(".")[2]).dtype


def _plain_tensor(described: Called) -> TensorDescription:
    """What a call of torch's function for a tensor, or a parameter, describes."""
    if described.function.name == "torch._utils._rebuild_parameter":
        described = described.arguments[0]
    version = described.function.name.removeprefix("torch._utils._rebuild_tensor_")
    storage, first, shape, stride, _, _, *more = described.arguments
    _, kind, record, _, _ = storage.arguments
    if version == "v3":  # the element type is named beside an untyped storage
        dtype = getattr(torch, more.pop(0).name.removeprefix("torch."))
    else:
        dtype = _type_of_storage(kind.name)
    is_plain = version in ("v2", "v3") and described.form == "call" and not any(more)
    if not is_plain or storage.form != "persistent" or not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor with metadata, such as the conjugate bit, or none")
    numbers = (first, *shape, *stride)
    if len(shape) != len(stride) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError("numbers that no tensor has")
    return TensorDescription(dtype, record, first, shape, stride)
