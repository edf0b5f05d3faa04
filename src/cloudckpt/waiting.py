"""Logs what a save or a load is waiting for, while a store fails or does not respond.

A request is retried for minutes, since a failing store often recovers by itself. Meanwhile, users
see a job that stands still, and need to know why, and for how long it may last.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from contextvars import ContextVar, Token

from cloudckpt.fork import module_lock

__all__ = ["FIRST_LINE", "LONGEST_SILENCE", "Waiting", "current", "is_stuck"]

logger = logging.getLogger("cloudckpt")

FIRST_LINE = 10.0
"""Seconds after which a line is logged for an operation that fails, or that moves no byte."""
LONGEST_SILENCE = 60.0
"""The longest pause between two log lines, in seconds. The first pause is 10 seconds; each further
one is twice as long as the pause before, up to this length.
"""


_NO_SUCCESS = 1.0  # seconds without any success, after which operations count as stuck


class Waiting:
    """An operation on a store that is retried after failures: a context manager around all tries.

    Within the block it is the :func:`current` operation, so that the code that sends its requests
    can report on them.

    Attributes:
        is_over: Whether the block was left.
    """

    def __init__(self, deadline: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Prepares an operation.

        Args:
            deadline: Seconds after its first failure during which it is retried.
            clock: Returns the seconds of a monotonic clock.
        """
        self._deadline = deadline
        self._clock = clock
        self._began = clock()
        self._failures = 0
        self._until: float | None = None
        self._request = "a request"
        self.is_over = False
        self._token: Token[Waiting | None] | None = None

    def __enter__(self) -> Waiting:
        self._token = _current.set(self)
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        if self._token is not None:
            _current.reset(self._token)
        self.is_over = True  # before `end`: another thread may be about to log
        _lines.end(self, self._clock() if kind is None else None)

    def sends(self, request: str) -> None:
        """Notes the request under way, for messages: its method and URI, without secrets."""
        self._request = request

    def failed(self, why: object, *, left: float, pause: float) -> None:
        """Notes a failed try, and logs it if the operation has taken ``FIRST_LINE`` seconds.

        It also logs the try if the pause before the next one is at least that long. It logs nothing
        if the pause between log lines is not over yet; see :data:`LONGEST_SILENCE`.

        Args:
            why: The error, or a text that describes it.
            left: Seconds during which the operation is still retried.
            pause: Seconds until the next try.
        """
        now = self._clock()
        self._failures += 1
        _lines.failing(self)
        self._until = now + left
        ahead = pause if pause >= FIRST_LINE else 0.0  # nothing can log during the pause
        if now + ahead - self._began >= FIRST_LINE:
            self._tell(str(why), now)

    def is_silent(self, seconds: float) -> None:
        """Notes that the try under way has moved no byte for `seconds`.

        It logs this from ``FIRST_LINE`` seconds on, unless the pause between log lines is not over.
        """
        if seconds >= FIRST_LINE:
            _lines.failing(self)
            self._tell(f"{self._request}: no byte has moved for {seconds:.0f} s", self._clock())

    def _tell(self, why: str, now: float) -> None:
        others = _lines.begin(self, now)
        if others is None:
            return
        end = f"{self._deadline:g} s after the first failed try"
        if self._until is not None:
            end = f"at {_moment(self._until - now)}"
        more = f"; other operations that wait: {others}" if others else ""
        logger.warning(
            "still waiting for the store: %s (since %s; failed tries: %d; gives up %s%s)",
            why,
            _moment(self._began - now),
            self._failures,
            end,
            more,
        )


class _Lines:
    """Determines when the next log line is due; all operations of a process share one schedule.

    When a store fails, many requests fail at the same time, and one line is enough for them.
    """

    def __init__(self) -> None:
        self._lock = module_lock()
        self._waiting: set[Waiting] = set()
        self._failing: set[Waiting] = set()
        self._succeeded = -math.inf
        self._due = 0.0
        self._interval = FIRST_LINE

    def begin(self, waiting: Waiting, now: float) -> int | None:
        """Registers a waiting operation, and decides whether to log a line about it now.

        Args:
            waiting: The operation.
            now: The time, by the clock of the operations.

        Returns:
            The number of other operations that wait, if a line is due; else None.
        """
        with self._lock:
            if waiting.is_over:
                return None
            if not self._waiting:
                self._due, self._interval = now, FIRST_LINE
            self._waiting.add(waiting)
            if now < self._due:
                return None
            self._due = now + self._interval
            self._interval = min(LONGEST_SILENCE, 2 * self._interval)
            return len(self._waiting) - 1

    def failing(self, waiting: Waiting) -> None:
        """Notes that a try of an operation has failed, or has been silent for long."""
        with self._lock:
            if not waiting.is_over:
                self._failing.add(waiting)

    def end(self, waiting: Waiting, succeeded: float | None) -> None:
        """Removes an operation that has ended.

        Args:
            waiting: The operation.
            succeeded: When it succeeded, by the clock of the operations; None if it failed.
        """
        with self._lock:
            self._waiting.discard(waiting)
            self._failing.discard(waiting)
            if succeeded is not None:
                self._succeeded = succeeded

    def is_stuck(self, now: float) -> bool:
        """Returns whether an operation is failing while none has succeeded in the last second."""
        with self._lock:
            return bool(self._failing) and now - self._succeeded >= _NO_SUCCESS

    def forget(self) -> None:
        """Removes all operations: a forked child lacks the threads that ran them."""
        self._waiting.clear()
        self._failing.clear()


def _moment(seconds: float) -> str:
    """Returns the date and time `seconds` from now."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() + seconds))


_lines = _Lines()
os.register_at_fork(after_in_child=_lines.forget)
_current: ContextVar[Waiting | None] = ContextVar("cloudckpt_waiting", default=None)


def is_stuck() -> bool:
    """Returns whether operations fail or are silent, and none has succeeded in the last second."""
    return _lines.is_stuck(time.monotonic())


def current() -> Waiting | None:
    """Returns the innermost operation around this call, in this thread or task; or None."""
    return _current.get()
