"""Saves of several ranks: planned once, and then again and again by the same plan.

It takes the steps of torch's saver, with the same planner and in the same order: each rank plans,
the coordinator gathers the plans and hands out each rank's part, each writes, and the coordinator
commits. What is left out where it can be is the planning: if every rank has a plan for just what it
saves, and all have the same, which they learn in their meeting (``meeting``), each writes by its
own. If only one has not, all plan anew. A plan is kept when a save by it has committed.

What this rules out:

- *A rank's state dict has changed.* Its outline is another one, so it has no plan, or one of
  another number, and all plan anew, in the same save.
- *Some ranks have seen a save commit and others have not*, as one has lost the others in between.
  They do not have the same plan afterwards.
- *Two plans have the same number*, whoever has brought that about. Each rank states the digest of
  what it has written, and the coordinator compares it with what it knows of the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checkpoint.torch_private import Collectives
from cloudckpt.dcp import plan_cache
from cloudckpt.dcp.meeting import PLAN_ANEW
from cloudckpt.dcp.outline import Outline
from cloudckpt.dcp.plan_cache import KnownPlan
from cloudckpt.dcp.planners import CloudSavePlanner
from cloudckpt.dcp.torch_log import logged_by_torch
from cloudckpt.dcp.writer import CloudStorageWriter
from cloudckpt.errors import IncompleteSaveError
from cloudckpt.gc_pause import paused_gc

__all__ = ["SaveLoop"]

Told = tuple[bytes, list[WriteResult]]
"""What a rank says when it has written: the digest of its plan, and its results."""


class SaveLoop:
    """One save.

    Attributes:
        plan: The number of the plan that this rank has for it.
    """

    def __init__(
        self,
        state_dict: dict[str, Any],
        writer: CloudStorageWriter,
        planner: DefaultSavePlanner,
        flags: tuple[Any, ...],
        group: dist.ProcessGroup | None,
        no_dist: bool,
    ) -> None:
        """
        Args:
            state_dict: What to save.
            writer: Where to.
            planner: Plans it, if it has to be planned.
            flags: What the planner does, see ``plan_cache``.
            group: As torch's ``process_group``.
            no_dist: As in torch.

        Raises:
            CheckpointExistsError: On the coordinator, if there is one that must not be overwritten.
        """
        self._state_dict, self._writer, self._planner = state_dict, writer, planner
        self._flags, self._group = flags, group
        alone = no_dist or not (dist.is_available() and dist.is_initialized())
        self._ranks = Collectives(group, not alone, 0)
        self._members = None if alone else group if group is not None else dist.group.WORLD
        writer.set_up_storage_writer(
            self._ranks.is_coordinator, rank=self._ranks.rank, use_collectives=True
        )
        writer.look_for_older()
        with paused_gc():
            self._outline = Outline.of(state_dict)
        self._known: KnownPlan | None = None
        if self._outline is not None:
            self._known = plan_cache.find(self._members, flags, self._outline)
        self.plan = PLAN_ANEW if self._known is None else self._known.number

    @classmethod
    def of(
        cls,
        state_dict: dict[str, Any],
        writer: StorageWriter,
        planner: SavePlanner,
        group: dist.ProcessGroup | None,
        no_dist: bool,
    ) -> SaveLoop | None:
        """The save; None if it has to be torch's, for a writer or a planner of a user's own."""
        flags = plan_cache.flags_of(planner)
        if flags is None or type(writer) is not CloudStorageWriter:
            return None
        return cls(state_dict, writer, cast(DefaultSavePlanner, planner), flags, group, no_dist)

    def run(self, agreed: int) -> Metadata:
        """Saves; errors are raised as torch's saver does.

        Args:
            agreed: The number of the plan that all ranks have, or ``PLAN_ANEW``.

        Raises:
            CheckpointException: If ranks failed, with the failures of all.
        """
        known = self._known if agreed != PLAN_ANEW else None
        if known is None:
            step: SavePlan
            step, number, metadata = self._planned()
        else:
            step, number, metadata = known.plan, known.number, known.metadata
        mine: list[KnownPlan] = []

        @self._logged
        def write_data() -> Told:
            entry = self._taken_up(known) if known is not None else self._finished(step, number)
            mine.append(entry)
            future = self._writer.write_data(entry.plan, self._planner)
            return entry.digest, future.value()

        @self._logged
        def finish_checkpoint(told: list[Told]) -> Metadata:
            digests = tuple(digest for digest, _ in told)
            if known is not None:
                self._check(known, digests)
            assert metadata is not None
            committed = replace(metadata)
            self._writer.finish(committed, [results for _, results in told])
            mine[0] = replace(mine[0], metadata=metadata, digests=digests)
            return committed

        result: Metadata = self._ranks.all_reduce("write", write_data, finish_checkpoint)
        if self._outline is not None:
            plan_cache.remember(mine[0])
        return result

    def _logged(self, step: Callable[..., Any]) -> Any:
        """A step, of which torch's logger is told as of those of torch's saver."""
        return logged_by_torch(checkpoint_id=self._writer.checkpoint_id, group=self._group)(step)

    def _planned(self) -> tuple[SavePlan, int, Metadata | None]:
        """This rank's part of a new plan, its number, and on the coordinator the metadata."""
        found: list[Metadata] = []

        @self._logged
        def local_step() -> SavePlan:
            self._planner.set_up_planner(
                self._state_dict, self._writer.storage_meta(), self._ranks.is_coordinator
            )
            return self._writer.prepare_local_plan(self._planner.create_local_plan())

        @self._logged
        def global_step(plans: list[SavePlan]) -> list[tuple[SavePlan, int]]:
            plans, metadata = self._planner.create_global_plan(plans)
            found.append(metadata)
            number = plan_cache.new_number()
            return [(plan, number) for plan in self._writer.prepare_global_plan(plans)]

        step, number = self._ranks.reduce_scatter("plan", local_step, global_step)
        return step, number, found[0] if found else None

    def _finished(self, step: SavePlan, number: int) -> KnownPlan:
        planner = self._planner
        plan = planner.finish_plan(step)
        if isinstance(planner, CloudSavePlanner):
            structure = planner.structure
        else:
            with paused_gc():
                structure = Structure.of(self._state_dict, str(self._writer.uri))
        self._writer.note_structure(structure)
        outline = self._outline if self._outline is not None else Outline()
        return KnownPlan(
            number=number,
            group=self._members,
            flags=self._flags,
            outline=outline.without_leaves(),
            names=tuple(planner.state_dict),
            mappings=planner.mappings,
            structure=structure,
            plan=plan,
            digest=plan_cache.digest_of(plan),
            metadata=None,
            digests=(),
        )

    def _taken_up(self, known: KnownPlan) -> KnownPlan:
        """Sets up the planner as it was when it had planned."""
        assert self._outline is not None
        assert self._outline.leaves is not None
        planner = self._planner
        planner.state_dict = dict(zip(known.names, self._outline.leaves, strict=True))
        planner.mappings, planner.plan = known.mappings, known.plan
        planner.is_coordinator = self._ranks.is_coordinator
        if isinstance(planner, CloudSavePlanner):
            planner.structure = known.structure
        self._writer.note_structure(known.structure)
        return known

    def _check(self, known: KnownPlan, digests: tuple[bytes, ...]) -> None:
        """Whether all ranks have written by the plan that this one knows.

        Raises:
            IncompleteSaveError: If one has not.
        """
        for rank, (digest, planned) in enumerate(zip(digests, known.digests, strict=True)):
            if digest != planned:
                raise IncompleteSaveError(
                    f"rank {rank} has written by another plan than the one that rank 0 knows under "
                    "the same number; nothing was committed. Save again: all ranks plan anew then",
                    uri=str(self._writer.uri),
                )
