"""Runs the steps of a save: plan, send, commit; later saves of the structure reuse the plan.

It takes the same steps as torch's saver, with the same planner and in the same order: each rank
plans, the coordinator gathers the plans and hands out each rank's part, each rank writes, and the
coordinator commits. Planning is skipped if possible. If every rank has a plan for exactly what it
saves, and all have the same plan (they learn this in their meeting, see ``meeting``), each writes
by its own plan. If any rank lacks it, all plan anew. A plan is kept once a save by it has
committed.

What this rules out:

- *A rank's state dict has changed.* Its outline differs, so the rank has no plan or one with
  another number, and all ranks plan anew within the same save.
- *Some ranks have seen a save commit and others have not*, because one lost the others in between.
  Their plans differ afterwards.
- *Two plans have the same number*, for whatever reason. Each rank reports the digest of the plan it
  has written by, and the coordinator compares it with its own record of the plan.
"""

from __future__ import annotations

import inspect
import pickle
import re
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from cloudckpt.checkpoint.from_torch import NotInColumnsError
from cloudckpt.checkpoint.manifest import Manifest, Planned
from cloudckpt.checkpoint.pending import Pending
from cloudckpt.checkpoint.record import Heads, Record
from cloudckpt.checkpoint.shard import check_supported
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checkpoint.torch_private import Collectives, forget_plans
from cloudckpt.dcp import incremental, save_plan
from cloudckpt.dcp.copies import Copies, Described, Shared, are_alike, refuse_or_tell
from cloudckpt.dcp.failures import portable_errors
from cloudckpt.dcp.global_plan import plan_together, record_of
from cloudckpt.dcp.meeting import PLAN_ANEW, PLAN_EACH_TIME
from cloudckpt.dcp.reader import committed_metadata
from cloudckpt.dcp.save_plan import (
    CloudSavePlanner,
    KnownPlan,
    OfAllRanks,
    Outline,
    lost_by_flattening,
)
from cloudckpt.dcp.saving import Contents
from cloudckpt.dcp.writer import CloudStorageWriter, OurWriter, committing
from cloudckpt.errors import CloudCheckpointError, IncompleteSaveError, UnsupportedValueError
from cloudckpt.gc_pause import paused_gc

__all__ = ["SaveLoop"]

Report = tuple[bytes, Record, int, tuple[MetadataIndex, ...]]
"""A rank's report after writing: the digest of its plan, the record of what it has written, its
number for the comparison of copies (see ``copies``), and its items, of a custom planner only.
"""


class SaveLoop:
    """Saves one state dict, together with the other ranks.

    Attributes:
        plan: The number of this rank's plan for the save.
    """

    def __init__(
        self,
        state_dict: dict[str, Any],
        writer: OurWriter,
        planner: SavePlanner,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Begins the save on this rank, and looks for a kept plan; sends no data.

        Args:
            state_dict: The state dict to save.
            writer: Writes the checkpoint.
            planner: Plans the save, if no kept plan fits.
            group: The ranks; None if this process is alone.

        Raises:
            CheckpointExistsError: On the coordinator, if a checkpoint exists that must not be
                overwritten.
        """
        self._state_dict, self._group = state_dict, group
        self._ranks = Collectives(group, group is not None, 0)
        writer.set_up_storage_writer(self._ranks.is_coordinator, rank=self._ranks.rank)
        self._writer, self._planner = writer, CloudSavePlanner.like(planner)
        # only torch's protocol calls the methods of other writers, also of derived ones
        self._ours = writer if type(writer) is CloudStorageWriter else None
        self._known: KnownPlan | None = None
        self._outline: Outline | None = None
        self._flags = save_plan.flags_of(self._planner)
        self.plan = PLAN_EACH_TIME
        if self._ours is None or self._flags is None:
            return
        if self._ours.waits_before_sending:
            self._ours.wait_for_baseline()
        # the algorithm is recorded in the commit object
        self._flags = (*self._flags, self._ours.checksum.name, self._ours.config.replicas)
        with paused_gc():
            self._outline = Outline.of(state_dict)
        if self._outline is not None:
            self._known = save_plan.find(group, self._flags, self._outline)
        self.plan = PLAN_ANEW if self._known is None else self._known.number

    def run(self, agreed: int) -> Metadata:
        """Saves and commits; raises errors as torch's saver does.

        Args:
            agreed: The number of the plan that all ranks have, or one of the two constants.

        Returns:
            The metadata of the checkpoint.

        Raises:
            CheckpointException: If ranks failed, with the failures of all.
        """
        try:
            if self._ours is None:
                return self._by_protocol()
            if self._known is not None:
                save_plan.drop(self._known)
            known = None if agreed in (PLAN_EACH_TIME, PLAN_ANEW) else self._known
            plan = known or self._plan_anew(self._ours, agreed == PLAN_EACH_TIME)
            return self._carry_out(self._ours, plan)
        except BaseException:
            forget_plans(self._planner)
            raise

    def _carry_out(self, writer: CloudStorageWriter, plan: KnownPlan) -> Metadata:
        """Writes by a plan, and commits; each rank reports locations only if they have changed."""
        planner, is_new = self._planner, not plan.saves
        is_custom, base = plan.flags == (), None
        made: list[tuple[KnownPlan, Record]] = []
        reported: list[Report] = []
        manifests: list[Manifest] = []
        if writer.is_incremental:
            base = incremental.agree_on_base(self._ranks, self._group, writer, is_planned=is_new)

        @portable_errors(self._writer.checkpoint_id)
        def write_data() -> Report:
            entry = plan
            if is_new:
                entry = plan.finished(planner)
            elif self._outline is not None:
                entry.restore(
                    cast(DefaultSavePlanner, planner),
                    self._outline,
                    coordinates=self._ranks.is_coordinator,
                )
            compared, pending = entry.copies.weighed(cast(DefaultSavePlanner, planner)), None
            if writer.sender.outlives and not is_custom:
                if entry.record is None:
                    with paused_gc():
                        record = record_of(entry.plan, entry.structure, writer.checksum)
                    entry = replace(entry, record=record)
                pending = self._pending(writer, entry, compared)
            written = writer.send(
                entry.plan,
                planner,
                expected=entry.expected,
                small=entry.small_tensors(planner),
                pending=pending,
                contents=Contents(len(entry.plan.items), base) if writer.is_incremental else None,
            )
            made.append((replace(entry, extents=written.extents, saves=entry.saves + 1), written))
            if not is_new:
                written = written.without(plan.extents)
            indices = tuple(item.index for item in entry.plan.items) if is_custom else ()
            return entry.digest, written, compared, indices

        @portable_errors(self._writer.checkpoint_id)
        def finish_checkpoint(reports: list[Report]) -> str | None:
            reported.extend(reports)
            return commit() if are_alike(number for _, _, number, _ in reports) else None

        def commit() -> str:
            of_all, written = self._of_all(writer, plan.of_all, reported)
            with committing(writer):
                manifests.append(writer.finish_with(cast(Planned, of_all.planned), written))
                made[0] = replace(made[0][0], of_all=of_all), made[0][1]
                return writer.attempt

        @portable_errors(self._writer.checkpoint_id)
        def describe_copies() -> list[Described]:
            return plan.copies.described(cast(DefaultSavePlanner, planner))

        @portable_errors(self._writer.checkpoint_id)
        def compare_copies(by_rank: list[list[Described]]) -> tuple[str, frozenset[str]]:
            refuses = writer.config.replicas == "refuse"
            differing = refuse_or_tell(by_rank, writer.checkpoint_id, refuses=refuses)
            return commit(), differing

        differing: frozenset[str] = frozenset()
        attempt = self._ranks.all_reduce("write", write_data, finish_checkpoint)
        if attempt is None:
            attempt, differing = self._ranks.all_reduce("compare", describe_copies, compare_copies)
        [(entry, written)] = made
        if entry.outline is not None:
            save_plan.remember(replace(entry, copies=entry.copies.without(differing)))
        if writer.is_incremental:
            incremental.remember(self._group, writer.uri, attempt, written)
        if manifests:
            return manifests[0].metadata
        return committed_metadata(writer.uri, writer.config, attempt)

    def _by_protocol(self) -> Metadata:
        """Plans, writes and commits with exactly torch's calls, for writers of other classes."""
        writer, planner = self._writer, self._planner
        planned: list[Metadata] = []

        @portable_errors(self._writer.checkpoint_id)
        def global_step(plans: list[SavePlan]) -> list[SavePlan]:
            if isinstance(writer, CloudStorageWriter):
                plans = CloudStorageWriter.prepare_global_plan(writer, plans)
            plans, metadata = planner.create_global_plan(plans)
            planned.append(metadata)
            return writer.prepare_global_plan(plans)

        @portable_errors(self._writer.checkpoint_id)
        def write_data() -> list[WriteResult]:
            future = writer.write_data(planner.finish_plan(plan), planner)
            future.wait()
            return future.value()

        @portable_errors(self._writer.checkpoint_id)
        def finish_checkpoint(results: list[list[WriteResult]]) -> str | Metadata:
            with committing(writer):
                writer.finish(planned[0], results)
            return writer.attempt if isinstance(writer, CloudStorageWriter) else planned[0]

        @portable_errors(writer.checkpoint_id)
        def local_step() -> SavePlan:
            return self._local_plan(is_custom=True)[0]

        plan: SavePlan = self._ranks.reduce_scatter("plan", local_step, global_step)
        done: str | Metadata = self._ranks.all_reduce("write", write_data, finish_checkpoint)
        if isinstance(done, Metadata) or not isinstance(writer, CloudStorageWriter):
            return cast(Metadata, done)
        return planned[0] if planned else committed_metadata(writer.uri, writer.config, done)

    def _local_plan(self, *, is_custom: bool) -> tuple[SavePlan, Structure]:
        """Plans this rank's items; returns also what flattening has lost."""
        writer, planner = self._writer, self._planner
        given: dict[str, Any] = {
            "state_dict": self._state_dict,
            "is_coordinator": self._ranks.is_coordinator,
        }
        if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
            given["storage_meta"] = writer.storage_meta()
        planner.set_up_planner(**given)
        if is_custom and isinstance(writer, CloudStorageWriter) and self._group is not None:
            writer.compared_by = planner
        plan = writer.prepare_local_plan(planner.create_local_plan())
        structure = lost_by_flattening(self._state_dict, planner, writer.checkpoint_id)
        if isinstance(writer, CloudStorageWriter):
            writer.note_structure(structure)
        return plan, structure

    def _plan_anew(self, writer: CloudStorageWriter, is_custom: bool) -> KnownPlan:
        """Makes a new plan together with the other ranks; returns this rank's part.

        Ranks send their plans as columns, because the plans of a large job are millions of objects;
        custom planners may use plans of any class, which are pickled.
        """
        planned: list[Planned | Metadata] = []
        local: list[tuple[SavePlan, Structure]] = []

        @portable_errors(self._writer.checkpoint_id)
        def local_step() -> bytes:
            plan, structure = self._local_plan(is_custom=is_custom)
            local.append((plan, structure))
            with paused_gc():
                return pickle.dumps(plan) if is_custom else self._record_of(writer, plan, structure)

        @portable_errors(self._writer.checkpoint_id)
        def global_step(plans: list[bytes]) -> list[tuple[Any, int, Shared]]:
            number, together = save_plan.new_number(), self._planned_together
            with paused_gc():
                of_all, parts, shared = (
                    self._planned_by_planner(plans) if is_custom else together(writer, plans)
                )
            planned.append(of_all)
            return [(part, number, own) for part, own in zip(parts, shared, strict=True)]

        part, number, shared = self._ranks.reduce_scatter("plan", local_step, global_step)
        [(plan, structure)] = local
        with paused_gc():
            samples = is_custom or writer.config.replicas != "refuse"
            copies = Copies.of(plan, shared, samples=samples)
            if is_custom:
                plan = pickle.loads(part)  # noqa: S301 - of the coordinator
            else:
                plan = replace(plan, items=[plan.items[number] for number in part])
        outline = None if is_custom or self._outline is None else self._outline.without_leaves()
        return KnownPlan(
            number=number,
            group=save_plan.ref_to(self._group),
            flags=() if is_custom or self._flags is None else self._flags,
            outline=outline,
            structure=structure,
            plan=plan,
            copies=copies,
            of_all=OfAllRanks(planned[0]) if planned else None,
        )

    def _record_of(self, writer: CloudStorageWriter, plan: SavePlan, structure: Structure) -> bytes:
        """Returns the plan of this rank as the bytes of a record.

        Raises:
            UnsupportedTensorError: If torch can't save a tensor.
            UnsupportedValueError: If the format can't express the plan.
        """
        try:
            return record_of(plan, structure, writer.checksum)
        except NotInColumnsError as exc:
            for name, value in cast(DefaultSavePlanner, self._planner).state_dict.items():
                if isinstance(value, torch.Tensor):
                    check_supported(value, name)
            raise UnsupportedValueError(
                f"the state dict can't be described in the format of checkpoints: {exc}",
                uri=writer.checkpoint_id,
            ) from exc

    def _planned_by_planner(self, plans: list[bytes]) -> tuple[Metadata, list[bytes], list[Shared]]:
        """Returns the metadata of a custom planner, and each rank's pickled part of its plan.

        The last result says, for each rank, that its items have been compared.
        """
        loaded = [pickle.loads(plan) for plan in plans]  # noqa: S301 - of the ranks
        loaded = self._writer.prepare_global_plan(loaded)
        loaded, metadata = self._planner.create_global_plan(loaded)
        parts = [pickle.dumps(plan) for plan in loaded]
        return metadata, parts, [Shared([], [], [])] * len(parts)

    def _planned_together(
        self, writer: CloudStorageWriter, plans: list[bytes]
    ) -> tuple[Planned, list[list[int]], list[Shared]]:
        """Returns the plan of all ranks, and each rank's part and items in common with others.

        Raises:
            IncompleteSaveError: If the ranks' parts of a tensor do not fill it.
            KeyCollisionError: If ranks have different types or shapes under one name.
        """
        uri, heads = writer.checkpoint_id, Heads()
        records = [Record.parse(one, uri, known=heads) for one in plans]
        lowest = cast(DefaultSavePlanner, self._planner).dedup_save_to_lowest_rank
        try:
            planned, parts, shared = plan_together(records, to_lowest_rank=lowest, uri=uri)
        except ValueError as exc:
            if isinstance(exc, CloudCheckpointError):
                raise
            found = re.search(r"key:(\S+)", str(exc))
            raise IncompleteSaveError(
                "the ranks' parts of a tensor overlap, or do not cover it. Give the same keys "
                "on all ranks, for example those of "
                "torch.distributed.checkpoint.state_dict.get_model_state_dict(model), and save "
                "nothing inside an `if rank == ...:`",
                uri=uri,
                item=None if found is None else found[1],
                cause=exc,
            ) from exc
        if writer.config.replicas == "trust":
            shared = [Shared([], [], [])] * len(parts)
        return planned, parts, shared

    def _pending(self, writer: CloudStorageWriter, plan: KnownPlan, compared: int) -> Pending:
        """Makes the pending object for this rank's saving process, without the items' locations.

        Args:
            writer: The writer.
            plan: The plan of this rank.
            compared: This rank's number for the comparison of copies.
        """
        hook = writer.commit_hook
        assert plan.record is not None
        return Pending(
            save=f"{plan.number:x}.{plan.saves}",
            rank=self._ranks.rank,
            ranks=1 if self._group is None else dist.get_world_size(self._group),
            job="" if hook is None else hook.claimed_by,
            attempt=writer.attempt,
            plan=plan.record,
            notes=writer.noted,
            copies=compared,
            held=() if writer.hold is None else tuple(sorted(writer.hold.folders)),
        )

    def _of_all(
        self, writer: CloudStorageWriter, before: OfAllRanks | None, reports: list[Report]
    ) -> tuple[OfAllRanks, list[Record]]:
        """Returns the plan of all ranks, and the record of what each has written.

        Raises:
            IncompleteSaveError: If a rank has written by another plan, or its previous save differs
                from the coordinator's.
        """
        assert before is not None
        planned, written = before.planned, [record for _, record, _, _ in reports]
        digests = tuple(digest for digest, _, _, _ in reports)
        if isinstance(planned, Metadata):
            indices = [of_rank for _, _, _, of_rank in reports]
            planned = Planned.of(planned, indices, writer.checksum, writer.checkpoint_id)
        for rank, (planned_digest, extents) in enumerate(
            zip(before.digests, before.extents, strict=True)
        ):
            try:
                if digests[rank] != planned_digest:
                    raise ValueError("the rank wrote by another plan")
                written[rank] = written[rank].completed(extents)
            except ValueError as exc:
                raise IncompleteSaveError(
                    f"rank {rank} wrote by another plan, or another save, than rank 0: {exc}; "
                    "nothing was committed. Save again: all ranks will then plan anew",
                    uri=writer.checkpoint_id,
                ) from exc
        return OfAllRanks(planned, digests, tuple(one.extents for one in written)), written
