"""``CheckpointManager``: saves, restores and prunes the checkpoints of a training run."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Literal

from cloudckpt._arguments import suggesting
from cloudckpt.checkpoint.notes import Notes
from cloudckpt.checkpointer import CheckpointerConfig, ClosedAtExit, checked
from cloudckpt.config import Config
from cloudckpt.dcp.meeting import Meeting, RankStatus, collective
from cloudckpt.dcp.report import LoadReport
from cloudckpt.errors import ClosedError, ConfigError
from cloudckpt.runs.catalog import Run
from cloudckpt.runs.claim import OwnLine
from cloudckpt.runs.preemption import Preemption
from cloudckpt.runs.pruning import Pruner, best_step
from cloudckpt.runs.restoring import checkpoint_in, load_from, notes_to_restore, restore_newest
from cloudckpt.runs.saves import OnFailure, RunStatus, Saves, StepSaver, saving_options
from cloudckpt.runs.schedule import Schedule
from cloudckpt.runs.steps import DEFAULT_PATTERN, Retention, check_seconds, check_step
from cloudckpt.uri import URILike

__all__ = ["CheckpointManager"]

logger = logging.getLogger("cloudckpt")


class CheckpointManager(ClosedAtExit):
    """Saves, lists, restores and prunes the checkpoints of one run; use it as a context manager.

    All ranks must make the same calls in the same order; only :meth:`uri`, :meth:`status` and
    :attr:`load_report` may be used on single ranks.

    >>> with CheckpointManager("s3://bucket/run", max_to_keep=3) as manager:  # doctest: +SKIP
    ...     for step in range((manager.restore(state) or 0) + 1, steps):
    ...         train(step)
    ...         manager.save(step, state, metrics={"loss": loss})
    ...         if manager.reached_preemption(step):
    ...             break
    """

    @collective("CheckpointManager()")
    @suggesting
    def __init__(
        self,
        run: URILike,
        *,
        save_interval_steps: int | None = None,
        save_interval_seconds: float | None = None,
        max_to_keep: int | None = None,
        best_to_keep: int | None = None,
        keep_younger_than: float | None = None,
        keep_period: int | None = None,
        best_metric: str | None = None,
        best_mode: Literal["min", "max"] | None = None,
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
            save_interval_steps: :meth:`save` saves only steps that are multiples of this number; by
                default all steps, unless ``save_interval_seconds`` is given.
            save_interval_seconds: :meth:`save` saves a step if so many seconds have passed on the
                first rank since the previous save; all ranks save the same steps. Can't be combined
                with ``save_interval_steps``.
            max_to_keep: How many of the newest checkpoints to keep; at least the newest is kept.
                With ``best_metric`` and without ``best_to_keep``, it is used as ``best_to_keep``.
            best_to_keep: How many of the best checkpoints to keep; checkpoints without the metric
                are kept, too. Needs ``best_metric``.
            keep_younger_than: Keep checkpoints younger than so many seconds, by the store's clock.
            keep_period: Keep steps that are multiples of this number. A checkpoint stays if any of
                these four rules keeps it; if none of the first three is given, all stay.
            best_metric: The name of the metric by which checkpoints are ranked; give ``best_mode``
                with it.
            best_mode: Whether the lowest (``"min"``) or the highest values (``"max"``) are best.
            step_name: The pattern of the checkpoints' folder names.
            asynchronous: Whether :meth:`save` returns once the state is staged, and the data is
                sent and committed in the background.
            incremental: Whether a save sends only data that the newest committed step of this
                training does not have, and refers to that step for the rest.
            on_failure: What happens when a save fails. ``raise``: the error is raised on all ranks.
                ``log``: transient failures (throttling, an outage, no memory for staging, a saving
                process that died) are logged, counted, and reported as an event ``failure``, and
                training continues; other errors are raised. ``log_all``: all errors of saves are
                treated like transient ones.
            max_failures: After so many failures in a row, the last one is raised in any case.
            preemption: How the job learns that it is about to be stopped; default: by SIGTERM,
                handled from the first call of :meth:`save`, :meth:`should_save` or
                :meth:`reached_preemption`.
            checkpointer: Options of the checkpointer that saves and loads, and its process group.
            adopt_wait: Seconds that :meth:`restore` waits for saving processes of a killed job that
                are still sending a step. With 0, no pending step is committed, even if it is sent.
            keep_abandoned: Whether abandoned steps stay: those of a training that was given up, or
                of a job that this one has replaced. They don't count for retention, and a warning
                lists them. If False, each save deletes them, provided that :meth:`restore` was
                called before.
            read_only: Whether this job only restores: it then writes nothing and handles no signal,
                and calls that would write raise :class:`ConfigError`.
            config: Options; if ``checkpointer`` is given, set them there instead.

        Raises:
            ConfigError: If an option is invalid, or ``run`` is a checkpoint; or if an option
                differs between ranks, except ``preemption`` and machine-specific fields of
                ``config``, such as the endpoint.
            DifferentCheckpointsError: If two ranks were given different runs.
            InvalidURIError: If ``run`` is not a valid location.
            StoreError: If the store refuses or stays unreachable.
            CloudCheckpointError: The errors of :func:`make_async_checkpointer`.
        """
        arguments = dict(locals())
        given = CheckpointerConfig() if checkpointer is None else checked(checkpointer)
        self._read_only, self._keep_abandoned = read_only, keep_abandoned
        self._adopt_wait = adopt_wait
        self._meeting = Meeting.of(given.process_group, given.no_dist)
        self._pid = os.getpid()
        self._closed = False
        self._has_warned = False  # whether it was logged that steps going back are not saved

        def prepare() -> tuple[Run, Retention, CheckpointerConfig]:
            self._schedule = Schedule(
                save_interval_steps, save_interval_seconds, preemption, read_only=read_only
            )
            check_seconds("adopt_wait", adopt_wait, or_zero=True)
            kept = Retention(
                max_to_keep=max_to_keep,
                best_to_keep=best_to_keep,
                keep_younger_than=keep_younger_than,
                keep_period=keep_period,
                best_metric=best_metric,
                best_mode=best_mode,
            )
            options = saving_options(checkpointer, config, incremental=incremental)
            the_run = Run(run, step_name=step_name, config=options.config)
            self._saves = Saves(on_failure, max_failures, the_run.uri, self._meeting.rank)
            if preemption is not None:
                self._schedule.watch()
            undo.callback(self._schedule.ignore)
            return the_run, kept, options

        def alike(made: tuple[Run, Retention, CheckpointerConfig]) -> RankStatus:
            # a machine may have its own notice of the end, endpoint, and limits
            for name in ("self", "run", "preemption", "checkpointer", "config"):
                del arguments[name]
            arguments["overwrite"] = made[2].config.overwrite
            options = tuple(f"{name}={value!r}" for name, value in arguments.items())
            return RankStatus(location=str(made[0].root), options=options)

        with contextlib.ExitStack() as undo:  # if another rank fails, releases what was made here
            self._run, self._retention, options = self._meeting.begin(prepare, alike)
            self._line = OwnLine(self._run, self._meeting, options.commit_hook)
            self._pruner = Pruner(self._run, self._retention, self._line)
            undo.callback(self._pruner.close, wait=False)
            self._saver = StepSaver(
                replace(options, commit_hook=self._line),
                self._saves,
                self._line,
                self._pruner.in_use,
                in_background=asynchronous and not read_only,
            )
            self._checkpointer = self._saver.checkpointer
            undo.callback(self._checkpointer.close)
            self._schedule.meet(self._meeting)
            undo.pop_all()

    def uri(self, step: int) -> str:
        """Returns the location of a step's checkpoint, whether or not it exists."""
        return str(self._run.uri(step))

    @property
    def load_report(self) -> LoadReport | None:
        """The report of this rank's last :meth:`restore`; None before the first load."""
        return self._checkpointer.load_report

    @collective("CheckpointManager.all_steps")
    def all_steps(self) -> list[int]:
        """Lists the committed steps of this training in the store, oldest first.

        Abandoned steps, and steps whose notes can't be read, are left out;
        :func:`cloudckpt.list_checkpoints` lists them, too.

        Raises:
            StoreError: If the store refuses or stays unreachable.
            ProcessGroupError: If the ranks lost contact with each other.
        """
        return self._meeting.broadcast_from_first(lambda: [*self._run.history().line])

    @collective("CheckpointManager.latest_step")
    def latest_step(self) -> int | None:
        """Returns the newest committed step of this training; None if there is none.

        Abandoned steps are skipped, and so are steps whose notes are damaged, which is logged.

        Raises:
            StoreError: If the store refuses or stays unreachable.
            ProcessGroupError: If the ranks lost contact with each other.
        """
        return self._meeting.broadcast_from_first(self._run.newest)

    @collective("CheckpointManager.best_step")
    def best_step(self) -> int | None:
        """Returns the committed step of this training whose ``best_metric`` is best.

        Returns None if no step has the metric. Steps whose metrics are damaged are logged and left
        out.

        Raises:
            ConfigError: If the manager was made without ``best_metric``.
            StoreError: If the store refuses or stays unreachable.
            ProcessGroupError: If the ranks lost contact with each other.
        """
        if self._retention.best_metric is None:
            raise ConfigError(
                "best_step() needs a metric: pass best_metric= and best_mode= to the manager",
                uri=str(self._run.root),
            )
        best = self._meeting.broadcast_from_first(lambda: best_step(self._run, self._retention))
        return None if best is None else best[0]

    @collective("CheckpointManager.metrics")
    def metrics(self, step: int) -> dict[str, float]:
        """Returns the metrics saved with the checkpoint of a step; empty if there are none.

        Raises:
            CheckpointNotFoundError: If the step has no committed checkpoint.
            CheckpointCorruptError: If its metadata is damaged.
            ConfigError: If ``step`` is not a valid step.
            StoreError: If the store refuses or stays unreachable.
            ProcessGroupError: If the ranks lost contact with each other.
        """
        return dict(self._meeting.broadcast_from_first(lambda: self._run.notes(step).metrics))

    @collective("CheckpointManager.notes")
    def notes(self, step: int) -> dict[str, Any]:
        """Returns the notes that :meth:`save` was given for a step; empty if there are none.

        Raises:
            CheckpointNotFoundError: If the step has no committed checkpoint.
            CheckpointCorruptError: If its metadata is damaged.
            ConfigError: If ``step`` is not a valid step.
            StoreError: If the store refuses or stays unreachable.
            ProcessGroupError: If the ranks lost contact with each other.
        """
        return dict(self._meeting.broadcast_from_first(lambda: self._run.notes(step).user))

    def should_save(self, step: int) -> bool:
        """Returns whether :meth:`save` would save this step without ``force``; same on all ranks.

        It would if the step is due by the save interval and newer than the step that this manager
        has saved or restored last; or if the job is about to end, the final save was not made yet,
        and the step is not the one saved or restored last. A step whose background save failed
        counts as saved until the failure is reported.

        Raises:
            ClosedError: If the manager was closed.
            ConfigError: If ``step`` is not a valid step.
            ProcessGroupError: If the ranks lost contact with each other.
        """
        step = check_step(step)
        self._check_open()
        newest = self._saves.newest
        if self._schedule.is_last(step, newest):
            return True
        return self._schedule.is_turn(step) and (newest is None or step > newest)

    @collective("CheckpointManager.reached_preemption")
    def reached_preemption(self, step: int) -> bool:
        """Returns whether any rank has noticed that the job is about to end; same on all ranks.

        The result becomes True on all ranks at the same step: at the step after the notice, or at
        once if steps take more than a second. :meth:`save` and :meth:`should_save` use the same
        result; each step takes one collective.

        Raises:
            ClosedError: If the manager was closed.
            ConfigError: If ``step`` is not a valid step.
            ProcessGroupError: If the ranks lost contact with each other.
        """
        self._check_open()
        return self._schedule.is_ending(check_step(step))

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
        """Saves a step if it is due, and deletes steps that retention does not keep.

        The deletion takes place in the background after the commit. The error of a background save
        is raised by the next save, on all ranks. If the job is about to end
        (:meth:`reached_preemption`), one step is saved even if it is not due, and is committed when
        this returns; the error of an earlier save is then only logged.

        Args:
            step: The number of the step.
            state: The state dict to save, as for :func:`cloudckpt.save`.
            metrics: Numbers to store with the checkpoint; those of the first rank are stored. A
                checkpoint without ``best_metric``, or with NaN there, is never the best, and
                ``best_to_keep`` keeps it; this is logged.
            notes: Other values to store with the checkpoint, of types that JSON has; those of the
                first rank are stored.
            force: Whether to save the step even if it is not due, or if it exists and the job has
                not called :meth:`restore`.

        Returns:
            Whether the step is saved. False if it is not due, if it is skipped because the previous
            save is still in progress (see ``when_busy``: by default only if that save makes no
            progress), or if the save failed and ``on_failure`` tolerates the failure.

        Raises:
            CheckpointExistsError: If the step already has a checkpoint, and ``Config.overwrite`` is
                off or the job has not called :meth:`restore` and does not ``force`` the save.
            CheckpointConflictError: If another job has begun to save into this run.
            ConfigError: If ``step`` is not a valid step, the metrics or notes can't be stored, or
                the manager is ``read_only``.
            ClosedError: If the manager was closed.
            CloudCheckpointError: The errors of :func:`cloudckpt.save`, of this save or an earlier
                one.
        """
        step = check_step(step)
        self._check_writable()
        if not (self.should_save(step) or force):
            newest = self._saves.newest
            if newest is not None and step < newest and not self._has_warned:
                logger.warning(
                    "%s is not saved: step %d was saved or restored before, and only later steps "
                    "are saved. Number the steps through the whole training, and begin its loop "
                    "at the step after the one that restore() returns",
                    self.uri(step),
                    newest,
                )
                self._has_warned = True
            return False
        is_last = self._schedule.is_last(step, self._saves.newest)
        begun = self._saver.save(step, state, metrics, notes, force=force, is_last=is_last)
        if begun is None:
            return False
        noted, ends = begun
        self._schedule.saved(is_last=is_last)
        if self._meeting.rank == 0:
            self._retention.warn_of_metric(step, noted.metrics)
            # a job that never called restore() may not know that the run has steps
            keeps = self._keep_abandoned or not self._line.has_restored
            self._pruner.after(ends, keep_abandoned=keeps)
        return True

    @collective("CheckpointManager.restore")
    def restore(
        self,
        state: dict[str, Any],
        step: int | None = None,
        *,
        source: URILike | None = None,
        keys: str | Collection[str] | None = None,
        verify: bool = False,
        strict: bool = True,
    ) -> int | None:
        """Loads a checkpoint into ``state`` in place: by default the newest intact one of the run.

        Saves of this manager that are in progress end first. If the newest checkpoint is damaged,
        an error is logged, and the previous one is loaded; all of ``state`` then comes from that
        checkpoint. All ranks load the same checkpoint.

        A pending step, which a killed job had staged, is committed here if the saving processes of
        all its ranks have sent their data, and no other job has claimed the run since. If some of
        them are still sending, this waits for them, up to ``adopt_wait`` seconds.

        Args:
            state: The state dict to load into, as for :func:`cloudckpt.load`.
            step: The step to load instead of the newest; if it is damaged, an error is raised.
            source: Another run, or a single checkpoint, to load instead, for example to start a
                training from another one. This does not count as a restore of this run: try that
                first, as in ``if manager.restore(state) is None:
                manager.restore(state, source=..., keys="model.*")``.
            keys: Patterns of the names to load, such as ``"model.*"``; other entries of ``state``
                keep their values.
            verify: Whether to read and verify the whole checkpoint before it is loaded, divided
                among the ranks. Loaded bytes are compared with their checksums in any case; this
                also verifies the entries that ``state`` does not have, and leaves ``state``
                unchanged if all checkpoints are damaged.
            strict: Whether each key of ``state`` must be in the checkpoint and fit. If False,
                entries that fit are loaded, the others keep their values, and :attr:`load_report`
                names them.

        Returns:
            The step that was loaded. None if the run has no committed checkpoint (``state`` is then
            unchanged), or if ``source`` is a checkpoint saved without a step.

        Raises:
            CheckpointNotFoundError: If ``step`` has no committed checkpoint (the message lists the
                committed steps), or ``source`` has none.
            CheckpointCorruptError: If all checkpoints are damaged, or the one of ``step`` or
                ``source`` is.
            ConfigError: If ``keys`` match no entry of ``state``, ``step`` is not a valid step, or
                ``step`` is given with a ``source`` that is a single checkpoint.
            ClosedError: If the manager was closed.
            CloudCheckpointError: The errors of :func:`cloudckpt.load`.
        """
        self._check_open()
        step = None if step is None else check_step(step)
        load = functools.partial(
            load_from, self._checkpointer, self._meeting, state, keys, verify=verify, strict=strict
        )
        self._saver.join()
        if source is not None:
            run = Run(source, step_name=self._run.names.pattern, config=self._run.config)
            uri, loaded_step = self._meeting.broadcast_from_first(lambda: checkpoint_in(run, step))
            load(uri, self._run.config)
            return loaded_step

        def go_on_from(step: int | None, notes: Notes | None) -> None:
            self._saves.begin(step, "restored")
            self._line.go_on_from(step, notes)

        def load_step(step: int, notes: Notes) -> None:
            with self._pruner.in_use.kept(step):
                load(self.uri(step), self._run.config)
            go_on_from(step, notes)

        if step is not None:
            goal = self._meeting.broadcast_from_first(lambda: notes_to_restore(self._run, step))
            load_step(step, goal)
            return step
        adopts = self._adopt_wait and not self._read_only
        until = time.monotonic() + self._adopt_wait if adopts else None
        newest = restore_newest(self._run, self._meeting, self._line, until, load_step)
        if newest is None:
            go_on_from(None, None)
        return newest

    @collective("CheckpointManager.delete")
    def delete(self, step: int) -> None:
        """Deletes the checkpoint of a step, after the saves in progress have ended.

        Raises:
            CheckpointConflictError: If another job has claimed the run since this manager was made:
                the step may be that job's.
            CheckpointNotFoundError: If the step has no committed checkpoint.
            CheckpointReplacedError: If another writer has saved the step anew meanwhile.
            ClosedError: If the manager was closed.
            ConfigError: If ``step`` is not a valid step, or the manager is ``read_only``.
            StoreError: If the store refuses or stays unreachable.
            ProcessGroupError: If the ranks lost contact with each other.
        """
        step = check_step(step)
        self._check_open()
        self._check_writable()
        self._line.claim(saves=False)
        self._meeting.broadcast_from_first(lambda: self._pruner.delete(step))

    def wait_until_finished(self) -> None:
        """Waits until all saves are committed, and retention's deletions after them have ended.

        A failed deletion is only logged.

        Raises:
            ClosedError: If the manager was closed.
            CloudCheckpointError: If a save failed, and no call has raised its error yet.
        """
        self._check_open()
        self._checkpointer.wait()
        self._pruner.wait()

    def status(self) -> RunStatus:
        """Returns what this rank knows of the run's saves; sends nothing and waits for nothing."""
        return self._saves.status()

    def close(self) -> None:
        """Waits for saves and deletions in progress, and releases memory and processes.

        Does nothing in a process forked from the manager's process.

        Raises:
            CloudCheckpointError: If a save failed, and no call has raised its error yet.
            SaveInProgressError: If a save has not ended within ``BackgroundOptions.patience``.
        """
        if self._closed or not self._belongs_here:
            return
        self._closed = True
        self._schedule.ignore()
        try:
            self._checkpointer.close()
        finally:
            self._pruner.close(wait=self._saver.is_idle)
            self._schedule.close()

    @property
    def _belongs_here(self) -> bool:
        """Whether this is the process that made the manager, not a fork of it."""
        return self._pid == os.getpid()

    def _check_writable(self) -> None:
        """Raises a ConfigError if the manager is ``read_only``."""
        if self._read_only:
            raise ConfigError(
                "the manager was made with read_only=True: to save or delete, leave read_only out",
                uri=str(self._run.root),
            )

    def _check_open(self) -> None:
        """Raises a ClosedError if the manager was closed, or made in another process."""
        if self._closed:
            raise ClosedError("the manager was closed: make a new one", uri=str(self._run.root))
        if not self._belongs_here:
            raise ClosedError(
                f"the manager belongs to process {self._pid}, from which this one was forked: make "
                "a new manager in this process",
                uri=str(self._run.root),
            )
