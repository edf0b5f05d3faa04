"""Deletes the steps of a run that are no longer kept, and knows their scores."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from cloudckpt.background.save import SaveFuture
from cloudckpt.errors import (
    CheckpointConflictError,
    CheckpointNotFoundError,
    CloudCheckpointError,
    StoreError,
)
from cloudckpt.runs.catalog import Run
from cloudckpt.runs.claim import ClaimHook
from cloudckpt.runs.deleting import delete_at
from cloudckpt.runs.steps import Retention

__all__ = ["Pruner"]

logger = logging.getLogger("cloudckpt")

_LOOKS = 3  # for the best step, while steps are deleted between listing and reading them


class Pruner:
    """Deletes steps on one thread, in the order of the saves; of the first rank of a job.

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
        self._unread: set[int] = set()  # those without a score, as logged
        self._has_told_loss = False  # of the run, to another job
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cloudckpt-prune")

    def after(self, step: int, saved: SaveFuture | None = None) -> None:
        """Deletes the steps no longer kept once this step is saved, in the background.

        Args:
            step: The step.
            saved: Its save, if that may be in progress.
        """
        self._thread.submit(self._after, step, saved)

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

    def best(self) -> int | None:
        """The committed step with the best score; None if no step has one.

        Raises:
            StoreError: If the store refuses or stays unreachable.
        """
        for _ in range(_LOOKS):
            steps = self._run.committed()
            scores, unread = self._run.scores(steps, str(self._best_metric))
            for error in unread.values():
                if isinstance(error, StoreError):
                    raise error
            if len(scores) + len(unread) == len(steps):
                break  # otherwise some were deleted meanwhile, perhaps for newer ones
        self._run.log_unread(unread)
        return self._retention.best(scores)

    def _after(self, step: int, saved: SaveFuture | None) -> None:
        """Deletes the steps no longer kept, if the save of this step succeeds.

        Later steps belong to a training that was given up when this one resumed from an earlier
        step: they will be saved again, and until then are left alone. So is everything once another
        job has claimed the run, which may have saved the same steps anew.
        """
        if saved is not None:
            concurrent.futures.wait([saved])
            if saved.exception() is not None or saved.skipped:
                return
        if self._retention.max_to_keep is None:
            return
        try:
            known = [one for one in self._run.committed() if one <= step]
            scores = None if self._best_metric is None else self._compared(known)
            for one in self._retention.unneeded(known if scores is None else [*scores], scores):
                self._prune(one)
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

    def _prune(self, step: int) -> None:
        with self.in_use.deleted(step) as is_free:
            if not is_free:
                return
            try:
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

    def _compared(self, steps: list[int]) -> dict[int, float]:
        """The scores of those steps that can be compared; on the deleting thread.

        What is left out is not deleted in this round: a step may be unreadable for a moment only.
        It does not matter for the others: none that is unneeded beside some is needed beside more.
        """
        scores, unread = self._run.scores(steps, str(self._best_metric))
        if unread.keys() != self._unread:
            self._run.log_unread(unread)
            self._unread = set(unread)
        return scores


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
