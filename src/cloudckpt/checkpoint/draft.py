"""The bytes of a commit object, before they are sent.

They are made anew for each commit from what all ranks have written. A save of the same structure
reuses only the plan of the previous save.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from cloudckpt.checkpoint.columns import column_of, unfilled
from cloudckpt.checkpoint.committed import CommitObject
from cloudckpt.checkpoint.from_torch import (
    NotInColumnsError,
    check_chunks,
    inventory_of_metadata,
)
from cloudckpt.checkpoint.inventory import Inventory
from cloudckpt.checkpoint.lazy import lazy_metadata, save_id_of
from cloudckpt.checkpoint.objects import WrittenObject
from cloudckpt.checkpoint.pickled import metadata_pickle
from cloudckpt.checkpoint.record import Record, bound
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checkpoint.torch_private import CURRENT_DCP_VERSION, StorageInfo
from cloudckpt.checkpoint.trailer import with_trailer
from cloudckpt.checkpoint.written import Extents, Written
from cloudckpt.checksum import ChecksumAlgorithm
from cloudckpt.errors import DifferentCheckpointsError, IncompleteSaveError
from cloudckpt.gc_pause import paused_gc
from cloudckpt.uri import CheckpointURI

__all__ = ["Draft", "Planned"]


class Draft:
    """What a save is about to commit.

    Attributes:
        attempt: The random name of the save.
        objects: Its data objects.
        inventory: What it holds; None if only the pickle can say so.
        metadata: torch's metadata for it.
    """

    def __init__(
        self,
        attempt: str,
        objects: Sequence[WrittenObject],
        metadata: Metadata,
        inventory: Inventory | None,
        pickled: bytes,
        record: bytes,
    ) -> None:
        self.attempt = attempt
        self.objects = objects
        self.metadata = metadata
        self.inventory = inventory
        self._pickled = pickled
        self._record = record

    @classmethod
    def of(
        cls,
        planned: Planned,
        written: Sequence[Written],
        checksum: ChecksumAlgorithm,
        *,
        attempt: str,
        uri: str,
    ) -> Draft:
        """That of a save.

        Args:
            planned: What all ranks were to write.
            written: By rank, what it wrote.
            checksum: The algorithm of the store.
            attempt: The random name of the save: sixteen hexadecimal digits.
            uri: The checkpoint.

        Raises:
            DifferentCheckpointsError: If a rank has written to another location.
            IncompleteSaveError: If the metadata promise an item that no rank has written, or a
                rank's report is inconsistent.
        """
        _check_location(written, uri)
        folder = CheckpointURI.parse(uri).folder
        written = [one.seen_from(folder) for one in written]
        for rank, (count, one) in enumerate(zip(planned.counts, written, strict=True)):
            if count != len(one.extents):
                raise IncompleteSaveError(
                    f"rank {rank} has planned {count} items, and written {len(one.extents)}; "
                    "nothing was committed",
                    uri=uri,
                )
        objects, numbers = _objects_of(written)
        structure = planned.structure
        if structure is None:
            structure = Structure.merged([one.structure for one in written], uri)
        if planned.inventory is None:
            metadata = planned.metadata
            metadata.storage_data = places = _places(planned.indices, written)
            _check_complete(metadata, places, uri)
            metadata.storage_meta = StorageMeta(save_id=save_id_of(attempt))
            metadata.version = CURRENT_DCP_VERSION
            return cls._by_pickle(attempt, objects, metadata, checksum, structure)
        try:
            inventory = dataclasses.replace(
                planned.inventory,
                extents=_extents(planned.inventory.count, planned.rows, written, numbers),
                objects=objects,
                structure=structure,
            )
            inventory.check_extents()
        except ValueError as exc:
            raise IncompleteSaveError(
                f"a rank has written other objects than it says: {exc}; nothing was committed",
                uri=uri,
            ) from exc
        return cls.from_inventory(inventory, attempt)

    @classmethod
    def from_inventory(cls, inventory: Inventory, attempt: str) -> Draft:
        """The draft of an inventory, by pickle only if the format has no room for all of it."""
        metadata, objects = lazy_metadata(inventory, attempt), inventory.objects
        try:
            pickled = metadata_pickle(inventory, attempt)
            record = Record.of(inventory, attempt).to_bytes(bound(len(pickled)))
        except (KeyError, ValueError):
            structure = inventory.structure
            return cls._by_pickle(attempt, objects, metadata, inventory.checksum, structure)
        return cls(attempt, objects, metadata, inventory, pickled, record)

    @classmethod
    def _by_pickle(
        cls,
        attempt: str,
        objects: Sequence[WrittenObject],
        metadata: Metadata,
        checksum: ChecksumAlgorithm,
        structure: Structure,
    ) -> Draft:
        """The draft of metadata that columns can't express, or not within the format's limits."""
        with paused_gc():
            pickled = pickle.dumps(metadata, protocol=pickle.HIGHEST_PROTOCOL)
        record = Record(attempt, objects, checksum, structure).to_bytes(bound(len(pickled)))
        return cls(attempt, objects, metadata, None, pickled, record)

    @classmethod
    def of_copy(
        cls, source: CommitObject, objects: Mapping[str, WrittenObject], attempt: str
    ) -> Draft:
        """The draft of a copy of a checkpoint.

        Args:
            source: The checkpoint that is copied.
            objects: The copies of its data objects, by their original names.
            attempt: The random name of the copy.
        """
        renamed = [objects[one.name] for one in source.objects]
        if source.inventory is not None:
            return cls.from_inventory(
                dataclasses.replace(source.inventory, objects=renamed), attempt
            )
        metadata = dataclasses.replace(source.metadata)
        with paused_gc():
            metadata.storage_data = {
                index: dataclasses.replace(place, relative_path=objects[place.relative_path].name)
                for index, place in (source.metadata.storage_data or {}).items()
            }
        metadata.storage_meta = dataclasses.replace(
            source.metadata.storage_meta or StorageMeta(), checkpoint_id=None, load_id=None
        )
        if source.record is not None:
            metadata.storage_meta.save_id = save_id_of(attempt)
            of_ours = source.record
            return cls._by_pickle(attempt, renamed, metadata, of_ours.checksum, of_ours.structure)
        pickled = pickle.dumps(metadata, protocol=pickle.HIGHEST_PROTOCOL)
        return cls(attempt, list(objects.values()), metadata, None, pickled, b"")

    def data(self, notes: bytes = b"") -> list[memoryview]:
        """All bytes of the commit object, including the notes."""
        return with_trailer(self._pickled, self._record, notes)


@dataclass(frozen=True)
class Planned:
    """What the ranks are to write, in this save and in later ones by the same plan.

    It is made before they write, so that the plans of all ranks need not be kept meanwhile.

    Attributes:
        counts: By rank, the number of items in its plan.
        inventory: All of it, without locations; None if columns can't express it.
        rows: By rank, the rows of the items in its plan.
        structure: What flattening has lost of the state dicts of all ranks; None if each rank
            reports it with what it has written.
        metadata: torch's, where there is no inventory.
        indices: By rank, the indices of the items in its plan, in that case.
    """

    counts: tuple[int, ...]
    inventory: Inventory | None
    rows: tuple[torch.Tensor, ...] = ()
    structure: Structure | None = None
    metadata: Metadata = field(default_factory=lambda: Metadata({}))
    indices: Sequence[Sequence[MetadataIndex]] = ()

    @classmethod
    def of(
        cls,
        metadata: Metadata,
        indices: Sequence[Sequence[MetadataIndex]],
        checksum: ChecksumAlgorithm,
    ) -> Planned:
        """The plan of a planner that makes torch's metadata.

        Args:
            metadata: The planner's metadata.
            indices: By rank, the indices of the items in its plan, in the plan's order.
            checksum: The algorithm of the store.
        """
        counts = tuple(map(len, indices))
        try:
            with paused_gc():
                inventory = inventory_of_metadata(metadata, checksum)
                check_chunks(inventory)
                rows = tuple(map(inventory.rows, indices))
            _check_rows(inventory, rows)
        except NotInColumnsError:
            return cls(counts, None, metadata=metadata, indices=indices)
        return cls(counts, inventory, rows)


def _check_rows(inventory: Inventory, rows: Sequence[torch.Tensor]) -> None:
    """Checks that the ranks write everything in the inventory, and nothing else.

    Raises:
        NotInColumnsError: If they don't, or two chunks are the same part of a tensor.
    """
    is_written = torch.zeros(inventory.count, dtype=torch.bool, device="cpu")
    for of_rank in rows:
        if bool((of_rank < 0).any()):
            raise NotInColumnsError("an item that the metadata do not have")
        is_written[of_rank] = True
    if not bool(is_written.all()):
        raise NotInColumnsError("two chunks with one place, or one that nobody will write")


def _objects_of(written: Sequence[Written]) -> tuple[list[WrittenObject], list[torch.Tensor]]:
    """The objects of all ranks, each once, and by rank the numbers of its own among them.

    Several ranks may refer to the same object of another checkpoint.
    """
    found: dict[str, int] = {}
    objects: list[WrittenObject] = []
    numbers: list[torch.Tensor] = []
    for one in written:
        of_rank = []
        for each in one.objects:
            number = found.setdefault(each.name, len(objects))
            if number == len(objects):
                objects.append(each)
            of_rank.append(number)
        numbers.append(column_of(of_rank))
    return objects, numbers


def _extents(
    count: int,
    rows: Sequence[torch.Tensor],
    written: Sequence[Written],
    numbers: Sequence[torch.Tensor],
) -> Extents:
    """Where all rows lie, with objects numbered across all ranks."""
    have_digests = all(one.extents.has_digests for one in written)
    columns = [unfilled(count) for _ in range(5 if have_digests else 3)]
    for of_rank, one, number in zip(rows, written, numbers, strict=True):
        objects, *others = one.extents.all_columns if have_digests else one.extents.columns
        if bool(((objects < 0) | (objects >= number.numel())).any()):
            raise ValueError("an item in an object that is not there")
        for column, values in zip(columns, (number[objects], *others), strict=True):
            column[of_rank] = values
    return Extents(*columns)


def _places(
    indices: Sequence[Sequence[MetadataIndex]], written: Sequence[Written]
) -> dict[MetadataIndex, StorageInfo]:
    places: dict[MetadataIndex, StorageInfo] = {}
    for of_rank, one in zip(indices, written, strict=True):
        names = [found.name for found in one.objects]
        rows = zip(*(column.tolist() for column in one.extents.columns), strict=True)
        for index, (number, offset, length) in zip(of_rank, rows, strict=True):
            places[index] = StorageInfo(names[number], offset, length)
    return places


def _check_location(written: Sequence[Written], uri: str) -> None:
    """Checks that all ranks have written to the committing rank's location."""
    for rank, one in enumerate(written):
        if one.uri != uri:
            raise DifferentCheckpointsError(
                f"the rank that commits saves here, and rank {rank} to {one.uri}: give the same "
                "checkpoint_id on all ranks, for example by a broadcast of it",
                uri=uri,
            )


def _check_complete(
    metadata: Metadata, written: dict[MetadataIndex, StorageInfo], uri: str
) -> None:
    """Checks that every item that a reader may ask for was written."""
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            wanted = [MetadataIndex(fqn, chunk.offsets) for chunk in entry.chunks]
        else:
            wanted = [MetadataIndex(fqn)]
        for index in wanted:
            if index not in written:
                raise IncompleteSaveError(
                    f"{fqn} (offsets {index.offset}) was planned, but no rank has written it; "
                    "nothing was committed",
                    uri=uri,
                    item=fqn,
                )
