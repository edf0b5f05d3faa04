"""Saves the steps of a job, keeps the list of its saves, and decides when failures end training."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

from cloudckpt import events
from cloudckpt.background.save import SaveFuture
from cloudckpt.checkpoint.notes import Notes, metrics_of
from cloudckpt.checkpointer import (
    AsyncCheckpointer,
    Checkpointer,
    CheckpointerConfig,
    make_sync_checkpointer,
)
from cloudckpt.config import Config, config_or_default
from cloudckpt.errors import (
    CloudCheckpointError,
    CommitUnknownError,
    ConfigError,
    RanksFailedError,
    SaveInProgressError,
    SaveProcessError,
    StagingMemoryError,
    TransientStoreError,
)
from cloudckpt.runs.claim import OwnLine
from cloudckpt.runs.pruning import StepsInUse
from cloudckpt.runs.steps import check_count

__all__ = ["OnFailure", "RunStatus", "Saves", "StepSaver", "saving_options"]

logger = logging.getLogger("cloudckpt")

OnFailure = Literal["raise", "log", "log_all"]

_TRANSIENT = (
    TransientStoreError,
    CommitUnknownError,
    RanksFailedError,
    SaveInProgressError,
    SaveProcessError,
    StagingMemoryError,
)
"""Errors whose cause may be gone when the next step is saved. Permanent errors are not among them:
a missing bucket, denied credentials, a full disk, another job in the same run."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The state of a job's saves, as one rank knows it without a request to the store.

    Attributes:
        newest_step: The step that this job has committed or restored last; None if it has done
            neither.
        newest_age: Seconds since this job committed that step; None if the job has restored it, or
            there is none.
        under_way: The steps being saved, oldest first.
        failures_in_row: How many saves have failed in a row, up to the last save whose outcome is
            known.
        last_failure: The error of the failure that was counted last; None if none was counted.
    """

    newest_step: int | None
    newest_age: float | None
    under_way: tuple[int, ...]
    failures_in_row: int
    last_failure: CloudCheckpointError | None


Outcome = Literal["under way", "ended", "committed", "failed", "dropped", "restored"]
"""The state of a :class:`Save`. ``ended``: the save has failed, and this is not reported yet;
``failed``: the failure was reported; ``dropped``: the save did not take place; ``restored``: not a
save, but a restored step."""


@dataclass(eq=False)
class Save:
    """One entry of the list of a job's saves: a requested save, or a restored step.

    Attributes:
        step: The step; None for a restore that found no step.
        outcome: The state of the save.
        when: When the save was committed, in seconds of :func:`time.monotonic`; None if it is not
            committed.
        number: The number that the background checkpointer gave the save; -1 if it has none.
    """

    step: int | None
    outcome: Outcome
    when: float | None = None
    number: int = -1


class Saves:
    """The saves of a job and the steps that it restored, in order; :meth:`end` removes old ones.

    All ranks count a failure at the same call, so all decide alike whether training goes on. A
    commit may become known to the ranks at different times.

    Attributes:
        last_failure: The error of the failure that was counted last; None if none was counted.
        has_committed: Whether this rank knows of a committed save of this job.
    """

    def __init__(
        self, on_failure: OnFailure, max_failures: int, uri: Callable[[int], object], rank: int
    ) -> None:
        """
        Args:
            on_failure: Which failures are tolerated; see :class:`CheckpointManager`.
            max_failures: After how many failures in a row training ends.
            uri: Returns the location of a step.
            rank: The number of this rank.

        Raises:
            ConfigError: If an option is invalid.
        """
        if on_failure not in get_args(OnFailure):
            raise ConfigError(f"on_failure={on_failure!r}: choose one of {get_args(OnFailure)}")
        self._max_failures = check_count("max_failures", max_failures)
        self._on_failure, self._uri, self._rank = on_failure, uri, rank
        self._all: list[Save] = []
        self._lock = threading.Lock()  # saves end in other threads
        self.last_failure: CloudCheckpointError | None = None
        self.has_committed = False

    @property
    def newest(self) -> int | None:
        """The step that this job restored or began to save last; None if there is none.

        Also None if the last of them was a restore that found no step. Saves whose failure was
        reported do not count.
        """
        with self._lock:
            counted = (save.step for save in reversed(self._all) if save.outcome != "failed")
            return next(counted, None)

    def begin(self, step: int | None, outcome: Outcome = "under way") -> Save:
        """Adds a save or, with the outcome ``restored``, a restored step to the list."""
        made = Save(step, outcome)
        with self._lock:
            self._all.append(made)
        return made

    def end(self, save: Save, outcome: Outcome) -> None:
        """Sets the outcome of a save under way.

        A commit removes the earlier entries from the list, except saves under way and those whose
        failure was not reported yet. A dropped save is removed.
        """
        with self._lock:
            if save.outcome == "under way":
                save.outcome = outcome
            at = self._all.index(save) if save in self._all else 0
            if outcome == "committed":
                save.when, self.has_committed = time.monotonic(), True
                open_ = [one for one in self._all[:at] if one.outcome in ("under way", "ended")]
                self._all[:at] = open_
            elif outcome == "dropped" and save in self._all:
                self._all.remove(save)

    def failed_earlier(self, numbers: Collection[int], error: CloudCheckpointError) -> None:
        """Counts failures of earlier background saves.

        Args:
            numbers: The numbers that the checkpointer gave these saves.
            error: Why they failed.

        Raises:
            CloudCheckpointError: ``error``, if ``on_failure`` does not tolerate it.
        """
        with self._lock:
            failed = [save for save in self._all if save.number in numbers]
        if not all([self.tolerates(save, error) for save in failed]):  # noqa: C419 - each counts
            raise error

    def status(self) -> RunStatus:
        """Returns the state of the job's saves, as this rank knows it."""
        with self._lock:
            known = [save for save in self._all if save.outcome in ("committed", "restored")]
            newest = next((save for save in reversed(known) if save.step is not None), None)
            when = None if newest is None else newest.when
            settled = [save for save in self._all if save.outcome in ("committed", "failed")]
            is_well = bool(settled) and settled[-1].outcome == "committed"
            open_steps = [save.step for save in self._all if save.outcome == "under way"]
            return RunStatus(
                newest_step=None if newest is None else newest.step,
                newest_age=None if when is None else time.monotonic() - when,
                under_way=tuple(step for step in open_steps if step is not None),
                failures_in_row=0 if is_well else self._row(),
                last_failure=self.last_failure,
            )

    def tolerates(self, save: Save, error: CloudCheckpointError) -> bool:
        """Counts a failure; returns whether training goes on, and in that case logs the failure."""
        save.outcome, self.last_failure = "failed", error
        with self._lock:
            failures = self._row()
        goes_on = failures < self._max_failures and (
            self._on_failure == "log_all"
            or (self._on_failure == "log" and isinstance(error, _TRANSIENT))
        )
        if goes_on:
            self._report(save, error, failures)
        return goes_on

    def _report(self, save: Save, error: CloudCheckpointError, failures: int) -> None:
        """Logs a tolerated failure, and emits an event ``failure``."""
        status = self.status()
        assert save.step is not None
        age = "" if status.newest_age is None else f", {status.newest_age:.0f} s ago"
        logger.error(
            "saving step %d failed, but training continues (failed saves in a row: %d; training "
            "ends at %d; newest committed checkpoint: %s): %s",
            save.step,
            failures,
            self._max_failures,
            "none" if status.newest_step is None else f"step {status.newest_step}{age}",
            error,
        )
        events.emit(
            events.Event(
                phase="failure",
                uri=str(self._uri(save.step)),
                rank=self._rank,
                began=time.time(),
                detail=type(error).__name__,
                failed=True,
                step=save.step,
                newest_step=status.newest_step,
                newest_age=status.newest_age,
            )
        )

    def _row(self) -> int:
        """Returns how many saves in a row have failed, ending with the last reported failure."""
        row = 0
        for save in reversed(self._all):
            if save.outcome == "failed":
                row += 1
            elif row:
                break
        return row


def saving_options(
    given: CheckpointerConfig | None, config: Config | None, *, incremental: bool
) -> CheckpointerConfig:
    """Merges the options given to a manager into those of its checkpointer.

    Args:
        given: The manager's argument ``checkpointer``.
        config: The manager's argument ``config``.
        incremental: Whether saves are incremental even if these options do not say so.

    Raises:
        ConfigError: If both ``given`` and ``config`` are not None.
    """
    if given is not None and config is not None:
        raise ConfigError(
            "config= and checkpointer= exclude each other: pass config= to CheckpointerConfig"
        )
    options = given if given is not None else CheckpointerConfig()
    config = config_or_default(options.config if config is None else config)
    return replace(options, config=replace(config, incremental=incremental or config.incremental))


def _make_notes(
    step: int,
    metrics: Mapping[str, float] | None,
    notes: Mapping[str, Any] | None,
    of_job: Notes,
) -> Notes:
    """Returns ``of_job``, the notes that name the job, plus a step's number, metrics and notes.

    Raises:
        ConfigError: If ``metrics`` or ``notes`` is not a dict, or a metric is not a number.
    """
    for name, given in (("metrics", metrics), ("notes", notes)):
        if not isinstance(given, (Mapping, type(None))):
            raise ConfigError(f"{name}={given!r}: give a dict")
    return replace(of_job, step=step, metrics=metrics_of(metrics), user=dict(notes or {}))


class StepSaver:
    """Saves steps in the background or synchronously; all ranks must make the same calls.

    Attributes:
        checkpointer: The checkpointer that saves all steps but the final one, and loads.
    """

    def __init__(
        self,
        options: CheckpointerConfig,
        saves: Saves,
        line: OwnLine,
        in_use: StepsInUse,
        *,
        in_background: bool,
    ) -> None:
        """
        Args:
            options: The options of the checkpointers.
            saves: The list of the job's saves.
            line: Claims the run, and knows whether existing steps may be replaced.
            in_use: Prevents the deletion of a step while it is saved.
            in_background: Whether a save other than the final one returns once the state is staged.
        """
        self._saves, self._line, self._in_use = saves, line, in_use
        self._last: SaveFuture | None = None  # of the last save in the background
        self._direct = make_sync_checkpointer(options)
        self.checkpointer: Checkpointer = self._direct
        if in_background:
            self.checkpointer = AsyncCheckpointer(
                options, on_failure=self._saves.failed_earlier, when_busy="auto"
            )

    def save(
        self,
        step: int,
        state: dict[str, Any],
        metrics: Mapping[str, float] | None,
        notes: Mapping[str, Any] | None,
        *,
        force: bool,
        is_last: bool,
    ) -> tuple[Notes, SaveFuture | None] | None:
        """Saves a step, in the background if that was chosen, and the step is not the final one.

        Args:
            step: The number of the step.
            state: The state dict to save.
            metrics: Numbers to store with the checkpoint.
            notes: Other values to store with it.
            force: Whether an existing step may be replaced even if the job has not called
                ``restore()``.
            is_last: Whether this is the final save before the job ends: it waits for the earlier
                saves, and is committed when this returns.

        Returns:
            None if the step is skipped, or has failed with a tolerated error. Otherwise a pair: the
            notes stored with the step, and the future of the save; the future is None if the save
            is committed already.

        Raises:
            CloudCheckpointError: The errors of a checkpointer's ``save`` and of
                :meth:`OwnLine.claim`, unless they are tolerated.
        """
        save, line = self._saves.begin(step), self._line
        try:
            of_job = line.claim()
            # called by the save, which raises an invalid value's error on all ranks
            noted = functools.cache(partial(_make_notes, step, metrics, notes, of_job))
            if is_last:
                self._end_earlier_saves()
            with contextlib.ExitStack() as in_use:
                in_use.enter_context(self._in_use.kept(step))
                futures = (self._direct if is_last else self.checkpointer).save(
                    line.run.uri(step),
                    state,
                    notes=noted,
                    base=line.base,
                    # a job that never called restore() may not know that the step exists
                    keep_existing=not (line.has_restored or force),
                    is_first=not self._saves.has_committed,
                )
                written = None if futures is None else futures[1]
                if written is None:
                    self._saves.end(save, "committed")
                elif written.skipped:
                    self._saves.end(save, "dropped")
                    return None
                else:
                    self._last, save.number = written, written.number
                    written.add_done_callback(partial(self._note_end, save, in_use.pop_all()))
            line.base = None
            return noted(), written
        except CloudCheckpointError as error:
            line.explain(error)
            if error is self._saves.last_failure:  # the error of an earlier save, counted already
                self._saves.end(save, "dropped")
                raise
            if not self._saves.tolerates(save, error):
                raise
            return None
        except BaseException:
            self._saves.end(save, "dropped")
            raise

    @property
    def is_idle(self) -> bool:
        """Whether no save is in progress."""
        return self._last is None or self._last.done()

    def join(self) -> None:
        """Waits until no save is in progress, without raising the error of one that has failed."""
        concurrent.futures.wait([] if self._last is None else [self._last])

    def _end_earlier_saves(self) -> None:
        """Waits for all earlier saves before the final one; a failure is only logged."""
        try:
            self.checkpointer.wait()
        except CloudCheckpointError as error:
            logger.error("an earlier save failed; the final save continues: %s", error)

    def _note_end(self, save: Save, in_use: contextlib.ExitStack, written: SaveFuture) -> None:
        """Records the outcome of a background save; runs in the thread that saved."""
        in_use.close()
        error = written.exception()
        self._line.explain(error)  # before it is logged
        self._saves.end(save, "committed" if error is None else "ended")
