"""Decides which steps a job saves: by number or clock, and one before the job ends."""

from __future__ import annotations

import time

from cloudckpt.dcp.meeting import Meeting
from cloudckpt.errors import ConfigError
from cloudckpt.runs.preemption import Agreement, Preemption
from cloudckpt.runs.steps import check_count, check_seconds

__all__ = ["Schedule"]


class Schedule:
    """Decides which steps are saved; all ranks must ask about the same steps in the same order."""

    def __init__(
        self,
        every_steps: int | None,
        every_seconds: float | None,
        preemption: Preemption | None,
        *,
        read_only: bool,
    ) -> None:
        """
        Args:
            every_steps: Save the steps that are multiples of this number; None saves all steps,
                unless ``every_seconds`` is given.
            every_seconds: Save a step if so many seconds have passed on rank 0 since the last save;
                None ignores the time. Can't be combined with ``every_steps``.
            preemption: How the job learns that it is about to be stopped; None: by SIGTERM.
            read_only: Whether no signal is handled.

        Raises:
            ConfigError: If an option is invalid, or both intervals are given.
        """
        given: object = preemption
        if not isinstance(given, (Preemption, type(None))):
            raise ConfigError(f"preemption={given!r}: give a Preemption, such as Preemption()")
        self._steps, self._seconds = 1, every_seconds
        if every_steps is not None:
            self._steps = check_count("save_interval_steps", every_steps)
        if every_seconds is not None:
            check_seconds("save_interval_seconds", every_seconds)
        if every_steps is not None and every_seconds is not None:
            raise ConfigError(
                "save_interval_steps= and save_interval_seconds= exclude each other: give one "
                "of them"
            )
        self._preemption = preemption if preemption is not None else Preemption()
        self._is_watching, self._read_only = False, read_only
        self._has_saved_last = False  # whether the final save was made
        self._asked: tuple[int, bool, bool] | None = None  # the last step, and its two answers
        self._due_since = time.monotonic()  # the beginning of the current interval in seconds

    def watch(self) -> None:
        """Begins to handle the signals, unless they are handled already or the job is read-only."""
        if not (self._is_watching or self._read_only):
            self._preemption.watch()
            self._is_watching = True

    def meet(self, meeting: Meeting) -> None:
        """Sets the ranks that decide together; call it before the methods that decide."""
        self._is_first = meeting.rank == 0
        self._agreement = Agreement(meeting.group)

    def ignore(self) -> None:
        """Stops handling signals."""
        if self._is_watching:
            self._preemption.ignore()
        self._is_watching = False

    def close(self) -> None:
        """Releases the process group of the ranks."""
        self._agreement.close()

    def is_ending(self, step: int) -> bool:
        """Returns whether any rank has detected that the job is about to end."""
        return self._answers(step)[0]

    def is_last(self, step: int, newest: int | None) -> bool:
        """Returns whether a step is to be the final save.

        ``newest`` is the step saved or restored last; None if there is none.
        """
        return self.is_ending(step) and not self._has_saved_last and step != newest

    def is_turn(self, step: int) -> bool:
        """Returns whether a step is to be saved by its number or the clock."""
        is_due = self._answers(step)[1]
        return is_due if self._seconds is not None else step % self._steps == 0

    def saved(self, *, is_last: bool) -> None:
        """Records that a save has begun: the interval in seconds begins anew."""
        self._due_since = time.monotonic()
        self._has_saved_last = self._has_saved_last or is_last

    def _answers(self, step: int) -> tuple[bool, bool]:
        """Returns whether the job is about to end, and whether a save is due by the clock.

        The first call for a step is a collective; further calls return the same result.
        """
        self.watch()
        if self._asked is None or self._asked[0] != step:
            is_due = False
            if self._is_first and self._seconds is not None:
                is_due = time.monotonic() - self._due_since >= self._seconds
                if is_due:  # passed on in one step only: the ranks may get it a step later
                    self._due_since = time.monotonic()
            self._asked = step, *self._agreement.step(self._preemption.noticed, is_due)
        return self._asked[1:]
