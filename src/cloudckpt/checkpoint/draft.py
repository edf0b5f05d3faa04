"""The bytes of a commit object, before they are sent.

They are made anew for each commit from what all ranks have written. A save of the same structure
reuses only the plan of the previous save.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
from cloudckpt.checkpoint.lazy import lazy_metadata
from cloudckpt.checkpoint.objects import WrittenObject
from cloudckpt.checkpoint.pickled import metadata_pickle
from cloudckpt.checkpoint.record import Record, bound
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checkpoint.trailer import with_trailer
from cloudckpt.checkpoint.written import Extents, Written
from cloudckpt.checksum import ChecksumAlgorithm
from cloudckpt.errors import DifferentCheckpointsError, IncompleteSaveError, UnsupportedValueError
from cloudckpt.gc_pause import paused_gc
from cloudckpt.uri import CheckpointURI

__all__ = ["Draft", "Planned"]


class Draft:
    """What a save is about to commit.

    Attributes:
        attempt: The random name of the save.
        objects: Its data objects.
        inventory: What it holds; None of a copy of what another package has written.
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
        *,
        attempt: str,
        uri: str,
    ) -> Draft:
        """That of a save.

        Args:
            planned: What all ranks were to write.
            written: By rank, what it wrote.
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
        return cls.from_inventory(inventory, attempt, uri)

    @classmethod
    def from_inventory(cls, inventory: Inventory, attempt: str, uri: str | None = None) -> Draft:
        """The draft of an inventory.

        Raises:
            UnsupportedValueError: If the format has no room for it.
        """
        metadata, objects = lazy_metadata(inventory, attempt), inventory.objects
        try:
            pickled = metadata_pickle(inventory, attempt)
            record = Record.of(inventory, attempt).to_bytes(bound(len(pickled)))
        except (KeyError, ValueError) as exc:
            raise UnsupportedValueError(
                f"the state dict can't be described in the format of checkpoints: {exc}", uri=uri
            ) from exc
        return cls(attempt, objects, metadata, inventory, pickled, record)

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
        if source.inventory is not None:
            renamed = [objects[one.name] for one in source.objects]
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
        inventory: All of it, without locations.
        rows: By rank, the rows of the items in its plan.
        structure: What flattening has lost of the state dicts of all ranks; None if each rank
            reports it with what it has written.
    """

    counts: tuple[int, ...]
    inventory: Inventory
    rows: tuple[torch.Tensor, ...] = ()
    structure: Structure | None = None

    @classmethod
    def of(
        cls,
        metadata: Metadata,
        indices: Sequence[Sequence[MetadataIndex]],
        checksum: ChecksumAlgorithm,
        uri: str,
    ) -> Planned:
        """The plan of a planner that makes torch's metadata.

        Args:
            metadata: The planner's metadata.
            indices: By rank, the indices of the items in its plan, in the plan's order.
            checksum: The algorithm of the store.
            uri: The checkpoint, for messages.

        Raises:
            IncompleteSaveError: If no rank writes an item that the metadata promise.
            UnsupportedValueError: If it is no metadata as torch's planners make it.
        """
        counts = tuple(map(len, indices))
        try:
            with paused_gc():
                inventory = inventory_of_metadata(metadata, checksum)
                check_chunks(inventory)
                rows = tuple(map(inventory.rows, indices))
        except NotInColumnsError as exc:
            raise UnsupportedValueError(
                f"the planner's plan can't be written in the format of checkpoints: {exc}", uri=uri
            ) from exc
        _check_rows(inventory, rows, uri)
        return cls(counts, inventory, rows)


def _check_rows(inventory: Inventory, rows: Sequence[torch.Tensor], uri: str) -> None:
    """Checks that the ranks write everything in the inventory, each chunk once, and nothing else.

    Raises:
        IncompleteSaveError: If they don't.
    """
    is_written = torch.zeros(inventory.count, dtype=torch.bool, device="cpu")
    for rank, of_rank in enumerate(rows):
        if bool((of_rank < 0).any()):
            raise IncompleteSaveError(
                f"rank {rank} has written an item that the planner's metadata do not have; nothing "
                "was committed",
                uri=uri,
            )
        is_written[of_rank] = True
    missing = (~is_written).nonzero().view(-1)
    if missing.numel():
        row = int(missing[0])
        name = inventory.name_of(row)
        entry = inventory.metadata_of(name)
        part = ""
        if isinstance(entry, TensorStorageMetadata):
            part = f" (offsets {entry.chunks[row - inventory.entries[name].first].offsets})"
        raise IncompleteSaveError(
            f"{name}{part} was planned, but no rank has written it, or it was planned twice; "
            "nothing was committed",
            uri=uri,
            item=name,
        )


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


def _check_location(written: Sequence[Written], uri: str) -> None:
    """Checks that all ranks have written to the committing rank's location."""
    for rank, one in enumerate(written):
        if one.uri != uri:
            raise DifferentCheckpointsError(
                f"the rank that commits saves here, and rank {rank} to {one.uri}: give the same "
                "checkpoint_id on all ranks, for example by a broadcast of it",
                uri=uri,
            )
