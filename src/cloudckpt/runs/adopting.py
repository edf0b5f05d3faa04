"""Commits steps whose trainers ended before the commit, if their saving processes sent everything.

When a rank's trainer has ended, its saving process sends the rest of the data. It also writes a
record beside the data (:mod:`cloudckpt.background.sender`); the record is complete when all data is
sent. The complete records of all ranks contain everything that the commit of that save needs. So
any process that has read them can commit the step: by one write of ``.metadata``, on the condition
that the object does not exist yet. The cases:

- *Two jobs adopt a step at once*: one commits, and the other sees the checkpoint.
- *Another job has claimed the run since* (:mod:`cloudckpt.runs.claim`): the step is not committed.
  A record names the job that held the claim when the step was staged, and counts only while that
  job holds it. Processes that finish later leave leftovers, never a commit.
- *A process is still sending*: it rewrites its record every two seconds, and this job waits as long
  as records change, up to a limit.
- *A record is missing, damaged or of another save, or an object differs from its record*: the step
  is not committed. Its data can be swept a day later (:mod:`cloudckpt.runs.sweeping`).
- *The data is about to be swept*: data older than half the age of leftovers is no longer adopted,
  and the commit is sent within the other half, or not at all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from cloudckpt.checkpoint.baseline import LONGEST_SAVE, Baseline, refuse_run
from cloudckpt.checkpoint.commit import commit, conditions_work
from cloudckpt.checkpoint.manifest import Manifest
from cloudckpt.checkpoint.objects import (
    METADATA,
    OF_RANKS,
    WrittenObject,
    find_commit,
    is_pending_name,
    keep_name,
    trial_name,
)
from cloudckpt.checkpoint.pending import MOST_BYTES, Pending
from cloudckpt.checkpoint.record import Heads, Record, bound
from cloudckpt.config import Config, config_or_default
from cloudckpt.dcp.copies import are_alike
from cloudckpt.dcp.global_plan import plan_together
from cloudckpt.dcp.writer import CommitHook, run_after
from cloudckpt.errors import (
    CheckpointConflictError,
    CheckpointCorruptError,
    CheckpointNotFoundError,
    IncompleteSaveError,
    ObjectNotFoundError,
    ObjectTooLargeError,
)
from cloudckpt.runs.catalog import Run
from cloudckpt.runs.sweeping import clock_of
from cloudckpt.stores.base import random_suffix
from cloudckpt.stores.listings import forget_listings
from cloudckpt.transfer.deleting import delete_quietly
from cloudckpt.transfer.view import View
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["Adoption", "adopt"]

logger = logging.getLogger("cloudckpt")

_BETWEEN_LISTINGS = 0.5  # seconds between two listings of the records
_NEXT = "Load an earlier checkpoint; cloudckpt sweep deletes this data when it is a day old"
_SILENT_LISTINGS = 20  # listings in a row without a changed record: the processes count as dead


def adopt(uri: URILike, *, wait: float = 60.0, config: Config | None = None) -> None:
    """Commits a checkpoint whose trainers ended before the commit, if all of its data was sent.

    A checkpoint that is already committed is left unchanged.

    Args:
        uri: The location of the checkpoint.
        wait: Maximum seconds to wait for saving processes that are still sending. With 0, the
            checkpoint is committed only if all data was sent already.
        config: Options; None reads them from the environment.

    Raises:
        CheckpointNotFoundError: If the location has neither a checkpoint nor data of a save.
        IncompleteSaveError: If the checkpoint can't be committed: for example, some rank has not
            sent all of its data, the data was changed or is too old, ranks saved different values
            under one name, or another job has claimed the run since.
        ConfigError: If ``uri`` is the folder of a run, or the store does not support conditional
            writes.
        InvalidURIError: If ``uri`` is not a valid location.
        StoreError: If the store refuses or stays unreachable.
        CommitUnknownError: If the store does not say whether the commit took place.
    """
    location, config = CheckpointURI.parse(uri), config_or_default(config)
    try:
        Adoption(location, config, CommitHook()).carry_out(time.monotonic() + wait)
    except IncompleteSaveError as error:
        view = View(location, config)
        if find_commit(view.look, location) is not None:
            logger.info("%s: this checkpoint is already committed", location)
            return
        refuse_run(view, looks_inside=True)
        if not view.level(location.key("")):
            raise CheckpointNotFoundError(
                "there is no checkpoint and no unfinished save here: check the location",
                uri=str(location),
            ) from error
        raise


class Adoption:
    """Commits one pending step from the records that its saving processes have left."""

    def __init__(self, uri: CheckpointURI, config: Config, hook: CommitHook) -> None:
        """
        Args:
            uri: The location of the step; its parent folder is the run.
            config: Options.
            hook: Called before and after the commit.
        """
        self._uri, self._config, self._hook = uri, config, hook
        self._run = Run(uri.parent, config=config)
        self._records: dict[str, Pending] = {}  # the records read so far, by key, the newest first

    def _owner(self) -> str:
        """Reads the name of the job that claimed the run last; empty if none did.

        Also empty if the claim object, which names the job, can't be parsed.
        """
        owner = self._run.owner()
        return "" if owner is None else owner.job

    def carry_out(self, until: float) -> None:
        """Waits for the records, checks them and the objects, commits, and deletes the records.

        Also deletes the marks by which the save protected objects of other steps, if the checkpoint
        does not need these objects. If another job commits the step meanwhile, its commit stays.

        Args:
            until: When to stop waiting, by :func:`time.monotonic`.

        Raises:
            IncompleteSaveError: If the step can't be committed, for example because another job
                has committed it before, and has deleted the records.
            StoreError: If the store refuses or stays unreachable.
            CommitUnknownError: If the store does not say whether the commit took place.
        """
        by_rank = self._wait_for_records(self._owner(), until)
        self._compare(by_rank)
        baseline = Baseline(self._uri.key(METADATA), None)
        manifest = self._draft(by_rank)
        self._check_objects(manifest.objects)
        self._commit(manifest, by_rank[0], baseline)
        keys, threads = list(self._records), self._config.requests_at_once
        needed, mark = {one.folder for one in manifest.objects}, keep_name(by_rank[0].attempt)
        keys += [self._uri.beside(one).key(mark) for one in by_rank[0].held if one not in needed]
        delete_quietly(self._run.store, keys, self._config.retry, threads=threads)

    def _wait_for_records(self, job: str, until: float) -> Mapping[int, Pending]:
        """Waits until all ranks of one save of ``job`` have sent their data.

        Returns:
            The record of each rank; if several saves are complete, those of the newest save.

        Raises:
            IncompleteSaveError: If there are no records, or only those of other jobs; or if a
                rank's record is still incomplete at ``until``, or when the records have stopped
                changing.
        """
        is_logged, silent = False, 0  # counted in listings: a slow store makes both sides slow
        while True:
            before = self._records
            self._read_records()
            saves: dict[tuple[str, int], dict[int, Pending]] = {}  # the records of a save, by rank
            for pending in self._records.values():
                if pending.job == job:
                    saves.setdefault((pending.save, pending.ranks), {})[pending.rank] = pending
            for (_, ranks), by_rank in saves.items():
                sent = {rank for rank, pending in by_rank.items() if pending.objects is not None}
                if sent >= {*range(ranks)}:
                    return by_rank
            if not saves and self._records:
                raise self._of_another_job()
            if not saves:
                raise self._incomplete("no saving process has left anything to commit")
            silent = silent + 1 if self._records == before else 0
            missing, left = _progress(saves.values()), until - time.monotonic()
            if left <= 0 or silent >= _SILENT_LISTINGS:
                raise self._incomplete(
                    missing, "Try again if ranks are still uploading, or load an earlier checkpoint"
                )
            if not is_logged:
                logger.info("%s: %s; waiting for up to %.0f s", self._uri, missing, left)
                is_logged = True
            time.sleep(_BETWEEN_LISTINGS)

    def _read_records(self) -> None:
        """Lists the records in the step's folder; reads new ones, and unfinished ones again.

        Records that can't be read are logged and left out.
        """
        below = self._uri.key("")
        listed = {
            info.key: info.modified or 0.0
            for info in self._run.view.objects(below + OF_RANKS)
            if is_pending_name(info.key.removeprefix(below)) and info.size <= MOST_BYTES
        }

        def read(key: str) -> tuple[str, Pending | None]:
            try:
                data, _ = self._run.view.retrier.call(
                    lambda: self._run.store.get(key, limit=MOST_BYTES)
                )
                return key, Pending.parse(bytes(data), self._run.store.uri(key))
            except ObjectNotFoundError:
                return key, None
            except (CheckpointCorruptError, ObjectTooLargeError) as error:
                logger.warning("%s", error)
                return key, None

        known = {key: pending for key, pending in self._records.items() if key in listed}
        final = {key for key, pending in known.items() if pending.objects is not None}
        for key, pending in self._run.view.each(read, [key for key in listed if key not in final]):
            if pending is not None:
                known[key] = pending
        newest_first = sorted(known, key=lambda key: listed[key], reverse=True)
        self._records = {key: known[key] for key in newest_first}

    def _compare(self, by_rank: Mapping[int, Pending]) -> None:
        """Checks that the ranks saved equal values under the same name.

        If not, ``Config.replicas`` decides whether this raises, logs a warning, or does nothing.

        Raises:
            IncompleteSaveError: If values differ, and ``replicas`` is ``"refuse"``.
        """
        if are_alike(pending.copies for pending in by_rank.values()):
            return
        what = (
            "ranks saved different values under one name, and the checkpoint keeps only one of the "
            "values: in the training script, wrap such values in cloudckpt.per_rank"
        )
        if self._config.replicas == "refuse":
            raise self._incomplete(what, "To commit this step, set Config(replicas='warn')")
        if self._config.replicas == "warn":
            logger.warning("%s: %s", self._uri, what)

    def _draft(self, by_rank: Mapping[int, Pending]) -> Manifest:
        """Builds the manifest of the step from the records of all ranks.

        Raises:
            IncompleteSaveError: If the ranks' records contradict each other, or can't be parsed.
        """
        uri, written, plans = str(self._uri), list[Record](), list[Record]()
        known: Heads = {}
        try:
            for rank in range(len(by_rank)):
                pending = by_rank[rank]
                assert pending.objects is not None
                if any(stored.rank != rank for stored in pending.objects if not stored.folder):
                    raise ValueError("a rank reported objects of another rank")
                # names compress well, so the stored size does not limit the unpacked size
                most = max(MOST_BYTES, bound(len(pending.plan)))
                plans.append(Record.parse(pending.plan, uri, most, known))
                record = Record.parse(pending.record, uri, MOST_BYTES)
                written.append(replace(record, objects=pending.objects, location=uri))
            planned, _, _ = plan_together(plans, to_lowest_rank=True, uri=uri)
            if [rows.numel() for rows in planned.rows] != [
                len(record.extents) for record in written
            ]:
                raise ValueError("two ranks wrote the same items")
            # objects in other steps are kept by a mark whose name contains the attempt
            refers = any(stored.folder for record in written for stored in record.objects)
            attempt = by_rank[0].attempt if refers else random_suffix()
            return Manifest(planned.written(written, attempt=attempt, uri=uri), uri)
        except MemoryError:
            raise
        except Exception as exc:  # the records' checksums are right, and their content may be any
            raise self._incomplete(f"the ranks' reports do not fit together: {exc}") from exc

    def _check_objects(self, objects: Iterable[WrittenObject]) -> None:
        """Checks the size, checksum and age of all objects that the step needs.

        Checksums are compared only if the store reports them. Objects of other checkpoints may have
        any age; the step's own must be too young to be swept soon.

        Raises:
            IncompleteSaveError: If an object is missing, differs from the record, or is too old.
        """
        view, below = self._run.view, self._uri.key(OF_RANKS)
        young = clock_of(self._run) - LONGEST_SAVE
        ages = {info.key: info.modified for info in view.objects(below)}

        def check(stored: WrittenObject) -> None:
            try:
                info = view.look(self._uri.key(stored.name))
            except ObjectNotFoundError as exc:
                raise self._incomplete(f"its object {stored.name} does not exist") from exc
            if info.size != stored.size or info.checksum not in (None, stored.checksum):
                raise self._incomplete(f"its object {stored.name} was changed or replaced")
            if stored.folder:  # an object of another checkpoint may have any age
                return
            if (written := ages.get(self._uri.key(stored.name))) is None or written <= young:
                raise self._incomplete("its data is over 12 hours old: a sweep may delete it soon")

        view.each(check, objects)

    def _commit(self, manifest: Manifest, pending: Pending, baseline: Baseline) -> None:
        """Writes ``.metadata`` if the records' job still holds the claim, and runs the hook.

        If another job has committed the step meanwhile, that is logged, and nothing is written.

        Raises:
            IncompleteSaveError: If another job has claimed the run, or the data became too old.
            ConfigError: If the store does not support conditional writes.
            CommitUnknownError: If the store does not say whether the commit took place.
            CloudCheckpointError: An error of the hook before the commit, or of the store.
        """
        store, uri, retrier = self._run.store, str(self._uri), self._run.retrier
        body = manifest.data(pending.notes)
        trial = self._uri.key(trial_name(manifest.attempt))
        setting = self._config.conditional_writes
        conditional = conditions_work(store, setting, trial, retrier)
        self._hook.before_commit(uri, manifest.metadata)
        baseline.check_age(uri)

        def check() -> None:
            if self._owner() != pending.job:
                raise self._of_another_job()

        try:
            commit(store, baseline, body, conditional=conditional, retrier=retrier, check=check)
        except CheckpointConflictError:
            logger.info("%s: another job has just committed this checkpoint", uri)
            return
        finally:
            forget_listings()
        logger.warning(
            "%s is committed now: its trainers ended before they could commit it, and their "
            "saving processes uploaded the rest",
            uri,
        )
        run_after(self._hook, uri, manifest.metadata)

    def _of_another_job(self) -> IncompleteSaveError:
        return self._incomplete("the run no longer belongs to the job that saved this data")

    def _incomplete(self, why: str, advice: str = _NEXT) -> IncompleteSaveError:
        text = f"this checkpoint can't be committed: {why}. {advice}"
        return IncompleteSaveError(text, uri=str(self._uri))


def _progress(saves: Iterable[Mapping[int, Pending]]) -> str:
    """Describes for a message how many ranks of the most complete save have finished."""

    def finished(by_rank: Mapping[int, Pending]) -> int:
        return sum(pending.objects is not None for pending in by_rank.values())

    best = max(saves, key=finished)
    ranks, done = next(iter(best.values())).ranks, finished(best)
    return (
        f"of {ranks} ranks, finished: {done}, with unfinished uploads: {len(best) - done}, "
        f"without a report: {ranks - len(best)}"
    )
