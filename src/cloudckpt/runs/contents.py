"""The content of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from cloudckpt.checkpoint.columns import unfilled
from cloudckpt.checkpoint.committed import CommitObject
from cloudckpt.checkpoint.lazy import table_behind
from cloudckpt.checkpoint.notes import Notes
from cloudckpt.checkpoint.objects import METADATA
from cloudckpt.checkpoint.places import Places
from cloudckpt.config import Config, config_or_default
from cloudckpt.dcp.reader import CloudStorageReader
from cloudckpt.errors import CheckpointCorruptError
from cloudckpt.stores.base import ObjectInfo, ObjectStore
from cloudckpt.transfer.download import raise_it
from cloudckpt.transfer.landing import StoredBytes
from cloudckpt.transfer.retry import open_store
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["CheckpointContents", "ReadContent", "StoredItem", "inspect", "read_content"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredItem:
    """An entry of a stored state dict.

    Attributes:
        name: Its fully qualified name.
        shape: Of the whole tensor; None if it is not a tensor.
        dtype: The type of its elements without ``torch.``; None if it is not a tensor.
        nbytes: Bytes of the whole tensor, or of the pickled value.
        chunks: The number of pieces in which it is stored.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: str | None
    nbytes: int
    chunks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTimes:
    """How long a save took. Times are milliseconds since 1970, by each rank's own clock.

    Attributes:
        ranks: For each rank: its number, when it began to plan, when its first byte went out, when
            the store had all of its data, and how many bytes it sent.
        committing: When the commit began.
    """

    ranks: tuple[tuple[int, int, int, int, int], ...]
    committing: int


@dataclass(frozen=True, kw_only=True)
class CheckpointContents:
    """The content of a checkpoint.

    Attributes:
        uri: Where it is.
        items: Its entries, by name.
        notes: The notes saved with it.
        has_checksums: Whether its blocks can be verified; those of torch's own writers can't.
        shared: For each checkpoint beside it that it refers to, how many of its bytes are there,
            envelopes included; empty if it stands alone.
        times: How long the save took; None if cloudckpt has not written it.
    """

    uri: str
    items: tuple[StoredItem, ...]
    notes: Notes
    has_checksums: bool
    shared: Mapping[str, int] = field(default_factory=dict)
    times: SaveTimes | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(item.nbytes for item in self.items)


def inspect(uri: URILike, *, config: Config | None = None) -> CheckpointContents:
    """The content of a committed checkpoint: names, shapes, types, sizes, notes; reads no tensor.

    Args:
        uri: ``s3://bucket/path`` or another location.
        config: Options.

    Raises:
        CheckpointNotFoundError: If there is no committed checkpoint.
        CheckpointCorruptError: If its metadata is damaged.
        StoreError: If the store refuses or stays unreachable.
    """
    location = CheckpointURI.parse(uri)
    config = config_or_default(config)
    read, notes = read_content(location, config), Notes()
    if read.commit.key == location.key(METADATA):  # models have none
        notes = Notes.from_json(read.said.notes, open_store(location, config).uri(read.commit.key))
    return CheckpointContents(
        uri=str(location),
        items=tuple(sorted(read.items(), key=lambda item: item.name)),
        notes=notes,
        has_checksums=read.has_checksums,
        shared={str(location.beside(folder)): size for folder, size in read.shared().items()},
        times=read.times(),
    )


@dataclass(frozen=True)
class ReadContent:
    """A checkpoint as its commit object describes it.

    Attributes:
        said: What the commit object says.
        places: The locations of the items.
    """

    said: CommitObject
    places: Places

    @property
    def commit(self) -> ObjectInfo:
        """The commit object."""
        return self.said.info

    @property
    def metadata(self) -> Metadata:
        """Torch's metadata."""
        return self.said.metadata

    @property
    def has_checksums(self) -> bool:
        """Whether its blocks can be verified."""
        return self.said.record is not None

    def shared(self) -> dict[str, int]:
        """The bytes of items in checkpoints beside this one, by folder."""
        found: dict[str, int] = {}
        if (record := self.said.record) is not None and len(record.extents):
            extents, sums = record.extents, unfilled(len(record.objects)).zero_()
            sums.index_add_(0, extents.objects, extents.lengths)
            for one, nbytes in zip(record.objects, sums.tolist(), strict=True):
                if one.folder:
                    found[one.folder] = found.get(one.folder, 0) + nbytes
        return found

    def times(self) -> SaveTimes | None:
        """How long the save took; None if that was not recorded."""
        record = self.said.record
        if record is None or not len(record.times):
            return None
        ranks = tuple(tuple(row) for row in record.times.tolist())
        return SaveTimes(ranks=ranks, committing=record.committing)

    def items(self) -> Iterator[StoredItem]:
        """All entries."""
        table = table_behind(self.metadata)
        if table is None:
            for name, entry in self.metadata.state_dict_metadata.items():
                yield self.item(name, entry)
            return
        for name, known in table.entries():
            if known.shape is None:
                yield self.item(name, None)
            else:
                yield _stored(name, known.shape, known.form.dtype, known.count)

    def item(self, name: str, entry: object) -> StoredItem:
        """One entry of the metadata."""
        if isinstance(entry, TensorStorageMetadata):
            return _stored(name, tuple(entry.size), entry.properties.dtype, len(entry.chunks))
        nbytes = self.places.wholes([MetadataIndex(name)])[0].nbytes
        return StoredItem(name=name, shape=None, dtype=None, nbytes=nbytes, chunks=1)

    def sources(
        self,
        store: ObjectStore,
        config: Config,
        damaged: Callable[[CheckpointCorruptError], None] = raise_it,
    ) -> list[StoredBytes]:
        """The items' own bytes, with their checksums; reads the indexes.

        See :meth:`cloudckpt.checkpoint.places.Places.sources`.
        """
        found: list[MetadataIndex] = []
        for name, entry in self.metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                found += (
                    MetadataIndex(name, chunk.offsets, number)
                    for number, chunk in enumerate(entry.chunks)
                )
            else:
                found.append(MetadataIndex(name))
        return self.places.sources(found, store, config, damaged)


def _stored(name: str, shape: tuple[int, ...], dtype: torch.dtype, chunks: int) -> StoredItem:
    return StoredItem(
        name=name,
        shape=shape,
        dtype=str(dtype).removeprefix("torch."),
        nbytes=math.prod(shape) * dtype.itemsize,
        chunks=chunks,
    )


def read_content(uri: CheckpointURI, config: Config) -> ReadContent:
    """The checkpoint, as its commit object describes it.

    Raises:
        CheckpointNotFoundError: If there is no committed checkpoint.
        CheckpointCorruptError: If metadata are damaged.
        StoreError: If the store refuses or stays unreachable.
    """
    reader = CloudStorageReader(uri, config=config)
    metadata = reader.read_metadata()
    assert reader.commit is not None  # it has read the metadata
    return ReadContent(reader.commit, reader.places_in(metadata))
