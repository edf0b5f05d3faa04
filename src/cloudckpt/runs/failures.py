"""How many saves of a run may fail before training ends, and the state of its saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

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

__all__ = ["FailureBudget", "OnFailure", "RunStatus"]

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


class FailureBudget:
    """Decides whether training goes on after a failed save; the same on all ranks.

    Attributes:
        in_row: How many saves have failed in a row, including the last whose outcome is known.
        last: The last failure.
    """

    def __init__(self, on_failure: OnFailure, max_failures: int) -> None:
        """
        Args:
            on_failure: What to do with a failure.
            max_failures: After how many in a row training ends.

        Raises:
            ConfigError: If an option is invalid.
        """
        if on_failure not in get_args(OnFailure):
            raise ConfigError(f"on_failure={on_failure!r}: choose one of {get_args(OnFailure)}")
        self.max_failures = whole_number(max_failures) or 0
        if self.max_failures < 1:
            raise ConfigError(f"max_failures={max_failures!r}: give a whole number of at least 1")
        self._on_failure = on_failure
        self._failed: set[int] = set()
        self.in_row = 0
        self.last: CloudCheckpointError | None = None

    @property
    def logs(self) -> bool:
        """Whether some failures are only logged."""
        return self._on_failure != "raise"

    def goes_on(self, number: int, error: CloudCheckpointError) -> bool:
        """Counts a failure, and returns whether training goes on nevertheless.

        Args:
            number: The number of the save among those requested, the same on all ranks.
            error: Why it failed.
        """
        self._failed.add(number)
        number, in_row = max(self._failed), 0
        while number - in_row in self._failed:
            in_row += 1
        self.in_row, self.last = in_row, error
        if not self.logs or self.in_row >= self.max_failures:
            return False
        return self._on_failure == "log_all" or isinstance(error, _MAY_PASS)

    def succeeded(self, number: int) -> None:
        """Ends the row of failures, unless a later save is known to have failed."""
        if number > max(self._failed, default=0):
            self.in_row = 0
