"""Reads what a checkpoint contains, from its commit object and without its tensors."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
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
from cloudckpt.errors import CheckpointNotFoundError, CloudCheckpointError
from cloudckpt.runs.catalog import Run
from cloudckpt.transfer.retry import open_store
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["CheckpointContents", "ReadContent", "StoredItem", "inspect", "read_content"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredItem:
    """One entry of a checkpoint's state dict: a tensor, or a pickled value.

    Attributes:
        name: The fully qualified name of the entry.
        shape: The shape of the whole tensor; None if the entry is not a tensor.
        dtype: The element type without ``torch.``; None if the entry is not a tensor.
        nbytes: Bytes of the whole tensor, or of the pickled value.
        chunks: The number of chunks in which the entry is stored.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: str | None
    nbytes: int
    chunks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTimes:
    """The times of a save, in milliseconds since 1970 by each rank's own clock.

    Attributes:
        ranks: For each rank a tuple: its number, when its planning began, when its first byte was
            sent, when the store had all of its data, and how many bytes it sent.
        committing: When all ranks had written, by the first rank's clock.
    """

    ranks: tuple[tuple[int, int, int, int, int], ...]
    committing: int


@dataclass(frozen=True, kw_only=True)
class CheckpointContents:
    """The entries of a checkpoint, its notes, and what it needs of other checkpoints.

    Attributes:
        uri: The location of the checkpoint.
        items: The entries, sorted by name.
        notes: The notes saved with the checkpoint.
        has_checksums: Whether the checkpoint can be verified by checksums; False for those of
            torch's own writers, and for models in safetensors files.
        shared: For each other checkpoint of the run that this one refers to, by location, the bytes
            of it that this one needs, including torch's format around each tensor; empty if this
            one refers to no other checkpoint.
        times: The times of the save; None if it has not stored them, as with torch's own writers.
    """

    uri: str
    items: tuple[StoredItem, ...]
    notes: Notes
    has_checksums: bool
    shared: Mapping[str, int] = field(default_factory=dict)
    times: SaveTimes | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of all entries, without torch's format around each tensor."""
        return sum(item.nbytes for item in self.items)


def inspect(uri: URILike, *, config: Config | None = None) -> CheckpointContents:
    """Returns what a committed checkpoint contains: names, shapes, types, sizes, notes.

    Only metadata is read, no tensor.

    Args:
        uri: The location of the checkpoint, for example ``s3://bucket/path``.
        config: Options; None reads them from the environment.

    Raises:
        InvalidURIError: If ``uri`` is not a valid location.
        CheckpointNotFoundError: If the location has no committed checkpoint.
        CheckpointCorruptError: If the metadata is damaged.
        CheckpointError: If the metadata can't be read for another reason: it names code that is not
            on the allow-list, for example, or is replaced again and again.
        ConfigError: If an option is invalid.
        StoreError: If the store refuses or stays unreachable.
    """
    location = CheckpointURI.parse(uri)
    config = config_or_default(config)
    read, notes = read_content(location, config), Notes()
    if read.commit.info.key == location.key(METADATA):  # models of safetensors files have no notes
        notes = Notes.from_json(
            read.commit.notes, open_store(location, config).uri(read.commit.info.key)
        )
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
    """A checkpoint whose commit object was read.

    Attributes:
        commit: The commit object, parsed.
        places: Locates the bytes of the entries in the data objects.
    """

    commit: CommitObject
    places: Places

    @property
    def metadata(self) -> Metadata:
        """The checkpoint's metadata in torch's form."""
        return self.commit.metadata

    @property
    def has_checksums(self) -> bool:
        """Whether the checkpoint has checksums, as all that cloudckpt writes have."""
        return self.commit.record is not None

    def shared(self) -> dict[str, int]:
        """Returns how many bytes of other checkpoints this one needs, by their folders' names."""
        sizes: dict[str, int] = {}
        if (record := self.commit.record) is not None and len(record.extents):
            extents, sums = record.extents, unfilled(len(record.objects)).zero_()
            sums.index_add_(0, extents.objects, extents.lengths)
            for stored, nbytes in zip(record.objects, sums.tolist(), strict=True):
                if stored.folder:
                    sizes[stored.folder] = sizes.get(stored.folder, 0) + nbytes
        return sizes

    def times(self) -> SaveTimes | None:
        """Returns the times of the save; None if the save has not stored them."""
        record = self.commit.record
        if record is None or not len(record.times):
            return None
        ranks = tuple(tuple(row) for row in record.times.tolist())
        return SaveTimes(ranks=ranks, committing=record.committing)

    def items(self) -> Iterator[StoredItem]:
        """Yields all entries of the checkpoint."""
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
        """Describes the entry with this name; ``entry`` is torch's metadata of it.

        If this is not the metadata of a tensor, the entry is a pickled value.
        """
        if isinstance(entry, TensorStorageMetadata):
            return _stored(name, tuple(entry.size), entry.properties.dtype, len(entry.chunks))
        nbytes = self.places.wholes([MetadataIndex(name)])[0].nbytes
        return StoredItem(name=name, shape=None, dtype=None, nbytes=nbytes, chunks=1)

    def indices(self, name: str) -> list[MetadataIndex]:
        """Returns torch's index of each chunk of an entry."""
        entry = self.metadata.state_dict_metadata[name]
        if not isinstance(entry, TensorStorageMetadata):
            return [MetadataIndex(name)]
        return [
            MetadataIndex(name, chunk.offsets, number) for number, chunk in enumerate(entry.chunks)
        ]


def _stored(name: str, shape: tuple[int, ...], dtype: torch.dtype, chunks: int) -> StoredItem:
    """Describes a tensor that is stored in ``chunks`` chunks."""
    return StoredItem(
        name=name,
        shape=shape,
        dtype=str(dtype).removeprefix("torch."),
        nbytes=math.prod(shape) * dtype.itemsize,
        chunks=chunks,
    )


def read_content(uri: CheckpointURI, config: Config) -> ReadContent:
    """Reads the commit object of a checkpoint.

    Raises:
        CheckpointNotFoundError: If the location has no committed checkpoint. If it is a run, the
            message names its newest step.
        CheckpointCorruptError: If the metadata is damaged.
        CheckpointError: If the metadata can't be read for another reason.
        StoreError: If the store refuses or stays unreachable.
    """
    reader = CloudStorageReader(uri, config=config)
    try:
        metadata = reader.read_metadata()
    except CheckpointNotFoundError as error:
        run, newest = Run(uri, config=config), None
        with contextlib.suppress(CloudCheckpointError):
            newest = run.newest(run.steps(warns=False))
        if newest is not None:
            error.message = (
                f"this is a run, not a checkpoint: give one of its steps; {run.uri(newest)} is the "
                "newest"
            )
        raise
    assert reader.commit is not None  # set by read_metadata()
    return ReadContent(reader.commit, reader.places_in(metadata))
