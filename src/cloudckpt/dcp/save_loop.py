"""Saves of several ranks, planned once and then repeated by the same plan.

It takes the same steps as torch's saver, with the same planner and in the same order: each rank
plans, the coordinator gathers the plans and hands out each rank's part, each rank writes, and the
coordinator commits. Planning is skipped where possible. If every rank has a plan for exactly what
it saves, and all have the same plan (they learn this in their meeting, see ``meeting``), each
writes by its own plan. If any rank lacks it, all plan anew. A plan is kept once a save by it has
committed.

What this rules out:

- *A rank's state dict has changed.* Its outline differs, so the rank has no plan or one with
  another number, and all ranks plan anew within the same save.
- *Some ranks have seen a save commit and others have not*, because one lost the others in between.
  Their plans differ afterwards.
- *Two plans have the same number*, for whatever reason. Each rank reports the digest of the plan it
  has written by, and the coordinator compares it with what it knows of the plan.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter
from torch.distributed.tensor import DTensor

from cloudckpt.checkpoint.base import Base
from cloudckpt.checkpoint.draft import Draft, Planned
from cloudckpt.checkpoint.from_torch import NotInColumnsError
from cloudckpt.checkpoint.record import Record
from cloudckpt.checkpoint.sending import send_here
from cloudckpt.checkpoint.shard import SmallForm
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checkpoint.torch_private import Collectives
from cloudckpt.checkpoint.written import Extents, Written
from cloudckpt.checksum import ChecksumAlgorithm
from cloudckpt.dcp import incremental, plan_cache
from cloudckpt.dcp.committed_metadata import committed_metadata
from cloudckpt.dcp.failures import portably
from cloudckpt.dcp.global_plan import (
    Part,
    plan_of,
    plan_together,
    record_of,
    refuse_contradictions,
)
from cloudckpt.dcp.incremental import Contents
from cloudckpt.dcp.leaving import Leaving
from cloudckpt.dcp.meeting import PLAN_ANEW
from cloudckpt.dcp.outline import PLAIN, Outline
from cloudckpt.dcp.plan_cache import KnownPlan, OfAllRanks
from cloudckpt.dcp.planners import CloudSavePlanner
from cloudckpt.dcp.saving import CachedLayout, expected_size
from cloudckpt.dcp.torch_log import logged_by_torch
from cloudckpt.dcp.writer import CloudStorageWriter
from cloudckpt.errors import IncompleteSaveError
from cloudckpt.gc_pause import paused_gc

__all__ = ["SaveLoop"]

_AS_TORCH = (DefaultSavePlanner.create_global_plan, CloudSavePlanner.create_global_plan)

Told = tuple[bytes, Written]
"""A rank's report after writing: the digest of its plan, and what it has written."""


class Committed(NamedTuple):
    """The coordinator's report after the commit: the save, and whether its plan is kept."""

    attempt: str
    can_be_filled: bool


@dataclass(frozen=True)
class _Planned:
    """A new plan.

    Attributes:
        step: This rank's part.
        number: Its number.
        structure: What flattening has lost of this rank's state dict.
        is_known: Whether the coordinator knows that structure, too.
        of_all: On the coordinator, what all ranks will write.
    """

    step: SavePlan
    number: int
    structure: Structure
    is_known: bool
    of_all: Planned | None


class SaveLoop:
    """One save.

    Attributes:
        plan: The number of this rank's plan for it.
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
            writer: Writes the checkpoint.
            planner: Plans the save, if no plan is kept.
            flags: The planner's behaviour, see ``plan_cache``.
            group: As torch's ``process_group``.
            no_dist: As in torch.

        Raises:
            CheckpointExistsError: On the coordinator, if a checkpoint exists that must not be
                overwritten.
        """
        self._state_dict, self._writer, self._planner = state_dict, writer, planner
        self._group = group
        alone = no_dist or not (dist.is_available() and dist.is_initialized())
        self._ranks = Collectives(group, not alone, 0)
        self._members = None if alone else group if group is not None else dist.group.WORLD
        writer.set_up_storage_writer(self._ranks.is_coordinator, rank=self._ranks.rank)
        if writer.sender is send_here or not writer.config.overwrite:
            writer.look_for_older()  # otherwise done once a saving process is at work
        self._flags = (*flags, writer.checksum.name)  # it stands in the commit object
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
        """The save; None for a custom writer or planner, whose saves must be planned each time."""
        flags = plan_cache.flags_of(planner)
        if flags is None or type(writer) is not CloudStorageWriter:
            return []
        return [cls(state_dict, writer, cast(DefaultSavePlanner, planner), flags, group, no_dist)]

    def give_up(self) -> None:
        """Abandons the save: the ranks do not begin, or must plan each save."""
        if self._known is not None:
            plan_cache.remember(self._known)

    def run(self, agreed: int) -> Metadata:
        """Saves; raises errors as torch's saver does.

        Args:
            agreed: The number of the plan that all ranks have, or ``PLAN_ANEW``.

        Raises:
            CheckpointException: If ranks failed, with the failures of all.
        """
        known = self._known if agreed != PLAN_ANEW else None
        planned = self._planned() if known is None else None
        base = self._base(is_planned=planned is not None) if self._writer.is_incremental else None
        mine: list[KnownPlan] = []
        drafts: list[Draft] = []
        sent: list[Written] = []

        @self._logged
        def write_data() -> Told:
            if planned is not None:
                plan = self._planner.finish_plan(planned.step)
                self._writer.note_structure(Structure() if planned.is_known else planned.structure)
                leave = self._leaving(planned.number, plan, planned.structure)
                contents = self._contents(plan, base)
                written = self._writer.send(plan, self._planner, leave=leave, contents=contents)
                entry = self._entry(planned, plan)
            else:
                entry = self._restore_plan()
                leave = self._leaving(
                    entry.number, entry.plan, entry.structure, entry.saves, entry.record
                )
                cached, contents = self._cached_layout(entry), self._contents(entry.plan, base)
                written = self._writer.send(entry.plan, self._planner, cached, leave, contents)
            saves, record = entry.saves + 1, leave.record
            sent.append(written)
            mine.append(replace(entry, extents=written.extents, saves=saves, record=record))
            if known is not None:  # the coordinator knows how the values were nested, too
                written = replace(written.since(known.extents), structure=Structure())
            return entry.digest, written

        @self._logged
        def finish_checkpoint(told: list[Told]) -> Committed:
            of_all = self._of_all(told, planned, known)
            written = [
                replace(one, extents=extents, items=None)
                for (_, one), extents in zip(told, of_all.extents, strict=True)
            ]
            timings = [one.timing for one in written if one.timing is not None]
            draft = self._writer.finish_with(
                lambda: Draft.of(
                    of_all.planned,
                    written,
                    self._writer.checksum,
                    attempt=self._writer.attempt,
                    uri=str(self._writer.uri),
                ),
                timings,
            )
            drafts.append(draft)
            if draft.inventory is not None:
                kept = replace(of_all.planned, structure=draft.inventory.structure)
                mine[0] = replace(mine[0], of_all=replace(of_all, planned=kept))
            return Committed(self._writer.attempt, draft.inventory is not None)

        committed: Committed = self._ranks.all_reduce("write", write_data, finish_checkpoint)
        if self._outline is not None and committed.can_be_filled:
            plan_cache.remember(mine[0])
        incremental.remember(self._members, self._writer.uri, committed.attempt, sent[0])
        if drafts:
            return drafts[0].metadata
        return committed_metadata(self._writer.uri, self._writer.config, committed.attempt)

    def _contents(self, plan: SavePlan, base: Base | None) -> Contents | None:
        """Collects the digests of a plan's items, if they are wanted."""
        return Contents(len(plan.items), base) if self._writer.is_incremental else None

    def _base(self, *, is_planned: bool) -> Base | None:
        return incremental.agree_on_base(
            self._ranks, self._members, self._writer, self._logged, is_planned=is_planned
        )

    def _logged(self, step: Callable[..., Any]) -> Any:
        """Wraps a step so that torch's logger records it as it does those of torch's saver."""
        where = self._writer.checkpoint_id
        return logged_by_torch(checkpoint_id=where, group=self._group)(portably(step, where))

    def _planned(self) -> _Planned:
        """This rank's part of a new plan.

        Ranks send what they would write as columns, because the plans of a large job are millions
        of objects; where columns can't express it they send torch's plan. That is pickled here, not
        during the exchange, so that the garbage collector does not traverse it repeatedly.
        """
        found: list[Planned] = []
        local: list[tuple[SavePlan, Structure]] = []
        alone = self._members is None

        @self._logged
        def local_step() -> bytes | SavePlan:
            self._planner.set_up_planner(
                self._state_dict, self._writer.storage_meta(), self._ranks.is_coordinator
            )
            plan = self._writer.prepare_local_plan(self._planner.create_local_plan())
            with paused_gc():
                structure = self._lost_by_flattening()
                local.append((plan, structure))
                told = record_of(plan, structure, self._writer.checksum)
                if told is not None:
                    return told
                return plan if alone else pickle.dumps(plan)

        @self._logged
        def global_step(told: list[Any]) -> list[tuple[Any, int]]:
            number = plan_cache.new_number()
            with paused_gc():
                planned, steps = self._planned_together(told)
                found.append(planned)
                return [
                    (step if alone or isinstance(step, Part) else pickle.dumps(step), number)
                    for step in steps
                ]

        step, number = self._ranks.reduce_scatter("plan", local_step, global_step)
        plan, structure = local[0]
        is_known = isinstance(step, Part)
        with paused_gc():
            if isinstance(step, bytes):
                step = pickle.loads(step)  # noqa: S301 - of the coordinator
            plan = step.of(plan) if isinstance(step, Part) else step
        return _Planned(plan, number, structure, is_known, found[0] if found else None)

    def _planned_together(self, told: list[Any]) -> tuple[Planned, Sequence[Part | SavePlan]]:
        """What all ranks write, and each rank's part.

        Raises:
            IncompleteSaveError: If the ranks' parts of a tensor do not fill it.
            KeyCollisionError: If ranks have different values under one name.
        """
        try:
            return self._joined(told)
        except ValueError as exc:
            if "Failed to validate global plan" not in str(exc):
                raise
            found = re.search(r"key:(\S+)", str(exc))
            raise IncompleteSaveError(
                "the parts of a tensor that the ranks have overlap, or do not fill it. Give the "
                "same keys on all ranks, for example those of torch.distributed.checkpoint."
                "state_dict.get_model_state_dict(model), and nothing is saved behind an "
                "`if rank == ...:`",
                uri=str(self._writer.uri),
                item=None if found is None else found[1],
                cause=exc,
            ) from exc

    def _joined(self, told: list[Any]) -> tuple[Planned, Sequence[Part | SavePlan]]:
        uri, checksum = str(self._writer.uri), self._writer.checksum
        by_rank = [self._heard(one) for one in told]
        records = [one for one in by_rank if isinstance(one, Record)]
        if len(records) == len(by_rank):
            lowest = self._planner.dedup_save_to_lowest_rank
            try:
                return plan_together(records, to_lowest_rank=lowest, uri=uri)
            except NotInColumnsError:
                pass
        plans = [plan_of(one) if isinstance(one, Record) else one for one in by_rank]
        if type(self._planner).create_global_plan in _AS_TORCH:
            refuse_contradictions(plans, uri)
        plans, metadata = self._planner.create_global_plan(plans)
        plans = self._writer.prepare_global_plan(plans)
        planned = Planned.of(metadata, [[i.index for i in p.items] for p in plans], checksum)
        if isinstance(self._planner, CloudSavePlanner):
            self._planner.forget_others()
        return planned, plans

    def _heard(self, told: Any) -> Record | SavePlan:
        """What a rank would write, from its report."""
        if isinstance(told, SavePlan):
            return told
        if Record.is_one(told):
            return Record.parse(told, str(self._writer.uri))
        return cast(SavePlan, pickle.loads(told))  # noqa: S301 - of a rank

    def _lost_by_flattening(self) -> Structure:
        planner = self._planner
        if isinstance(planner, CloudSavePlanner):
            return planner.structure
        return Structure.of(self._state_dict, str(self._writer.uri))

    def _leaving(
        self,
        number: int,
        plan: SavePlan,
        structure: Structure,
        saves: int = 0,
        record: bytes | None = None,
    ) -> Leaving:
        """What to record of this rank if its trainer ends while saving by this numbered plan."""
        return Leaving(
            self._writer,
            plan,
            structure,
            save=f"{number:x}.{saves}",
            rank=self._ranks.rank,
            ranks=1 if self._members is None else dist.get_world_size(self._members),
            record=record,
        )

    def _entry(self, planned: _Planned, plan: SavePlan) -> KnownPlan:
        """What to remember of a new plan once it has been written."""
        outline, items = self._outline, plan.items
        if outline is None:  # it is not remembered, and items may have any name
            outline, items = Outline(), []
        values, checksum = self._planner.state_dict, self._writer.checksum
        numbers = {name: number for number, name in enumerate(values)}
        return KnownPlan(
            number=planned.number,
            group=self._members,
            flags=self._flags,
            outline=outline.without_leaves(),
            names=tuple(values),
            mappings=self._planner.mappings,
            structure=planned.structure,
            plan=plan,
            digest=plan_cache.digest_of(plan),
            expected=expected_size(plan.items),
            leaves=[numbers[item.index.fqn] for item in items],
            forms=[
                None if item.tensor_data is None else _form(values[item.index.fqn], checksum)
                for item in items
            ],
        )

    def _restore_plan(self) -> KnownPlan:
        """The kept plan, with the planner set up as it was when it made the plan."""
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

    def _cached_layout(self, entry: KnownPlan) -> CachedLayout:
        assert self._outline is not None
        assert self._outline.leaves is not None
        values = self._outline.leaves
        tensors = [
            None if form is None else _local(values[leaf])
            for leaf, form in zip(entry.leaves, entry.forms, strict=True)
        ]
        return CachedLayout(entry.expected, entry.forms, tensors)

    def _of_all(
        self, told: list[Told], planned: _Planned | None, known: KnownPlan | None
    ) -> OfAllRanks:
        """What all ranks were to write, and where they wrote it.

        Raises:
            IncompleteSaveError: If a rank has written by another plan, or its previous save is
                another than the coordinator's.
        """
        digests = tuple(digest for digest, _ in told)
        if planned is not None:
            assert planned.of_all is not None
            return OfAllRanks(planned.of_all, digests, tuple(one.extents for _, one in told))
        assert known is not None
        assert known.of_all is not None
        found: list[Extents] = []
        of_before = zip(known.of_all.digests, known.of_all.extents, strict=True)
        for rank, ((digest, one), (planned_digest, before)) in enumerate(
            zip(told, of_before, strict=True)
        ):
            try:
                if digest != planned_digest:
                    raise ValueError("it has written by another plan")
                found.append(one.extents_after(before))
            except (ValueError, IndexError) as exc:
                raise IncompleteSaveError(
                    f"rank {rank} means another plan or save than rank 0, under the same number: "
                    f"{exc}; nothing was committed. Save again: all ranks plan anew then",
                    uri=str(self._writer.uri),
                ) from exc
        return replace(known.of_all, extents=tuple(found))


def _form(value: torch.Tensor, checksum: ChecksumAlgorithm) -> SmallForm | None:
    """The form of a tensor in an object, if it is a small one in host memory."""
    local = _local(value)
    return SmallForm.of(local, checksum) if type(local) in PLAIN else None


def _local(value: torch.Tensor) -> torch.Tensor:
    """The part of a tensor in this rank's memory."""
    return value._local_tensor if isinstance(value, DTensor) else value
