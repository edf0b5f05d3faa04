"""The steps of a save: plan, send, commit; planned once, and then repeated by the same plan.

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

import functools
import inspect
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
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from cloudckpt.checkpoint.base import Base
from cloudckpt.checkpoint.draft import Draft, Planned
from cloudckpt.checkpoint.from_torch import NotInColumnsError
from cloudckpt.checkpoint.objects import WrittenObject
from cloudckpt.checkpoint.pending import Pending
from cloudckpt.checkpoint.record import Heads, Record
from cloudckpt.checkpoint.shard import SmallForm, check_supported
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checkpoint.torch_private import Collectives, forget_plans
from cloudckpt.checkpoint.written import Extents, Written
from cloudckpt.checksum import ChecksumAlgorithm
from cloudckpt.dcp import incremental, plan_cache
from cloudckpt.dcp.copies import (
    Copies,
    Described,
    Shared,
    refuse_or_tell,
)
from cloudckpt.dcp.failures import portable_errors
from cloudckpt.dcp.global_plan import (
    Part,
    plan_together,
    record_of,
)
from cloudckpt.dcp.incremental import Contents
from cloudckpt.dcp.meeting import PLAN_ANEW, PLAN_EACH_TIME
from cloudckpt.dcp.outline import PLAIN, Outline
from cloudckpt.dcp.plan_cache import KnownPlan, OfAllRanks
from cloudckpt.dcp.planners import CloudSavePlanner, keep_containers, lost_by_flattening
from cloudckpt.dcp.reader import committed_metadata
from cloudckpt.dcp.saving import CachedLayout, expected_size
from cloudckpt.dcp.torch_log import logged_by_torch
from cloudckpt.dcp.writer import CloudStorageWriter, OurWriter, committing
from cloudckpt.errors import CloudCheckpointError, IncompleteSaveError, UnsupportedValueError
from cloudckpt.gc_pause import paused_gc

__all__ = ["SaveLoop"]

Report = tuple[bytes, Written, int]
"""A rank's report after writing: the digest of its plan, what it has written, and the number by
which its copies of what others have, too, are compared with theirs (see ``copies``)."""


class Committed(NamedTuple):
    """The coordinator's report after the commit: the save."""

    attempt: str


@dataclass(frozen=True)
class _Planned:
    """A new plan.

    Attributes:
        step: This rank's part.
        number: Its number.
        structure: What flattening has lost of this rank's state dict.
        copies: What this rank has in common with others.
        of_all: On the coordinator, what all ranks will write.
    """

    step: SavePlan
    number: int
    structure: Structure
    copies: Copies
    of_all: Planned | None


class SaveLoop:
    """One save.

    Attributes:
        plan: The number of this rank's plan for it.
    """

    def __init__(
        self,
        state_dict: dict[str, Any],
        writer: OurWriter,
        planner: SavePlanner,
        group: dist.ProcessGroup | None,
    ) -> None:
        """
        Args:
            state_dict: What to save.
            writer: Writes the checkpoint.
            planner: Plans the save, if no plan is kept.
            group: The ranks; None if this process is alone.

        Raises:
            CheckpointExistsError: On the coordinator, if a checkpoint exists that must not be
                overwritten.
        """
        self._state_dict, self._group = state_dict, group
        self._ranks = Collectives(group, group is not None, 0)
        writer.set_up_storage_writer(self._ranks.is_coordinator, rank=self._ranks.rank)
        # a custom planner or writer gets every call that torch would make
        self._given = writer, planner
        self._known: KnownPlan | None = None
        flags = plan_cache.flags_of(planner)
        if flags is None or type(writer) is not CloudStorageWriter:
            self.plan = PLAN_EACH_TIME
            return
        self._writer, self._planner = writer, cast(DefaultSavePlanner, planner)
        if writer.waits_before_sending:
            writer.wait_for_baseline()
        # the checksum stands in the commit object
        self._flags = (*flags, writer.checksum.name, writer.config.replicas)
        with paused_gc():
            self._outline = Outline.of(state_dict)
        if self._outline is not None:
            self._known = plan_cache.find(group, self._flags, self._outline)
        self._record: bytes | None = None  # see KnownPlan
        self.plan = PLAN_ANEW if self._known is None else self._known.number

    def run(self, agreed: int) -> Metadata:
        """Saves; raises errors as torch's saver does.

        Args:
            agreed: The number of the plan that all ranks have, or one of the two constants.

        Raises:
            CheckpointException: If ranks failed, with the failures of all.
        """
        if agreed == PLAN_EACH_TIME:
            return self._run_as_torch()
        if self._known is not None:
            plan_cache.drop(self._known)
        known = self._known if agreed != PLAN_ANEW else None
        planned = self._planned() if known is None else None
        base: Base | None = None
        if self._writer.is_incremental:
            base = incremental.agree_on_base(
                self._ranks, self._group, self._writer, self._logged, is_planned=known is None
            )
        mine: list[KnownPlan] = []
        drafts: list[Draft] = []
        sent: list[Written] = []
        reported: list[Report] = []

        @self._logged
        def write_data() -> Report:
            if planned is not None:
                plan, cached = self._planner.finish_plan(planned.step), None
                number, saves, structure = planned.number, 0, planned.structure
                self._writer.note_structure(Structure())  # the coordinator knows it
            else:
                entry = self._restore_plan()
                plan, cached = entry.plan, self._cached_layout(entry)
                number, saves, structure = entry.number, entry.saves, entry.structure
                self._record = entry.record
            leave = functools.partial(self._left, number, saves, plan, structure)
            contents = Contents(len(plan.items), base) if self._writer.is_incremental else None
            written = self._writer.send(plan, self._planner, cached, leave, contents)
            if planned is not None:
                entry = self._entry(planned, plan)
            sent.append(written)
            mine.append(
                replace(entry, extents=written.extents, saves=entry.saves + 1, record=self._record)
            )
            if known is not None:  # the coordinator knows how the values were nested, too
                written = replace(written.without(known.extents), structure=Structure())
            return entry.digest, written, entry.copies.weighed(self._planner)

        @self._logged
        def finish_checkpoint(reports: list[Report]) -> Committed | None:
            reported.extend(reports)
            return None if sum(number for _, _, number in reports) % (1 << 64) else commit()

        def commit() -> Committed:
            of_all, written = self._of_all(reported, planned, known)
            with committing(self._writer):
                draft = self._writer.finish_with(lambda: of_all.planned, written)
                drafts.append(draft)
                mine[0] = replace(mine[0], of_all=of_all)
                return Committed(self._writer.attempt)

        @self._logged
        def describe_copies() -> list[Described]:
            return mine[0].copies.described(self._planner)

        @self._logged
        def compare_copies(by_rank: list[list[Described]]) -> tuple[Committed, frozenset[str]]:
            refuses = self._writer.config.replicas == "refuse"
            unlike = refuse_or_tell(by_rank, str(self._writer.uri), refuses=refuses)
            return commit(), unlike

        committed = self._ranks.all_reduce("write", write_data, finish_checkpoint)
        if committed is None:
            committed, unlike = self._ranks.all_reduce("compare", describe_copies, compare_copies)
            mine[0] = replace(mine[0], copies=mine[0].copies.without(unlike))
        if self._outline is not None:
            plan_cache.remember(mine[0])
        incremental.remember(self._group, self._writer.uri, committed.attempt, sent[0])
        if drafts:
            return drafts[0].metadata
        return committed_metadata(self._writer.uri, self._writer.config, committed.attempt)

    def _run_as_torch(self) -> Metadata:
        """Saves by torch's steps with the calls that torch makes, for what may plan as it likes."""
        writer, planner = self._given
        ours = writer if isinstance(writer, CloudStorageWriter) else None
        # a writer derived from ours may have a write_data of its own, which takes no base
        may_refer = type(writer) is CloudStorageWriter and writer.is_incremental
        made: list[Metadata] = []

        @self._logged
        def local_step() -> tuple[bool, bytes]:
            told: dict[str, Any] = {
                "state_dict": self._state_dict,
                "is_coordinator": self._ranks.is_coordinator,
            }
            if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
                told["storage_meta"] = writer.storage_meta()
            planner.set_up_planner(**told)
            if type(planner) is DefaultSavePlanner:
                keep_containers(planner, self._state_dict)
            if ours is not None:
                ours.note_structure(
                    lost_by_flattening(self._state_dict, planner, ours.checkpoint_id)
                )
            return may_refer, pickle.dumps(writer.prepare_local_plan(planner.create_local_plan()))

        @self._logged
        def global_step(told: list[tuple[bool, bytes]]) -> list[tuple[bool, bytes]]:
            with paused_gc():
                plans = [pickle.loads(plan) for _, plan in told]  # noqa: S301 - of the ranks
                plans, metadata = planner.create_global_plan(plans)
                made.append(metadata)
                are_incremental = all(one for one, _ in told)
                return [
                    (are_incremental, pickle.dumps(plan))
                    for plan in writer.prepare_global_plan(plans)
                ]

        @self._logged
        def write_data() -> list[WriteResult]:
            own = planner.finish_plan(pickle.loads(plan))  # noqa: S301 - of the coordinator
            if is_incremental and ours is not None:  # the first has no base, but digests
                future = ours.write_data(own, planner, Contents(len(own.items), base))
            else:
                future = writer.write_data(own, planner)
            future.wait()
            results: list[WriteResult] = future.value()
            written.extend(one.storage_data for one in results)
            return results

        @self._logged
        def finish_checkpoint(results: list[list[WriteResult]]) -> str | Metadata:
            with committing(writer):
                writer.finish(made[0], results)
            return made[0] if ours is None else ours.attempt

        written: list[Any] = []
        base: Base | None = None
        try:
            is_incremental, plan = self._ranks.reduce_scatter("plan", local_step, global_step)
            if is_incremental and ours is not None:
                base = incremental.agree_on_base(
                    self._ranks, self._group, ours, self._logged, is_planned=True
                )
            committed = self._ranks.all_reduce("write", write_data, finish_checkpoint)
        except BaseException:
            forget_plans(planner)
            raise
        if ours is None:
            return cast(Metadata, committed)
        for one in written:
            if isinstance(one, Written):
                incremental.remember(self._group, ours.uri, committed, one)
        return made[0] if made else committed_metadata(ours.uri, ours.config, committed)

    def _logged(self, step: Callable[..., Any]) -> Any:
        """Wraps a step so that torch's logger records it as it does those of torch's saver."""
        where = self._given[0].checkpoint_id
        return logged_by_torch(checkpoint_id=where, group=self._group)(portable_errors(where)(step))

    def _planned(self) -> _Planned:
        """This rank's part of a new plan.

        Ranks send what they would write as columns, because the plans of a large job are millions
        of objects.
        """
        found: list[Planned] = []
        local: list[tuple[SavePlan, Structure]] = []
        uri = str(self._writer.uri)

        @self._logged
        def local_step() -> bytes:
            self._planner.set_up_planner(
                self._state_dict, self._writer.storage_meta(), self._ranks.is_coordinator
            )
            plan = self._writer.prepare_local_plan(self._planner.create_local_plan())
            with paused_gc():
                structure = lost_by_flattening(self._state_dict, self._planner, uri)
                local.append((plan, structure))
                try:
                    return record_of(plan, structure, self._writer.checksum)
                except NotInColumnsError as exc:
                    for name, value in self._planner.state_dict.items():
                        if isinstance(value, torch.Tensor):
                            check_supported(value, name)
                    raise UnsupportedValueError(
                        f"the state dict can't be described in the format of checkpoints: {exc}",
                        uri=uri,
                    ) from exc

        @self._logged
        def global_step(told: list[bytes]) -> list[tuple[Part, int, Shared]]:
            number = plan_cache.new_number()
            with paused_gc():
                planned, parts, shared = self._planned_together(told)
                found.append(planned)
                if self._writer.config.replicas == "trust":
                    shared = [Shared.nothing()] * len(parts)
                return [(part, number, own) for part, own in zip(parts, shared, strict=True)]

        part, number, shared = self._ranks.reduce_scatter("plan", local_step, global_step)
        plan, structure = local[0]
        with paused_gc():
            copies = Copies.of(plan, shared, samples=self._writer.config.replicas != "refuse")
            plan = part.of(plan)
        return _Planned(plan, number, structure, copies, found[0] if found else None)

    def _planned_together(self, told: list[bytes]) -> tuple[Planned, list[Part], list[Shared]]:
        """What all ranks write, each rank's part, and what of it others have, too.

        Raises:
            IncompleteSaveError: If the ranks' parts of a tensor do not fill it.
            KeyCollisionError: If ranks have different things under one name.
        """
        uri, known = str(self._writer.uri), Heads()
        records = [Record.parse(one, uri, known=known) for one in told]
        lowest = self._planner.dedup_save_to_lowest_rank
        try:
            return plan_together(records, to_lowest_rank=lowest, uri=uri)
        except ValueError as exc:
            if isinstance(exc, CloudCheckpointError):
                raise
            found = re.search(r"key:(\S+)", str(exc))
            raise IncompleteSaveError(
                "the parts of a tensor that the ranks have overlap, or do not fill it. Give the "
                "same keys on all ranks, for example those of torch.distributed.checkpoint."
                "state_dict.get_model_state_dict(model), and nothing is saved behind an "
                "`if rank == ...:`",
                uri=uri,
                item=None if found is None else found[1],
                cause=exc,
            ) from exc

    def _left(
        self,
        number: int,
        saves: int,
        plan: SavePlan,
        structure: Structure,
        extents: Extents,
        references: tuple[WrittenObject, ...],
    ) -> Pending:
        """What this rank's saving process records in the store if its trainer ends.

        Args:
            number: The number of the plan.
            saves: How many saves have used it.
            plan: What this rank writes.
            structure: What flattening has lost of its state dict.
            extents: Where the items of the plan lie, in their order.
            references: The objects of other checkpoints that hold some items.
        """
        if self._record is None:
            with paused_gc():
                self._record = record_of(plan, structure, self._writer.checksum)
        writer, hook = self._writer, self._writer.commit_hook
        return Pending(
            save=f"{number:x}.{saves}",
            rank=self._ranks.rank,
            ranks=1 if self._group is None else dist.get_world_size(self._group),
            job="" if hook is None else hook.claimed_by,
            attempt=writer.attempt,
            record=self._record,
            extents=extents.pack(),
            columns=len(extents.all_columns),
            notes=writer.noted,
            references=references,
            held=() if writer.hold is None else tuple(sorted(writer.hold.folders)),
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
            group=plan_cache.ref_to(self._group),
            flags=self._flags,
            outline=outline.without_leaves(),
            names=tuple(values),
            mappings=self._planner.mappings,
            structure=planned.structure,
            copies=planned.copies,
            plan=plan,
            digest=plan_cache.digest_of(plan),
            expected=expected_size(plan.items),
            leaves=[numbers[item.index.fqn] for item in items],
            forms=[
                None
                if item.tensor_data is None
                else _form(values[item.index.fqn], item.tensor_data.chunk.sizes, checksum)
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
        self, reports: list[Report], planned: _Planned | None, known: KnownPlan | None
    ) -> tuple[OfAllRanks, list[Written]]:
        """What all ranks were to write, and what each has written.

        Raises:
            IncompleteSaveError: If a rank has written by another plan, or its previous save is
                another than the coordinator's.
        """
        digests = tuple(digest for digest, _, _ in reports)
        if planned is not None:
            assert planned.of_all is not None
            written = [one for _, one, _ in reports]
            return OfAllRanks(planned.of_all, digests, _extents_of(written)), written
        assert known is not None
        assert known.of_all is not None
        written = []
        of_before = zip(known.of_all.digests, known.of_all.extents, strict=True)
        for rank, ((digest, one, _), (planned_digest, before)) in enumerate(
            zip(reports, of_before, strict=True)
        ):
            try:
                if digest != planned_digest:
                    raise ValueError("it has written by another plan")
                written.append(one.completed(before))
            except ValueError as exc:
                raise IncompleteSaveError(
                    f"rank {rank} means another plan or save than rank 0, under the same number: "
                    f"{exc}; nothing was committed. Save again: all ranks plan anew then",
                    uri=str(self._writer.uri),
                ) from exc
        return replace(known.of_all, extents=_extents_of(written)), written


def _extents_of(written: Sequence[Written]) -> tuple[Extents, ...]:
    return tuple(one.extents for one in written)


def _form(value: torch.Tensor, sizes: torch.Size, checksum: ChecksumAlgorithm) -> SmallForm | None:
    """The form of an item in an object, if it is all of a small tensor in host memory."""
    local = _local(value)
    if type(local) not in PLAIN or local.shape != sizes:
        return None
    return SmallForm.of(local, checksum)


def _local(value: torch.Tensor) -> torch.Tensor:
    """The part of a tensor in this rank's memory."""
    return value._local_tensor if isinstance(value, DTensor) else value
