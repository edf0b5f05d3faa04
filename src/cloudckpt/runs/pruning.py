"""Deletes the steps of a run that are no longer kept."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from cloudckpt.background.save import SaveFuture
from cloudckpt.checkpoint.notes import Notes
from cloudckpt.errors import (
    CheckpointConflictError,
    CheckpointNotFoundError,
    CloudCheckpointError,
)
from cloudckpt.runs.catalog import History, Run, notes_of, summary
from cloudckpt.runs.claim import ClaimHook
from cloudckpt.runs.deleting import delete_at
from cloudckpt.runs.steps import Retention

__all__ = ["Pruner"]

logger = logging.getLogger("cloudckpt")


class Pruner:
    """Deletes steps on one thread, in the order of the saves; of the first rank of a job.

    It knows nothing of the run from one save to the next: steps may be removed by others meanwhile.

    Attributes:
        in_use: The steps that are being saved or loaded.
    """

    def __init__(
        self, run: Run, retention: Retention, best_metric: str | None, hook: ClaimHook
    ) -> None:
        """
        Args:
            run: The run.
            retention: Which steps are kept.
            best_metric: The metric that ranks them; None ranks them by age.
            hook: Knows whether the run is still this job's.
        """
        self._run = run
        self._retention = retention
        self._best_metric = best_metric
        self._hook = hook
        self.in_use = StepsInUse()
        self._logged: set[int] = set()  # steps that are unread or abandoned
        self._has_told_loss = False  # of the run, to another job
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cloudckpt-prune")

    def after(self, saved: SaveFuture | None = None, *, keep_abandoned: bool = True) -> None:
        """Deletes the steps no longer kept once a step is saved, in the background.

        Args:
            saved: Its save, if that may be in progress.
            keep_abandoned: Whether steps that are not on the run's line stay.
        """
        self._thread.submit(self._after, saved, keep_abandoned)

    def delete(self, step: int) -> None:
        """Deletes a step, after the saves begun before.

        Raises:
            CheckpointConflictError: If another job has claimed the run since.
            CheckpointNotFoundError: If the step has no committed checkpoint.
            StoreError: If the store refuses or stays unreachable.
        """
        self._thread.submit(self._delete, step).result()

    def wait(self) -> None:
        """Returns when all is deleted that was to be deleted."""
        self._thread.submit(lambda: None).result()

    def close(self, *, wait: bool) -> None:
        """Ends the thread, when it has nothing left to do."""
        self._thread.shutdown(wait=wait)

    def _after(self, saved: SaveFuture | None, keep_abandoned: bool) -> None:
        """Deletes the steps no longer kept, if the save succeeds.

        Nothing is deleted once another job has claimed the run.
        """
        if saved is not None:
            concurrent.futures.wait([saved])
            if saved.exception() is not None or saved.skipped:
                return
        if self._retention.max_to_keep is None and keep_abandoned:
            return
        try:
            self._hook.check_claim()
            history = self._run.history()
            job = self._hook.job
            if job and all(one.job != job for one in history.line.values()):
                return  # somebody has removed all that this job has saved
            self._log_new(history, keep_abandoned)
            metric = self._best_metric
            scores = None if metric is None else history.scores(metric)
            for step in self._retention.unneeded(history.line, scores):
                self._prune(step, history.line[step])
            if not keep_abandoned:
                for step, notes in history.abandoned.items():
                    self._prune(step, notes)
        except CheckpointConflictError as error:
            if not self._has_told_loss:  # several steps may have been committed before the loss
                logger.error(
                    "%s: no old checkpoints are deleted any more: %s", self._run.root, error
                )
            self._has_told_loss = True
        except CloudCheckpointError as error:
            logger.error("%s: old checkpoints could not be deleted: %s", self._run.root, error)
        except Exception:
            logger.exception("%s: old checkpoints could not be deleted", self._run.root)

    def _log_new(self, history: History, keep_abandoned: bool) -> None:
        """Logs, once for each step, what is kept besides and why."""
        new = {step: why for step, why in history.unread.items() if step not in self._logged}
        self._run.log_unread(new)
        abandoned = [step for step in history.abandoned if step not in self._logged]
        if abandoned and keep_abandoned:
            view, names = self._run.view, map(self._run.names.name, abandoned)
            found = view.each(partial(summary, view, self._run), names)
            logger.warning(
                "%s: steps of another training stay (%s), %d bytes in all: delete them with "
                "rm, with prune --abandoned, or by keep_abandoned=False",
                self._run.root,
                ", ".join(map(str, abandoned)),
                sum(one.nbytes for one in found if one is not None),
            )
        self._logged = {*history.unread, *history.abandoned}

    def _prune(self, step: int, notes: Notes) -> None:
        """Deletes a step, unless this job has saved it anew since its notes were read."""
        with self.in_use.deleted(step) as is_free:
            if not is_free:
                return
            try:
                if notes_of(self._run.view, self._run, step) == notes:
                    self._delete(step)
            except CheckpointConflictError:
                raise  # the other steps are not this job's either
            except CheckpointNotFoundError:
                pass  # another process has deleted it
            except CloudCheckpointError as error:
                logger.error(
                    "step %d could not be deleted and stays until the next save: %s", step, error
                )

    def _delete(self, step: int) -> None:
        delete_at(self._run.uri(step), self._run.config, self._hook.check_claim)


class StepsInUse:
    """The steps that a job is saving or loading, which are not deleted meanwhile.

    A deletion during a save of the same step would make that save fail, because the checkpoint that
    it replaces would be gone; during a load it would remove what is being read.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._used: Counter[int] = Counter()
        self._deleted: set[int] = set()

    def begin(self, step: int) -> None:
        """Marks a step as saved or loaded from now on, once any deletion of it has ended."""
        with self._changed:
            self._changed.wait_for(lambda: step not in self._deleted)
            self._used[step] += 1

    def end(self, step: int) -> None:
        """Ends that."""
        with self._changed:
            self._used[step] -= 1

    @contextlib.contextmanager
    def kept(self, step: int) -> Iterator[None]:
        """Calls both, around a ``with`` block."""
        self.begin(step)
        try:
            yield
        finally:
            self.end(step)

    @contextlib.contextmanager
    def deleted(self, step: int) -> Iterator[bool]:
        """Whether a step is unused; if so, no use of it begins until the block ends."""
        with self._changed:
            is_free = not self._used[step]
            if is_free:
                self._deleted.add(step)
        try:
            yield is_free
        finally:
            if is_free:
                with self._changed:
                    self._deleted.remove(step)
                    self._changed.notify_all()
