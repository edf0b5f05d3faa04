"""A save by the steps that torch's saver takes, for classes that may do anything in them.

Nobody knows whether a planner of a user's own plans the same for the same state dict, so it plans
each time. A writer that is derived from ours is asked for all that torch would ask it for.

A save that is incremental takes one more step: what the coordinator holds of the base goes to all
ranks. Whether it does is said by the coordinator, so that ranks with other options wait for nobody.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from cloudckpt.checkpoint.base import Base
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checkpoint.torch_private import Collectives, forget_plans, traverse_state_dict
from cloudckpt.dcp.committed_metadata import committed_metadata
from cloudckpt.dcp.failures import portably
from cloudckpt.dcp.incremental import Contents
from cloudckpt.dcp.planners import CloudSavePlanner
from cloudckpt.dcp.torch_log import logged_by_torch
from cloudckpt.dcp.writer import CloudStorageWriter, OurWriter
from cloudckpt.gc_pause import paused_gc

__all__ = ["save_by_steps"]


def save_by_steps(
    state_dict: dict[str, Any],
    writer: OurWriter,
    planner: SavePlanner,
    group: dist.ProcessGroup | None,
    no_dist: bool,
) -> Metadata:
    """Saves; errors are raised as torch's saver does.

    Args:
        state_dict: What to save.
        writer: Where to.
        planner: Plans it.
        group: As torch's ``process_group``.
        no_dist: As in torch.

    Raises:
        CheckpointException: If ranks failed, with the failures of all.
    """
    alone = no_dist or not (dist.is_available() and dist.is_initialized())
    ranks = Collectives(group, not alone, 0)
    where = writer.checkpoint_id
    made: list[Metadata] = []

    def logged(step: Callable[..., Any]) -> Any:
        return logged_by_torch(checkpoint_id=where, group=group)(portably(step, where))

    @logged
    def local_step() -> SavePlan:
        told: dict[str, Any] = {"state_dict": state_dict, "is_coordinator": ranks.is_coordinator}
        if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
            told["storage_meta"] = writer.storage_meta()
        planner.set_up_planner(**told)
        writer.set_up_storage_writer(ranks.is_coordinator, rank=ranks.rank)
        if isinstance(writer, CloudStorageWriter):
            writer.note_structure(_structure_of(state_dict, planner, where))
        return writer.prepare_local_plan(planner.create_local_plan())

    @logged
    def global_step(plans: list[SavePlan]) -> list[tuple[SavePlan, bool]]:
        plans, metadata = planner.create_global_plan(plans)
        made.append(metadata)
        is_incremental = type(writer) is CloudStorageWriter and writer.is_incremental
        return [(plan, is_incremental) for plan in writer.prepare_global_plan(plans)]

    def nothing() -> None: ...

    @logged
    def held(_: list[None]) -> Base | None:
        assert isinstance(writer, CloudStorageWriter)
        hold = writer.hold_base(None)
        return None if hold is None else hold.contents

    @logged
    def write_data() -> list[WriteResult]:
        plan = planner.finish_plan(mine[0])
        if is_incremental and isinstance(writer, CloudStorageWriter):
            written = writer.write_data(plan, planner, Contents(len(plan.items), base))
        else:
            written = writer.write_data(plan, planner)
        written.wait()
        return written.value()

    @logged
    def finish_checkpoint(results: list[list[WriteResult]]) -> str | Metadata:
        writer.finish(made[0], results)
        return writer.attempt if isinstance(writer, CloudStorageWriter) else made[0]

    mine: list[SavePlan] = []
    try:
        plan, is_incremental = ranks.reduce_scatter("plan", local_step, global_step)
        mine.append(plan)
        base: Base | None = ranks.all_reduce("base", nothing, held) if is_incremental else None
        committed: str | Metadata = ranks.all_reduce("write", write_data, finish_checkpoint)
    except BaseException:
        forget_plans(planner)
        raise
    if made:
        return made[0]
    if isinstance(committed, Metadata):
        return committed
    assert isinstance(writer, CloudStorageWriter)
    return committed_metadata(writer.uri, writer.config, committed)


def _structure_of(state_dict: dict[str, Any], planner: SavePlanner, uri: str) -> Structure:
    """What flattening has lost of the state dict, as far as that can be seen.

    Our planner notes it. Of torch's, the planner's paths are compared with the state dict: one that
    saves something else than it was given leaves the structure to the texts in its paths.

    Raises:
        KeyCollisionError: If two entries of the state dict would have the same name.
    """
    if isinstance(planner, CloudSavePlanner):
        return planner.structure
    if not isinstance(planner, DefaultSavePlanner) or not planner.flatten_state_dict:
        return Structure()
    with paused_gc():
        structure = Structure.of(state_dict, uri)
        if structure and not _flattens(planner, state_dict):
            return Structure()
    return structure


def _flattens(planner: DefaultSavePlanner, state_dict: dict[str, Any]) -> bool:
    """Whether the planner saves this state dict, and not what it has made of it."""
    paths: list[Any] = []
    traverse_state_dict(state_dict, lambda path, value: paths.append(path))
    return len(paths) == len(planner.mappings) and all(
        planner.mappings.get(".".join(map(str, path))) == path for path in paths
    )
