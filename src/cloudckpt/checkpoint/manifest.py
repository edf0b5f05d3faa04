"""Merges what all ranks have recorded into one record, and makes the commit object's bytes from it.

Record and commit object are made anew for each save; a later save of the same structure reuses only
the plan.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from cloudckpt.checkpoint.columns import column_of, unfilled
from cloudckpt.checkpoint.committed import CommitObject
from cloudckpt.checkpoint.from_torch import NotInColumnsError, table_of_metadata
from cloudckpt.checkpoint.lazy import lazy_metadata
from cloudckpt.checkpoint.objects import WrittenObject
from cloudckpt.checkpoint.record import Extents, Record, bound
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checkpoint.table import Table
from cloudckpt.checkpoint.torch_pickle import metadata_pickle
from cloudckpt.checkpoint.trailer import with_trailer
from cloudckpt.checksum import ChecksumAlgorithm
from cloudckpt.errors import DifferentCheckpointsError, IncompleteSaveError, UnsupportedValueError
from cloudckpt.gc_pause import paused_gc
from cloudckpt.uri import CheckpointURI

__all__ = ["Manifest", "Planned", "earlier_objects"]


@dataclass(frozen=True)
class Planned:
    """The plan of all ranks: what each writes in this save, and in later ones of equal structure.

    Attributes:
        table: The names and chunks of all ranks.
        rows: For each rank, the rows of the table that hold the items of its plan, in the plan's
            order.
        checksum: The checksum algorithm of the store.
        structure: The keys and empty dicts of all ranks' state dicts that torch's paths do not
            express; None if each rank reports its own after it has written.
    """

    table: Table
    rows: tuple[torch.Tensor, ...]
    checksum: ChecksumAlgorithm
    structure: Structure | None = None

    @classmethod
    def of(
        cls,
        metadata: Metadata,
        indices: Sequence[Sequence[MetadataIndex]],
        checksum: ChecksumAlgorithm,
        uri: str,
    ) -> Planned:
        """Makes the plan from torch's metadata, as a planner returns it.

        Args:
            metadata: The planner's metadata.
            indices: For each rank, the indices of the items in its plan, in the plan's order.
            checksum: The checksum algorithm of the store.
            uri: The checkpoint, for messages.

        Raises:
            IncompleteSaveError: If no rank writes an item that the metadata lists, or a rank writes
                an item that it does not list.
            UnsupportedValueError: If the metadata has classes that torch's planners do not make,
                or invalid numbers.
        """
        try:
            with paused_gc():
                table = table_of_metadata(metadata)
                table.check_names()
                table.check_chunks()
                rows = tuple(map(table.rows, indices))
        except NotInColumnsError as exc:
            raise UnsupportedValueError(
                f"the planner's metadata can't be written in the format of checkpoints: {exc}; "
                "use torch's DefaultSavePlanner, or a planner that returns the same classes",
                uri=uri,
            ) from exc
        _check_rows(table, rows, uri)
        return cls(table, rows, checksum)

    def written(self, records: Sequence[Record], *, attempt: str, uri: str) -> Record:
        """Merges the records of all ranks, which have written their items, into one record.

        Args:
            records: For each rank, the record of what it wrote.
            attempt: The random name of the save: sixteen hexadecimal digits.
            uri: The checkpoint.

        Raises:
            DifferentCheckpointsError: If a rank has written to another location.
            IncompleteSaveError: If a rank has not written as many items as it planned, or its
                report is inconsistent.
        """
        folder = CheckpointURI.parse(uri).folder
        for rank, (rows, one) in enumerate(zip(self.rows, records, strict=True)):
            if one.location != uri:
                raise DifferentCheckpointsError(
                    f"the rank that commits saves to {uri}, and rank {rank} to {one.location}: "
                    "give the same checkpoint_id on all ranks, for example by broadcasting it",
                    uri=uri,
                )
            if rows.numel() != len(one.extents):
                raise IncompleteSaveError(
                    f"rank {rank} planned {rows.numel()} items, but wrote {len(one.extents)}; "
                    "nothing was committed. Save again; if that fails, too, correct the planner",
                    uri=uri,
                )
        structure = self.structure
        if structure is None:
            structure = Structure.merged([one.structure for one in records], uri)
        # several ranks may refer to the same object of another checkpoint
        seen = [[each.seen_from(folder) for each in one.objects] for one in records]
        objects = {each.name: each for of_rank in seen for each in of_rank}
        numbers = {name: number for number, name in enumerate(objects)}
        of_ranks = [column_of([numbers[each.name] for each in of_rank]) for of_rank in seen]
        try:
            made = Record(
                table=self.table,
                extents=_extents(self.table.count, self.rows, records, of_ranks),
                objects=list(objects.values()),
                checksum=self.checksum,
                structure=structure,
                attempt=attempt,
                times=torch.cat([one.times for one in records]),
                committing=round(time.time() * 1000),
            )
            made.check_extents()
        except ValueError as exc:
            raise IncompleteSaveError(
                f"the ranks' reports of what they wrote are inconsistent: {exc}; nothing was "
                "committed. Save again; if that fails, too, correct the planner",
                uri=uri,
            ) from exc
        return made


class Manifest:
    """The contents of a commit object, before it is written.

    Attributes:
        attempt: The random name of the save.
        objects: The data objects of the checkpoint.
        metadata: torch's metadata of the checkpoint.
    """

    def __init__(self, record: Record, uri: str | None = None) -> None:
        """Encodes a record.

        Args:
            record: The record of what all ranks have written.
            uri: The checkpoint, for messages; None to leave it out of them.

        Raises:
            UnsupportedValueError: If the format can't express the record.
        """
        self.attempt, self.objects = record.attempt, record.objects
        self.metadata = lazy_metadata(record)
        try:
            self._pickled = metadata_pickle(record)
            self._record = record.to_bytes(bound(len(self._pickled)))
        except (KeyError, ValueError) as exc:
            raise UnsupportedValueError(
                f"the metadata of the state dict can't be stored: {exc}", uri=uri
            ) from exc

    @classmethod
    def of_copy(
        cls, source: CommitObject, objects: Mapping[str, WrittenObject], attempt: str
    ) -> Manifest:
        """Makes the manifest of a copy of a checkpoint.

        Args:
            source: The commit object of the original.
            objects: The copies of its data objects, by their original names.
            attempt: The random name of the copy.
        """
        if source.record is not None:
            renamed = [objects[one.name] for one in source.objects]
            return cls(dataclasses.replace(source.record, objects=renamed, attempt=attempt))
        made = cls.__new__(cls)
        made.attempt, made.objects = attempt, list(objects.values())
        made.metadata = metadata = copy.copy(source.metadata)  # with fields of its library
        with paused_gc():
            metadata.storage_data = {
                index: dataclasses.replace(place, relative_path=objects[place.relative_path].name)
                for index, place in (source.metadata.storage_data or {}).items()
            }
        metadata.storage_meta = dataclasses.replace(
            source.metadata.storage_meta or StorageMeta(), checkpoint_id=None, load_id=None
        )
        made._pickled = pickle.dumps(metadata, protocol=pickle.HIGHEST_PROTOCOL)
        made._record = b""
        return made

    def data(self, notes: bytes = b"") -> list[memoryview]:
        """Returns all bytes of the commit object, with these notes."""
        return with_trailer(self._pickled, self._record, notes)


def earlier_objects(records: Iterable[Record], folder: str) -> set[str]:
    """Returns the names of earlier saves' objects to which the checkpoint in ``folder`` refers.

    Args:
        records: For each rank, the record of what it wrote.
        folder: The name of the checkpoint's folder.
    """
    return {
        one.seen_from(folder).name for of_rank in records for one in of_rank.objects if one.folder
    }


def _check_rows(table: Table, rows: Sequence[torch.Tensor], uri: str) -> None:
    """Checks that the ranks' plans have each item of the table, and no other items.

    Args:
        table: The items that were planned.
        rows: For each rank, the rows of its items in the table; -1 for an item that is not there.
        uri: The checkpoint, for messages.

    Raises:
        IncompleteSaveError: If no rank plans an item, or a rank plans an unknown one.
    """
    is_written = torch.zeros(table.count, dtype=torch.bool, device="cpu")
    for rank, of_rank in enumerate(rows):
        if bool((of_rank < 0).any()):
            raise IncompleteSaveError(
                f"rank {rank} wrote an item that the planner's metadata lacks; nothing was "
                "committed: correct create_global_plan, which returns this metadata",
                uri=uri,
            )
        is_written[of_rank] = True
    missing = (~is_written).nonzero().view(-1)
    if missing.numel():
        name, part = table.name_of(row := int(missing[0])), ""
        if (entry := table.get(name)) is not None and entry.form.dims > 0:
            offsets = table.chunks[entry.form.dims].offsets[entry.place + row - entry.first]
            part = f" (offsets {offsets.tolist()})"
        raise IncompleteSaveError(
            f"the planner's metadata lists {name}{part}, which no rank wrote, or lists it twice; "
            "nothing was committed: correct create_global_plan, which returns this metadata",
            uri=uri,
            item=name,
        )


def _extents(
    count: int,
    rows: Sequence[torch.Tensor],
    records: Sequence[Record],
    numbers: Sequence[torch.Tensor],
) -> Extents:
    """Returns the locations of all ranks' items, in the order of the table.

    Args:
        count: The number of rows of the table.
        rows: For each rank, the rows of its items.
        records: For each rank, the record of what it wrote.
        numbers: For each rank, the new number of each object in its record.

    Raises:
        ValueError: If the number of an object in a record is out of range.
    """
    have_digests = all(one.extents.has_digests for one in records)
    columns = [unfilled(count) for _ in range(5 if have_digests else 3)]
    for of_rank, one, number in zip(rows, records, numbers, strict=True):
        objects, *others = one.extents.columns[: len(columns)]
        if bool(((objects < 0) | (objects >= number.numel())).any()):
            raise ValueError("the location of an item refers to an object that does not exist")
        for column, values in zip(columns, (number[objects], *others), strict=True):
            column[of_rank] = values
    return Extents(*columns)
