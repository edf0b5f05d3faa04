"""The bytes of a commit object, before they are sent; and what the next save can take from them.

All of them are made anew at each commit, of what all ranks have written, by the same steps. A save
of the same structure takes only the plan from the one before, as columns, and where the items of
each rank lay in that rank's objects: a rank says which of its items have moved since. Whether the
rank and the coordinator mean the same by that is compared, as everything that was kept is.
"""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from cloudckpt.checkpoint.body import body_of, to_json, without_columns
from cloudckpt.checkpoint.committed import CommitObject
from cloudckpt.checkpoint.inventory import Inventory, NotInColumnsError, PlannedInventory
from cloudckpt.checkpoint.lazy import lazy_metadata, save_id_of
from cloudckpt.checkpoint.pickled import metadata_pickle
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checkpoint.torch_private import CURRENT_DCP_VERSION, StorageInfo
from cloudckpt.checkpoint.trailer import with_trailer
from cloudckpt.checkpoint.written import Extents, Written, WrittenObject
from cloudckpt.checksum import ChecksumAlgorithm
from cloudckpt.errors import DifferentCheckpointsError, IncompleteSaveError
from cloudckpt.gc_pause import paused_gc

__all__ = ["Draft", "Planned"]


class Draft:
    """What a save is about to commit.

    Attributes:
        attempt: The random name of the save.
        objects: Its data objects.
        inventory: What it holds; None if only the pickle can say so.
        metadata: torch's metadata of it.
    """

    def __init__(
        self,
        attempt: str,
        objects: Sequence[WrittenObject],
        metadata: Metadata,
        inventory: Inventory | None,
        pickled: bytes,
        body: bytes,
    ) -> None:
        self.attempt = attempt
        self.objects = objects
        self.metadata = metadata
        self.inventory = inventory
        self._pickled = pickled
        self._body = body
        self._next: _ForNextSave | None = None

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
        """That of a save whose structure is new.

        Args:
            planned: What all ranks were to write.
            written: By rank, what it has written.
            checksum: The algorithm of the store.
            attempt: The random name of the save: sixteen hexadecimal digits.
            uri: The checkpoint.

        Raises:
            DifferentCheckpointsError: If a rank has written to another location.
            IncompleteSaveError: If the metadata promise an item that nobody has written, or a rank
                has written what makes no sense.
        """
        _check_location(written, uri)
        for rank, (count, one) in enumerate(zip(planned.counts, written, strict=True)):
            if count != len(one.extents):
                raise IncompleteSaveError(
                    f"rank {rank} has planned {count} items, and written {len(one.extents)}; "
                    "nothing was committed",
                    uri=uri,
                )
        structure = Structure.merged([one.structure for one in written], uri)
        if planned.inventory is not None:
            return cls._placed(planned.inventory, written, structure, checksum, attempt, uri)
        metadata = planned.metadata
        metadata.storage_data = places = _places(planned.indices, written)
        _check_complete(metadata, places, uri)
        metadata.storage_meta = StorageMeta(save_id=save_id_of(attempt))
        metadata.version = CURRENT_DCP_VERSION
        objects = list(itertools.chain.from_iterable(one.objects for one in written))
        return cls._by_pickle(attempt, objects, metadata, checksum, structure)

    @classmethod
    def _placed(
        cls,
        planned: PlannedInventory,
        written: Sequence[Written],
        structure: Structure,
        checksum: ChecksumAlgorithm,
        attempt: str,
        uri: str,
    ) -> Draft:
        """That of a plan, and of what each rank has written of it, all its items."""
        try:
            inventory = planned.placed(written, checksum, structure)
        except ValueError as exc:
            raise IncompleteSaveError(
                f"a rank has written other objects than it says: {exc}; nothing was committed",
                uri=uri,
            ) from exc
        draft = cls.from_inventory(inventory, attempt)
        draft._next = _ForNextSave(planned, tuple(one.extents for one in written), structure)
        return draft

    @classmethod
    def from_inventory(cls, inventory: Inventory, attempt: str) -> Draft:
        """That of an inventory; only the pickle has it if the format has no room for all of it."""
        metadata, objects = lazy_metadata(inventory, attempt), inventory.objects
        pickled = metadata_pickle(inventory, attempt)
        body = None if pickled is None else body_of(inventory, attempt, len(pickled))
        if pickled is not None and body is not None:
            return cls(attempt, objects, metadata, inventory, pickled, body)
        return cls._by_pickle(attempt, objects, metadata, inventory.checksum, inventory.structure)

    @classmethod
    def _by_pickle(
        cls,
        attempt: str,
        objects: Sequence[WrittenObject],
        metadata: Metadata,
        checksum: ChecksumAlgorithm,
        structure: Structure,
    ) -> Draft:
        """That of metadata which columns can't express, or not in bounds."""
        with paused_gc():
            pickled = pickle.dumps(metadata, protocol=pickle.HIGHEST_PROTOCOL)
        body = without_columns(attempt, objects, checksum, _more(structure))
        return cls(attempt, objects, metadata, None, pickled, body)

    @classmethod
    def of_copy(
        cls, source: CommitObject, objects: Mapping[str, WrittenObject], attempt: str
    ) -> Draft:
        """That of a copy of a checkpoint.

        Args:
            source: What is copied.
            objects: What its data objects have become, by the names that they had.
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
            if source.body is not None:
                metadata.storage_meta.save_id = save_id_of(attempt)
            pickled = pickle.dumps(metadata, protocol=pickle.HIGHEST_PROTOCOL)
        body = b""
        if source.body is not None:
            more = _more(source.structure)
            body = without_columns(attempt, renamed, source.body.checksum, more)
        return cls(attempt, list(objects.values()), metadata, None, pickled, body)

    def next(self, written: Sequence[Written], attempt: str, uri: str) -> Draft | None:
        """The draft of the next save, of the same structure.

        Args:
            written: By rank, its objects, and the items of its plan that lie elsewhere than before.
            attempt: The random name of that save.
            uri: Where it goes.

        Returns:
            The draft; None if this one knows too little: make one by :meth:`of`.

        Raises:
            DifferentCheckpointsError: If a rank has written to another location.
            IncompleteSaveError: If a rank has written what makes no sense, or not by this plan.
        """
        _check_location(written, uri)
        kept = self._next
        if self.inventory is None or kept is None or len(written) != len(kept.extents):
            return None
        of_all: list[Written] = []
        for rank, (one, earlier) in enumerate(zip(written, kept.extents, strict=True)):
            try:
                of_all.append(one.with_unchanged(earlier))
            except (ValueError, IndexError) as exc:
                raise IncompleteSaveError(
                    f"rank {rank} means another save by the one before than rank 0: {exc}; nothing "
                    "was committed. Save again: all ranks plan anew then",
                    uri=uri,
                ) from exc
        checksum = self.inventory.checksum
        return self._placed(kept.planned, of_all, kept.structure, checksum, attempt, uri)

    def data(self, notes: bytes = b"") -> list[memoryview]:
        """All bytes of the commit object, with notes in it."""
        return with_trailer(self._pickled, self._body, notes)


@dataclass(frozen=True)
class _ForNextSave:
    """What a save of the same structure takes from the one before.

    Attributes:
        planned: What all ranks write.
        extents: By rank, where the items of its plan lay in its objects.
        structure: What flattening has lost of the state dicts of all.
    """

    planned: PlannedInventory
    extents: tuple[Extents, ...]
    structure: Structure


@dataclass(frozen=True)
class Planned:
    """What the ranks of a save whose structure is new are to write.

    It is made before they write, so that the plans of all ranks need not be kept until they have.

    Attributes:
        counts: By rank, the number of items in its plan.
        inventory: All of it; None if columns can't express it.
        metadata: torch's, in that case.
        indices: By rank, those of the items in its plan, in that case.
    """

    counts: tuple[int, ...]
    inventory: PlannedInventory | None
    metadata: Metadata
    indices: Sequence[Sequence[MetadataIndex]]

    @classmethod
    def of(cls, metadata: Metadata, indices: Sequence[Sequence[MetadataIndex]]) -> Planned:
        """
        Args:
            metadata: The planner's.
            indices: By rank, those of the items in its plan, in its order.
        """
        counts = tuple(map(len, indices))
        try:
            return cls(counts, PlannedInventory(metadata, indices), Metadata({}), ())
        except NotInColumnsError:
            return cls(counts, None, metadata, indices)


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
    """Whether all ranks have written to the location of the one that commits."""
    for rank, one in enumerate(written):
        if one.uri != uri:
            raise DifferentCheckpointsError(
                f"the rank that commits saves here, and rank {rank} to {one.uri}: give the same "
                "checkpoint_id on all ranks, for example by a broadcast of it",
                uri=uri,
            )


def _more(structure: Structure) -> bytes:
    return to_json({"structure": structure.to_json()} if structure else {})


def _check_complete(
    metadata: Metadata, written: dict[MetadataIndex, StorageInfo], uri: str
) -> None:
    """Whether every item that a reader may ask for was written."""
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
