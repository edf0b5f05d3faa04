"""Claims a run for one job: a small object in the run names the only job that may write to it.

Two jobs that save into one run would delete each other's checkpoints and mix two trainings under
consecutive steps, while each of their commits succeeds. So a job writes the claim object with its
first save or deletion, on the condition that the object is still the version that the job read
when it opened the run: a job that another job replaced before its own first save can't take the run
back. Before each commit, and before each deletion of a step, the job checks that the claim is still
its own. A restarted job takes over the claim of the killed job. If the old job is still running
somewhere, its next commit fails, and it deletes nothing that the new job has saved. A job that only
restores does not claim the run.

The first save waits up to ten seconds for the claim, so that a missing bucket or a wrong key is
reported there. If the store does not answer in that time, training goes on, and the commit waits.

A claim also lists the jobs that this job continues, each with its last step: readers decide by it
which steps are on the line of the run (:mod:`cloudckpt.runs.line`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from cloudckpt.checkpoint.baseline import Beginning
from cloudckpt.checkpoint.commit import conditions_work
from cloudckpt.checkpoint.notes import Notes
from cloudckpt.checkpoint.objects import CLAIM, trial_name
from cloudckpt.dcp.meeting import Meeting
from cloudckpt.dcp.writer import CommitHook
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointConflictError,
    CheckpointExistsError,
    ObjectNotFoundError,
    PreconditionFailedError,
)
from cloudckpt.runs.catalog import Run
from cloudckpt.runs.line import Owner
from cloudckpt.stores.base import random_suffix
from cloudckpt.transfer.upload import put_whole

__all__ = ["OwnLine", "copy_claim"]

logger = logging.getLogger("cloudckpt")


def _put_claim(run: Run, document: Mapping[str, Any], seen: Owner | None) -> str:
    """Writes the claim object of a run, and returns its version.

    Args:
        run: The run.
        document: The content of the object.
        seen: The claim to replace, which must still be the current one; None if the run must have
            no claim yet.

    Raises:
        CheckpointConflictError: If another job has claimed the run meanwhile.
        ConfigError: If the store does not support conditional writes.
        StoreError: If the store refuses or stays unreachable.
    """
    store, retrier = run.store, run.retrier
    trial = run.root.key(trial_name(random_suffix()))
    version: str | None = None
    setting = run.config.conditional_writes
    if setting != "off" and conditions_work(store, setting, trial, retrier):
        version = "" if seen is None else seen.version
    else:
        now = run.owner()
        if (now and now.version) != (seen and seen.version):
            raise _taken(run, now)
    try:
        key, data = run.root.key(CLAIM), memoryview(json.dumps(document).encode())
        return put_whole(store, key, data, retrier, if_version=version).version
    except (PreconditionFailedError, ObjectNotFoundError) as error:
        raise _taken(run, run.owner()) from error


def copy_claim(origin: Run, goal: Run) -> bool:
    """Copies the claim of a run to its copy, so that both have the same line.

    An earlier copy of the claim is replaced: it does not name the jobs that have claimed the source
    since. If another job has claimed the target itself, or the store denies the write, a warning is
    logged. Does nothing if the target has a claim of the same job.

    Returns:
        Whether another job has claimed the target, so that its steps belong to another training.

    Raises:
        ConfigError: If the target's store does not support conditional writes.
        StoreError: If a store refuses or stays unreachable.
    """
    ours, theirs = origin.owner(), goal.owner()
    if ours is not None and theirs is not None and theirs.job == ours.job:
        return False
    try:
        if theirs is not None and "copied" not in theirs.document:
            raise CheckpointConflictError(f"{theirs.process} has saved into the target itself")
        if ours is not None:
            _put_claim(goal, {**ours.document, "copied": True}, theirs)
        return False
    except (AccessDeniedError, CheckpointConflictError) as error:
        logger.warning(
            "%s: the list of the copied run's jobs was not written here, so restore() skips the "
            "copied steps of jobs that the list here lacks (they count as abandoned). To avoid "
            "this, copy the run to an empty folder that you may write to. The cause: %s",
            goal.root,
            error,
        )
        return isinstance(error, CheckpointConflictError)


def _taken(run: Run, by: Owner | None) -> CheckpointConflictError:
    """Makes the error for a job whose run was claimed by another job, or whose claim is gone.

    ``by`` is the current claim; None if it was deleted.
    """
    what = (
        f"the object {CLAIM} of this run was deleted, so this job no longer saves into it: find "
        "out what deletes objects here, such as a lifecycle rule, and start the job again"
    )
    if by is not None:
        what = (
            f"another job has claimed this run: {by.process}. Two training jobs in one run would "
            "delete and replace each other's checkpoints: give one of them its own folder, or "
            "stop one"
        )
    return CheckpointConflictError(what, uri=str(run.root))


_MANY_JOBS = 100  # a line of more jobs drops those that have no committed step any more
_PATIENCE = 10.0  # seconds that a call of save() waits for the claim


class OwnLine(CommitHook):
    """A job's claim of its run, and the earlier jobs and steps that the job continues.

    Both are the same on all ranks. Rank 0 claims the run, and sends the job's name to the other
    ranks. As the commit hook of the job's saves, this object checks the claim before each commit,
    and calls the user's hook.

    Attributes:
        run: The run.
        claimed_by: The job's name, which is part of each step's notes; empty until the job claims
            the run.
        base: The restored checkpoint, if saves are incremental and none has begun since the
            restore: the next save may refer to the data of this checkpoint. Otherwise None.
        has_restored: Whether the job has called ``restore()`` without ``source``, and so knows
            whether the run has steps.
    """

    def __init__(self, run: Run, meeting: Meeting, inner: CommitHook | None) -> None:
        """Reads the current claim of the run; a collective call.

        Args:
            run: The run.
            meeting: The ranks of the job.
            inner: The user's hook; None if there is none.

        Raises:
            ConfigError: If the run's location is a checkpoint.
            StoreError: If the store refuses or stays unreachable.
        """
        self.run, self._meeting = run, meeting
        self._inner = inner if inner is not None else CommitHook()
        self.base: str | None = None
        self.has_restored = False
        self._continues: Mapping[str, int] = {}
        self._begins = True  # the next save begins a new line, and claims the run anew
        self._is_claimed = False
        self._claim: Future[Owner] | None = None
        self._drawn: set[str] = set()  # all random names of this job
        self._deciding = threading.Lock()
        self._is_late = False  # saves have used the job's name before the claim was answered
        self._opened = meeting.broadcast_from_first(self._open)

    def _open(self) -> Owner | None:
        """Checks the run's location, and reads the claim; called on rank 0."""
        self.run.check_is_run()
        return self.run.owner()

    def check_claim(self) -> None:
        """Checks that this job still holds the claim of the run, and calls the user's hook.

        If the claim is still being written, waits for that. If the job has not begun to claim the
        run, only the hook is called.

        Raises:
            CheckpointConflictError: If another job has claimed the run, or the claim was deleted.
            CloudCheckpointError: If the claim has failed, or can't be read.
        """
        if self._claim is not None:
            version, now = self._claim.result().version, None
            with contextlib.suppress(ObjectNotFoundError):
                key = self.run.root.key(CLAIM)
                now = self.run.retrier.call(lambda: self.run.store.head(key).version)
            if now != version:
                raise _taken(self.run, self.run.owner())
        self._inner.check_claim()

    def before_commit(self, uri: str, metadata: Metadata) -> None:
        """Calls the user's hook."""
        self._inner.before_commit(uri, metadata)

    def after_commit(self, uri: str, metadata: Metadata) -> None:
        """Calls the user's hook."""
        self._inner.after_commit(uri, metadata)

    def go_on_from(self, step: int | None, notes: Notes | None) -> None:
        """Makes the next save continue a restored step; a collective call.

        Args:
            step: The restored step; None if there was none to restore, so that the next save begins
                a new training.
            notes: The notes of the step; None without a step.
        """
        continues = {} if step is None or notes is None else notes.continued_at(step)
        if len(continues) > _MANY_JOBS:
            history = self._meeting.broadcast_from_first(self.run.history)
            jobs = {
                notes.job for part in (history.line, history.abandoned) for notes in part.values()
            }
            continues = {job: last for job, last in continues.items() if job in jobs}
        self._continues, self.has_restored, self._begins = continues, True, True
        is_base = step is not None and self.run.config.incremental
        self.base = str(self.run.uri(step)) if step is not None and is_base else None

    def claim(self, *, saves: bool = True) -> Notes:
        """Claims the run if this job has not done so, or a new line begins; a collective call.

        A new line begins with the first save, and with the first save after a restore. A save waits
        at most ten seconds for the store's answer; if none has come by then, only the save's commit
        waits for it.

        Args:
            saves: Whether the job is about to save. False before a deletion: a claim then keeps the
                run's current line.

        Returns:
            Notes that name the job and the jobs that it continues, without a step and metrics.

        Raises:
            CheckpointConflictError: If another job has claimed the run.
            CloudCheckpointError: If the run can't be claimed for another reason.
        """
        if (saves and self._begins) or not self._is_claimed:
            claimed = self._meeting.broadcast_from_first(lambda: self._claim_run(saves=saves))
            self.claimed_by, self._is_claimed = claimed
            self._begins = self._begins and not saves
        return Notes(job=self.claimed_by, continues=self._continues)

    def explain(self, error: BaseException | None) -> None:
        """Rewrites the message of a CheckpointExistsError if the job has not called ``restore()``.

        Such a job replaces a step only with ``force``, even if ``Config.overwrite`` is on. Does
        nothing for other errors, or if ``Config.overwrite`` is off.
        """
        is_on = self.run.config.overwrite
        if isinstance(error, CheckpointExistsError) and is_on and not self.has_restored:
            error.message = (
                "this step already has a checkpoint, perhaps of another training: call restore() "
                "first, give the job its own folder, or replace the step with force=True"
            )

    def _claim_run(self, *, saves: bool) -> tuple[str, bool]:
        """Claims the run if a save begins a new line, or this job has not claimed it successfully.

        Called on rank 0. A save waits up to ten seconds for the store's answer. If none has come by
        then, the commits of this save and later ones wait for the claim, and fail if it fails. A
        deletion waits for the answer without a limit.

        Returns:
            The job's name, and whether the store has answered.

        Raises:
            CloudCheckpointError: If the store has answered, and the run can't be claimed.
        """
        claim, patience = self._claim, None
        has_failed = claim is not None and claim.done() and claim.exception() is not None
        if (saves and self._begins) or claim is None or has_failed:
            patience = _PATIENCE if saves else None
            claim = self._begin(saves)
        elif saves:
            patience = 0.0
        concurrent.futures.wait([claim], patience)
        with self._deciding:
            is_there = claim.done()
            self._is_late = self._is_late or not is_there
        if is_there:
            claim.result()
        elif patience:
            logger.warning(
                "%s: the store has not answered for %.0f s whether this job may save into the "
                "run; training continues, and the save commits when it has answered",
                self.run.root,
                patience,
            )
        return self.claimed_by, is_there

    def _begin(self, saves: bool) -> Future[Owner]:
        """Begins to claim the run under a new job name; the requests are sent by another thread.

        Args:
            saves: As for :meth:`claim`.

        Returns:
            The future of the new claim.
        """
        before, continues = self._claim, self._continues
        if not saves:  # a deletion keeps the current line
            line = self.run.history().line
            continues = line[max(line)].continued_at(max(line)) if line else {}
        self._is_late, self.claimed_by = False, (job := random_suffix())

        def claim() -> Owner:
            if saves and not self.has_restored:
                self._warn_of_steps()
            seen = self._opened
            is_copied = seen is not None and "copied" in seen.document
            if before is not None and before.exception() is None:
                seen = before.result()
            elif before is not None or is_copied:
                # a failed request may have been carried out, or the run was copied here again
                now = self.run.owner()
                if now and (now.job in self._drawn or (is_copied and "copied" in now.document)):
                    seen = now
            self._drawn.add(job)
            return self._claimed(job, continues, seen)

        self._claim = Beginning(self.run.view, claim).future
        return self._claim

    def _claimed(self, job: str, continues: Mapping[str, int], seen: Owner | None) -> Owner:
        """Claims the run, or uses the existing claim if the store forbids to replace it.

        Args:
            job: The new name of this job.
            continues: The jobs that this job continues, each with its last step.
            seen: The claim to replace; None if there must be none.

        Returns:
            The new claim, or the existing one; this job then has the name of the job in it.

        Raises:
            AccessDeniedError: If the store forbids the write, and there is no existing claim, or
                saves in progress already have the new name.
            CheckpointConflictError: If another job has claimed the run meanwhile.
            CloudCheckpointError: If the claim can't be written for another reason.
        """
        document = {
            "job": job,
            "continues": [*continues.items()],
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "began": time.time(),
        }
        try:
            return Owner(_put_claim(self.run, document, seen), job)
        except AccessDeniedError as error:
            with self._deciding:
                if seen is None or self._is_late:
                    raise
                self.claimed_by = seen.job
            logger.warning(
                "the run's claim object %s can't be overwritten, so another job that saves into "
                "this run would go unnoticed; check permissions and retention policies: %s",
                CLAIM,
                error,
            )
            return seen

    def _warn_of_steps(self) -> None:
        """Logs a warning if the run has committed steps; the job has not called ``restore()``."""
        steps = reversed(self.run.steps())
        if (newest := next(filter(self.run.is_committed, steps), None)) is not None:
            logger.warning(
                "%s has steps up to %d, but this job did not call restore(), or only with source=. "
                "Its saves begin a new training, which the next job will restore; they replace an "
                "old step only with force=True. To continue the old steps, start the job again "
                "with restore() before the first save",
                self.run.root,
                newest,
            )
