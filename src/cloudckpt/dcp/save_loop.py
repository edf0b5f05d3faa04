"""Runs the steps of a save: plan, send, commit; later saves of the same structure reuse the plan.

It takes the same steps as torch's saver, with the same planner and in the same order: each rank
plans, the coordinator gathers the plans and hands out each rank's part, each rank writes, and the
coordinator commits. Planning is skipped if possible. If every rank has a plan for exactly what it
saves, and all these plans have the same number (they learn this in their meeting, see ``meeting``),
each writes the items of its plan. Otherwise all plan anew. A plan is kept once a save that used it
has committed.

What this rules out:

- *A rank's state dict has changed.* Its outline (:func:`~cloudckpt.dcp.save_plan.outline_of`)
  differs, so the rank has no plan or one with another number, and all ranks plan anew within the
  same save.
- *Some ranks have seen a save commit and others have not*, because one lost the others in between.
  The others have dropped their plan when that save began, so all ranks plan anew.
- *A rank and the coordinator remember different earlier saves of the plan.* A rank whose items have
  the same locations as in the save before reports only a digest of them, and the coordinator
  compares it with the digest of those that it remembers for this rank.
"""

from __future__ import annotations

import inspect
import pickle
from dataclasses import replace
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from cloudckpt.checkpoint.from_torch import NotInColumnsError
from cloudckpt.checkpoint.manifest import Manifest, Planned
from cloudckpt.checkpoint.pending import Pending
from cloudckpt.checkpoint.record import Heads, Record
from cloudckpt.checkpoint.shard import check_supported
from cloudckpt.checkpoint.structure import Flat
from cloudckpt.checkpoint.torch_private import flatten_sharded_tensors, forget_plans
from cloudckpt.dcp import incremental, save_plan
from cloudckpt.dcp.copies import Copies, Described, Shared, are_alike, refuse_or_tell
from cloudckpt.dcp.failures import unpickled
from cloudckpt.dcp.global_plan import plan_together, record_of
from cloudckpt.dcp.meeting import PLAN_ANEW, PLAN_EACH_TIME, Meeting, RankStatus
from cloudckpt.dcp.reader import committed_metadata
from cloudckpt.dcp.save_plan import CloudSavePlanner, KnownPlan, PlanKey
from cloudckpt.dcp.writer import CloudStorageWriter, OurWriter, committing
from cloudckpt.errors import IncompleteSaveError, UnsupportedValueError
from cloudckpt.gc_pause import paused_gc

__all__ = ["SaveLoop"]


class SaveLoop:
    """Saves one state dict, together with the other ranks.

    Attributes:
        writer: Writes the checkpoint.
    """

    def __init__(
        self,
        state_dict: dict[str, Any],
        writer: OurWriter,
        planner: SavePlanner,
        meeting: Meeting,
    ) -> None:
        """Begins the save on this rank, and looks for a kept plan; sends no data.

        Args:
            state_dict: The state dict to save.
            writer: Writes the checkpoint.
            planner: Plans the save, if no kept plan fits.
            meeting: The meeting of the ranks.

        Raises:
            CloudCheckpointError: On the coordinator, if nothing may be saved at the location, for
                example if it has a checkpoint and ``overwrite`` is off; see
                :meth:`CloudStorageWriter.prepare_local_plan`.
            KeyCollisionError: If two entries of the state dict would have the same name.
        """
        self._state_dict, self._meeting = state_dict, meeting
        self._is_coordinator = meeting.rank == 0
        writer.set_up_storage_writer(self._is_coordinator, rank=meeting.rank)
        self.writer, self._planner = writer, CloudSavePlanner.like(planner)
        self._uri = writer.checkpoint_id
        # only torch's protocol calls the methods of other writers, also of derived ones
        self._ours = writer if type(writer) is CloudStorageWriter else None
        self._known: KnownPlan | None = None
        self._key: PlanKey | None = None
        self._flat = Flat({})
        self._plan = PLAN_EACH_TIME
        flags = save_plan.flags_of(self._planner)
        if self._ours is None or flags is None:
            return
        if self._ours.waits_before_sending:
            self._ours.wait_for_baseline()
        with paused_gc():
            self._flat = Flat(state_dict, self._uri)
            outline = save_plan.outline_of(self._flat)
        if outline is not None:
            # the algorithm is recorded in the commit object
            flags = (*flags, self._ours.checksum.name, self._ours.config.replicas)
            self._key = save_plan.ref_to(meeting.group), flags, outline
            self._known = save_plan.find(self._key)
        self._plan = PLAN_ANEW if self._known is None else self._known.number

    @property
    def status(self) -> RankStatus:
        """This rank's plan, and the properties that all ranks must share to save together.

        Other options may differ: the coordinator's determine the contents and the condition of the
        commit, each rank's determine how it sends its own objects.
        """
        planner, writer = self._planner, self.writer
        keeps_plans = isinstance(planner, DefaultSavePlanner) and bool(planner._enable_plan_caching)
        options = (
            f"enable_plan_caching={keeps_plans}",
            f"storage_writer={type(writer).__name__}",
            f"incremental={isinstance(writer, CloudStorageWriter) and writer.is_incremental}",
        )
        return RankStatus(location=self._uri, options=options, plan=self._plan)

    def run(self, agreed: int) -> Metadata:
        """Saves the state dict, and commits the checkpoint; a collective call.

        Args:
            agreed: The number of the plan that all ranks have, see :attr:`Consensus.plan`.

        Returns:
            The metadata of the checkpoint.

        Raises:
            BaseException: See :meth:`Meeting.combined_by_first`.
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
        """Sends this rank's items as planned, and commits once all ranks have sent theirs.

        A rank reports the locations of its items to the coordinator only if they have changed
        since the last save with this plan. Before the commit, the values that ranks have of the
        same items are compared.
        """
        meeting, is_new = self._meeting, not plan.saves
        planner = cast(DefaultSavePlanner, self._planner)
        entries: list[KnownPlan] = []
        reported: list[Record] = []
        manifests: list[Manifest] = []
        if writer.is_incremental:
            incremental.agree_on_base(meeting, writer, is_planned=is_new)

        def write_data() -> tuple[Record, int]:  # with this rank's Copies.weighed
            if is_new:
                entry = plan.finished(planner)
            else:
                entry, planner.state_dict = plan, self._flat.values
            compared, pending = entry.copies.weighed(planner), None
            if writer.sender.outlives:
                if entry.record is None:
                    entry = replace(entry, record=self._record_of(writer, entry.plan))
                pending = self._pending(writer, entry, compared)
            written = writer.send(
                entry.plan,
                planner,
                expected=entry.expected,
                small=entry.small_tensors(planner),
                pending=pending,
            )
            entries.append(replace(entry, extents=written.extents, saves=entry.saves + 1))
            return written if is_new else written.without(plan.extents), compared

        def finish_checkpoint(reports: list[tuple[Record, int]]) -> str | None:
            reported.extend(record for record, _ in reports)
            return commit() if are_alike(number for _, number in reports) else None

        def commit() -> str:
            assert plan.of_all is not None
            for rank, extents in enumerate(plan.of_ranks):
                try:
                    reported[rank] = reported[rank].completed(extents)
                except ValueError as exc:
                    raise IncompleteSaveError(
                        f"rank 0 does not know where rank {rank} has written its items: {exc}; "
                        "nothing was committed. Save again: all ranks will then plan anew",
                        uri=self._uri,
                    ) from exc
            with committing(writer):
                manifests.append(writer.finish_with(plan.of_all, reported))
                return writer.attempt

        def describe_copies() -> list[Described]:
            return plan.copies.described(planner, entries[0].plan)

        def compare_copies(by_rank: list[list[Described]]) -> str:
            refuse_or_tell(by_rank, self._uri, refuses=writer.config.replicas == "refuse")
            return commit()

        attempt = meeting.combined_by_first("write", write_data, finish_checkpoint, self._uri)
        if attempt is None:
            attempt = meeting.combined_by_first(
                "compare", describe_copies, compare_copies, self._uri
            )
        [entry] = entries
        save_plan.remember(replace(entry, of_ranks=tuple(one.extents for one in reported)))
        if writer.is_incremental:
            incremental.remember(meeting.group, writer, attempt)
        if manifests:
            return manifests[0].metadata
        return committed_metadata(writer.uri, writer.config, attempt)

    def _by_protocol(self) -> Metadata:
        """Saves by the calls that torch's save makes, for custom planners and derived writers.

        The coordinator pickles the part of each rank, and the rank unpickles it in the next step,
        which reports errors to all ranks: a custom class may fail to unpickle.
        """
        writer, planner, ours = self.writer, self._planner, self._ours
        meeting = self._meeting
        planned: list[Metadata] = []

        def local_step() -> SavePlan:
            given: dict[str, Any] = {"state_dict": self._state_dict}
            if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
                given["storage_meta"] = writer.storage_meta()
            planner.set_up_planner(**given, is_coordinator=self._is_coordinator)
            if isinstance(writer, CloudStorageWriter):
                compares = meeting.group is not None
                writer.note_planning(self._state_dict, planner, compares=compares)
            return writer.prepare_local_plan(planner.create_local_plan())

        def global_step(plans: list[SavePlan]) -> list[bytes]:
            with paused_gc():
                plans, metadata = planner.create_global_plan(plans)
                planned.append(metadata)
                return [pickle.dumps(plan) for plan in writer.prepare_global_plan(plans)]

        def write_data() -> list[WriteResult]:
            plan = planner.finish_plan(unpickled(part, self._uri))
            future = writer.write_data(plan, planner)
            future.wait()
            return future.value()

        def finish_checkpoint(results: list[list[WriteResult]]) -> str | Metadata:
            with committing(writer):
                writer.finish(planned[0], results)
            return writer.attempt if isinstance(writer, CloudStorageWriter) else planned[0]

        part = meeting.divided_by_first("plan", local_step, global_step, self._uri)
        if ours is not None and ours.is_incremental:
            incremental.agree_on_base(meeting, ours, is_planned=True)
        done = meeting.combined_by_first("write", write_data, finish_checkpoint, self._uri)
        if isinstance(done, Metadata) or not isinstance(writer, CloudStorageWriter):
            return cast(Metadata, done)
        if ours is not None and ours.is_incremental:
            incremental.remember(meeting.group, ours, done)
        return planned[0] if planned else committed_metadata(writer.uri, writer.config, done)

    def _plan_anew(self, writer: CloudStorageWriter) -> KnownPlan:
        """Makes a new plan together with the other ranks; returns this rank's part.

        Ranks send their plans as columns of numbers: those of a large job are millions of objects.
        """
        planner = cast(DefaultSavePlanner, self._planner)
        planned: list[Planned] = []
        local: list[SavePlan] = []

        def local_step() -> bytes:
            planner.state_dict = flatten_sharded_tensors(self._flat.values)
            planner.mappings, planner.is_coordinator = self._flat.paths, self._is_coordinator
            local.append(writer.prepare_local_plan(planner.create_local_plan()))
            return self._record_of(writer, local[0])

        def global_step(plans: list[bytes]) -> list[tuple[list[int], int, Shared]]:
            number, heads = save_plan.new_number(), Heads()
            with paused_gc():
                of_all, parts, shared = plan_together(
                    [Record.parse(one, self._uri, known=heads) for one in plans],
                    to_lowest_rank=planner.dedup_save_to_lowest_rank,
                    compares=writer.config.replicas != "trust",
                    uri=self._uri,
                )
            planned.append(of_all)
            return [(part, number, own) for part, own in zip(parts, shared, strict=True)]

        part, number, shared = self._meeting.divided_by_first(
            "plan", local_step, global_step, self._uri
        )
        [plan] = local
        with paused_gc():
            sets = [(weight, [plan.items[one] for one in numbers]) for weight, numbers in shared]
            plan = replace(plan, items=[plan.items[number] for number in part])
        return KnownPlan(
            key=self._key,
            number=number,
            plan=plan,
            copies=Copies(sets, samples=writer.config.replicas != "refuse"),
            of_all=planned[0] if planned else None,
        )

    def _record_of(self, writer: CloudStorageWriter, plan: SavePlan) -> bytes:
        """Returns the plan of this rank, encoded as a :class:`Record` without locations.

        Raises:
            UnsupportedTensorError: If a tensor can't be stored.
            UnsupportedValueError: If the format can't express the plan for another reason.
        """
        try:
            with paused_gc():
                return record_of(plan, self._flat.structure(), writer.checksum)
        except NotInColumnsError as exc:
            for name, value in cast(DefaultSavePlanner, self._planner).state_dict.items():
                if isinstance(value, torch.Tensor):
                    check_supported(value, name)
            raise UnsupportedValueError(
                f"the save plan of the state dict can't be stored: {exc}. Change or leave out the "
                "entry at fault; if a custom planner made the plan, correct the planner",
                uri=self._uri,
            ) from exc

    def _pending(self, writer: CloudStorageWriter, plan: KnownPlan, compared: int) -> Pending:
        """Returns what the saving process leaves in the store if this trainer ends too early.

        The locations of the items are missing; the writer's ``sender`` adds them.

        Args:
            writer: The writer.
            plan: The plan of this rank.
            compared: This rank's :meth:`Copies.weighed`.
        """
        hook = writer.commit_hook
        assert plan.record is not None
        return Pending(
            save=f"{plan.number:x}.{plan.saves}",
            rank=self._meeting.rank,
            ranks=self._meeting.size,
            job="" if hook is None else hook.claimed_by,
            attempt=writer.attempt,
            plan=plan.record,
            notes=writer.noted,
            copies=compared,
            held=() if writer.hold is None else tuple(sorted(writer.hold.folders)),
        )
