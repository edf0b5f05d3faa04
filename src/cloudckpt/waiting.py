"""Says in the log what a save or a load waits for, while a store fails or does not answer.

A request is tried for minutes, since a store that fails often recovers by itself. Whoever watches a
job that stands still needs to know why, and for how long it may last.
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
"""Seconds without success after which the first line is written."""
LONGEST_SILENCE = 60.0
"""Seconds between two lines, at most; the first such pause is as long as the wait for the first
line, and each further one twice as long."""


_NO_SUCCESS = 1.0  # seconds


class Waiting:
    """One operation on a store that is tried until it succeeds; a context manager around it.

    Inside the block it is the :func:`current` one, so that those who send its requests can report
    on them.

    Attributes:
        is_over: Whether the block was left.
    """

    def __init__(self, deadline: float, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            deadline: Seconds behind its first failure in which it is tried again.
            clock: Seconds of a clock that only goes forward.
        """
        self._deadline = deadline
        self._clock = clock
        self._began = clock()
        self._failures = 0
        self._until: float | None = None
        self._request = "a request"
        self._is_told = False
        self.is_over = False
        self._token: Token[Waiting | None] | None = None

    def __enter__(self) -> Waiting:
        self._token = _current.set(self)
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        if self._token is not None:
            _current.reset(self._token)
        self.is_over = True  # before the question: another thread may be about to tell
        _lines.ended(self, self._clock() if kind is None else None)
        if self._is_told:
            _lines.end(self)

    def sends(self, request: str) -> None:
        """Notes which request is on its way, for messages: its method and URI, without secrets."""
        self._request = request

    def failed(self, why: object, *, left: float, pause: float) -> None:
        """Notes that a try has failed, and says so if this has lasted long enough.

        Args:
            why: The error, or a text.
            left: Seconds in which it is tried again.
            pause: Seconds until the next try.
        """
        now = self._clock()
        self._failures += 1
        _lines.failing(self)
        self._until = now + left
        ahead = pause if pause >= FIRST_LINE else 0.0  # nobody is there to say it meanwhile
        if now + ahead - self._began >= FIRST_LINE:
            self._tell(str(why), now)

    def is_silent(self, seconds: float) -> None:
        """Says that the try under way has moved no byte for ``seconds``, if that is long enough."""
        if seconds >= FIRST_LINE:
            _lines.failing(self)
            self._tell(f"{self._request}: no byte has moved for {seconds:.0f} s", self._clock())

    def _tell(self, why: str, now: float) -> None:
        self._is_told = True
        others = _lines.begin(self, now)
        if others is None:
            return
        end = f"{self._deadline:g} s after its first failure"
        if self._until is not None:
            end = _moment(self._until - now)
        more = f"; {others} other operations wait, too" if others else ""
        logger.warning(
            "still waiting for the store: %s (failed tries: %d, since %s; tried until %s%s)",
            why,
            self._failures,
            _moment(self._began - now),
            end,
            more,
        )


class _Lines:
    """When the next line is due: all operations of a process share one rhythm.

    A store that fails, fails for all of the many requests that are under way.
    """

    def __init__(self) -> None:
        self._lock = module_lock()
        self._waiting: set[Waiting] = set()
        self._failing: set[Waiting] = set()
        self._succeeded = -math.inf
        self._due = 0.0
        self._interval = FIRST_LINE

    def begin(self, waiting: Waiting, now: float) -> int | None:
        """How many others wait, too, if a line is due now; None if none is."""
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
        """A try of it has failed, or says nothing for long."""
        with self._lock:
            if not waiting.is_over:
                self._failing.add(waiting)

    def ended(self, waiting: Waiting, succeeded: float | None) -> None:
        """It has ended; ``succeeded``: when, if it has succeeded."""
        with self._lock:
            self._failing.discard(waiting)
            if succeeded is not None:
                self._succeeded = succeeded

    def is_stuck(self, now: float) -> bool:
        """Whether something fails, and nothing has succeeded of late."""
        with self._lock:
            return bool(self._failing) and now - self._succeeded >= _NO_SUCCESS

    def end(self, waiting: Waiting) -> None:
        """It has succeeded, or was given up."""
        with self._lock:
            self._waiting.discard(waiting)

    def forget(self) -> None:
        """Nothing waits any more: in a forked child, where the threads that waited are gone."""
        self._waiting.clear()
        self._failing.clear()


def _moment(seconds: float) -> str:
    """The date and time ``seconds`` from now."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() + seconds))


_lines = _Lines()
os.register_at_fork(after_in_child=_lines.forget)
_current: ContextVar[Waiting | None] = ContextVar("cloudckpt_waiting", default=None)


def is_stuck() -> bool:
    """Whether a store fails or says nothing: operations wait, and none has succeeded of late."""
    return _lines.is_stuck(time.monotonic())


def current() -> Waiting | None:
    """The innermost one around this call, in this thread or task."""
    return _current.get()
