"""Where the items of a loaded checkpoint lie, according to its metadata and objects' indexes.

Objects of torch and other writers have no index: there, tensors are located by the archives that
the items are (:mod:`cloudckpt.checkpoint.archives`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from cloudckpt.checkpoint.archives import StoredTensor, locate
from cloudckpt.checkpoint.committed import CommitObject
from cloudckpt.checkpoint.object_index import IndexItem, ObjectIndex
from cloudckpt.checkpoint.objects import WrittenObject, checked
from cloudckpt.checkpoint.torch_private import StorageInfo
from cloudckpt.checksum import CRC32C, Blocks, ChecksumAlgorithm
from cloudckpt.config import Config
from cloudckpt.errors import CheckpointCorruptError, Damage, ObjectNotFoundError
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
    """The location of an item.

    Attributes:
        whole: All of its bytes.
        tensor: The plain tensor in it; None if only ``torch.load`` can read the item.
        transforms: The stream transforms (compression) that torch's writer applied to it.
    """

    whole: StoredBytes
    tensor: StoredTensor | None
    transforms: Sequence[str] = ()


_Whole = tuple[str, StoredBytes, Sequence[str]]


class Places:
    """Locates the items of one checkpoint; keeps the indexes that it has read.

    Args:
        uri: The checkpoint.
        commit: Its commit object; None if it was not read yet.
    """

    def __init__(self, uri: CheckpointURI, commit: CommitObject | None) -> None:
        self._uri = uri
        self._commit = commit
        self._objects = {one.name: one for one in commit.objects} if commit is not None else {}
        self._indexes: dict[str, ObjectIndex | None] = {}
        self._lost: set[str] = set()  # objects whose damaged index was reported

    def find(
        self,
        indices: Sequence[MetadataIndex],
        store: RangeReader,
        config: Config,
        stats: TransferStats,
    ) -> list[ItemPlace]:
        """The locations of items, in the same order.

        Reads the indexes of their objects or, without indexes, the edges of the items that hold
        tensors.

        Raises:
            CheckpointCorruptError: If an item has no location, or a contradictory one.
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
        """Reads the indexes of all objects that were not read yet.

        Args:
            store: Where they are.
            config: Options.
            damaged: Called with the error of a damaged index. If it does not raise, that object's
                content is unknown, and :meth:`wholes` leaves it out.

        Raises:
            CheckpointCorruptError: If one is damaged.
            StoreError: If the store refuses or stays unreachable.
        """
        names = {name: f"the index of {name}" for name in self._objects}
        self._read_indexes(names, store, config, TransferStats(str(self._uri)), damaged)

    def agreeing(
        self,
        indices: Sequence[MetadataIndex],
        damaged: Callable[[CheckpointCorruptError], None],
    ) -> list[MetadataIndex]:
        """The items whose location is the same in the metadata and in the indexes that were read.

        Args:
            indices: All items.
            damaged: Called with each of the others.

        Raises:
            CheckpointCorruptError: If an item of another writer has no location.
        """
        if not self._objects:
            return list(indices)
        with paused_gc():
            placed = list(self._placed(indices, damaged))
            by_object: dict[str, list[int]] = {}
            wholes, shapes = self._wholes(placed), self._shapes(placed)
            digests = self._digests(placed)
            for number, (name, _, _) in enumerate(wholes):
                if self._indexes.get(name) is not None:
                    by_object.setdefault(name, []).append(number)
            wrong: set[int] = set()
            for name, numbers in by_object.items():
                index = self._indexes[name]
                assert index is not None
                found = index.contradictions(
                    [wholes[number][1].offset for number in numbers],
                    [wholes[number][1].nbytes for number in numbers],
                    [
                        None if placed[number].offset is None else math.prod(shapes[number])
                        for number in numbers
                    ],
                    [digests[number] for number in numbers],
                )
                for place, what in found.items():
                    wrong.add(numbers[place])
                    damaged(self._contradictory(name, wholes[numbers[place]][1], what))
            return [one for number, one in enumerate(placed) if number not in wrong]

    def _digests(self, indices: Sequence[MetadataIndex]) -> Sequence[object]:
        """The known digests of items' content."""
        inventory = self._commit.inventory if self._commit is not None else None
        if inventory is None or inventory.extents.high is None or inventory.extents.low is None:
            return [None] * len(indices)
        rows = inventory.rows(indices)
        halves = inventory.extents.high[rows], inventory.extents.low[rows]
        return list(zip(*(half.tolist() for half in halves), strict=True))

    def _placed(
        self,
        indices: Sequence[MetadataIndex],
        damaged: Callable[[CheckpointCorruptError], None],
    ) -> Iterator[MetadataIndex]:
        """The items with a location in our metadata; columns have one for each."""
        assert self._commit is not None  # it names objects
        for index in indices:
            try:
                if self._commit.inventory is None:
                    self._described(index)
            except CheckpointCorruptError as error:
                damaged(error)
            else:
                yield index

    def _contradictory(self, name: str, item: StoredBytes, what: str) -> CheckpointCorruptError:
        uri = self._uri.object(name)
        return CheckpointCorruptError(
            f"index and metadata contradict each other: {what}",
            uri=uri,
            item=item.item,
            damages=[Damage(uri, item.item, what, item.offset, item.offset + item.nbytes)],
        )

    def wholes(self, indices: Sequence[MetadataIndex]) -> list[StoredBytes]:
        """The payloads of items with their checksums, if indexes were read; otherwise all bytes.

        Raises:
            CheckpointCorruptError: If one has no place, or a contradictory one.
        """
        with paused_gc():
            wholes = self._wholes(indices)
            places = self._inside(indices, wholes)
            pairs = zip(wholes, places, strict=True)
            return [place.whole for (name, _, _), place in pairs if name not in self._lost]

    def between(
        self,
        indices: Sequence[MetadataIndex],
        store: RangeReader,
        config: Config,
        damaged: Callable[[CheckpointCorruptError], None] = raise_it,
    ) -> list[StoredBytes]:
        """The bytes around the payloads of all items, as far as their checksums are known.

        They are known in objects whose indexes were read, see :meth:`ObjectIndex.between`.
        Elsewhere the archives' descriptions of the tensors in them are read and compared.

        Args:
            indices: All items on which index and metadata agree.
            store: Where they are.
            config: Options.
            damaged: Called with each item whose archive contradicts the index.

        Raises:
            StoreError: If the store refuses or stays unreachable.
        """
        if not self._objects:
            return []
        with paused_gc():
            objects: dict[str, dict[int, tuple[str, tuple[int, ...]]]] = {}
            wholes = self._wholes(indices)
            for (name, item, _), shape in zip(wholes, self._shapes(indices), strict=True):
                of_object = objects.setdefault(name, {})
                if item.nbytes:
                    of_object[item.offset] = item.item, shape
            known = {
                name: index.between(items)
                for name, items in objects.items()
                if (index := self._indexes.get(name)) is not None
            }
        self._compare_archives(
            [
                (one, whole)
                for one, whole in zip(indices, wholes, strict=True)
                if not known.get(whole[0], True)
            ],
            store,
            config,
            damaged,
        )
        return [
            StoredBytes(
                self._uri.key(name), start, blocks.size, blocks, self._objects[name].size, what
            )
            for name, found in known.items()
            for start, blocks, what in found
        ]

    def _compare_archives(
        self,
        items: Sequence[tuple[MetadataIndex, _Whole]],
        store: RangeReader,
        config: Config,
        damaged: Callable[[CheckpointCorruptError], None],
    ) -> None:
        """Compares the archives' descriptions of tensors with the indexes.

        An unreadable archive is ignored here; a missing one is reported by the read itself.
        """
        indices, wholes = [index for index, _ in items], [whole for _, whole in items]
        tensors = [
            (whole, place.tensor)
            for whole, place in zip(wholes, self._inside(indices, wholes), strict=True)
            if place.tensor is not None
        ]
        stats = TransferStats(str(self._uri))
        edges = [whole for (_, whole, _), _ in tensors]
        found = locate(store, edges, config, stats, damaged=lambda error: None)
        for (name, whole, _), ours in tensors:
            if (its := found[whole]) is None or _said(its) == _said(ours):
                continue
            what = f"{_said(its)} by the archive around it, {_said(ours)} by the index"
            damaged(self._contradictory(name, whole, what))

    def length_of(self, index: MetadataIndex) -> int:
        """The bytes of an item.

        Raises:
            CheckpointCorruptError: If it has no place.
        """
        return self._wholes([index])[0][1].nbytes

    def _wholes(self, indices: Sequence[MetadataIndex]) -> list[_Whole]:
        """The objects of items, their byte ranges, and the transforms that were applied to them."""
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
        """The same for one item, from torch's metadata."""
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

        folders = {self._uri_of(record): record.folder for record in records if record.folder}

        def note(error: CheckpointCorruptError) -> None:
            if (folder := folders.get(error.uri or "")) and _is_gone(error):
                error.message += (
                    f"; {self._uri} shares it with {self._uri.beside(folder)}: what was copied "
                    "without that one can't be loaded. Copy both, or use cloudckpt cp, which makes "
                    "a copy that stands alone"
                )
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
                self._indexes[record.name] = None  # the edges of its items are read instead
            else:
                self._indexes[record.name] = found

    def _index_bytes(self, record: WrittenObject, item: str) -> StoredBytes:
        start, size = record.size - record.index_size, record.index_size
        key, blocks = self._uri.key(record.name), Blocks(CRC32C, size, (record.index_crc,))
        return StoredBytes(key, start, size, blocks, record.size, item)

    def _uri_of(self, record: WrittenObject) -> str:
        return self._uri.object(record.name)

    @property
    def _checksum(self) -> ChecksumAlgorithm:
        assert self._commit is not None
        assert self._commit.record is not None  # it names objects
        return self._commit.record.checksum

    def _inside(
        self, indices: Sequence[MetadataIndex], wholes: Sequence[_Whole]
    ) -> list[ItemPlace]:
        """The items' contents, according to the indexes that were read."""
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


def _is_gone(error: CheckpointCorruptError) -> bool:
    return isinstance(error.__cause__, ObjectNotFoundError)


def _said(tensor: StoredTensor) -> str:
    """A description of the tensor, for messages."""
    elements, dtype = tensor.elements, str(tensor.dtype).removeprefix("torch.")
    stop = elements.offset + elements.nbytes
    return f"{dtype} of shape {tensor.shape} at bytes {elements.offset} to {stop}"
