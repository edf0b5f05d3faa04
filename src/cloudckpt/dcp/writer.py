"""``CloudStorageWriter``: torch's StorageWriter on an object store."""

from __future__ import annotations

import abc
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from cloudckpt.checkpoint.commit import Baseline, begin, publish
from cloudckpt.checkpoint.committed import fetch, object_names
from cloudckpt.checkpoint.draft import Draft, Planned
from cloudckpt.checkpoint.notes import Notes, with_timing
from cloudckpt.checkpoint.objects import METADATA, ObjectRecord
from cloudckpt.checkpoint.references import Hold, check_beside
from cloudckpt.checkpoint.sending import Destination, Sender, send_here
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checkpoint.timing import RankTiming, SaveTiming
from cloudckpt.checkpoint.torch_private import state_dict_being_planned, traverse_state_dict
from cloudckpt.checkpoint.written import Written
from cloudckpt.checksum import ChecksumAlgorithm
from cloudckpt.config import Config
from cloudckpt.dcp.failures import portable_errors
from cloudckpt.dcp.incremental import Contents, newest_beside
from cloudckpt.dcp.planners import CloudSavePlanner
from cloudckpt.dcp.saving import CachedLayout, Leave, expected_size, send
from cloudckpt.errors import (
    CloudCheckpointError,
    CommitUnknownError,
    ConfigError,
    IncompleteSaveError,
    UnsupportedTensorError,
)
from cloudckpt.events import Event, Span, Transferred, emit
from cloudckpt.gc_pause import paused_gc
from cloudckpt.stores.base import ObjectStore, random_suffix
from cloudckpt.stores.listings import forget_listings
from cloudckpt.stores.registry import checkpoint_location
from cloudckpt.transfer.deleting import delete_quietly
from cloudckpt.transfer.regions import check_regions
from cloudckpt.transfer.retry import Retrier, open_store
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["CloudStorageWriter", "CommitHook", "OurWriter", "check_together", "run_after"]

logger = logging.getLogger("cloudckpt")


class CommitHook:
    """Called on the coordinator, around the one request that makes a checkpoint visible.

    An asynchronous save calls it on a thread of the trainer, whatever sends.

    Attributes:
        claimed_by: Which job has claimed the run that the checkpoint is of; empty if none has.
    """

    claimed_by = ""

    def before_commit(self, uri: str, metadata: Metadata) -> None:
        """All data is in the store, and nothing is visible; raising fails the save on all ranks."""

    def after_commit(self, uri: str, metadata: Metadata) -> None:
        """The checkpoint is committed; what is raised here is logged, and undoes nothing."""


class OurWriter(StorageWriter):
    """A writer that ``cloudckpt.save`` drives.

    Attributes:
        checkpoint_id: The location, as a string.
    """

    @property
    @abc.abstractmethod
    def checkpoint_id(self) -> str: ...

    @abc.abstractmethod
    def discard(self) -> None:
        """Deletes what this rank has sent in a save that was certainly not committed."""


def check_together(use_collectives: bool, uri: str | None = None) -> None:
    """Refuses torch's option that has each rank commit by itself.

    Raises:
        ConfigError: If it is given.
    """
    if not use_collectives:
        raise ConfigError(
            "use_collectives=False is not supported: each rank would commit a part by itself, and "
            "a save that fails on one of them would leave parts of two checkpoints. Leave it out: "
            "all ranks commit by one request. A process that is to save alone takes no_dist=True",
            uri=uri,
        )


class CloudStorageWriter(OurWriter):
    """Writes a checkpoint to ``s3://``, ``file://`` or a local path.

    Works wherever torch takes a ``storage_writer``. Every rank streams its shards in parallel
    multipart uploads out of tensor memory; the coordinator then commits with one conditional write
    of ``.metadata``. Until then nothing is visible, and a checkpoint that was there stays loadable.

    The object is picklable (location, options and hook travel, nothing else) and may be used for
    one save after another, not for two at a time.

    Attributes:
        transferred: What this rank sent in the last save.
        sender: Sends what is laid out; a saving process can do it instead of this one.
        commits: Whether this rank is one that commits.
        committed: Whether the save is committed, as far as this rank knows by itself; None while
            it commits, after an uncertain commit, and where another rank commits.
    """

    def __init__(
        self,
        checkpoint_id: URILike,
        *,
        config: Config | None = None,
        commit_hook: CommitHook | None = None,
        notes: Notes | None = None,
        base: URILike | None = None,
    ) -> None:
        """
        Args:
            checkpoint_id: Where to save; :meth:`reset` may name another place later.
            config: Options; read from the environment where they are not given.
            commit_hook: Called on the coordinator around the commit.
            notes: What is noted with the checkpoint; those of the coordinator count.
            base: An earlier checkpoint in the same folder, whose bytes are not sent again where
                they are the same; by default, with ``Config(incremental=True)``, the newest one.
                torch's own ``save`` sends all, unless :func:`cloudckpt.install` was called.

        Raises:
            ConfigError: If the notes can't be kept.
            InvalidURIError: If ``checkpoint_id`` is no location that a checkpoint can have.
        """
        super().__init__()
        self.uri = checkpoint_location(checkpoint_id)
        self.config = config if config is not None else Config()
        self.commit_hook = commit_hook
        self.notes = notes
        self.base = None if base is None else checkpoint_location(base)
        self._noted = b"" if notes is None else notes.to_json()
        self.transferred: Transferred | None = None
        self.sender: Sender = send_here
        self._start_attempt()

    def _start_attempt(self) -> None:
        self._attempt = random_suffix()
        self._began = time.time()
        self._rank = 0
        self._baseline: Baseline | None = None
        self._written: list[str] = []
        self._structure = Structure()
        self._hold: Hold | None = None
        self.commits = False
        self.committed: bool | None = None

    def __getstate__(self) -> dict[str, Any]:
        kept = {"config": self.config, "commit_hook": self.commit_hook, "notes": self.notes}
        return {"checkpoint_id": self.uri, "base": self.base, **kept}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def checkpoint_id(self) -> str:
        """The location, as a string."""
        return str(self.uri)

    @property
    def attempt(self) -> str:
        """The random name of this save, on a rank that commits."""
        return self._attempt

    @property
    def is_incremental(self) -> bool:
        """Whether bytes are not sent again that an earlier checkpoint has."""
        return self.config.incremental or self.base is not None

    @property
    def noted(self) -> bytes:
        """What is to be noted with the checkpoint."""
        return self._noted

    @property
    def claimed_by(self) -> str:
        """The job that has claimed the run; empty if none has."""
        return "" if self.commit_hook is None else self.commit_hook.claimed_by

    @property
    def checksum(self) -> ChecksumAlgorithm:
        """The algorithm of the store."""
        return self._store().capabilities.checksum

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the location can be parsed."""
        return CheckpointURI.accepts(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a new attempt, at another location if one is given."""
        if checkpoint_id:
            self.uri = checkpoint_location(checkpoint_id)
        self._start_attempt()

    def storage_meta(self) -> StorageMeta:
        """What planners are told about this save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._attempt)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begins a save.

        Raises:
            ConfigError: If ranks are to commit each by itself (``use_collectives=False``).
        """
        # torch passes rank and use_collectives only to a parameter named exactly `kwargs`
        if self._baseline is not None or self._written:
            self._start_attempt()  # a caller that does not reset between two saves
        self._began = time.time()
        self._rank = kwargs.get("rank") or 0
        check_together(kwargs.get("use_collectives", True), str(self.uri))
        self.commits = is_coordinator
        self.committed = False if self.commits else None
        self._structure = self._seen_structure()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Notes what is there already, before anything is sent.

        Raises:
            UnsupportedTensorError: If torch can't save the element type of a tensor.
            CheckpointExistsError: If there is a checkpoint and ``overwrite`` is off.
        """
        _check_types(plan, str(self.uri))
        self.look_for_older()
        return plan

    def look_for_older(self) -> None:
        """Notes what is there already, on a rank that commits; once in a save.

        Raises:
            CheckpointExistsError: See :meth:`prepare_local_plan`.
        """
        if self.commits and self._baseline is None:
            key, overwrite = self.uri.key(METADATA), self.config.overwrite
            self._baseline = begin(self._store(), key, overwrite=overwrite, retrier=self._retrier())

    def hold_base(self, last: CheckpointURI | None) -> Hold | None:
        """Keeps the earlier checkpoint from being deleted until the commit, on a rank that commits.

        A base that is gone, or can't be read, costs the save its economy, and nothing else.

        Args:
            last: The last one that this process has saved beside it, if it has.

        Returns:
            It; None if there is none that can be referred to.

        Raises:
            ConfigError: If the base that was given does not stand beside the checkpoint.
        """
        if self.base is not None:
            check_beside(self.uri, self.base)
        if self.base or last:
            self._hold = self._held(self.base or last)
        if self._hold is None and self.base is None:
            self._hold = self._held(None)
        return self._hold

    def _held(self, base: CheckpointURI | None) -> Hold | None:
        """Holds a base; without one, the newest checkpoint beside this one."""
        try:
            store = self._store()
            base = base or newest_beside(store, self.uri, self.config)
            if base is None or not self.uri.folder:
                return None
            hold = Hold.of(store, self.uri, base, self.config, self._attempt)
        except CloudCheckpointError as error:
            logger.warning("%s: %s is no base for it: %s", self.uri, base or "nothing", error)
            return None
        if hold is None:
            logger.warning(
                "%s: %s is no base for it, as it has no digests, or is being replaced: save it "
                "with Config(incremental=True)",
                self.uri,
                base,
            )
        return hold

    def note_structure(self, structure: Structure) -> None:
        """Is told what flattening has lost of the state dict, which no writer is shown."""
        self._structure = structure

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # plans may be cached by the planner and come back in a later save: nothing of this attempt
        # may travel in them
        return plans

    def write_data(
        self, plan: SavePlan, planner: SavePlanner, contents: Contents | None = None
    ) -> Future[list[WriteResult]]:
        """Sends this rank's items, but for what ``contents`` knows to be there.

        Returns when the store has all of them.
        """
        if isinstance(planner, CloudSavePlanner):
            self.note_structure(planner.structure)
        if self.is_incremental and contents is None:
            logger.warning(
                "%s: all of it is sent, as torch's own saver was called: call cloudckpt.save, or "
                "cloudckpt.install() before",
                self.uri,
            )
        written = self.send(plan, planner, contents=contents)
        told = dataclasses.replace(written, indices=tuple(item.index for item in plan.items))
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex(""), 0, told)])
        return future

    def send(
        self,
        plan: SavePlan,
        planner: SavePlanner,
        cached: CachedLayout | None = None,
        leave: Leave = lambda extents, references: None,
        contents: Contents | None = None,
    ) -> Written:
        """Sends this rank's items; says what the store has when it has all of them.

        Args:
            plan: What to send.
            planner: Has the data.
            cached: What is known of the items, of a save before.
            leave: What the store is to be told if this trainer ends before the commit.
            contents: Knows what need not be sent.
        """
        sending = self._tell_plan()
        expected = cached.expected if cached is not None else expected_size(plan.items)
        stats = TransferStats(str(self.uri), self._rank, expected)
        with portable_errors(str(self.uri)), Span("upload", str(self.uri), self._rank) as span:
            try:
                written = self._send(plan.items, planner, stats, expected, cached, leave, contents)
            finally:
                self.transferred = stats.snapshot()
            span.nbytes = self.transferred.nbytes
        timing = RankTiming(
            rank=self._rank,
            began=self._began,
            sending=sending,
            sent=time.time(),
            nbytes=self.transferred.nbytes,
        )
        return dataclasses.replace(written, timing=timing)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits.

        Raises:
            IncompleteSaveError: If an item of the plan was not written.
            DifferentCheckpointsError: If a rank has written to another location, or store.
            CheckpointConflictError: If another writer has committed since this save began.
            CommitUnknownError: If the store does not say whether the commit took place.
        """
        written = [of_rank[0].storage_data for of_rank in results if of_rank]
        draft = self.finish_with(
            lambda: Draft.of(
                Planned.of(metadata, [one.indices for one in written], self.checksum),
                written,
                self.checksum,
                attempt=self._attempt,
                uri=str(self.uri),
            ),
            [one.timing for one in written if one.timing is not None],
        )
        metadata.storage_data = draft.metadata.storage_data
        metadata.storage_meta = draft.metadata.storage_meta
        metadata.version = draft.metadata.version

    def finish_with(self, draw_up: Callable[[], Draft], timings: Sequence[RankTiming]) -> Draft:
        """Commits what ``draw_up`` makes, and returns it. Errors are those of :meth:`finish`."""
        if self._baseline is None:
            raise IncompleteSaveError("the save was not planned", uri=str(self.uri))
        with portable_errors(str(self.uri)):
            with paused_gc():  # which would look through the plans of all ranks
                draft = draw_up()
            if draft.metadata.storage_meta is not None:  # what is stored may be copied elsewhere
                draft.metadata.storage_meta.checkpoint_id = str(self.uri)
            if self.commit_hook is not None:
                self.commit_hook.before_commit(str(self.uri), draft.metadata)
        self.committed = None
        with Span("commit", str(self.uri), self._rank):
            try:
                publish(
                    self._store(),
                    self.uri,
                    self.config,
                    baseline=self._baseline,
                    attempt=self._attempt,
                    objects=[ObjectRecord(o.name, o.size, o.checksum) for o in draft.objects],
                    own=self._written,
                    data=lambda: draft.data(
                        with_timing(self._noted, SaveTiming.of(timings, time.time()))
                    ),
                )
            except CommitUnknownError:
                raise
            except Exception:
                self.committed = False
                raise
            finally:
                forget_listings()
        self.committed = True
        self._written = []
        self._let_go_of_base({one.folder for one in draft.objects} - {self.uri.folder})
        if self.commit_hook is not None:
            run_after(self.commit_hook, str(self.uri), draft.metadata)
        return draft

    def _seen_structure(self) -> Structure:
        """What flattening has lost of the state dict, as far as that can be seen.

        Our planner notes it. torch's has dropped the state dict by now, so the one that torch's
        saver holds is compared with the planner's paths: a planner of another kind, or one that
        saves something else than it was given, leaves the structure to the strings in its paths.

        Raises:
            KeyCollisionError: If two entries of the state dict would have the same name.
        """
        state_dict, planner = state_dict_being_planned() or ({}, None)
        if isinstance(planner, CloudSavePlanner):
            return planner.structure
        if not isinstance(planner, DefaultSavePlanner) or not planner.flatten_state_dict:
            return Structure()
        with paused_gc():
            structure = Structure.of(state_dict, str(self.uri))
            if structure and not _flattens(planner, state_dict):
                return Structure()
        return structure

    def _tell_plan(self) -> float:
        """Planning is torch's; what can be seen of it is the time until it asks for the data.

        Returns:
            The time now.
        """
        now = time.time()
        seconds = now - self._began
        emit(
            Event(
                phase="plan", uri=str(self.uri), rank=self._rank, began=self._began, seconds=seconds
            )
        )
        return now

    def discard(self) -> None:
        """Deletes what this rank has written in an attempt that was certainly not committed."""
        self._let_go_of_base()
        if self._written:
            keys = [self.uri.key(name) for name in self._written]
            delete_quietly(
                self._store(), keys, self.config.retry, threads=self.config.requests_at_once
            )
        self._written = []

    @property
    def held(self) -> tuple[str, ...]:
        """The checkpoints that have a mark of this save, on a rank that commits."""
        return () if self._hold is None else tuple(sorted(self._hold.folders))

    def _let_go_of_base(self, needed: Collection[str] = ()) -> None:
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.let_go(needed)

    def look_whether_committed(self) -> bool | None:
        """Whether this save is committed; None if that can't be found out, or may change yet.

        For a rank that has lost the others. A commit object that names what this rank has written,
        under names that no other attempt has drawn, is that of this save.
        """
        if self.committed is None and self._written:
            store, key = self._store(), self.uri.key(METADATA)
            try:
                retrier = Retrier.for_cleanup(self.config.retry)
                found = retrier.call(lambda: fetch(store, key))
                names = object_names(found, store.uri(key))
            except CloudCheckpointError as error:
                logger.warning("whether the save is committed could not be seen: %s", error)
            else:
                if not names.isdisjoint(self._written):
                    self.committed = True
        return self.committed

    def _send(
        self,
        items: list[WriteItem],
        planner: SavePlanner,
        stats: TransferStats,
        expected: int,
        cached: CachedLayout | None,
        leave: Leave,
        contents: Contents | None,
    ) -> Written:
        destination = Destination(self.uri, self.config, self._rank, random_suffix(), expected)

        def meanwhile() -> None:
            self.look_for_older()  # whose answer may say where the bucket is
            check_regions(self._store(), self.config, expected)

        try:
            objects, extents = send(
                items,
                planner,
                destination,
                self._store(),
                stats,
                began=self._written.append,
                sender=self.sender,
                cached=cached,
                leave=leave,
                meanwhile=meanwhile,
                contents=contents,
            )
        except BaseException:
            self._written = []  # nothing of it is left in the store
            raise
        return Written(str(self.uri), objects, extents, structure=self._structure)

    def _store(self) -> ObjectStore:
        return open_store(self.uri, self.config)

    def _retrier(self) -> Retrier:
        return Retrier(self.config.retry)


def run_after(hook: CommitHook, uri: str, metadata: Metadata) -> None:
    """Calls a hook after the commit, which nothing may make look like a failure."""
    try:
        hook.after_commit(uri, metadata)
    except Exception:
        logger.exception("the hook after the commit of %s failed; the checkpoint is committed", uri)


def _check_types(plan: SavePlan, uri: str) -> None:
    """Refuses element types whose size torch's planner can't tell; it would fail without a name.

    Those are integers of 1 to 7 bits, which ``torch.save`` can't write either, and bits.
    """
    types = {
        item.tensor_data.properties.dtype: item.index.fqn
        for item in plan.items
        if item.tensor_data is not None
    }
    for dtype, fqn in types.items():
        if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
            continue
        try:
            torch.iinfo(dtype)
        except TypeError as exc:
            raise UnsupportedTensorError(
                f"{fqn} is of type {dtype}, which torch can't save: view it as torch.uint8",
                uri=uri,
                item=fqn,
            ) from exc


def _flattens(planner: DefaultSavePlanner, state_dict: dict[str, Any]) -> bool:
    """Whether the planner saves this state dict, and not what it has made of it."""
    paths: list[Any] = []
    traverse_state_dict(state_dict, lambda path, value: paths.append(path))
    return len(paths) == len(planner.mappings) and all(
        planner.mappings.get(".".join(map(str, path))) == path for path in paths
    )
