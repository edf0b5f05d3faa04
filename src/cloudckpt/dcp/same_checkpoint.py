"""Checks that all ranks mean the same checkpoint.

A job that derives the location on each rank, say from the time or from a listing, may derive
different ones. The ranks would then save parts of a checkpoint that is nowhere complete, or load
different steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.planner import LoadPlan

from cloudckpt.errors import CheckpointReplacedError, DifferentCheckpointsError

__all__ = ["LoadedSave", "check_sources"]


@dataclass(frozen=True, slots=True)
class LoadedSave:
    """What a rank loads.

    Attributes:
        uri: The location.
        save_id: Which save to that location, since another one may have replaced it meanwhile.
    """

    uri: str
    save_id: str | None


def check_sources(plans: Sequence[LoadPlan]) -> None:
    """Checks that all ranks load the same save.

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
