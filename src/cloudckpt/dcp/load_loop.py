"""A load by all ranks of a group: one of them reads the metadata, each plans for itself.

torch's loader has every rank read the metadata, and gathers the plans of all on one, which hands
them back. For planners of which the global plan is what the ranks have planned, as torch's default
one, nothing of that is needed: here, only the metadata travels, once, and then the bytes that
several ranks want. Planners of the caller's are carried out by torch's loader.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

from cloudckpt.checkpoint.model_folder import ModelFolder
from cloudckpt.checkpoint.objects import is_metadata_of_a_rank
from cloudckpt.dcp.load_plan import check_whole
from cloudckpt.dcp.meeting import Meeting, Stance, one_error
from cloudckpt.dcp.planners import CloudLoadPlanner, EverythingPlanner, PartialPlanner
from cloudckpt.dcp.reader import CloudStorageReader
from cloudckpt.dcp.sharing import SharedReads
from cloudckpt.errors import (
    CheckpointNotFoundError,
    CloudCheckpointError,
    TransferCancelledError,
)

__all__ = ["load_together", "loads_together"]


_PLANNERS = (CloudLoadPlanner, PartialPlanner, EverythingPlanner, DefaultLoadPlanner)


def loads_together(reader: object, planner: object) -> bool:
    """Whether this loop is for them: not for classes of the caller's, which may do anything."""
    return type(reader) is CloudStorageReader and type(planner) in _PLANNERS


def load_together(
    state_dict: dict[str, Any],
    reader: CloudStorageReader,
    planner: DefaultLoadPlanner,
    meeting: Meeting,
) -> None:
    """Loads into a state dict; a collective call, which raises the same on all ranks.

    Args:
        state_dict: What to load, with what its ``Stateful`` values return.
        reader: Where from, and with the same options on all ranks.
        planner: One for which :func:`loads_together` holds.
        meeting: Of the ranks.

    Raises:
        CloudCheckpointError: As :func:`cloudckpt.load`.
    """
    try:
        _load(state_dict, reader, planner, meeting)
    except Exception as error:
        if meeting.group is not None or isinstance(error, CloudCheckpointError):
            raise
        uri = reader.checkpoint_id  # as if one of several ranks had failed
        raise one_error({0: error}, 0, "while it was loaded", uri) from error


def _load(
    state_dict: dict[str, Any],
    reader: CloudStorageReader,
    planner: DefaultLoadPlanner,
    meeting: Meeting,
) -> None:
    rank = 0 if meeting.group is None else dist.get_rank(meeting.group)
    metadata_of = _metadata(reader, meeting, rank)

    def plan() -> LoadPlan:
        metadata = metadata_of()
        planner.set_up_planner(state_dict, metadata, rank == 0)
        reader.set_up_storage_reader(metadata, rank == 0)
        made = planner.finish_plan(planner.create_local_plan())
        key = "" if reader.commit is None else reader.commit.info.key
        alone = is_metadata_of_a_rank(key.rpartition("/")[2])
        check_whole(planner.state_dict, made, metadata, reader.checkpoint_id, of_one_rank=alone)
        return made

    made = meeting.begin(plan)
    failure: BaseException | None = None
    try:
        shared = SharedReads.of(meeting.group, reader.config)
        reader.read(made, planner, begin=meeting.begin, shared=shared)
    except BaseException as error:
        if meeting.is_broken:
            raise
        failure = error
    is_own = not isinstance(failure, TransferCancelledError)
    meeting.hold(Stance(failure=failure if is_own else None), has_begun=True).raise_alike(
        "while it was loaded"
    )
    if failure is not None:
        raise failure


def _metadata(reader: CloudStorageReader, meeting: Meeting, rank: int) -> Callable[[], Metadata]:
    """What the first rank reads; or what each one has, if they have saved each by itself.

    Returns:
        Makes it of what was told, which may fail on one rank: it may trust other classes.
    """
    read: list[Metadata] = []

    def read_it() -> bytes | ModelFolder | CheckpointNotFoundError:
        try:
            read.append(reader.read_metadata())
        except CheckpointNotFoundError as error:
            return error
        return b"" if meeting.group is None else reader.packed()

    told = meeting.told_by_first(read_it)
    if isinstance(told, CheckpointNotFoundError):
        reader.failure = told
        return functools.partial(reader.read_metadata, rank=rank)
    return (lambda: read[0]) if read else functools.partial(reader.adopt, told)
