"""Keeps which steps a job continues, and claims the run for the job on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from cloudckpt.checkpoint.notes import Notes
from cloudckpt.dcp.meeting import Meeting
from cloudckpt.errors import CheckpointExistsError, CloudCheckpointError
from cloudckpt.runs import claim
from cloudckpt.runs.catalog import Run, check_is_run, owner_of
from cloudckpt.runs.claim import ClaimHook
from cloudckpt.runs.line import Owner

__all__ = ["OwnLine"]

logger = logging.getLogger("cloudckpt")

_MANY_JOBS = 100  # a line of more jobs drops those that have no committed step any more


class OwnLine:
    """The jobs and steps that this job continues, equal on all ranks; rank 0 claims the run.

    Attributes:
        has_restored: Whether the job has called ``restore()`` without ``source``, and so knows
            whether the run has steps.
    """

    def __init__(self, run: Run, meeting: Meeting, hook: ClaimHook) -> None:
        """Reads the current claim of the run.

        Raises:
            ConfigError: If the run's location is a checkpoint.
            StoreError: If the store refuses or stays unreachable.
        """
        self._run, self._meeting, self._hook = run, meeting, hook
        self._continues: Mapping[str, int] = {}
        self.has_restored = False
        self._begins = True  # the next save begins a new line, and claims the run anew
        self._is_claimed = False
        self._opened = meeting.broadcast_from_first(self._open)

    def _open(self) -> Owner | None:
        """Checks the run's location, and reads the claim; called on rank 0."""
        check_is_run(self._run.view, self._run)
        return owner_of(self._run.view, self._run)

    def go_on_from(self, step: int | None, notes: Notes | None) -> None:
        """Makes the next save continue the restored step; None, in an empty run, continues none."""
        continues = {} if step is None or notes is None else notes.continued_at(step)
        if len(continues) > _MANY_JOBS:
            there = self._meeting.broadcast_from_first(lambda: self._run.history())
            jobs = {one.job for part in (there.line, there.abandoned) for one in part.values()}
            continues = {job: last for job, last in continues.items() if job in jobs}
        self._continues, self.has_restored, self._begins = continues, True, True

    def for_save(self) -> tuple[str, Mapping[str, int]]:
        """Claims the run if it is not claimed yet or a new line begins, on all ranks together.

        Returns:
            The job's name, and the jobs that it continues, each with its last step: for the notes.

        Raises:
            CheckpointConflictError: If another job has claimed the run.
            CloudCheckpointError: If the run can't be claimed.
        """
        if self._begins or not self._is_claimed:
            told = self._meeting.broadcast_from_first(self._claim)
            self._hook.job, self._is_claimed = told
            self._begins = False
        return self._hook.job, self._continues

    def explain(self, error: CloudCheckpointError) -> None:
        """Rewrites the message of an existing step's error if the job did not call ``restore()``.

        Without it, a save replaces no step, even if the options allow it.
        """
        if isinstance(error, CheckpointExistsError) and not self.has_restored:
            error.message = (
                "this step already has a checkpoint of another training, and this job did not "
                "call restore(): call it, give the job its own folder, or replace the step "
                "with force=True"
            )

    def for_deletion(self) -> None:
        """Claims the run before a deletion if it is not claimed yet; keeps the current line.

        Raises:
            CheckpointConflictError: If another job has claimed the run.
            CloudCheckpointError: If the run can't be claimed.
        """
        if not self._is_claimed:
            self._hook.job = self._meeting.broadcast_from_first(self._take_over)
            self._is_claimed = True

    def _claim(self) -> tuple[str, bool]:
        """Claims the run on rank 0 if a new line begins; otherwise checks the claim in progress.

        Returns:
            The job's name, and whether the store has answered the claim.
        """
        patience = 0.0
        if self._begins or self._hook.is_wanting:
            patience = claim.PATIENCE
            first = (lambda: None) if self.has_restored else self._warn_of_steps
            run = self._run
            self._hook.begin(run.root, run.config, self._continues, self._opened, first)
        is_there = self._hook.wait(patience)
        if patience and not is_there:
            logger.warning(
                "%s: the store has not answered for %.0f s whether this job may save into the "
                "run; training continues, and the save commits when it has answered",
                self._run.root,
                patience,
            )
        return self._hook.job, is_there

    def _warn_of_steps(self) -> None:
        """Logs a warning if the run has steps and the job saves without calling ``restore()``."""
        there = next(self._run.committed_steps(), None)
        if there is not None:
            logger.warning(
                "%s has steps up to %d, and restore() was not called: this job starts a new "
                "line of steps, which the next job will restore. Existing steps are not "
                "replaced without force=True",
                self._run.root,
                there,
            )

    def _take_over(self) -> str:
        """Claims the run on rank 0 without a new line; returns the job's name."""
        if self._hook.is_wanting:
            continues = self._continues
            if not self.has_restored:
                line = self._run.history().line
                continues = line[max(line)].continued_at(max(line)) if line else {}
            self._hook.begin(self._run.root, self._run.config, continues, self._opened)
        self._hook.wait(None)
        return self._hook.job
