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
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
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
from cloudckpt.dcp.failures import portable_errors, unpickled_plan
from cloudckpt.dcp.global_plan import plan_together, record_of
from cloudckpt.dcp.meeting import PLAN_ANEW, PLAN_EACH_TIME
from cloudckpt.dcp.reader import committed_metadata
from cloudckpt.dcp.save_plan import CloudSavePlanner, KnownPlan, OfAllRanks, Outline
from cloudckpt.dcp.saving import Contents
from cloudckpt.dcp.writer import CloudStorageWriter, OurWriter, committing
from cloudckpt.errors import CloudCheckpointError, IncompleteSaveError, UnsupportedValueError
from cloudckpt.gc_pause import paused_gc

__all__ = ["SaveLoop"]

Report = tuple[bytes, Record, int]
"""A rank's report after writing: the digest of its plan, the record of what it has written, and its
number for the comparison of copies (see ``copies``).
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
        self._uri = writer.checkpoint_id
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
            if self._ours is None or agreed == PLAN_EACH_TIME:
                return self._by_protocol()
            if self._known is not None:
                save_plan.drop(self._known)
            known = None if agreed == PLAN_ANEW else self._known
            return self._carry_out(self._ours, known or self._plan_anew(self._ours))
        except BaseException:
            forget_plans(self._planner)
            raise

    def _carry_out(self, writer: CloudStorageWriter, plan: KnownPlan) -> Metadata:
        """Writes by a plan, and commits; each rank reports locations only if they have changed."""
        planner, is_new = cast(DefaultSavePlanner, self._planner), not plan.saves
        made: list[tuple[KnownPlan, Record]] = []
        reported: list[Report] = []
        manifests: list[Manifest] = []
        contents_of = self._contents_beside(writer, is_planned=is_new)

        @portable_errors(self._uri)
        def write_data() -> Report:
            entry = plan
            if is_new:
                entry = plan.finished(planner)
            elif self._outline is not None:
                coordinates = self._ranks.is_coordinator
                entry.restore(planner, self._outline, coordinates=coordinates)
            compared, pending = entry.copies.weighed(planner), None
            if writer.sender.outlives:
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
                contents=contents_of(entry.plan),
            )
            made.append((replace(entry, extents=written.extents, saves=entry.saves + 1), written))
            return entry.digest, written if is_new else written.without(plan.extents), compared

        @portable_errors(self._uri)
        def finish_checkpoint(reports: list[Report]) -> str | None:
            reported.extend(reports)
            return commit() if are_alike(number for _, _, number in reports) else None

        def commit() -> str:
            of_all, written = self._of_all(writer, plan.of_all, reported)
            with committing(writer):
                manifests.append(writer.finish_with(of_all.planned, written))
                made[0] = replace(made[0][0], of_all=of_all), made[0][1]
                return writer.attempt

        @portable_errors(self._uri)
        def describe_copies() -> list[Described]:
            return plan.copies.described(planner)

        @portable_errors(self._uri)
        def compare_copies(by_rank: list[list[Described]]) -> str:
            refuse_or_tell(by_rank, self._uri, refuses=writer.config.replicas == "refuse")
            return commit()

        attempt = self._ranks.all_reduce("write", write_data, finish_checkpoint)
        if attempt is None:
            attempt = self._ranks.all_reduce("compare", describe_copies, compare_copies)
        [(entry, written)] = made
        if entry.outline is not None:
            save_plan.remember(entry)
        if writer.is_incremental:
            incremental.remember(self._group, writer.uri, attempt, written)
        if manifests:
            return manifests[0].metadata
        return committed_metadata(writer.uri, writer.config, attempt)

    def _contents_beside(
        self, writer: CloudStorageWriter, *, is_planned: bool
    ) -> Callable[[SavePlan], Contents | None]:
        """Agrees on the base of an incremental save; returns a function that makes ``Contents``."""
        if not writer.is_incremental:
            return lambda plan: None
        base = incremental.agree_on_base(self._ranks, self._group, writer, is_planned=is_planned)
        return lambda plan: Contents(len(plan.items), base)

    def _by_protocol(self) -> Metadata:
        """Plans, writes and commits with torch's calls, for custom planners and derived writers.

        Plans are pickled here, not by the collectives: a rank that can't unpickle a custom class
        would leave the others waiting.
        """
        writer, planner, ours = self._writer, self._planner, self._ours
        planned: list[Metadata] = []
        written: list[WriteResult] = []

        @portable_errors(self._uri)
        def local_step() -> bytes:
            plan = self._local_plan(compares=self._group is not None)[0]
            with paused_gc():
                return pickle.dumps(plan)

        @portable_errors(self._uri)
        def global_step(plans: list[bytes]) -> list[bytes]:
            with paused_gc():
                loaded = [unpickled_plan(plan, self._uri) for plan in plans]
                loaded, metadata = planner.create_global_plan(loaded)
                planned.append(metadata)
                return [pickle.dumps(plan) for plan in writer.prepare_global_plan(loaded)]

        @portable_errors(self._uri)
        def write_data() -> list[WriteResult]:
            plan = planner.finish_plan(unpickled_plan(part, self._uri))
            if ours is not None:
                written.append(ours.written(plan, planner, contents_of(plan)))
                return written
            future = writer.write_data(plan, planner)
            future.wait()
            return future.value()

        @portable_errors(self._uri)
        def finish_checkpoint(results: list[list[WriteResult]]) -> str | Metadata:
            with committing(writer):
                writer.finish(planned[0], results)
            return writer.attempt if isinstance(writer, CloudStorageWriter) else planned[0]

        part: bytes = self._ranks.reduce_scatter("plan", local_step, global_step)
        if ours is not None:
            contents_of = self._contents_beside(ours, is_planned=True)
        done: str | Metadata = self._ranks.all_reduce("write", write_data, finish_checkpoint)
        if isinstance(done, Metadata) or not isinstance(writer, CloudStorageWriter):
            return cast(Metadata, done)
        if written and writer.is_incremental:
            incremental.remember(self._group, writer.uri, done, written[0].storage_data.record)
        return planned[0] if planned else committed_metadata(writer.uri, writer.config, done)

    def _local_plan(self, *, compares: bool) -> tuple[SavePlan, Structure]:
        """Returns a plan of this rank's items, and the keys and empty dicts lost by flattening."""
        writer, planner, structure = self._writer, self._planner, Structure()
        given: dict[str, Any] = {
            "state_dict": self._state_dict,
            "is_coordinator": self._ranks.is_coordinator,
        }
        if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
            given["storage_meta"] = writer.storage_meta()
        planner.set_up_planner(**given)
        if isinstance(writer, CloudStorageWriter):
            structure = writer.note_planning(self._state_dict, planner, compares=compares)
        return writer.prepare_local_plan(planner.create_local_plan()), structure

    def _plan_anew(self, writer: CloudStorageWriter) -> KnownPlan:
        """Makes a new plan together with the other ranks; returns this rank's part.

        Ranks send their plans as columns, because the plans of a large job are millions of objects.
        """
        planned: list[Planned] = []
        local: list[tuple[SavePlan, Structure]] = []

        @portable_errors(self._uri)
        def local_step() -> bytes:
            local.append(self._local_plan(compares=False))
            with paused_gc():
                return self._record_of(writer, *local[0])

        @portable_errors(self._uri)
        def global_step(plans: list[bytes]) -> list[tuple[list[int], int, Shared]]:
            number = save_plan.new_number()
            with paused_gc():
                of_all, parts, shared = self._planned_together(writer, plans)
            planned.append(of_all)
            return [(part, number, own) for part, own in zip(parts, shared, strict=True)]

        part, number, shared = self._ranks.reduce_scatter("plan", local_step, global_step)
        [(plan, structure)] = local
        with paused_gc():
            sets = [(weight, [plan.items[one] for one in numbers]) for weight, numbers in shared]
            plan = replace(plan, items=[plan.items[number] for number in part])
        assert self._flags is not None
        return KnownPlan(
            number=number,
            group=save_plan.ref_to(self._group),
            flags=self._flags,
            outline=None if self._outline is None else self._outline.without_leaves(),
            structure=structure,
            plan=plan,
            copies=Copies(sets, samples=writer.config.replicas != "refuse"),
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
                uri=self._uri,
            ) from exc

    def _planned_together(
        self, writer: CloudStorageWriter, plans: list[bytes]
    ) -> tuple[Planned, list[list[int]], list[Shared]]:
        """Returns the plan of all ranks, and each rank's part and items in common with others.

        Raises:
            IncompleteSaveError: If the ranks' parts of a tensor do not fill it.
            KeyCollisionError: If ranks have different types or shapes under one name.
        """
        uri, heads = self._uri, Heads()
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
            shared = [[]] * len(parts)
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
        written = [record for _, record, _ in reports]
        digests = tuple(digest for digest, _, _ in reports)
        for rank, (planned_digest, extents) in enumerate(
            zip(before.digests, before.extents, strict=True)
        ):
            try:
                if digests[rank] != planned_digest:
                    raise ValueError("its plan has another digest")
                written[rank] = written[rank].completed(extents)
            except ValueError as exc:
                raise IncompleteSaveError(
                    f"rank {rank} used a different plan than rank 0, or its previous save was a "
                    f"different one: {exc}; nothing was committed. Save again: "
                    "all ranks will then plan anew",
                    uri=self._uri,
                ) from exc
        return OfAllRanks(before.planned, digests, tuple(one.extents for one in written)), written
