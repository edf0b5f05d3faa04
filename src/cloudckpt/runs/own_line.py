"""A job's place in the line of its run: what it continues, and its claim."""

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

_MANY_JOBS = 100  # in a line, above which jobs of which no step is left are forgotten


class OwnLine:
    """What a job continues; all ranks know the same, and the first one claims the run.

    Attributes:
        has_restored: Whether the job has restored a step of the run, or has seen that there is
            none. Otherwise it may not know of the steps that are there.
    """

    def __init__(self, run: Run, meeting: Meeting, hook: ClaimHook) -> None:
        """Reads the claim that is there.

        Raises:
            ConfigError: If the location is that of a checkpoint.
            StoreError: If the store refuses or stays unreachable.
        """
        self._run, self._meeting, self._hook = run, meeting, hook
        self._continues: Mapping[str, int] = {}
        self.has_restored = False
        self._begins = True  # with the next save
        self._is_claimed = False
        self._opened = meeting.broadcast_from_first(self._open)

    def _open(self) -> Owner | None:
        check_is_run(self._run.view, self._run)
        return owner_of(self._run.view, self._run)

    def go_on_from(self, step: int | None, notes: Notes | None) -> None:
        """Has the next save continue a step that was restored; or nothing, if there is none."""
        continues = {} if step is None or notes is None else notes.continued_at(step)
        if len(continues) > _MANY_JOBS:
            there = self._meeting.broadcast_from_first(lambda: self._run.history())
            jobs = {one.job for part in (there.line, there.abandoned) for one in part.values()}
            continues = {job: last for job, last in continues.items() if job in jobs}
        self._continues, self.has_restored, self._begins = continues, True, True

    def for_save(self) -> tuple[str, Mapping[str, int]]:
        """Claims the run if need be; returns the job's name and what it continues, for the notes.

        Raises:
            CheckpointConflictError: If another job has claimed the run.
            CloudCheckpointError: If it can't be claimed.
        """
        if self._begins or not self._is_claimed:
            told = self._meeting.broadcast_from_first(self._claim)
            self._hook.job, self._is_claimed = told
            self._begins = False
        return self._hook.job, self._continues

    def explain(self, error: CloudCheckpointError) -> None:
        """Says why a save replaces no step although the options allow it."""
        if isinstance(error, CheckpointExistsError) and not self.has_restored:
            error.message = (
                "this step already has a checkpoint of another training, and this job did not "
                "call restore(): call it, give the job its own folder, or replace the step "
                "with force=True"
            )

    def for_deletion(self) -> None:
        """Claims the run if need be, without beginning a line; errors are those of a save."""
        if not self._is_claimed:
            self._hook.job = self._meeting.broadcast_from_first(self._take_over)
            self._is_claimed = True

    def _claim(self) -> tuple[str, bool]:
        """Claims the run for a line that begins, or asks whether the claim is there by now.

        Returns the job's name, and whether the claim is there.
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
        """Says what a job does that saves without having called ``restore()``."""
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
        if self._hook.is_wanting:
            continues = self._continues
            if not self.has_restored:
                line = self._run.history().line
                continues = line[max(line)].continued_at(max(line)) if line else {}
            self._hook.begin(self._run.root, self._run.config, continues, self._opened)
        self._hook.wait(None)
        return self._hook.job
