"""Locates the items of a loaded checkpoint, by its metadata and its objects' indexes.

Objects of torch and other writers have no index. Their items are zip archives, in which
:mod:`cloudckpt.checkpoint.archives` locates the tensors.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from cloudckpt.checkpoint.archives import StoredTensor, locate
from cloudckpt.checkpoint.committed import CommitObject
from cloudckpt.checkpoint.object_index import CONTRADICTION, IndexItem, ObjectIndex
from cloudckpt.checkpoint.objects import checked
from cloudckpt.checkpoint.torch_private import StorageInfo
from cloudckpt.checksum import CRC32C, Blocks
from cloudckpt.config import Config
from cloudckpt.errors import CheckpointCorruptError, ObjectNotFoundError
from cloudckpt.gc_pause import paused_gc
from cloudckpt.stores.base import RangeReader
from cloudckpt.transfer.download import download, raise_it
from cloudckpt.transfer.landing import BytesSink, StoredBytes, Wanted
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.uri import CheckpointURI

__all__ = ["ItemPlace", "Places"]

logger = logging.getLogger("cloudckpt")


@dataclass(frozen=True, slots=True)
class ItemPlace:
    """The byte range of an item, and the tensor in it.

    Attributes:
        whole: The byte range of the item's payload in the object, if an index describes the item;
            otherwise the range of all bytes of the item.
        tensor: The plain tensor in it; None if only ``torch.load`` can read the item.
        transforms: The stream transforms (compression) that torch's writer applied to it.
    """

    whole: StoredBytes
    tensor: StoredTensor | None
    transforms: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _Item:
    """An item as the metadata describes it.

    Attributes:
        name: The name of the object that holds the item.
        whole: The range of all bytes of the item in its object.
        shape: The shape of its chunk; empty for scalars, for values that are not tensors, and if
            the checkpoint has no indexes.
        transforms: The stream transforms that were applied to it.
    """

    name: str
    whole: StoredBytes
    shape: tuple[int, ...]
    transforms: Sequence[str] = ()


class Places:
    """Locates the items of one checkpoint; keeps the object indexes that it has read.

    Args:
        uri: The checkpoint.
        commit: The checkpoint's commit object; None if it was not read yet.
    """

    def __init__(self, uri: CheckpointURI, commit: CommitObject | None) -> None:
        self._uri = uri
        self._commit = commit
        self._objects = {one.name: one for one in commit.objects} if commit is not None else {}
        self._indexes: dict[str, ObjectIndex | None] = {}  # None: damaged, and not needed

    def find(
        self,
        indices: Sequence[MetadataIndex],
        store: RangeReader,
        config: Config,
        stats: TransferStats,
    ) -> list[ItemPlace]:
        """Returns the locations of items, in the order of ``indices``.

        It reads the indexes of the items' objects. In objects without an index, it reads both ends
        of each item that holds a tensor.

        Raises:
            CheckpointCorruptError: If an item has no location or a contradictory one, or an index
                is damaged.
            StoreError: If the store refuses or stays unreachable.
        """
        with paused_gc():
            items = self._located(indices)
        names = {item.name: item.whole.item for item in reversed(items)}
        self.read_indexes(store, config, names=names, stats=stats)
        with paused_gc():
            places = self._inside(items)
        probed = [
            item.whole
            for index, item in zip(indices, items, strict=True)
            if index.offset is not None and not item.transforms and not self._indexes.get(item.name)
        ]
        found = locate(store, probed, config, stats) if probed else {}
        return [
            replace(place, tensor=found[place.whole]) if place.whole in found else place
            for place in places
        ]

    def read_indexes(
        self,
        store: RangeReader,
        config: Config,
        damaged: Callable[[CheckpointCorruptError], None] = raise_it,
        *,
        names: Mapping[str, str] | None = None,
        stats: TransferStats | None = None,
    ) -> None:
        """Reads the indexes of objects, except indexes that were read before.

        Args:
            store: The store of the objects.
            config: Options.
            damaged: Called with the error of a damaged index. If it does not raise, the content of
                that object is unknown, and :meth:`sources` leaves it out.
            names: The names of the objects whose indexes are read, each with the name of an item in
                the object, for errors; None for all objects.
            stats: Counts the bytes read; None to count them only for this call's events.

        Raises:
            CheckpointCorruptError: If ``damaged`` raises it, as it does by default; or, unless
                ``config.verify`` is False, if an index matches its checksum, but is invalid.
            StoreError: If the store refuses or stays unreachable.
        """
        names = {name: f"the index of {name}" for name in self._objects} if names is None else names
        wanted = self._objects.keys() & names.keys() - self._indexes.keys()
        records = [self._objects[name] for name in sorted(wanted)]
        sinks = [BytesSink(record.index_size) for record in records]
        reads = []
        for record, sink in zip(records, sinks, strict=True):
            key, size = self._uri.key(record.name), record.index_size
            blocks, item = Blocks(CRC32C, size, (record.index_crc,)), names[record.name]
            index = StoredBytes(key, record.size - size, size, blocks, record.size, item)
            reads.append(Wanted(index, 0, size, sink, True))
        lost: set[str | None] = set()
        folders = {self._uri.object(record.name): record.folder for record in records}

        def note(error: CheckpointCorruptError) -> None:
            if isinstance(error.__cause__, ObjectNotFoundError) and folders.get(error.uri or ""):
                beside = self._uri.beside(folders[error.uri or ""])
                error.message += (
                    f"; the object belongs to the checkpoint {beside}, with which this one shares "
                    "it: restore it from a backup. If this checkpoint is a copy, copy both, or use "
                    "cloudckpt cp, which makes a self-contained copy"
                )
            damaged(error)
            lost.add(error.uri)

        download(store, reads, config, stats or TransferStats(str(self._uri)), damaged=note)
        for record, sink in zip(records, sinks, strict=True):
            if store.uri(self._uri.key(record.name)) in lost:
                continue
            kind = None if self._commit is None else self._commit.checksum
            where = self._uri.object(record.name)
            assert kind is not None  # the commit object names objects
            try:
                self._indexes[record.name] = ObjectIndex(sink.data, record, kind, where)
            except CheckpointCorruptError as error:
                if config.verify:
                    raise
                logger.warning("verify is off, so an object is read without its index: %s", error)
                self._indexes[record.name] = None  # both ends of its items are read instead

    def wholes(self, indices: Sequence[MetadataIndex]) -> list[StoredBytes]:
        """Returns the byte ranges of items' payloads, with the checksums in the indexes.

        Only indexes that were read before are used. For an item in an object without one, it
        returns all of the item's bytes, without checksums.

        Raises:
            CheckpointCorruptError: If an item has no location, or a contradictory one.
        """
        with paused_gc():
            return [place.whole for place in self._inside(self._located(indices))]

    def sources(
        self,
        indices: Sequence[MetadataIndex],
        store: RangeReader,
        config: Config,
        damaged: Callable[[CheckpointCorruptError], None] = raise_it,
    ) -> list[StoredBytes]:
        """Reads the indexes, and returns the byte ranges of items' payloads, with their checksums.

        Args:
            indices: All items of the checkpoint.
            store: The store of the objects.
            config: Options.
            damaged: Called with the error of each damaged index, of each item of another writer
                that has no location, and of each object whose index contradicts the metadata. If it
                does not raise, such items and the items of objects with damaged indexes are left
                out, and items that contradict an index are returned without checksums.

        Raises:
            CheckpointCorruptError: If ``damaged`` raises it, as it does by default.
            StoreError: If the store refuses or stays unreachable.
        """
        self.read_indexes(store, config, damaged)
        lost = self._objects.keys() - self._indexes
        with paused_gc():
            items = [item for item in self._located(indices, damaged) if item.name not in lost]
            return [place.whole for place in self._inside(items, damaged)]

    def _located(
        self,
        indices: Sequence[MetadataIndex],
        damaged: Callable[[CheckpointCorruptError], None] = raise_it,
    ) -> list[_Item]:
        """Returns the metadata's description of each item that has a location, in their order.

        Args:
            indices: The items.
            damaged: Called with the error of each item for which another writer's metadata has no
                valid location. If it does not raise, the item is left out.

        Raises:
            CheckpointCorruptError: If cloudckpt's metadata has no location for an item; or if
                ``damaged`` raises it.
        """
        located: list[_Item] = []
        record = self._commit.record if self._commit is not None else None
        if record is not None and record.table is not None:
            rows = record.table.rows(indices)
            if bool((rows < 0).any()):
                raise self._without_location(indices[int((rows < 0).nonzero()[0])])
            named = [(one.name, self._uri.key(one.name), one.size) for one in record.objects]
            places = (column.tolist() for column in record.extents.at(rows).columns[:3])
            shapes = record.table.shapes(rows)
            for index, number, offset, length, shape in zip(indices, *places, shapes, strict=True):
                name, key, size = named[number]
                whole = StoredBytes(key, offset, length, None, size, index.fqn)
                located.append(_Item(name, whole, shape))
            return located
        for index in indices:
            try:
                located.append(self._described(index))
            except CheckpointCorruptError as error:
                damaged(error)
        return located

    def _described(self, index: MetadataIndex) -> _Item:
        """Returns the description of one item in torch's metadata.

        Raises:
            CheckpointCorruptError: If the metadata has no valid location for the item.
        """
        metadata = None if self._commit is None else self._commit.metadata
        places = None if metadata is None else metadata.storage_data
        entry = places.get(index) if isinstance(places, Mapping) else None
        if metadata is None or not isinstance(entry, StorageInfo):
            raise self._without_location(index)
        name, shape = checked(entry.relative_path, str(self._uri)), tuple[int, ...]()
        known = self._objects.get(name)
        stored = metadata.state_dict_metadata.get(index.fqn)
        if known is not None and isinstance(stored, TensorStorageMetadata):
            hinted = stored.chunks[index.index : index.index + 1] if index.index else []
            same = (one for one in (*hinted, *stored.chunks) if one.offsets == index.offset)
            shape = next((tuple(one.sizes) for one in same), ())
        size = None if known is None else known.size
        key, start = self._uri.key(name), entry.offset
        whole = StoredBytes(key, start, entry.length, None, size, index.fqn)
        return _Item(name, whole, shape, entry.transform_descriptors or ())

    def _without_location(self, index: MetadataIndex) -> CheckpointCorruptError:
        part = "" if index.offset is None else f" (offsets {[*index.offset]})"
        return self._corrupt(
            f"invalid metadata: it has no location for {index.fqn}{part}: "
            "restore .metadata from a backup, or load an older checkpoint",
            index.fqn,
        )

    def _inside(
        self,
        items: Sequence[_Item],
        damaged: Callable[[CheckpointCorruptError], None] = raise_it,
    ) -> list[ItemPlace]:
        """Returns the payloads of items and the tensors in them, by the indexes that were read.

        Args:
            items: The items.
            damaged: Called with the error of each object whose index contradicts the metadata. If
                it does not raise, items of such an object may lack checksums and tensors.

        Raises:
            CheckpointCorruptError: If ``damaged`` raises it, as it does by default.
        """
        places = [ItemPlace(item.whole, None, item.transforms) for item in items]
        by_object: dict[str, list[int]] = {}
        for number, item in enumerate(items):
            by_object.setdefault(item.name, []).append(number)
        for name, numbers in by_object.items():
            if (index := self._indexes.get(name)) is None:
                continue
            wholes = [items[number].whole for number in numbers]
            try:
                described = index.find(
                    [whole.offset for whole in wholes],
                    [whole.nbytes for whole in wholes],
                    [whole.item for whole in wholes],
                )
                for number, found in zip(numbers, described, strict=True):
                    places[number] = self._place(items[number], found)
            except CheckpointCorruptError as error:
                damaged(error)
        return places

    def _place(self, item: _Item, found: IndexItem) -> ItemPlace:
        whole = item.whole
        offset, key, size = whole.offset + found.head, whole.key, whole.object_size
        raw = StoredBytes(key, offset, found.raw_length, found.blocks, size, whole.item)
        if found.dtype is None:
            return ItemPlace(raw, None)
        if math.prod(item.shape) * found.dtype.itemsize != found.raw_length:
            raise self._corrupt(CONTRADICTION, whole.item)
        return ItemPlace(raw, StoredTensor(raw, found.dtype, item.shape))

    def _corrupt(self, message: str, item: str) -> CheckpointCorruptError:
        return CheckpointCorruptError(message, uri=str(self._uri), item=item)
