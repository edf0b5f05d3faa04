"""A save by the same steps as torch's saver, for planners and writers with custom behaviour.

A custom planner may plan differently for the same state dict, so it plans each time. A writer
derived from ours gets every call that torch would make.

A save that is incremental on all ranks, as they report with their plans, takes one more step: the
coordinator distributes the contents of the base.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from cloudckpt.checkpoint.base import Base
from cloudckpt.checkpoint.torch_private import Collectives, forget_plans
from cloudckpt.checkpoint.written import Written
from cloudckpt.dcp.failures import is_of_group, portable_errors
from cloudckpt.dcp.incremental import Contents, agree_on_base, remember
from cloudckpt.dcp.planners import keep_containers, lost_by_flattening
from cloudckpt.dcp.reader import committed_metadata
from cloudckpt.dcp.torch_log import logged_by_torch
from cloudckpt.dcp.writer import CloudStorageWriter, OurWriter, committing
from cloudckpt.errors import CommitUnknownError

__all__ = ["clean_up_after", "save_by_steps"]


def save_by_steps(
    state_dict: dict[str, Any],
    writer: OurWriter,
    planner: SavePlanner,
    group: dist.ProcessGroup | None,
) -> Metadata:
    """Saves; raises errors as torch's saver does.

    Args:
        state_dict: What to save.
        writer: Writes the checkpoint.
        planner: Plans the save.
        group: The ranks; None if this process is alone.

    Raises:
        CheckpointException: If ranks failed, with the failures of all.
    """
    ranks = Collectives(group, group is not None, 0)
    where = writer.checkpoint_id
    made: list[Metadata] = []

    def logged(step: Callable[..., Any]) -> Any:
        return logged_by_torch(checkpoint_id=where, group=group)(portable_errors(where)(step))

    @logged
    def local_step() -> tuple[bool, SavePlan]:
        told: dict[str, Any] = {"state_dict": state_dict, "is_coordinator": ranks.is_coordinator}
        if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
            told["storage_meta"] = writer.storage_meta()
        planner.set_up_planner(**told)
        if type(planner) is DefaultSavePlanner:
            keep_containers(planner, state_dict)
        writer.set_up_storage_writer(ranks.is_coordinator, rank=ranks.rank)
        if isinstance(writer, CloudStorageWriter):
            writer.note_structure(lost_by_flattening(state_dict, planner, where))
        is_incremental = type(writer) is CloudStorageWriter and writer.is_incremental
        return is_incremental, writer.prepare_local_plan(planner.create_local_plan())

    @logged
    def global_step(told: list[tuple[bool, SavePlan]]) -> list[tuple[bool, SavePlan]]:
        plans, metadata = planner.create_global_plan([plan for _, plan in told])
        made.append(metadata)
        are_incremental = all(one for one, _ in told)
        return [(are_incremental, plan) for plan in writer.prepare_global_plan(plans)]

    @logged
    def write_data() -> list[WriteResult]:
        plan = planner.finish_plan(mine[0])
        if is_incremental and isinstance(writer, CloudStorageWriter):
            future = writer.write_data(plan, planner, Contents(len(plan.items), base))
        else:
            future = writer.write_data(plan, planner)
        future.wait()
        results: list[WriteResult] = future.value()
        written.extend(one.storage_data for one in results)
        return results

    @logged
    def finish_checkpoint(results: list[list[WriteResult]]) -> str | Metadata:
        with committing(writer):
            writer.finish(made[0], results)
        return writer.attempt if isinstance(writer, CloudStorageWriter) else made[0]

    mine: list[SavePlan] = []
    written: list[Any] = []
    try:
        is_incremental, plan = ranks.reduce_scatter("plan", local_step, global_step)
        mine.append(plan)
        base: Base | None = None
        if is_incremental and isinstance(writer, CloudStorageWriter):
            base = agree_on_base(ranks, group, writer, logged, is_planned=True)
        committed: str | Metadata = ranks.all_reduce("write", write_data, finish_checkpoint)
    except BaseException:
        forget_plans(planner)
        raise
    if isinstance(writer, CloudStorageWriter) and isinstance(committed, str):
        for one in written:
            if isinstance(one, Written):
                remember(group, writer.uri, committed, one)
    if made:
        return made[0]
    if isinstance(committed, Metadata):
        return committed
    assert isinstance(writer, CloudStorageWriter)
    return committed_metadata(writer.uri, writer.config, committed)


def clean_up_after(exc: BaseException, writer: OurWriter) -> bool | None:
    """Deletes what this rank has written in a failed save, if there was certainly no commit.

    The committing rank knows; for another rank this is certain if every rank's failure says so.
    After an interrupt or an uncertain commit the checkpoint may be or become visible.

    Args:
        exc: What the save raised.
        writer: Its writer.

    Returns:
        Whether the save is committed nevertheless, if the ranks have lost each other; None if
        unknown, or if they have not.
    """
    if not isinstance(writer, CloudStorageWriter):
        writer.discard()
        return None
    committed = writer.look_whether_committed() if is_of_group(exc) else None
    certain = writer.committed is False
    if isinstance(exc, CheckpointException) and not writer.commits:
        certain = all(
            isinstance(error, Exception) and not isinstance(error, CommitUnknownError)
            for error, _ in exc.failures.values()
        )
    if certain:
        writer.discard()
    return committed
