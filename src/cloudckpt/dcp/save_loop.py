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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from cloudckpt.checkpoint.base import Base
from cloudckpt.checkpoint.from_torch import NotInColumnsError
from cloudckpt.checkpoint.manifest import Manifest, Planned
from cloudckpt.checkpoint.object_plan import StoredForm
from cloudckpt.checkpoint.pending import Pending
from cloudckpt.checkpoint.record import Extents, Heads, Record
from cloudckpt.checkpoint.shard import check_supported, small_form_of
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checkpoint.torch_private import Collectives, forget_plans
from cloudckpt.dcp import incremental, plan_cache
from cloudckpt.dcp.copies import (
    Copies,
    Described,
    Shared,
    are_alike,
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
from cloudckpt.dcp.plan_cache import KnownPlan, OfAllRanks, Outline
from cloudckpt.dcp.planners import CloudSavePlanner, keep_containers, lost_by_flattening
from cloudckpt.dcp.reader import committed_metadata
from cloudckpt.dcp.saving import SmallTensors, expected_size
from cloudckpt.dcp.writer import CloudStorageWriter, OurWriter, committing
from cloudckpt.errors import CloudCheckpointError, IncompleteSaveError, UnsupportedValueError
from cloudckpt.gc_pause import paused_gc
from cloudckpt.transfer.memory import PLAIN

__all__ = ["SaveLoop"]

Report = tuple[bytes, Record, int]
"""A rank's report after writing: the digest of its plan, the record of what it has written, and its
number for the comparison of copies (see ``copies``).
"""


@dataclass(frozen=True)
class _Planned:
    """A plan that the ranks have made for the current save.

    Attributes:
        step: This rank's part of the plan.
        number: The number of the plan.
        structure: The nesting that flattening has lost of this rank's state dict.
        copies: The items that this rank has in common with others.
        of_all: On the coordinator, the plan of all ranks; or the metadata of a custom planner.
    """

    step: SavePlan
    number: int
    structure: Structure
    copies: Copies
    of_all: Planned | Metadata | None


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
        is_ours = type(writer) is CloudStorageWriter
        self._writer, self._planner = writer, planner
        # for methods that torch's protocol does not have
        self._ours = cast(CloudStorageWriter, writer)
        self._is_incremental = is_ours and self._ours.is_incremental
        self._known: KnownPlan | None = None
        self._outline: Outline | None = None
        self._record: bytes | None = None  # see KnownPlan
        self._sent: list[Record] = []
        flags = plan_cache.flags_of(planner) if is_ours else None
        if flags is None:
            self.plan = PLAN_EACH_TIME
            return
        if self._ours.waits_before_sending:
            self._ours.wait_for_baseline()
        # the algorithm is recorded in the commit object
        self._flags = (*flags, self._ours.checksum.name, self._ours.config.replicas)
        with paused_gc():
            self._outline = Outline.of(state_dict)
        if self._outline is not None:
            self._known = plan_cache.find(group, self._flags, self._outline)
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
        is_custom = agreed == PLAN_EACH_TIME
        if self._known is not None:
            plan_cache.drop(self._known)
        known = self._known if agreed not in (PLAN_EACH_TIME, PLAN_ANEW) else None
        try:
            planned = self._plan_anew(is_custom) if known is None else None
            base: Base | None = None
            if self._is_incremental:
                base = incremental.agree_on_base(
                    self._ranks, self._group, self._ours, is_planned=known is None
                )
            if is_custom and planned is not None:
                attempt, metadata = self._by_protocol(planned, base)
            else:
                attempt, metadata = self._by_columns(planned, known, base)
        except BaseException:
            forget_plans(self._planner)
            raise
        if not isinstance(self._writer, CloudStorageWriter):
            return cast(Metadata, metadata)
        for written in self._sent:
            incremental.remember(self._group, self._ours.uri, attempt, written)
        return metadata or committed_metadata(self._ours.uri, self._ours.config, attempt)

    def _by_columns(
        self, planned: _Planned | None, known: KnownPlan | None, base: Base | None
    ) -> tuple[str, Metadata | None]:
        """Writes and commits; each rank reports its plan's digest, and locations if they changed.

        Returns:
            The random name of the save, and the metadata on the coordinator.
        """
        planner = cast(DefaultSavePlanner, self._planner)
        mine: list[KnownPlan] = []
        manifests: list[Manifest] = []
        reported: list[Report] = []

        @portable_errors(self._writer.checkpoint_id)
        def write_data() -> Report:
            expected: int | None = None
            small: SmallTensors = ()
            if planned is not None:
                plan = planner.finish_plan(planned.step)
                number, saves, structure = planned.number, 0, planned.structure
            else:
                entry = self._restore_plan(planner)
                plan, expected, small = entry.plan, entry.expected, self._small_tensors(entry)
                number, saves, structure = entry.number, entry.saves, entry.structure
                self._record = entry.record
            copies = entry.copies if planned is None else planned.copies
            compared, pending = copies.weighed(planner), None
            if self._ours.sender.outlives:
                pending = self._pending(f"{number:x}.{saves}", plan, structure, compared)
            written = self._ours.send(
                plan,
                planner,
                expected=expected,
                small=small,
                pending=pending,
                contents=Contents(len(plan.items), base) if self._is_incremental else None,
            )
            if planned is not None:
                entry = self._entry(planned, plan, planner)
            self._sent.append(written)
            mine.append(
                replace(entry, extents=written.extents, saves=entry.saves + 1, record=self._record)
            )
            if known is not None:
                written = written.without(known.extents)
            return entry.digest, written, compared

        @portable_errors(self._writer.checkpoint_id)
        def finish_checkpoint(reports: list[Report]) -> str | None:
            reported.extend(reports)
            return commit() if are_alike(number for _, _, number in reports) else None

        def commit() -> str:
            of_all, written = self._of_all(reported, planned, known)
            with committing(self._writer):
                manifests.append(self._ours.finish_with(lambda: of_all.planned, written))
                mine[0] = replace(mine[0], of_all=of_all)
                return self._ours.attempt

        @portable_errors(self._writer.checkpoint_id)
        def describe_copies() -> list[Described]:
            return mine[0].copies.described(planner)

        @portable_errors(self._writer.checkpoint_id)
        def compare_copies(by_rank: list[list[Described]]) -> tuple[str, frozenset[str]]:
            refuses = self._ours.config.replicas == "refuse"
            unlike = refuse_or_tell(by_rank, self._ours.checkpoint_id, refuses=refuses)
            return commit(), unlike

        attempt = self._ranks.all_reduce("write", write_data, finish_checkpoint)
        if attempt is None:
            attempt, unlike = self._ranks.all_reduce("compare", describe_copies, compare_copies)
            mine[0] = replace(mine[0], copies=mine[0].copies.without(unlike))
        if self._outline is not None:
            plan_cache.remember(mine[0])
        return attempt, manifests[0].metadata if manifests else None

    def _by_protocol(self, planned: _Planned, base: Base | None) -> tuple[str, Metadata | None]:
        """Writes and commits with exactly torch's calls, for custom planners and writers.

        Returns:
            The random name of the save, empty for writers of other classes, and the metadata.
        """
        writer, metadata = self._writer, cast("Metadata | None", planned.of_all)

        @portable_errors(self._writer.checkpoint_id)
        def write_data() -> list[WriteResult]:
            plan = self._planner.finish_plan(planned.step)
            if self._is_incremental:  # the first save has no base, but digests
                contents = Contents(len(plan.items), base)
                future = self._ours.write_data(plan, self._planner, contents)
            else:
                future = writer.write_data(plan, self._planner)
            future.wait()
            results: list[WriteResult] = future.value()
            if self._is_incremental:  # a writer derived from ours may return other results
                self._sent += [result.storage_data[0] for result in results]
            return results

        @portable_errors(self._writer.checkpoint_id)
        def finish_checkpoint(results: list[list[WriteResult]]) -> str | Metadata:
            assert metadata is not None
            with committing(writer):
                writer.finish(metadata, results)
            return writer.attempt if isinstance(writer, CloudStorageWriter) else metadata

        done = self._ranks.all_reduce("write", write_data, finish_checkpoint)
        return ("", done) if isinstance(done, Metadata) else (done, metadata)

    def _plan_anew(self, is_custom: bool) -> _Planned:
        """Makes a new plan together with the other ranks; returns this rank's part.

        Ranks send their plans as columns, because the plans of a large job are millions of objects;
        custom planners and writers may use plans of any class, which are pickled.
        """
        writer, planner, uri = self._writer, self._planner, self._writer.checkpoint_id
        found: list[Planned | Metadata] = []
        local: list[tuple[SavePlan, Structure]] = []

        @portable_errors(self._writer.checkpoint_id)
        def local_step() -> bytes:
            given: dict[str, Any] = {
                "state_dict": self._state_dict,
                "is_coordinator": self._ranks.is_coordinator,
            }
            if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
                given["storage_meta"] = writer.storage_meta()
            planner.set_up_planner(**given)
            if type(planner) is DefaultSavePlanner:
                keep_containers(planner, self._state_dict)
            if is_custom and isinstance(writer, CloudStorageWriter) and self._group is not None:
                writer.compared_by = planner
            plan = writer.prepare_local_plan(planner.create_local_plan())
            with paused_gc():
                structure = lost_by_flattening(self._state_dict, planner, uri)
                local.append((plan, structure))
                if not is_custom:
                    return self._record_of(plan, structure)
            if isinstance(writer, CloudStorageWriter):
                writer.note_structure(structure)
            return pickle.dumps(plan)

        @portable_errors(self._writer.checkpoint_id)
        def global_step(told: list[bytes]) -> list[tuple[Any, int, Shared]]:
            number, plan = plan_cache.new_number(), self._planned_together
            with paused_gc():
                planned, parts, shared = self._planned_by_planner(told) if is_custom else plan(told)
            found.append(planned)
            return [(part, number, own) for part, own in zip(parts, shared, strict=True)]

        part, number, shared = self._ranks.reduce_scatter("plan", local_step, global_step)
        plan, structure = local[0]
        with paused_gc():
            samples = is_custom or self._ours.config.replicas != "refuse"
            copies = Copies.of(plan, shared, samples=samples)
            # pickled by the coordinator
            plan = part.of(plan) if isinstance(part, Part) else pickle.loads(part)  # noqa: S301
        return _Planned(plan, number, structure, copies, found[0] if found else None)

    def _record_of(self, plan: SavePlan, structure: Structure) -> bytes:
        """Returns the plan of this rank as the bytes of a record.

        Raises:
            UnsupportedTensorError: If torch can't save a tensor.
            UnsupportedValueError: If the format can't express the plan.
        """
        try:
            return record_of(plan, structure, self._ours.checksum)
        except NotInColumnsError as exc:
            for name, value in cast(DefaultSavePlanner, self._planner).state_dict.items():
                if isinstance(value, torch.Tensor):
                    check_supported(value, name)
            raise UnsupportedValueError(
                f"the state dict can't be described in the format of checkpoints: {exc}",
                uri=self._writer.checkpoint_id,
            ) from exc

    def _planned_by_planner(self, told: list[bytes]) -> tuple[Metadata, list[bytes], list[Shared]]:
        """Returns the metadata of a custom planner, and each rank's pickled part of its plan.

        The last result says, for each rank, that its items have been compared.
        """
        plans = [pickle.loads(plan) for plan in told]  # noqa: S301 - of the ranks
        if isinstance(self._writer, CloudStorageWriter):
            plans = CloudStorageWriter.prepare_global_plan(self._writer, plans)
        plans, metadata = self._planner.create_global_plan(plans)
        parts = [pickle.dumps(plan) for plan in self._writer.prepare_global_plan(plans)]
        return metadata, parts, [Shared.nothing()] * len(parts)

    def _planned_together(self, told: list[bytes]) -> tuple[Planned, list[Part], list[Shared]]:
        """Returns the plan of all ranks, and each rank's part and items in common with others.

        Raises:
            IncompleteSaveError: If the ranks' parts of a tensor do not fill it.
            KeyCollisionError: If ranks have different types or shapes under one name.
        """
        uri, known = str(self._ours.uri), Heads()
        records = [Record.parse(one, uri, known=known) for one in told]
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
        if self._ours.config.replicas == "trust":
            shared = [Shared.nothing()] * len(parts)
        return planned, parts, shared

    def _pending(self, save: str, plan: SavePlan, structure: Structure, compared: int) -> Pending:
        """Makes the pending object for this rank's saving process, without the items' locations.

        Args:
            save: The name of the save.
            plan: The plan of this rank.
            structure: The nesting that flattening has lost of its state dict.
            compared: This rank's number for the comparison of copies.
        """
        if self._record is None:
            with paused_gc():
                self._record = record_of(plan, structure, self._ours.checksum)
        writer, hook = self._ours, self._ours.commit_hook
        return Pending(
            save=save,
            rank=self._ranks.rank,
            ranks=1 if self._group is None else dist.get_world_size(self._group),
            job="" if hook is None else hook.claimed_by,
            attempt=writer.attempt,
            plan=self._record,
            notes=writer.noted,
            copies=compared,
            held=() if writer.hold is None else tuple(sorted(writer.hold.folders)),
        )

    def _entry(self, planned: _Planned, plan: SavePlan, planner: DefaultSavePlanner) -> KnownPlan:
        """Returns the entry to keep for a new plan, once it has been written."""
        outline, items = self._outline, plan.items
        if outline is None:  # the entry is not kept, and items may have any name
            outline, items = Outline(), []
        values = planner.state_dict
        numbers = {name: number for number, name in enumerate(values)}
        return KnownPlan(
            number=planned.number,
            group=plan_cache.ref_to(self._group),
            flags=self._flags,
            outline=outline.without_leaves(),
            names=tuple(values),
            mappings=planner.mappings,
            structure=planned.structure,
            copies=planned.copies,
            plan=plan,
            digest=plan_cache.digest_of(plan),
            expected=expected_size(plan.items),
            leaves=[numbers[item.index.fqn] for item in items],
            forms=[
                None
                if item.tensor_data is None
                else _form(values[item.index.fqn], item.tensor_data.chunk.sizes)
                for item in items
            ],
        )

    def _restore_plan(self, planner: DefaultSavePlanner) -> KnownPlan:
        """Returns the kept plan, and sets the planner up as it was when it made the plan."""
        known, outline = self._known, self._outline
        assert known is not None
        assert outline is not None
        assert outline.leaves is not None
        planner.state_dict = dict(zip(known.names, outline.leaves, strict=True))
        planner.mappings, planner.plan = known.mappings, known.plan
        planner.is_coordinator = self._ranks.is_coordinator
        if isinstance(planner, CloudSavePlanner):
            planner.structure = known.structure
        return known

    def _small_tensors(self, entry: KnownPlan) -> SmallTensors:
        assert self._outline is not None
        assert self._outline.leaves is not None
        values = self._outline.leaves
        return [
            None if form is None else (form, _local(values[leaf]))
            for leaf, form in zip(entry.leaves, entry.forms, strict=True)
        ]

    def _of_all(
        self, reports: list[Report], planned: _Planned | None, known: KnownPlan | None
    ) -> tuple[OfAllRanks, list[Record]]:
        """Returns the plan of all ranks, and the record of what each has written.

        Raises:
            IncompleteSaveError: If a rank has written by another plan, or its previous save differs
                from the coordinator's.
        """
        digests = tuple(digest for digest, _, _ in reports)
        if planned is not None:
            assert isinstance(planned.of_all, Planned)
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
                    raise ValueError("the rank wrote by another plan")
                written.append(one.completed(before))
            except ValueError as exc:
                raise IncompleteSaveError(
                    f"rank {rank} wrote by another plan, or another save, than rank 0: {exc}; "
                    "nothing was committed. Save again: all ranks will then plan anew",
                    uri=str(self._ours.uri),
                ) from exc
        return replace(known.of_all, extents=_extents_of(written)), written


def _extents_of(written: Sequence[Record]) -> tuple[Extents, ...]:
    return tuple(one.extents for one in written)


def _form(value: torch.Tensor, sizes: torch.Size) -> StoredForm | None:
    """Returns the form of an item that is a whole small tensor in host memory; else None."""
    local = _local(value)
    if type(local) not in PLAIN or local.shape != sizes:
        return None
    return small_form_of(local)


def _local(value: torch.Tensor) -> torch.Tensor:
    """Returns the part of a tensor in this rank's memory."""
    return value._local_tensor if isinstance(value, DTensor) else value
