"""The saves of a job, in one list; and how many of them may fail before training ends."""

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
"""Failures that may be over when the next step is saved. A missing bucket, denied credentials, a
full disk or another job in the same run are not among them."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """What a rank knows of the saves of its run, without asking the store.

    Attributes:
        newest_step: The newest step known to be committed: saved here, or restored.
        newest_age: Seconds since it was committed; None if this job has not saved it.
        under_way: The steps being saved, oldest first.
        failures_in_row: How many saves have failed in a row, up to the last save whose outcome is
            known.
        last_failure: The last failure reported; None if there was none.
    """

    newest_step: int | None
    newest_age: float | None
    under_way: tuple[int, ...]
    failures_in_row: int
    last_failure: CloudCheckpointError | None


@dataclass(eq=False)
class Save:
    """A save that was requested, or a restored step, from which the list goes on.

    Attributes:
        step: The step; None if there was nothing to restore.
        outcome: ``ended`` is a save that has failed, as long as this is not reported; ``dropped``
            is one that never took place.
        when: When it was committed here, by the monotonic clock.
        number: Its number in the checkpointer that saves it in the background.
    """

    step: int | None
    outcome: Literal["under way", "ended", "committed", "failed", "dropped", "restored"]
    when: float | None = None
    number: int = -1


class Saves:
    """The saves of a job since the last one that is known to be committed, in their order.

    Which of them have failed, and so whether training goes on, is the same on all ranks; which of
    them are committed is known to each rank at another moment.

    Attributes:
        last_failure: The last failure that was counted.
        has_committed: Whether a save of this job is known here to be committed.
    """

    def __init__(
        self, on_failure: OnFailure, max_failures: int, uri: Callable[[int], object], rank: int
    ) -> None:
        """
        Args:
            on_failure: What to do with a failure.
            max_failures: After how many in a row training ends.
            uri: Gives the location of a step.
            rank: This rank.

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
        self._lock = threading.Lock()  # saves end on other threads
        self.last_failure: CloudCheckpointError | None = None
        self.has_committed = False

    @property
    def newest(self) -> int | None:
        """The newest step saved or restored here whose save is not known to have failed."""
        with self._lock:
            counted = (one for one in reversed(self._all) if one.outcome not in _NOTHING)
            return next((one.step for one in counted), None)

    def begin(self, step: int) -> Save:
        """Adds a save."""
        made = Save(step, "under way")
        with self._lock:
            self._all.append(made)
        return made

    def restored(self, step: int | None) -> None:
        """Notes which step was restored; None if there was none."""
        with self._lock:
            self._all.append(Save(step, "restored"))

    def committed(self, save: Save) -> None:
        """Ends a save, and forgets those before it that have ended."""
        save.outcome, save.when, self.has_committed = "committed", time.monotonic(), True
        with self._lock:
            at = self._all.index(save) if save in self._all else 0
            open_ = [one for one in self._all[:at] if one.outcome in ("under way", "ended")]
            self._all[:at] = open_

    def dropped(self, save: Save) -> None:
        """Ends a save that neither failed nor succeeded."""
        save.outcome = "dropped"

    def ended(self, save: Save) -> None:
        """Ends a save that has failed, which is reported later."""
        if save.outcome == "under way":
            save.outcome = "ended"

    def failed_earlier(self, numbers: Collection[int], error: CloudCheckpointError) -> None:
        """Counts failures of earlier saves, given by the checkpointer's numbers.

        Raises:
            CloudCheckpointError: ``error``, if training is not to go on.
        """
        with self._lock:
            failed = [one for one in self._all if one.number in numbers]
        if not all([self.tolerates(one, error) for one in failed]):  # noqa: C419 - each counts
            raise error

    def status(self) -> RunStatus:
        """See :class:`RunStatus`."""
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
        """Counts a failure, and returns whether training goes on; if so, reports it."""
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
        """Logs a failure after which training goes on, and emits an event."""
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
        there = (one for one in reversed(self._all) if one.outcome in ("committed", "restored"))
        return next((one for one in there if one.step is not None), None)

    def _in_row(self) -> int:
        """How many have failed in a row, if none after them is known to be committed."""
        for one in reversed(self._all):
            if one.outcome == "committed":
                return 0
            if one.outcome == "failed":
                break
        return self._row()

    def _row(self) -> int:
        """How many have failed in a row, up to the last failure; the same on all ranks."""
        row, has_begun = 0, False
        for one in reversed(self._all):
            if one.outcome == "failed":
                row, has_begun = row + 1, True
            elif has_begun and one.outcome != "dropped":
                break
        return row


_NOTHING = ("failed", "dropped")
