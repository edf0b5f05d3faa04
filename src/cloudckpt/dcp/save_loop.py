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

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter
from torch.distributed.tensor import DTensor

from cloudckpt.checkpoint.draft import Draft, Planned
from cloudckpt.checkpoint.shard import SmallForm
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checkpoint.torch_private import Collectives
from cloudckpt.checkpoint.written import Written
from cloudckpt.checksum import ChecksumAlgorithm
from cloudckpt.dcp import plan_cache
from cloudckpt.dcp.committed_metadata import committed_metadata
from cloudckpt.dcp.meeting import PLAN_ANEW
from cloudckpt.dcp.outline import PLAIN, Outline
from cloudckpt.dcp.plan_cache import KnownPlan
from cloudckpt.dcp.planners import CloudSavePlanner
from cloudckpt.dcp.saving import Quick, expected_size
from cloudckpt.dcp.torch_log import logged_by_torch
from cloudckpt.dcp.writer import CloudStorageWriter
from cloudckpt.errors import IncompleteSaveError
from cloudckpt.gc_pause import paused_gc

__all__ = ["SaveLoop"]

Told = tuple[bytes, Written]
"""What a rank says when it has written: the digest of its plan, and what it has written."""


class Committed(NamedTuple):
    """What the coordinator says when it has committed: the save, and whether its plan is kept."""

    attempt: str
    can_be_filled: bool


@dataclass(frozen=True)
class _Planned:
    """A new plan: this rank's part, its number, and on the coordinator what all will write."""

    step: SavePlan
    number: int
    of_all: Planned | None


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
        self._group = group
        alone = no_dist or not (dist.is_available() and dist.is_initialized())
        self._ranks = Collectives(group, not alone, 0)
        self._members = None if alone else group if group is not None else dist.group.WORLD
        writer.set_up_storage_writer(
            self._ranks.is_coordinator, rank=self._ranks.rank, use_collectives=True
        )
        writer.look_for_older()
        self._flags = (*flags, writer.checksum.name)  # a plan's commit object has checksums in it
        with paused_gc():
            self._outline = Outline.of(state_dict)
        self._known: KnownPlan | None = None
        if self._outline is not None:
            self._known = plan_cache.take(self._members, self._flags, self._outline)
        self.plan = PLAN_ANEW if self._known is None else self._known.number

    @classmethod
    def of(
        cls,
        state_dict: dict[str, Any],
        writer: StorageWriter,
        planner: SavePlanner,
        group: dist.ProcessGroup | None,
        no_dist: bool,
    ) -> list[SaveLoop]:
        """The save; none if it has to be torch's, for a writer or a planner of a user's own."""
        flags = plan_cache.flags_of(planner)
        if flags is None or type(writer) is not CloudStorageWriter:
            return []
        return [cls(state_dict, writer, cast(DefaultSavePlanner, planner), flags, group, no_dist)]

    def give_up(self) -> None:
        """Does not save: the ranks do not begin, or go torch's way."""
        if self._known is not None:
            plan_cache.remember(self._known)

    def run(self, agreed: int) -> Metadata:
        """Saves; errors are raised as torch's saver does.

        Args:
            agreed: The number of the plan that all ranks have, or ``PLAN_ANEW``.

        Raises:
            CheckpointException: If ranks failed, with the failures of all.
        """
        known = self._known if agreed != PLAN_ANEW else None
        planned = self._planned() if known is None else None
        mine: list[KnownPlan] = []
        drafts: list[Draft] = []

        @self._logged
        def write_data() -> Told:
            if planned is not None:
                plan, structure = self._finished(planned)
                written = self._writer.send(plan, self._planner)
                entry = self._entry(planned.number, plan, structure)
            else:
                entry = self._taken_up()
                written = self._writer.send(entry.plan, self._planner, self._quick(entry))
            mine.append(replace(entry, extents=written.extents))
            if known is not None:  # as the coordinator knows how the values were nested, too
                written = replace(written.since(known.extents), structure=Structure())
            return entry.digest, written

        @self._logged
        def finish_checkpoint(told: list[Told]) -> Committed:
            digests = tuple(digest for digest, _ in told)
            written = [one for _, one in told]
            timings = [one.timing for one in written if one.timing is not None]
            if planned is not None:
                draft = self._writer.finish_with(lambda: self._new_draft(planned, written), timings)
            else:
                draft = self._writer.finish_with(
                    lambda: self._next_draft(digests, written), timings
                )
            drafts.append(draft)
            mine[0] = replace(mine[0], draft=draft, digests=digests)
            return Committed(self._writer.attempt, draft.inventory is not None)

        committed: Committed = self._ranks.all_reduce("write", write_data, finish_checkpoint)
        if self._outline is not None and committed.can_be_filled:
            plan_cache.remember(mine[0])
        if drafts:
            return drafts[0].metadata
        return committed_metadata(self._writer.uri, self._writer.config, committed.attempt)

    def _logged(self, step: Callable[..., Any]) -> Any:
        """A step, of which torch's logger is told as of those of torch's saver."""
        return logged_by_torch(checkpoint_id=self._writer.checkpoint_id, group=self._group)(step)

    def _planned(self) -> _Planned:
        """This rank's part of a new plan.

        Plans are pickled here, and not on their way: those of a large job are millions of objects,
        which the collector would look through again and again. They are gone at the end of a step.
        """
        found: list[Planned] = []
        alone = self._members is None

        @self._logged
        def local_step() -> SavePlan | bytes:
            self._planner.set_up_planner(
                self._state_dict, self._writer.storage_meta(), self._ranks.is_coordinator
            )
            plan = self._writer.prepare_local_plan(self._planner.create_local_plan())
            with paused_gc():
                return plan if alone else pickle.dumps(plan)

        @self._logged
        def global_step(told: list[Any]) -> list[tuple[SavePlan | bytes, int]]:
            number = plan_cache.new_number()
            with paused_gc():
                plans = told if alone else list(map(pickle.loads, told))
                plans, metadata = self._planner.create_global_plan(plans)
                plans = self._writer.prepare_global_plan(plans)
                found.append(Planned.of(metadata, [[i.index for i in p.items] for p in plans]))
                if isinstance(self._planner, CloudSavePlanner):
                    self._planner.forget_others()
                return [(plan if alone else pickle.dumps(plan), number) for plan in plans]

        step, number = self._ranks.reduce_scatter("plan", local_step, global_step)
        with paused_gc():
            plan = step if alone else pickle.loads(step)  # noqa: S301 - of the coordinator
        return _Planned(plan, number, found[0] if found else None)

    def _finished(self, planned: _Planned) -> tuple[SavePlan, Structure]:
        """What this rank writes by a new plan, and what flattening has lost of it."""
        planner = self._planner
        plan = planner.finish_plan(planned.step)
        if isinstance(planner, CloudSavePlanner):
            structure = planner.structure
        else:
            with paused_gc():
                structure = Structure.of(self._state_dict, str(self._writer.uri))
        self._writer.note_structure(structure)
        return plan, structure

    def _entry(self, number: int, plan: SavePlan, structure: Structure) -> KnownPlan:
        """What is to be remembered of a new plan, when it was written."""
        outline, items = self._outline, plan.items
        if outline is None:  # it will not be remembered, and items may be of any name
            outline, items = Outline(), []
        values, checksum = self._planner.state_dict, self._writer.checksum
        numbers = {name: number for number, name in enumerate(values)}
        return KnownPlan(
            number=number,
            group=self._members,
            flags=self._flags,
            outline=outline.without_leaves(),
            names=tuple(values),
            mappings=self._planner.mappings,
            structure=structure,
            plan=plan,
            digest=plan_cache.digest_of(plan),
            expected=expected_size(plan.items),
            leaves=[numbers[item.index.fqn] for item in items],
            forms=[
                None if item.tensor_data is None else _form(values[item.index.fqn], checksum)
                for item in items
            ],
        )

    def _taken_up(self) -> KnownPlan:
        """The plan of before, with the planner set up as it was when it had made it."""
        known, outline, planner = self._known, self._outline, self._planner
        assert known is not None
        assert outline is not None
        assert outline.leaves is not None
        planner.state_dict = dict(zip(known.names, outline.leaves, strict=True))
        planner.mappings, planner.plan = known.mappings, known.plan
        planner.is_coordinator = self._ranks.is_coordinator
        if isinstance(planner, CloudSavePlanner):
            planner.structure = known.structure
        return known

    def _quick(self, entry: KnownPlan) -> Quick:
        assert self._outline is not None
        assert self._outline.leaves is not None
        values = self._outline.leaves
        tensors = [
            None if form is None else _local(values[leaf])
            for leaf, form in zip(entry.leaves, entry.forms, strict=True)
        ]
        return Quick(entry.expected, entry.forms, tensors)

    def _new_draft(self, planned: _Planned, written: list[Written]) -> Draft:
        assert planned.of_all is not None
        return Draft.of(
            planned.of_all,
            written,
            self._writer.checksum,
            attempt=self._writer.attempt,
            uri=str(self._writer.uri),
        )

    def _next_draft(self, digests: tuple[bytes, ...], written: list[Written]) -> Draft:
        """That of before, with what is another in this save.

        Raises:
            IncompleteSaveError: If a rank has written by another plan.
        """
        known, uri = self._known, str(self._writer.uri)
        assert known is not None
        assert known.draft is not None
        for rank, (digest, planned) in enumerate(zip(digests, known.digests, strict=True)):
            if digest != planned:
                raise IncompleteSaveError(
                    f"rank {rank} has written by another plan than the one that rank 0 knows under "
                    "the same number; nothing was committed. Save again: all ranks plan anew then",
                    uri=uri,
                )
        draft = known.draft.next(written, self._writer.attempt, uri)
        if draft is None:
            raise IncompleteSaveError(
                "what the ranks have written does not fit the plan of the save before; nothing was "
                "committed. Save again: all ranks plan anew then",
                uri=uri,
            )
        return draft


def _form(value: torch.Tensor, checksum: ChecksumAlgorithm) -> SmallForm | None:
    """How a tensor looks in an object, if it is a small one in host memory."""
    local = _local(value)
    return SmallForm.of(local, checksum) if type(local) in PLAIN else None


def _local(value: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank has in its memory."""
    return value._local_tensor if isinstance(value, DTensor) else value
