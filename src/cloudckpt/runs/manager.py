"""``CheckpointManager``: the checkpoints of a training run, from its first step to its last."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import numbers
import os
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from cloudckpt import events
from cloudckpt.background.save import SaveFuture
from cloudckpt.checkpoint.notes import Notes, metrics_of
from cloudckpt.checkpoint.references import distrust
from cloudckpt.checkpointer import (
    AsyncCheckpointer,
    Checkpointer,
    CheckpointerConfig,
    ClosedAtExit,
    checked,
    make_sync_checkpointer,
)
from cloudckpt.config import Config, config_or_default, whole_number
from cloudckpt.dcp.arrivals import collective
from cloudckpt.dcp.meeting import Meeting, RankStatus
from cloudckpt.dcp.report import LoadReport
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ClosedError,
    CloudCheckpointError,
    ConfigError,
    SaveInProgressError,
    StoreError,
)
from cloudckpt.runs import claim, verifying
from cloudckpt.runs.catalog import (
    Run,
    check_is_run,
    history_of,
    newest_step,
    owner_of,
)
from cloudckpt.runs.claim import ClaimHook
from cloudckpt.runs.failures import FailureBudget, OnFailure, RunStatus
from cloudckpt.runs.line import Owner
from cloudckpt.runs.preemption import Agreement, Preemption
from cloudckpt.runs.pruning import Pruner
from cloudckpt.runs.restoring import Candidates, goal_of
from cloudckpt.runs.steps import DEFAULT_PATTERN, Retention, check_step
from cloudckpt.uri import URILike

__all__ = ["CheckpointManager"]

logger = logging.getLogger("cloudckpt")


_LOOKS = 3  # for the best step, while steps are deleted between listing and reading them
_MANY_JOBS = 100  # in a line, above which jobs of which no step is left are forgotten


class _Asked(NamedTuple):
    """A save in the background."""

    number: int  # among those requested of the manager
    step: int
    newest: int | None  # the newest step before it


class CheckpointManager(ClosedAtExit):
    """Saves, finds, restores and prunes the checkpoints of one run; use it as a context manager.

    All ranks make the same calls, in the same order; only :meth:`uri` and
    :meth:`status` may be called by some of them. The names are those of Orbax's manager.

    >>> with CheckpointManager("s3://bucket/run", max_to_keep=3) as manager:  # doctest: +SKIP
    ...     for step in range((manager.restore(state) or 0) + 1, steps):
    ...         train(step)
    ...         manager.save(step, state, metrics={"loss": loss})
    ...         if manager.reached_preemption(step):
    ...             break
    """

    @collective("CheckpointManager()")
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
        incremental: bool = False,
        on_failure: OnFailure = "raise",
        max_failures: int = 3,
        preemption: Preemption | None = None,
        checkpointer: CheckpointerConfig | None = None,
        adopt_wait: float = 60.0,
        keep_abandoned: bool = True,
        read_only: bool = False,
        config: Config | None = None,
    ) -> None:
        """
        Args:
            run: The folder of the run, for example ``s3://bucket/run``.
            save_interval_steps: :meth:`save` skips steps that this does not divide.
            max_to_keep: How many checkpoints to keep: the newest, or the best; None keeps all.
            keep_period: Steps that this divides are kept, too.
            best_metric: The metric that ranks checkpoints; None ranks them by age.
            best_mode: Whether its lowest or its highest values are the best.
            step_name: What the folders of checkpoints are called.
            asynchronous: Whether :meth:`save` returns when the state is copied.
            incremental: Whether a step sends only what the newest committed step of the run does
                not have, and refers to that step for the rest; as ``Config(incremental=True)``.
            on_failure: What happens when a save fails. ``raise``: the error is raised on all ranks.
                ``log``: failures that may pass (throttling, an outage, no memory for a copy, a
                saving process that died) are logged, counted, and reported as an event ``failure``,
                and training continues; other errors are raised. ``log_all``: those are logged, too.
            max_failures: After this many failures in a row, the last one is raised in any case.
            preemption: How the job learns that it is about to be stopped; default: by SIGTERM, from
                the first call of :meth:`save`, :meth:`should_save` or :meth:`reached_preemption`.
            checkpointer: How checkpoints are saved and loaded, and by which ranks.
            adopt_wait: Seconds that :meth:`restore` waits for saving processes of a killed job that
                are still sending a step; 0 ignores them.
            keep_abandoned: Whether steps stay that are not on the run's line: those of a training
                that was given up, or of a job that this one has replaced. They never count, and
                that they stay is logged. If False, each save deletes them, once a step was
                restored or the run was seen to be empty.
            read_only: Whether this job only restores: it then writes nothing and handles no signal,
                and calls that would write raise :class:`ConfigError`.
            config: Options; if a ``checkpointer`` is given, set them there.

        Raises:
            ConfigError: If an option is invalid, two ranks were given different ones, or ``run`` is
                a checkpoint.
            DifferentCheckpointsError: If two ranks were given different runs.
            InvalidURIError: If ``run`` is not a valid location.
            StoreError: If the store refuses or stays unreachable.
            CloudCheckpointError: As :func:`make_async_checkpointer`.
        """
        given: object = preemption
        if not isinstance(given, (Preemption, type(None))):
            raise ConfigError(f"preemption={given!r}: give a Preemption, such as Preemption()")
        if not isinstance(given := best_metric, (str, type(None))):
            raise ConfigError(f"best_metric={given!r}: give the name of a metric, such as 'loss'")
        if checkpointer is not None:
            checked(checkpointer)
        self._hook = ClaimHook(None if checkpointer is None else checkpointer.commit_hook)
        self._interval = whole_number(save_interval_steps) or 0
        self._adopt_wait = adopt_wait
        self._best_metric = best_metric
        self._preemption = preemption if preemption is not None else Preemption()
        self._is_watching = preemption is not None and not read_only
        self._read_only = read_only
        self._incremental = incremental
        self._keep_abandoned = keep_abandoned
        self._continues: Mapping[str, int] | None = None  # None if restore() was not called
        self._begins_line = True  # with the next save
        self._is_claimed = False
        self._base: str | None = None  # of the first save after a restore
        group, alone = None, False
        if checkpointer is not None:
            group, alone = checkpointer.process_group, checkpointer.no_dist
        self._meeting = Meeting.of(group, alone)
        self._is_first = self._meeting.group is None or dist.get_rank(self._meeting.group) == 0
        self._pid = os.getpid()
        self._closed = False
        self._reached: tuple[int, bool] | None = None
        self._has_saved_last = False  # whether the final save, before the job is ended, was made
        self._restored: int | None = None  # the restored step, until a loop is seen to ignore it
        self._newest: int | None = None  # the newest step that was saved or restored here
        self._saves = 0  # requested so far, the same on all ranks
        self._asked: dict[int, _Asked] = {}  # by the checkpointer's numbers
        self._under_way: list[int] = []
        self._committed: tuple[int, float | None] | None = None  # the newest step, and when

        def prepare() -> tuple[Run, Retention, CheckpointerConfig]:
            self._failures = FailureBudget(on_failure, max_failures)
            if self._interval < 1:
                raise ConfigError(
                    f"save_interval_steps={save_interval_steps!r}: give a whole number of at "
                    "least 1"
                )
            given: object = adopt_wait
            if not isinstance(given, numbers.Real) or not 0 <= float(given) < math.inf:
                raise ConfigError(f"adopt_wait={adopt_wait!r}: give a number of seconds")
            kept = Retention(max_to_keep=max_to_keep, keep_period=keep_period, best_mode=best_mode)
            if checkpointer is not None and config is not None:
                raise ConfigError(
                    "give config= to your CheckpointerConfig, which has its own options"
                )
            options = checkpointer if checkpointer is not None else CheckpointerConfig()
            options = options if config is None else dataclasses.replace(options, config=config)
            if incremental:
                made = dataclasses.replace(config_or_default(options.config), incremental=True)
                options = dataclasses.replace(options, config=made)
            options = dataclasses.replace(options, commit_hook=self._hook)
            found = Run(run, step_name=step_name, config=options.config)
            if self._is_watching:
                self._preemption.watch()
                undo.callback(self._preemption.ignore)
            return found, kept, options

        def alike(made: tuple[Run, Retention, CheckpointerConfig]) -> RankStatus:
            told = (
                f"save_interval_steps={self._interval}, {step_name=}, {asynchronous=}, "
                f"{incremental=}, {on_failure=}, {max_failures=}, {read_only=}"
            )
            return RankStatus(location=str(made[0].root), options=told)

        with contextlib.ExitStack() as undo:  # undoes what was begun here if another rank fails
            self._run, self._retention, options = self._meeting.begin(prepare, alike)
            self._seen = self._meeting.broadcast_from_first(self._open)
            self._pruner = Pruner(self._run, self._retention, best_metric, self._hook)
            self._in_use = self._pruner.in_use
            undo.callback(self._pruner.close, wait=False)
            self._direct = make_sync_checkpointer(options)
            self._checkpointer: Checkpointer = self._direct
            if asynchronous and not read_only:
                self._checkpointer = AsyncCheckpointer(
                    options, on_failure=self._failed_earlier, when_busy="auto"
                )
                undo.callback(self._checkpointer.close)
            self._agreement = Agreement(self._meeting.group)
            undo.pop_all()

    def uri(self, step: int) -> str:
        """The location of a step's checkpoint, whether or not it exists."""
        return str(self._run.uri(step))

    @property
    def load_report(self) -> LoadReport | None:
        """What the last :meth:`restore` loaded on this rank, and what it did not."""
        return self._checkpointer.load_report

    @collective("CheckpointManager.all_steps")
    def all_steps(self) -> list[int]:
        """The committed steps of this training, oldest first, as listed in the store now.

        Abandoned steps are left out (:func:`cloudckpt.list_checkpoints` has them).
        """
        return self._meeting.broadcast_from_first(lambda: [*self._run.history().line])

    @collective("CheckpointManager.latest_step")
    def latest_step(self) -> int | None:
        """The newest committed step of this training; None if there is none."""
        return self._meeting.broadcast_from_first(lambda: newest_step(self._run.view, self._run))

    @collective("CheckpointManager.best_step")
    def best_step(self) -> int | None:
        """The committed step of this training with the best metric; None if none has the metric.

        Steps whose metrics are damaged are left out, which is logged.

        Raises:
            ConfigError: If this manager was given no ``best_metric``.
            StoreError: If the store refuses or stays unreachable.
        """
        if self._best_metric is None:
            raise ConfigError("best_step() needs best_metric=, the metric to compare")
        return self._meeting.broadcast_from_first(self._best)

    @collective("CheckpointManager.metrics")
    def metrics(self, step: int) -> dict[str, float]:
        """The metrics saved with a checkpoint.

        Raises:
            CheckpointNotFoundError: If the step has no committed checkpoint.
        """
        return dict(self._notes(step).metrics)

    @collective("CheckpointManager.notes")
    def notes(self, step: int) -> dict[str, Any]:
        """The notes saved with a checkpoint.

        Raises:
            CheckpointNotFoundError: If the step has no committed checkpoint.
        """
        return dict(self._notes(step).user)

    def should_save(self, step: int) -> bool:
        """Whether :meth:`save` would save this step without being forced.

        That is: it is the step's turn, and the step is newer than what was saved or restored here;
        or the job is about to be ended, and has not been saved since it learned so. A step whose
        save failed in the background counts as saved until that failure is reported.

        Raises:
            ConfigError: If it is not a valid step.
            CloudCheckpointError: As :meth:`reached_preemption`.
        """
        step = check_step(step)
        is_turn = step % self._interval == 0 and (self._newest is None or step > self._newest)
        return self._is_last(step) or is_turn

    @collective("CheckpointManager.reached_preemption")
    def reached_preemption(self, step: int) -> bool:
        """Whether some rank has learned that the job is about to end; the same on all ranks.

        All ranks learn it at the same step: at most one step late, or at once if steps take more
        than a second. :meth:`save` and :meth:`should_save` check as well; each step asks the ranks
        once.

        Raises:
            ClosedError: If the manager was closed.
            ConfigError: If it is not a valid step.
            ProcessGroupError: If the ranks lost each other.
        """
        step = check_step(step)
        self._check_open()
        if not (
            self._is_watching or self._read_only
        ):  # a job that only restores ends by a signal, as any other does
            self._is_watching = True
            self._preemption.watch()
        if self._reached is None or self._reached[0] != step:
            self._reached = step, self._agreement.step(self._preemption.noticed)
        return self._reached[1]

    @collective("CheckpointManager.save")
    def save(
        self,
        step: int,
        state: dict[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
        notes: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Saves a step if it is its turn; once committed, deletes the steps no longer kept.

        A failure in the background is raised by the next call, on all ranks. The first step at
        which the job is about to be ended is saved in any case, and is committed when this returns;
        a failure of an earlier save is then only logged.

        Args:
            step: The step.
            state: What to save, as for :func:`cloudckpt.save`.
            metrics: Numbers to keep with the checkpoint; those of the first rank count. If
                ``best_metric`` is missing there or is not a number (NaN), the checkpoint counts as
                worse than all that have one, which is logged.
            notes: Other values to keep with it, of types that JSON can hold.
            force: Whether to save the step even if it is not its turn.

        Returns:
            Whether it is saved: False if it is not its turn, if it is skipped because the previous
            save is still in progress (see ``when_busy``: by default only if that one makes no
            progress), or if it failed and ``on_failure`` tolerates that.

        Raises:
            CheckpointExistsError: If the step has a checkpoint and ``overwrite`` is off; with it
                on, that checkpoint is replaced.
            CheckpointConflictError: If another job has begun to save into this run.
            ConfigError: If the metrics or notes can't be stored.
            ClosedError: If the manager was closed.
            CloudCheckpointError: As :func:`cloudckpt.save`, for this save or the previous one.
        """
        step = check_step(step)
        self._check_writable()
        if not (self.should_save(step) or force):
            if self._restored is not None and step < self._restored:
                logger.warning(
                    "step %d is not saved, nor will later ones be up to step %d, which was "
                    "restored: begin behind the step that restore() returns",
                    step,
                    self._restored,
                )
                self._restored = None
            return False
        self._saves += 1
        number = self._saves
        try:
            return self._save(step, number, state, metrics, notes, force)
        except CloudCheckpointError as error:
            self._explain(error)
            # the failure of an earlier save was counted when it was reported
            if error is self._failures.last or not self._goes_on(number, step, error):
                raise
            return False

    def _save(
        self,
        step: int,
        number: int,
        state: dict[str, Any],
        metrics: Mapping[str, float] | None,
        notes: Mapping[str, Any] | None,
        force: bool,
    ) -> bool:
        if self._begins_line or not self._is_claimed:
            told = self._meeting.broadcast_from_first(self._claim)
            self._hook.job, self._is_claimed = told
            self._begins_line = False
        job, continues = self._hook.job, self._continues or {}
        is_last = self._is_last(step)

        @functools.cache
        def noted() -> Notes:  # if a value is invalid on one rank, all ranks get the error
            for name, given in (("metrics", metrics), ("notes", notes)):
                if not isinstance(given, (Mapping, type(None))):
                    raise ConfigError(f"{name}={given!r}: give a dict")
            return Notes(
                step=step,
                metrics=metrics_of(metrics),
                user=dict(notes or {}),
                job=job,
                continues=continues,
            )

        saver = self._checkpointer
        if is_last:  # no other save may outlast this one
            self._end_earlier_saves()
            saver = self._direct
        self._in_use.begin(step)
        try:
            futures = saver.save(
                self.uri(step),
                state,
                notes=noted,
                base=self._base,
                # who never called restore() may not know that there are steps of this number
                keep_existing=self._continues is None and not force,
                is_first=number == 1,
            )
        except BaseException:
            self._in_use.end(step)
            raise
        written = None if futures is None else futures[1]
        if written is None:
            self._in_use.end(step)
            self._note_commit(number, step)
        else:
            if written.skipped:
                self._in_use.end(step)
                self._saves -= 1
                return False
            self._under_way.append(step)
            written.add_done_callback(functools.partial(self._note_end, number, step))
            self._asked[written.number] = _Asked(number, step, self._newest)
        self._newest, self._base = step, None
        if self._is_first:
            kept = noted().metrics
            if self._best_metric is not None and math.isnan(kept.get(self._best_metric, math.nan)):
                logger.warning(
                    "step %d: its metric %s is %s, so the step counts as worse than all that have "
                    "one",
                    step,
                    self._best_metric,
                    "not a number (NaN)"
                    if self._best_metric in kept
                    else f"missing (it has: {', '.join(kept) or 'none'})",
                )
            # who never called restore() may not know that the run has steps
            keeps = self._keep_abandoned or self._continues is None
            self._pruner.after(written, keep_abandoned=keeps)
        self._has_saved_last = self._has_saved_last or is_last
        return True

    @collective("CheckpointManager.restore")
    def restore(
        self,
        state: dict[str, Any],
        step: int | None = None,
        *,
        verify: bool = False,
        strict: bool = True,
    ) -> int | None:
        """Loads a checkpoint into ``state``, in place: by default the newest intact one.

        A damaged checkpoint is skipped, which is logged as an error, and the one before it is
        loaded; all of ``state`` then comes from that one. All ranks load the same checkpoint.

        A step that an earlier job had staged when it was killed is committed here, if the saving
        processes of all its ranks have sent it, and no other job has claimed the run since. If some
        are still sending, this waits for them, up to ``adopt_wait`` seconds.

        Args:
            state: What to load, as for :func:`cloudckpt.load`.
            step: The step to load instead of the newest; if it is damaged, an error is raised.
            verify: Whether to read all of a checkpoint before trusting it, each rank its share.
                What is loaded is compared with its checksums in any case; this also covers what
                ``state`` does not ask for, and leaves ``state`` as it was if nothing can be
                restored.
            strict: Whether each key of ``state`` must be in the checkpoint and fit; if not, what
                fits is loaded, and :attr:`load_report` names the rest, which keeps its values.

        Returns:
            The step that was loaded; None if the run has no committed checkpoint, in which case
            ``state`` is unchanged.

        Raises:
            CheckpointNotFoundError: If ``step`` has no committed checkpoint.
            CheckpointCorruptError: If all checkpoints are damaged.
            CloudCheckpointError: As :func:`cloudckpt.load`.
        """
        self._check_open()
        if step is not None:
            step = check_step(step)
            goal = self._meeting.broadcast_from_first(lambda: goal_of(self._run, step))
            self._load(state, step, verify, strict, goal)
            return step
        damages: list[CloudCheckpointError] = []
        adopts = self._adopt_wait and not self._read_only
        until = time.monotonic() + self._adopt_wait if adopts else None
        candidates = Candidates(self._run, self._hook, until)
        steps = self._meeting.broadcast_from_first(lambda: self._run.steps()[::-1])
        for found in self._in_turn(steps, candidates, damages):
            look = functools.partial(candidates.look, found)
            notes, error = self._meeting.broadcast_from_first(look)
            try:
                if error is not None:
                    raise error
                if notes is None:
                    continue
                self._load(state, found, verify, strict, notes)
            except (CheckpointCorruptError, CheckpointNotFoundError) as error:
                damages.append(error)
                if isinstance(error, CheckpointCorruptError):
                    distrust(error)
                logger.error(
                    "step %d can't be restored, so an older one is tried: %s", found, error
                )
                continue
            candidates.log(found)
            return found
        candidates.log(None)
        if damages:
            raise damages[0]
        self._newest = self._restored = None
        self._continues, self._begins_line = {}, True
        return None

    @collective("CheckpointManager.delete")
    def delete(self, step: int) -> None:
        """Deletes the checkpoint of a step, after the saves in progress.

        Raises:
            CheckpointConflictError: If another job has begun to save into this run since this one
                has, or since it was opened: the step may be that job's.
            CheckpointNotFoundError: If it has no committed checkpoint.
            ClosedError: If the manager was closed.
            ConfigError: If it is not a valid step.
            StoreError: If the store refuses or stays unreachable.
        """
        step = check_step(step)
        self._check_open()
        self._check_writable()
        if not self._is_claimed:
            self._hook.job = self._meeting.broadcast_from_first(self._take_over)
            self._is_claimed = True
        self._meeting.broadcast_from_first(lambda: self._pruner.delete(step))

    def wait_until_finished(self) -> None:
        """Waits until saves are committed and steps no longer kept are deleted.

        Raises:
            CloudCheckpointError: If a save failed and no call has raised its error.
        """
        self._check_open()
        self._checkpointer.wait()
        self._pruner.wait()

    def status(self) -> RunStatus:
        """What this rank knows of the run's saves, without asking the store or other ranks."""
        newest, when = self._committed or (None, None)
        return RunStatus(
            newest_step=newest,
            newest_age=None if when is None else time.monotonic() - when,
            under_way=tuple(self._under_way),
            failures_in_row=self._failures.in_row,
            last_failure=self._failures.last,
        )

    def close(self) -> None:
        """Waits for work in progress, and releases memory and processes.

        In a process forked from the manager's, nothing is done.

        Raises:
            CloudCheckpointError: If a save failed and no call has raised its error.
            SaveInProgressError: If a save has not ended within ``patience``.
        """
        if self._closed or not self._belongs_here:
            return
        self._closed = True
        if self._is_watching:
            self._preemption.ignore()
        has_ended = True
        try:
            self._checkpointer.close()
        except SaveInProgressError:
            has_ended = False
            raise
        finally:
            self._pruner.close(wait=has_ended)
            self._agreement.close()

    def _notes(self, step: int) -> Notes:
        return self._meeting.broadcast_from_first(lambda: self._run.notes(step))

    def _is_last(self, step: int) -> bool:
        """Whether the job is about to be ended, and this step is to be its final save."""
        reached = self.reached_preemption(step)
        return reached and not self._has_saved_last and step != self._newest

    def _end_earlier_saves(self) -> None:
        """Waits for the saves before the final one; their failures must not prevent it."""
        while True:
            try:
                self._checkpointer.wait()
            except CloudCheckpointError as error:
                logger.error("an earlier save failed; the final save continues: %s", error)
            else:
                return

    def _open(self) -> Owner | None:
        """The claim that this job finds, on the first rank.

        Raises:
            ConfigError: If the location is that of a checkpoint.
        """
        check_is_run(self._run.view, self._run)
        return owner_of(self._run.view, self._run)

    def _claim(self) -> tuple[str, bool]:
        """Claims the run for a save that begins a line, or whose claim is not known to be there.

        Returns the job's name, and whether the claim is there.
        """
        patience = 0.0
        if self._begins_line or self._hook.is_wanting:
            patience = claim.PATIENCE
            first = self._warn_of_steps if self._continues is None else lambda: None
            continues = self._continues or {}
            self._hook.begin(self._run.root, self._run.config, continues, self._seen, first)
        is_there = self._hook.wait(patience)
        if patience and not is_there:
            logger.warning(
                "%s: the store has not answered for %.0f s whether this job may claim the run; "
                "training goes on, and the save commits once it has",
                self._run.root,
                patience,
            )
        return self._hook.job, is_there

    def _warn_of_steps(self) -> None:
        """Says what a job does that saves without having called ``restore()``."""
        there = next(self._run.committed_steps(), None)
        if there is not None:
            logger.warning(
                "%s has steps up to %d, and restore() was not called: this job begins a new "
                "line beside them, which the next job will restore. Steps that are there are "
                "not replaced without force=True",
                self._run.root,
                there,
            )

    def _take_over(self) -> str:
        """Claims the run for a deletion, which begins no new line."""
        if self._hook.is_wanting:
            continues = self._continues
            if continues is None:
                line = self._run.history().line
                continues = line[max(line)].continued_at(max(line)) if line else {}
            self._hook.begin(self._run.root, self._run.config, continues, self._seen)
        self._hook.wait(None)
        return self._hook.job

    def _best(self) -> int | None:
        """See :meth:`best_step`; on the first rank."""
        for _ in range(_LOOKS):
            steps = self._run.steps()
            history = history_of(self._run.view, self._run, steps)
            if self._run.steps() == steps:
                break  # otherwise some were deleted meanwhile, perhaps for newer ones
        for error in history.unread.values():
            if isinstance(error, StoreError):
                raise error
        self._run.log_unread(history.unread)
        return self._retention.best(history.scores(str(self._best_metric)))

    def _in_turn(
        self, steps: list[int], candidates: Candidates, damages: list[CloudCheckpointError]
    ) -> Iterator[int]:
        """The steps, newest first; all again if the line has none, damaged ones included."""
        yield from steps
        if not damages and self._meeting.broadcast_from_first(candidates.begin_anew):
            yield from steps

    def _load(
        self, state: dict[str, Any], step: int, verify: bool, strict: bool, notes: Notes
    ) -> None:
        with self._in_use.kept(step):
            if verify:
                config, group = self._run.config, self._meeting.group
                verifying.verify(self.uri(step), config=config, process_group=group)
            self._checkpointer.load(self.uri(step), state, strict=strict)
        self._newest = self._restored = step
        self._committed = step, None
        continues, self._begins_line = notes.continued_at(step), True
        if len(continues) > _MANY_JOBS:
            line = self._meeting.broadcast_from_first(lambda: self._run.history().line)
            jobs = {one.job for one in line.values()}
            continues = {job: last for job, last in continues.items() if job in jobs}
        self._continues = continues
        self._base = self.uri(step) if self._incremental else None

    def _note_end(self, number: int, step: int, written: SaveFuture) -> None:
        """Records the end of a background save; runs on the thread that saved."""
        self._in_use.end(step)
        with contextlib.suppress(ValueError):
            self._under_way.remove(step)
        if written.exception() is None:
            self._note_commit(number, step)

    def _note_commit(self, number: int, step: int) -> None:
        self._committed = step, time.monotonic()
        self._failures.succeeded(number)

    def _explain(self, error: CloudCheckpointError) -> None:
        """Says why a save replaces no step although the options allow it."""
        if isinstance(error, CheckpointExistsError) and self._continues is None:
            error.message = (
                "the step has a checkpoint of another training, which this job, that has not "
                "called restore(), replaces only with force=True: call restore(), or give the "
                "job a folder of its own"
            )

    def _failed_earlier(self, saves: Collection[int], error: CloudCheckpointError) -> None:
        """Records failures of earlier saves, given by the checkpointer's numbers."""
        self._explain(error)
        failed = [self._asked.pop(save) for save in sorted(saves) if save in self._asked]
        for asked in reversed(failed):
            if self._newest == asked.step:
                self._newest = asked.newest  # so that the step can be saved again
        goes_on = [self._goes_on(asked.number, asked.step, error) for asked in failed]
        if not all(goes_on):
            raise error

    def _goes_on(self, number: int, step: int, error: CloudCheckpointError) -> bool:
        """Whether training continues after a failed save; if so, reports the failure."""
        goes_on, status = self._failures.goes_on(number, error), self.status()
        if goes_on:
            age = "" if status.newest_age is None else f", {status.newest_age:.0f} s ago"
            newest = "none" if status.newest_step is None else f"step {status.newest_step}{age}"
            logger.error(
                "step %d was not saved (failure %d in a row; %d end the training); newest "
                "committed checkpoint: %s; training continues: %s",
                step,
                status.failures_in_row,
                self._failures.max_failures,
                newest,
                error,
            )
            events.emit(
                events.Event(
                    phase="failure",
                    uri=self.uri(step),
                    rank=self._meeting.rank,
                    began=time.time(),
                    detail=type(error).__name__,
                    failed=True,
                    step=step,
                    newest_step=status.newest_step,
                    newest_age=status.newest_age,
                )
            )
        return goes_on

    @property
    def _belongs_here(self) -> bool:
        return self._pid == os.getpid()

    def _check_writable(self) -> None:
        if self._read_only:
            raise ConfigError("the manager is read_only: make another one to save or delete")

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the manager was closed")
        if not self._belongs_here:
            raise ClosedError(
                f"the manager belongs to process {self._pid}, from which this one was forked; make "
                "a new one here"
            )
