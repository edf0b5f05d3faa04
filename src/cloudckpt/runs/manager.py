"""``CheckpointManager``: the checkpoints of a training run, from its first step to its last."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

import torch.distributed as dist

from cloudckpt.checkpoint.notes import Notes, metrics_of
from cloudckpt.checkpointer import (
    Checkpointer,
    CheckpointerConfig,
    ClosedAtExit,
    make_async_checkpointer,
    make_sync_checkpointer,
)
from cloudckpt.dcp.meeting import Meeting
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ClosedError,
    CloudCheckpointError,
    ConfigError,
)
from cloudckpt.runs.catalog import Run
from cloudckpt.runs.claim import Claim, ClaimHook
from cloudckpt.runs.deleting import delete
from cloudckpt.runs.preemption import Agreement, Preemption
from cloudckpt.runs.steps import DEFAULT_PATTERN, Retention
from cloudckpt.uri import URILike

__all__ = ["CheckpointManager"]

logger = logging.getLogger("cloudckpt")


class CheckpointManager(ClosedAtExit):
    """Saves, finds, restores and prunes the checkpoints of one run; use it as a context manager.

    All ranks make the same calls, in the same order; only :meth:`should_save` and :meth:`uri` may
    be called by some of them. The names are those of Orbax's manager.

    >>> with CheckpointManager("s3://bucket/run", max_to_keep=3) as manager:  # doctest: +SKIP
    ...     for step in range((manager.restore(state) or 0) + 1, steps):
    ...         train(step)
    ...         manager.save(step, state, metrics={"loss": loss})
    ...         if manager.reached_preemption(step):
    ...             break
    """

    def __init__(
        self,
        run: URILike,
        *,
        save_interval_steps: int = 1,
        max_to_keep: int | None = None,
        keep_period: int | None = None,
        best_metric: str | None = None,
        best_mode: Literal["min", "max"] = "min",
        step_name: str = DEFAULT_PATTERN,
        asynchronous: bool = True,
        preemption: Preemption | None = None,
        checkpointer: CheckpointerConfig | None = None,
    ) -> None:
        """
        Args:
            run: The folder of the run, for example ``s3://bucket/run``.
            save_interval_steps: :meth:`save` skips steps that this does not divide.
            max_to_keep: How many checkpoints are kept: the newest, or the best; None keeps all.
            keep_period: Steps that it divides are kept besides.
            best_metric: The metric that makes checkpoints good; None if the newest are the best.
            best_mode: Whether the lowest or the highest values of it are the best.
            step_name: What the folders of checkpoints are called.
            asynchronous: Whether :meth:`save` returns when the state is copied.
            preemption: What tells that this job is about to be ended; default: SIGTERM.
            checkpointer: How checkpoints are saved and loaded, and by which ranks.

        Raises:
            ConfigError: If an option makes no sense.
            InvalidURIError: If ``run`` is no location.
            CloudCheckpointError: As :func:`make_async_checkpointer`.
        """
        options = checkpointer if checkpointer is not None else CheckpointerConfig()
        self._hook = ClaimHook(options.commit_hook)
        options = dataclasses.replace(options, commit_hook=self._hook)
        self._interval = save_interval_steps
        self._best_metric = best_metric
        self._preemption = preemption if preemption is not None else Preemption()
        self._meeting = Meeting.of(options.process_group, options.no_dist)
        self._is_first = self._meeting.group is None or dist.get_rank(self._meeting.group) == 0

        def prepare() -> tuple[Run, Retention]:
            if type(save_interval_steps) is not int or save_interval_steps < 1:
                raise ConfigError(
                    f"save_interval_steps={save_interval_steps!r}: give a whole number from 1 on"
                )
            kept = Retention(max_to_keep=max_to_keep, keep_period=keep_period, best_mode=best_mode)
            found = Run(run, step_name=step_name, config=options.config)
            self._preemption.watch()
            return found, kept

        self._run, self._retention = self._meeting.begin(prepare)
        self._reached: tuple[int, bool] | None = None
        self._newest: int | None = None  # the newest step that was saved or restored here
        self._cleaner = ThreadPoolExecutor(1, thread_name_prefix="cloudckpt-prune")
        self._steps: set[int] | None = None  # those that are committed, once it has asked
        self._scores: dict[int, float] = {}
        self._reading = threading.Lock()  # nothing is deleted while it is held
        self._closed = False
        self._checkpointer: Checkpointer
        if asynchronous:
            self._checkpointer = make_async_checkpointer(options)
        else:
            self._checkpointer = make_sync_checkpointer(options)
        self._agreement = Agreement(self._meeting.group)

    def uri(self, step: int) -> str:
        """Where the checkpoint of a step is, or would be."""
        return str(self._run.uri(step))

    def all_steps(self) -> list[int]:
        """The steps whose checkpoints are committed, oldest first; the store is asked."""
        return self._meeting.told_by_first(self._run.committed)

    def latest_step(self) -> int | None:
        """The newest step whose checkpoint is committed; None if there is none."""
        return self._meeting.told_by_first(lambda: next(self._run.committed_steps(), None))

    def best_step(self) -> int | None:
        """The committed step with the best metric; None if none has it.

        Raises:
            ConfigError: If this manager was not told by which metric.
        """
        if self._best_metric is None:
            raise ConfigError("best_step() needs best_metric=, the metric that is to be compared")
        return self._meeting.told_by_first(
            lambda: self._retention.best(self._known_scores(self._run.committed()))
        )

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics that a checkpoint was saved with.

        Raises:
            CheckpointNotFoundError: If the step has no committed checkpoint.
        """
        return self._meeting.told_by_first(lambda: dict(self._run.notes(step).metrics))

    def should_save(self, step: int) -> bool:
        """Whether :meth:`save` would save this step without being forced."""
        return step % self._interval == 0 and (self._newest is None or step > self._newest)

    def reached_preemption(self, step: int) -> bool:
        """Whether some rank was told that the job is about to end; the same on all ranks.

        All ranks hear of it at the same step, at most one step late; :meth:`save` has asked already
        if it was called with this step.

        Raises:
            ProcessGroupError: If the ranks lost each other.
        """
        if self._reached is None or self._reached[0] != step:
            self._reached = step, self._agreement.step(self._preemption.noticed)
        return self._reached[1]

    def save(
        self,
        step: int,
        state: dict[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
        notes: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Saves a step if it is its turn, and deletes what is not to be kept when it is committed.

        A step at which the job is about to be ended is saved in any case, and is committed when
        this returns. What goes wrong in the background is raised by the next call, on all ranks.

        Args:
            step: The step.
            state: What to save, as for :func:`cloudckpt.save`.
            metrics: Numbers that are kept with the checkpoint; those of the first rank count.
            notes: Other values that are kept with it, which JSON can hold.
            force: Whether to save it whether it is its turn or not.

        Returns:
            Whether it is saved.

        Raises:
            CheckpointExistsError: If the step has a checkpoint and ``overwrite`` is off; else that
                one is replaced.
            CheckpointConflictError: If another job has begun to save into this run.
            ConfigError: If the metrics or notes can't be kept.
            ClosedError: If the manager was closed.
            CloudCheckpointError: As :func:`cloudckpt.save`, of this save or of the one before.
        """
        self._check_open()
        is_last = self.reached_preemption(step) and step != self._newest
        if not (force or is_last or self.should_save(step)):
            return False
        if self._hook.claim is None:
            run, config = self._run.root, self._run.config
            self._hook.claim = self._meeting.told_by_first(lambda: Claim.make(run, config))

        def noted() -> Notes:  # what is wrong with them on one rank is told to all
            return Notes(step=step, metrics=metrics_of(metrics), user=dict(notes or {}))

        futures = self._checkpointer.save(state, self.uri(step), notes=noted)
        self._newest = step
        score = math.nan
        if self._best_metric is not None:
            score = metrics_of(metrics).get(self._best_metric, math.nan)
        if futures is None:
            self._on_commit(step, score)
        else:
            _, written = futures
            written.add_done_callback(partial(self._on_written, step, score))
        if is_last:
            self.wait_until_finished()
        return True

    def restore(self, state: dict[str, Any], step: int | None = None) -> int | None:
        """Loads a checkpoint into ``state``, in place: the newest that is whole.

        A committed checkpoint that is damaged is passed over, loudly, for the one before; then all
        of ``state`` comes from that one. All ranks take the same.

        Args:
            state: What to load, as for :func:`cloudckpt.load`; each of its keys must be there.
            step: The step to load instead of the newest; it is not passed over.

        Returns:
            The step that was loaded; None if the run has no committed checkpoint, and ``state`` is
            as it was.

        Raises:
            CheckpointNotFoundError: If ``step`` has none.
            CheckpointCorruptError: If all that there are are damaged.
            CloudCheckpointError: As :func:`cloudckpt.load`.
        """
        self._check_open()
        if step is not None:
            self._load(state, step)
            return step
        damage: CloudCheckpointError | None = None
        for found in self._meeting.told_by_first(lambda: list(reversed(self._run.steps()))):
            if not self._meeting.told_by_first(partial(self._run.is_committed, found)):
                continue
            try:
                self._load(state, found)
            except (CheckpointCorruptError, CheckpointNotFoundError) as error:
                damage = damage or error
                logger.error("step %d can't be restored, an older one is: %s", found, error)
                continue
            return found
        if damage is not None:
            raise damage
        return None

    def delete(self, step: int) -> None:
        """Deletes the checkpoint of a step.

        Raises:
            CheckpointNotFoundError: If it has none.
            StoreError: If the store refuses or stays unreachable.
        """
        self._meeting.told_by_first(lambda: self._delete(step))

    def wait_until_finished(self) -> None:
        """Waits until what was saved is committed, and what is not kept is deleted.

        Raises:
            CloudCheckpointError: If a save failed and no call has raised that.
        """
        self._check_open()
        self._checkpointer.wait()
        self._cleaner.submit(lambda: None).result()

    def close(self) -> None:
        """Waits for what is under way, and gives back memory and processes.

        Raises:
            CloudCheckpointError: If a save failed and no call has raised that.
        """
        if self._closed:
            return
        self._closed = True
        self._preemption.ignore()
        try:
            self._checkpointer.close()
        finally:
            self._cleaner.shutdown()
            self._agreement.close()

    def _load(self, state: dict[str, Any], step: int) -> None:
        with self._reading:
            self._checkpointer.load(self.uri(step), state, strict=True)
        self._newest = step

    def _on_written(self, step: int, score: float, written: Future[Any]) -> None:
        if not written.cancelled() and written.exception() is None:
            self._on_commit(step, score)

    def _on_commit(self, step: int, score: float) -> None:
        if self._is_first and self._retention.max_to_keep is not None:
            with contextlib.suppress(RuntimeError):  # the manager was closed before it was done
                self._cleaner.submit(self._prune, step, score)

    def _prune(self, step: int, score: float) -> None:
        """Deletes what is not to be kept beside a step that was just committed.

        Later steps are those of a training that was given up, as this one was resumed behind them:
        they will be saved anew, and nothing is said about them until then.
        """
        try:
            if self._steps is None:
                self._steps = set(self._run.committed())
            self._steps.add(step)
            known = [one for one in self._steps if one <= step]
            scores = None
            if self._best_metric is not None:
                self._scores[step] = score
                scores = self._known_scores(known)
            for one in self._retention.unneeded(known, scores):
                self._prune_one(one)
        except CloudCheckpointError as error:
            logger.error("%s: what is not to be kept stays: %s", self._run.root, error)
        except Exception:
            logger.exception("%s: what is not to be kept stays", self._run.root)

    def _prune_one(self, step: int) -> None:
        try:
            self._delete(step)
        except CheckpointNotFoundError:
            pass  # somebody else has deleted it
        except CloudCheckpointError as error:
            logger.error(
                "step %d is not to be kept, but stays until the next save: %s", step, error
            )
            return
        assert self._steps is not None
        self._steps.discard(step)

    def _delete(self, step: int) -> None:
        with self._reading:
            delete(self._run.uri(step), config=self._run.config)

    def _known_scores(self, steps: list[int]) -> dict[int, float]:
        unread = [step for step in steps if step not in self._scores]
        self._scores.update(self._run.scores(unread, str(self._best_metric)))
        return {step: self._scores[step] for step in steps}

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the manager was closed")
