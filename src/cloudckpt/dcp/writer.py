"""``CloudStorageWriter``: torch's StorageWriter on an object store."""

from __future__ import annotations

import abc
import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from cloudckpt._arguments import suggesting
from cloudckpt.checkpoint.baseline import Baseline, Beginning, begin, now, refuse_run
from cloudckpt.checkpoint.columns import column_of
from cloudckpt.checkpoint.commit import publish
from cloudckpt.checkpoint.committed import CommitObject, fetch
from cloudckpt.checkpoint.manifest import Manifest, Planned, earlier_objects
from cloudckpt.checkpoint.notes import Notes
from cloudckpt.checkpoint.object_plan import Destination
from cloudckpt.checkpoint.objects import METADATA
from cloudckpt.checkpoint.pending import Pending
from cloudckpt.checkpoint.record import Record
from cloudckpt.checkpoint.references import Hold
from cloudckpt.checkpoint.shard import Sender, send_here
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checkpoint.torch_private import flatten_state_dict, state_dict_being_planned
from cloudckpt.checksum import ChecksumAlgorithm
from cloudckpt.config import Config, config_or_default
from cloudckpt.dcp.copies import Described, Digests, refuse_or_tell
from cloudckpt.dcp.failures import portable, portable_errors
from cloudckpt.dcp.meeting import check_together
from cloudckpt.dcp.save_plan import lost_by_flattening
from cloudckpt.dcp.saving import Contents, SmallTensors, StateLayout, expected_size
from cloudckpt.errors import (
    CloudCheckpointError,
    CommitUnknownError,
    ConfigError,
    IncompleteSaveError,
    KeyCollisionError,
    ObjectNotFoundError,
)
from cloudckpt.events import Event, Span, Transferred, emit
from cloudckpt.gc_pause import paused_gc
from cloudckpt.stores.base import ObjectStore, random_suffix
from cloudckpt.stores.listings import forget_listings
from cloudckpt.stores.registry import checkpoint_location
from cloudckpt.transfer.deleting import delete_quietly
from cloudckpt.transfer.retry import Retrier, open_store
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.view import View
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["CloudStorageWriter", "CommitHook", "OurWriter", "committing", "run_after"]

logger = logging.getLogger("cloudckpt")


class CommitHook:
    """Base class for code that runs on the coordinator around the commit of a save.

    An asynchronous save calls it on a thread of the trainer, even if another process uploads.

    Attributes:
        claimed_by: The name by which this job has claimed the run (:mod:`cloudckpt.runs.claim`), in
            hooks that cloudckpt makes itself; empty in all others.
    """

    claimed_by = ""

    def check_claim(self) -> None:
        """Called before each try of the commit request; an error fails the save on all ranks."""

    def before_commit(self, uri: str, metadata: Metadata) -> None:
        """Called before the commit, once all data is in the store.

        An error fails the save on all ranks.

        Args:
            uri: The checkpoint.
            metadata: torch's metadata of the checkpoint.
        """

    def after_commit(self, uri: str, metadata: Metadata) -> None:
        """Called when the checkpoint is committed; an error is logged and undoes nothing.

        Args:
            uri: The checkpoint.
            metadata: torch's metadata of the checkpoint.
        """


class Report(NamedTuple):
    """A rank's report of the items that it has written, if torch's protocol plans the save.

    Attributes:
        record: The record of the written items.
        indices: The indices of the items, in the plan's order.
        copies: The digests of all items that the rank has, even if another rank writes them; empty
            if the ranks do not compare them.
    """

    record: Record
    indices: tuple[MetadataIndex, ...]
    copies: list[Described]


class OurWriter(StorageWriter):
    """The base class of the storage writers that ``cloudckpt.save`` accepts.

    Attributes:
        checkpoint_id: The location, as a string.
    """

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether ``checkpoint_id`` is a valid location; sends no request."""
        return CheckpointURI.accepts(checkpoint_id)

    @property
    @abc.abstractmethod
    def checkpoint_id(self) -> str: ...

    @abc.abstractmethod
    def begin(self, *, commits: bool) -> None:
        """Begins a save at the location, unless it has begun; does not wait for the store.

        The commit may replace only the checkpoint that exists now; if another writer commits a
        later one, the commit of this save fails.

        Args:
            commits: Whether this rank commits.
        """

    @abc.abstractmethod
    def discard(self) -> None:
        """Deletes this rank's objects of a save that is certainly not committed."""


class CloudStorageWriter(OurWriter):
    """Writes a checkpoint to ``s3://``, ``gs://``, ``az://``, ``file://`` or a local path.

    It works wherever torch takes a ``storage_writer``. Every rank streams its shards in parallel
    multipart uploads out of tensor memory; the coordinator then commits by one write of
    ``.metadata``. Until then nothing is visible, and an earlier checkpoint at the location stays
    loadable.

    The object can be pickled (only location, base, options, notes and hook are kept). It can be
    reused for consecutive saves, but not for two at once.

    Attributes:
        transferred: The bytes and requests of this rank in the last save; None before.
        sender: Uploads the prepared objects, in this process or in a saving process.
        attempt: A random name that this writer draws for each save; that of the committing rank
            identifies the save.
        noted: The notes to be stored with the checkpoint, as bytes.
        hold: On a rank that commits an incremental save, keeps the base (the checkpoint whose bytes
            are not sent again) from deletion; None if there is no base, and on other ranks.
        contents: In an incremental save, a function that takes the number of items and returns the
            ``Contents`` that looks them up in the base; None if everything is sent.
        written: The record of what this rank has written in this save; None before.
        commits: Whether this rank commits.
        committed: Whether the save is committed, as far as this rank alone knows; None during the
            commit, after an uncertain commit, and if another rank commits.
    """

    @suggesting
    def __init__(
        self,
        checkpoint_id: URILike,
        *,
        config: Config | None = None,
        commit_hook: CommitHook | None = None,
        notes: Notes | None = None,
        base: URILike | None = None,
    ) -> None:
        """Makes a writer; sends no request.

        Args:
            checkpoint_id: The location to save to; :meth:`reset` may change it later.
            config: Options; those not given are read from the environment.
            commit_hook: Called on the coordinator around the commit.
            notes: Notes stored with the checkpoint; the coordinator's notes are used.
            base: An earlier checkpoint in the same folder; bytes that it already has are not sent
                again. With ``Config(incremental=True)`` the default is the newest one. torch's own
                ``save`` sends everything; :func:`cloudckpt.save` does not.

        Raises:
            ConfigError: If the notes can't be stored, an argument has the wrong type, or a variable
                in the environment is invalid.
            InvalidURIError: If ``checkpoint_id`` or ``base`` is not a valid checkpoint location.
        """
        super().__init__()
        if not isinstance(commit_hook, (CommitHook, type(None))):
            raise ConfigError(
                f"commit_hook is a {type(commit_hook).__name__}: pass an object of a class "
                "derived from CommitHook"
            )
        self.uri = checkpoint_location(checkpoint_id)
        self.config = config_or_default(config)
        self.commit_hook = commit_hook
        self.notes = notes
        self.base = None if base is None else checkpoint_location(base)
        self.noted = b"" if notes is None else notes.to_json()
        self.transferred: Transferred | None = None
        self.sender: Sender = send_here
        self._start_attempt()

    def _start_attempt(self) -> None:
        self.attempt = random_suffix()
        self._began = time.time()
        self._rank = 0
        self._baseline: Beginning[Baseline] | None = None
        self._is_set_up = False
        self._written: list[str] = []
        self._structure = Structure()
        # the planner, and the flat state dict, if what ranks have under one name is compared
        self._compared: tuple[SavePlanner, Mapping[str, Any]] | None = None
        self._digests: Digests | None = None
        self.hold: Hold | None = None
        self.contents: Callable[[int], Contents] | None = None
        self.written: Record | None = None
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
    def is_incremental(self) -> bool:
        """Whether bytes that an earlier checkpoint has are not sent again."""
        return self.config.incremental or self.base is not None

    @property
    def checksum(self) -> ChecksumAlgorithm:
        """The checksum algorithm of the store."""
        return self._store().capabilities.checksum

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a new save, at another location if one is given.

        Args:
            checkpoint_id: The new location; None keeps the old one.

        Raises:
            InvalidURIError: If ``checkpoint_id`` is not a valid checkpoint location.
        """
        if checkpoint_id:
            self.uri = checkpoint_location(checkpoint_id)
        self._start_attempt()

    def storage_meta(self) -> StorageMeta:
        """Returns the location and this writer's ``attempt``, for planners."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.attempt)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begins a save on this rank; a rank that commits requests the present commit object.

        Raises:
            ConfigError: If each rank is to commit on its own (``use_collectives=False``).
            KeyCollisionError: If two entries of the state dict would have the same name.
        """
        # torch passes rank and use_collectives only to a parameter named exactly `kwargs`
        if self._is_set_up:
            self._start_attempt()  # the caller did not reset between two saves
        self._is_set_up = True
        self._began = time.time()
        self._rank = kwargs.get("rank") or 0
        check_together(kwargs.get("use_collectives", True), str(self.uri))
        self.commits = is_coordinator
        self.committed = False if self.commits else None
        self.begin(commits=self.commits)
        # the state dict that torch's saver is saving, if it is the caller
        if (planning := state_dict_being_planned()) is not None:
            is_alone = not (dist.is_available() and dist.is_initialized())
            self.note_planning(*planning, compares=not is_alone)

    def begin(self, *, commits: bool) -> None:
        if commits and self._baseline is None:
            key, began = self.uri.key(METADATA), now()
            view, overwrite = View(self.uri, self.config), self.config.overwrite
            ask_store = functools.partial(view.look, key)
            location, hook = self.uri.object(METADATA), self.commit_hook

            def ask() -> Baseline:
                baseline = begin(ask_store, key, location, overwrite=overwrite, began=began)
                if baseline.version is None and not (hook and hook.claimed_by):  # a step of its run
                    refuse_run(view)
                return baseline

            self._baseline = Beginning(view, ask)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Returns the plan, once a rank that commits knows what checkpoint the location has.

        Raises:
            CheckpointExistsError: If a checkpoint exists and ``overwrite`` is off.
            CheckpointConflictError: If another writer has committed since this save began.
            ConfigError: If the location is the folder of a run.
            StoreError: If the store refuses or stays unreachable.
        """
        self.wait_for_baseline()
        if self._compared is not None and isinstance(plan, SavePlan):
            planner, values = self._compared
            # a planner that caches its plans makes an empty one if nothing has changed
            items = plan.items if plan.usable else getattr(planner, "plan", plan).items
            samples = self.config.replicas != "refuse"
            self._digests = Digests(items, planner, values, samples)
        return plan

    @property
    def waits_before_sending(self) -> bool:
        """Whether nothing may be sent before the baseline (the present checkpoint) is known.

        If False, only the commit needs the baseline. A saving process can then be given the data
        even while the store is unreachable.
        """
        return self.sender is send_here or not self.config.overwrite

    def wait_for_baseline(self) -> None:
        """Waits, on a rank that commits, until it is known what checkpoint the location has.

        Raises:
            CloudCheckpointError: See :meth:`prepare_local_plan`.
        """
        if self.commits and self._baseline is not None:
            self._baseline.answer()

    def note_planning(self, state_dict: dict[str, Any], planner: Any, *, compares: bool) -> None:
        """Records the original keys and the empty dicts of a state dict for the commit.

        The flat names lack them, and torch does not pass the state dict to writers.

        Args:
            state_dict: The state dict.
            planner: The planner, after it was set up.
            compares: Whether the writer compares the values that ranks have under one name.

        Raises:
            KeyCollisionError: If two entries of the state dict would have the same name.
        """
        self._structure = lost_by_flattening(state_dict, planner, str(self.uri))
        if compares and self.config.replicas != "trust":
            values = getattr(planner, "state_dict", None)
            if not isinstance(values, Mapping):
                values = {}
                with contextlib.suppress(ValueError):  # the planner may use names of its own
                    values = flatten_state_dict(state_dict)[0]
            self._compared = planner, values

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Sends this rank's items; returns a completed future once the store has all of them.

        The future's result is one WriteResult, whose ``storage_data`` is a :class:`Report`.

        Raises:
            TensorChangedError: If a tensor was written to meanwhile.
            ShapeMismatchError: If the planner's tensor does not have the planned shape.
            UnsupportedTensorError: If a tensor can't be stored.
            UnsupportedValueError: If a value can't be pickled, or is refused as
                ``Config(unloadable=...)`` says.
            AsyncSaveError: If a saving process sends, and fails or lacks memory.
            StoreError: If the store refuses or stays unreachable.
        """
        if self.is_incremental and self.contents is None:
            logger.warning(
                "%s: everything is uploaded, as torch's own save and classes derived from "
                "CloudStorageWriter can't save incrementally: call cloudckpt.save with a "
                "CloudStorageWriter",
                self.uri,
            )
        record = self.send(plan, planner)
        indices = tuple(item.index for item in plan.items)
        copies = [] if self._digests is None else self._digests.of_all(plan)
        report = Report(record, indices, copies)
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex(""), 0, report)])
        return future

    def send(
        self,
        plan: SavePlan,
        planner: SavePlanner,
        *,
        expected: int | None = None,
        small: SmallTensors = (),
        pending: Pending | None = None,
    ) -> Record:
        """Sends this rank's items; returns their record once the store has all of them.

        It raises the errors of :meth:`write_data`.

        Args:
            plan: The plan of this rank.
            planner: Provides the data.
            expected: About how many bytes will be sent; None to compute it from the plan.
            small: The small tensors, which are sent without asking the planner for their data;
                empty if they are unknown.
            pending: A template of the record that is left in the store if this trainer ends before
                the commit; the sender adds the locations of the items. None to leave nothing.
        """
        uri, sending = str(self.uri), time.time()
        planned = sending - self._began  # torch's planning, as far as a writer sees it
        emit(Event(phase="plan", uri=uri, rank=self._rank, began=self._began, seconds=planned))
        expected = expected_size(plan.items) if expected is None else expected
        stats = TransferStats(uri, self._rank, expected)
        with portable_errors(uri), Span("upload", uri, self._rank) as span:
            try:
                store, name = self._store(), random_suffix()
                target = Destination(self.uri, self.config, self._rank, name, expected)
                contents = None if self.contents is None else self.contents(len(plan.items))
                layout = StateLayout(
                    plan.items, planner, target, store.capabilities, small, contents, self._digests
                )
                objects = self.sender(target, store, layout, stats, pending)
                self._written = [one.name for one in objects]
            finally:
                self.transferred = stats.snapshot()
            span.nbytes = self.transferred.nbytes
        times = (round(1000 * moment) for moment in (self._began, sending, time.time()))
        self.written = Record(
            extents=layout.extents,
            objects=(*objects, *layout.references),
            checksum=self.checksum,
            structure=self._structure,
            location=uri,
            times=column_of([[self._rank, *times, self.transferred.nbytes]]),
        )
        return self.written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits the checkpoint, on the coordinator; adds locations and save ID to ``metadata``.

        An error of the commit hook before the commit is raised as well.

        Raises:
            KeyCollisionError: If ranks have different values under one name, and
                ``Config(replicas="refuse")`` is given or they are parts of different models.
            UnsupportedValueError: If the metadata can't be stored.
            IncompleteSaveError: If an item of the plan was not written, the save began more than 12
                hours ago, or has not begun or has already finished.
            DifferentCheckpointsError: If a rank has written to another location or store.
            CheckpointCorruptError: If an object of an earlier checkpoint that this one needs is
                gone.
            CheckpointConflictError: If another writer has committed since this save began.
            CommitUnknownError: If the store's answers leave open whether the commit took place.
            ConfigError: If the store does not honour conditional writes, which are not turned off,
                or the location is the folder of a run.
            StoreError: If the commit did not take place, and will not.
        """
        reported: list[Report] = [of_rank[0].storage_data for of_rank in results if of_rank]
        uri, written = str(self.uri), [one.record for one in reported]
        try:
            refuses = self.config.replicas == "refuse"
            refuse_or_tell([one.copies for one in reported], uri, refuses=refuses)
        except KeyCollisionError:
            if not self.is_incremental:  # else some objects are those of earlier checkpoints
                self._delete([one.name for record in written for one in record.objects])
            raise
        indices = [one.indices for one in reported]
        manifest = self.finish_with(Planned.of(metadata, indices, self.checksum, uri), written)
        metadata.storage_data = manifest.metadata.storage_data
        metadata.storage_meta = manifest.metadata.storage_meta
        metadata.version = manifest.metadata.version

    def finish_with(self, planned: Planned, written: Sequence[Record]) -> Manifest:
        """Commits the items that the ranks have written; for errors see :meth:`finish`.

        Args:
            planned: The plan of all ranks.
            written: By rank, the record of what it has written.

        Returns:
            The committed manifest.
        """
        uri, hook = str(self.uri), self.commit_hook or CommitHook()
        if self._baseline is None:
            raise IncompleteSaveError(
                "this writer has no save to finish as the coordinator: none was begun, or it is "
                "already finished. Call set_up_storage_writer(is_coordinator=True) before each "
                "save",
                uri=uri,
            )
        baseline = self._baseline.answer()
        with portable_errors(uri):
            with paused_gc():  # the collector would traverse the plans of all ranks
                merged = planned.written(written, attempt=self.attempt, uri=uri)
                manifest = Manifest(merged, uri)
            # not stored: the checkpoint may be copied
            if manifest.metadata.storage_meta is not None:
                manifest.metadata.storage_meta.checkpoint_id = uri
            hook.before_commit(uri, manifest.metadata)
        self.committed, self._baseline = None, None  # its objects will be committed, or deleted
        with Span("commit", uri, self._rank):
            try:
                publish(
                    self._store(),
                    self.uri,
                    self.config,
                    baseline=baseline,
                    attempt=self.attempt,
                    objects=manifest.objects,
                    own=self._written,
                    kept=earlier_objects(written, self.uri.folder),
                    data=lambda: manifest.data(self.noted),
                    check=hook.check_claim,
                )
            except Exception as error:
                if not isinstance(error, CommitUnknownError):
                    self.committed = False
                raise
            finally:
                forget_listings()
        self.committed = True
        self._written = []
        self._let_go_of_base({one.folder for one in manifest.objects} - {self.uri.folder})
        run_after(hook, uri, manifest.metadata)
        return manifest

    def discard(self) -> None:
        """Deletes this rank's objects of a save that is certainly not committed.

        The base of an incremental save is then no longer kept from deletion.
        """
        self._let_go_of_base()
        self._delete(self._written)
        self._written = []

    def _delete(self, names: Collection[str]) -> None:
        if names:
            keys = [self.uri.key(name) for name in names]
            threads = self.config.requests_at_once
            delete_quietly(self._store(), keys, self.config.retry, threads=threads)

    def _let_go_of_base(self, needed: Collection[str] = ()) -> None:
        hold, self.hold = self.hold, None
        if hold is not None:
            hold.let_go(needed)

    def look_whether_committed(self) -> bool | None:
        """Returns whether this save is committed; None if this is unknown or may still change.

        A rank calls this if it has lost the other ranks. The save is committed if the commit object
        names objects of this rank, whose names are random.
        """
        if self.committed is None and self._written:
            store, key = self._store(), self.uri.key(METADATA)
            try:
                retrier = Retrier.for_cleanup(self.config.retry)
                commit = retrier.call(lambda: fetch(store, key))
                names = CommitObject.parse(commit, store.uri(key)).names(store.uri(key))
            except ObjectNotFoundError:
                pass  # it is not committed now, but may still be
            except CloudCheckpointError as error:
                logger.warning(
                    "%s: it is unknown whether this save is committed, because its commit object "
                    "could not be read: run cloudckpt inspect on this location (cause: %s)",
                    self.uri, error,
                )  # fmt: skip
            else:
                if not names.isdisjoint(self._written):
                    self.committed = True
        return self.committed

    def _store(self) -> ObjectStore:
        return open_store(self.uri, self.config)


@contextlib.contextmanager
def committing(writer: OurWriter) -> Iterator[None]:
    """Turns errors of the commit step into CommitUnknownError if the commit may have taken place.

    After a CommitUnknownError no rank deletes data. Interrupts that can be pickled are raised
    unchanged: the other ranks receive them, and keep the data as well.

    Raises:
        CommitUnknownError: Instead of an error that leaves the outcome open.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(writer, CloudStorageWriter) or isinstance(error, CommitUnknownError):
            raise
        if not writer.commits or writer.committed is False:
            raise
        uri = writer.checkpoint_id
        if not isinstance(error, Exception) and portable(error, uri) is error:
            raise
        raise CommitUnknownError(
            "the checkpoint is committed and can be loaded, but a step after that failed"
            if writer.committed
            else "the commit failed unexpectedly and may have taken place; its data was kept. "
            "Check whether the new checkpoint is here before you go on",
            uri=uri,
            cause=error,
        ) from error


def run_after(hook: CommitHook, uri: str, metadata: Metadata) -> None:
    """Calls the ``after_commit`` of a hook; logs its error, as the save has succeeded."""
    try:
        hook.after_commit(uri, metadata)
    except Exception:
        logger.exception(
            "the commit hook failed after the commit of %s; the checkpoint is committed", uri
        )
