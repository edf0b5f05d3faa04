"""Keeps the list of a job's saves, and decides after which failures training ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal, get_args

from cloudckpt import events
from cloudckpt.config import whole_number
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

__all__ = ["OnFailure", "RunStatus", "Save", "Saves"]

logger = logging.getLogger("cloudckpt")

OnFailure = Literal["raise", "log", "log_all"]

_MAY_PASS = (
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
        newest_step: The newest step that this job has committed or restored; None if it has done
            neither.
        newest_age: Seconds since this job committed that step; None if the job has restored it.
        under_way: The steps being saved, oldest first.
        failures_in_row: How many saves have failed in a row, up to the last save whose outcome is
            known.
        last_failure: The error of the last failure that was counted; None before the first failure.
    """

    newest_step: int | None
    newest_age: float | None
    under_way: tuple[int, ...]
    failures_in_row: int
    last_failure: CloudCheckpointError | None


@dataclass(eq=False)
class Save:
    """One entry of the list of a job's saves: a requested save, or a restored step.

    Attributes:
        step: The step; None for a restore that found no step.
        outcome: The state of the save. ``ended``: it has failed, and the failure is not reported
            yet; ``failed``: the failure was reported; ``dropped``: the save did not take place.
        when: When the save was committed, by the monotonic clock; None if it is not.
        number: The number that the background checkpointer gave the save; -1 if it has none.
    """

    step: int | None
    outcome: Literal["under way", "ended", "committed", "failed", "dropped", "restored"]
    when: float | None = None
    number: int = -1


class Saves:
    """The list of a job's saves, in their order, from the newest committed one on.

    Failures are counted at the same call on all ranks, so all ranks decide alike whether training
    goes on; a commit becomes known to each rank at another time.

    Attributes:
        last_failure: The error of the last failure that was counted; None before the first.
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
        self._max_failures = whole_number(max_failures) or 0
        if self._max_failures < 1:
            raise ConfigError(f"max_failures={max_failures!r}: give a whole number of at least 1")
        self._on_failure, self._uri, self._rank = on_failure, uri, rank
        self._all: list[Save] = []
        self._lock = threading.Lock()  # saves end in other threads
        self.last_failure: CloudCheckpointError | None = None
        self.has_committed = False

    @property
    def newest(self) -> int | None:
        """The last step saved or restored by this job, without failed and dropped saves."""
        with self._lock:
            counted = (one for one in reversed(self._all) if one.outcome not in _NOTHING)
            return next((one.step for one in counted), None)

    def begin(self, step: int) -> Save:
        """Adds a save to the list."""
        made = Save(step, "under way")
        with self._lock:
            self._all.append(made)
        return made

    def restored(self, step: int | None) -> None:
        """Adds a restored step to the list; None if the run had no step to restore."""
        with self._lock:
            self._all.append(Save(step, "restored"))

    def committed(self, save: Save) -> None:
        """Marks a save as committed, and removes earlier saves whose outcome is settled."""
        save.outcome, save.when, self.has_committed = "committed", time.monotonic(), True
        with self._lock:
            at = self._all.index(save) if save in self._all else 0
            open_ = [one for one in self._all[:at] if one.outcome in ("under way", "ended")]
            self._all[:at] = open_

    def dropped(self, save: Save) -> None:
        """Marks a save as one that did not take place."""
        save.outcome = "dropped"

    def ended(self, save: Save) -> None:
        """Marks a background save as failed; the failure is counted when it is reported."""
        if save.outcome == "under way":
            save.outcome = "ended"

    def failed_earlier(self, numbers: Collection[int], error: CloudCheckpointError) -> None:
        """Counts failures of earlier background saves, given by the checkpointer's numbers.

        Raises:
            CloudCheckpointError: ``error``, if ``on_failure`` does not tolerate it.
        """
        with self._lock:
            failed = [one for one in self._all if one.number in numbers]
        if not all([self.tolerates(one, error) for one in failed]):  # noqa: C419 - each counts
            raise error

    def status(self) -> RunStatus:
        """Returns the state of the job's saves, as this rank knows it."""
        with self._lock:
            newest = self._newest_committed()
            when = None if newest is None else newest.when
            return RunStatus(
                newest_step=None if newest is None else newest.step,
                newest_age=None if when is None else time.monotonic() - when,
                under_way=tuple(
                    one.step
                    for one in self._all
                    if one.outcome == "under way" and one.step is not None
                ),
                failures_in_row=self._in_row(),
                last_failure=self.last_failure,
            )

    def tolerates(self, save: Save, error: CloudCheckpointError) -> bool:
        """Counts a failure; returns whether training goes on, and in that case logs the failure."""
        save.outcome, self.last_failure = "failed", error
        with self._lock:
            in_row = self._row()
        goes_on = in_row < self._max_failures and (
            self._on_failure == "log_all"
            or (self._on_failure == "log" and isinstance(error, _MAY_PASS))
        )
        if goes_on:
            self._report(save, error, in_row)
        return goes_on

    def _report(self, save: Save, error: CloudCheckpointError, in_row: int) -> None:
        """Logs a tolerated failure, and emits an event ``failure``."""
        status = self.status()
        assert save.step is not None
        age = "" if status.newest_age is None else f", {status.newest_age:.0f} s ago"
        logger.error(
            "step %d was not saved (failure %d in a row; training ends after %d); newest "
            "committed checkpoint: %s; training continues: %s",
            save.step,
            in_row,
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

    def _newest_committed(self) -> Save | None:
        """Returns the last committed save or restored step; None if there is no such entry."""
        there = (one for one in reversed(self._all) if one.outcome in ("committed", "restored"))
        return next((one for one in there if one.step is not None), None)

    def _in_row(self) -> int:
        """Returns how many saves have failed in a row; 0 if a later save is known as committed."""
        for one in reversed(self._all):
            if one.outcome == "committed":
                return 0
            if one.outcome == "failed":
                break
        return self._row()

    def _row(self) -> int:
        """Returns the length of the last row of failures; same on all ranks."""
        row, has_begun = 0, False
        for one in reversed(self._all):
            if one.outcome == "failed":
                row, has_begun = row + 1, True
            elif has_begun and one.outcome != "dropped":
                break
        return row


_NOTHING = ("failed", "dropped")
