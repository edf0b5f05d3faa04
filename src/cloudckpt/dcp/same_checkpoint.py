"""Whether all ranks mean the same checkpoint.

A job that derives the location on each rank, say from the time or from a listing, may derive
different ones. The ranks would then save parts of what is nowhere whole, or load different steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.storage import WriteResult

from cloudckpt.checkpoint.manifest import ItemRecord
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checkpoint.timing import RankTiming
from cloudckpt.errors import CheckpointReplacedError, DifferentCheckpointsError

__all__ = [
    "LoadedSave",
    "check_sources",
    "collect_told",
    "collect_written",
    "told",
]


@dataclass(frozen=True, slots=True)
class LoadedSave:
    """What a rank loads.

    Attributes:
        uri: The location.
        save_id: Which of the saves to it, since another one may have replaced it meanwhile; None if
            the rank has metadata of its own, of a save without collectives.
    """

    uri: str
    save_id: str | None


def collect_written(
    results: Sequence[Iterable[WriteResult]], uri: str
) -> dict[MetadataIndex, ItemRecord]:
    """What the ranks have written; each result holds the location beside the record.

    Raises:
        DifferentCheckpointsError: If a rank has written to another location than ``uri``.
    """
    written: dict[MetadataIndex, ItemRecord] = {}
    for rank, of_rank in enumerate(results):
        for result in of_rank:
            where, record = result.storage_data
            if where != uri:
                raise DifferentCheckpointsError(
                    f"the rank that commits saves here, and rank {rank} to {where}: give the same "
                    "checkpoint_id on all ranks, for example by a broadcast of it",
                    uri=uri,
                )
            written[result.index] = record
    return written


def told(what: Structure | RankTiming, uri: str) -> WriteResult:
    """What tells the rank that commits how this rank's values were nested, or what they took."""
    return WriteResult(MetadataIndex(""), 0, (uri, what))


def collect_told(
    results: Sequence[Iterable[WriteResult]], uri: str
) -> tuple[Structure, list[RankTiming], list[list[WriteResult]]]:
    """How the ranks say that their values were nested, what they took, and their other results."""
    structures: list[Structure] = []
    timings: list[RankTiming] = []
    others: list[list[WriteResult]] = []
    for of_rank in results:
        others.append([])
        for result in of_rank:
            match result.storage_data[1]:
                case Structure() as structure:
                    structures.append(structure)
                case RankTiming() as timing:
                    timings.append(timing)
                case _:
                    others[-1].append(result)
    return Structure.merged(structures, uri), timings, others


def check_sources(plans: Sequence[LoadPlan]) -> None:
    """Compares what the ranks load.

    Raises:
        CheckpointReplacedError: If ranks have read the metadata of different saves.
        DifferentCheckpointsError: If they load from different locations.
    """
    first: LoadedSave | None = plans[0].storage_data if plans else None
    for rank, plan in enumerate(plans):
        source: LoadedSave | None = plan.storage_data
        if first is None or source is None or source == first:
            continue
        if source.uri == first.uri:
            raise CheckpointReplacedError(
                f"it was replaced while ranks 0 and {rank} read its metadata; load it again",
                saves=(first.save_id, source.save_id),
                uri=first.uri,
            )
        raise DifferentCheckpointsError(
            f"rank 0 loads from here, and rank {rank} from {source.uri}: give the same "
            "checkpoint_id on all ranks, for example by a broadcast of it",
            uri=first.uri,
        )
