"""Notices that a job is about to be ended, and lets all ranks learn it at the same step."""

from __future__ import annotations

import contextlib
import logging
import math
import numbers
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from cloudckpt.background.groups import give_back, open_group
from cloudckpt.dcp.arrivals import all_expected
from cloudckpt.errors import ConfigError, ProcessGroupError

__all__ = ["Agreement", "Preemption"]

logger = logging.getLogger("cloudckpt")

_START = 600.0  # seconds for all ranks to come to create the group
_PATIENCE = 1800.0  # seconds for all ranks to reach a step that one has reached, as in torch
_TOGETHER = 0.3  # seconds in which a signal that comes twice, from two senders, counts once
_LONG = 1.0  # seconds of a step that make the cost of a collective negligible


def _is_time(given: object) -> bool:
    return isinstance(given, numbers.Real) and not math.isnan(given)


class Preemption:
    """Notices that this job is about to be ended: by a signal, a function, or a point in time."""

    def __init__(
        self,
        *,
        signals: Sequence[int] = (signal.SIGTERM,),
        is_due: Callable[[], bool] | None = None,
        deadline: float | None = None,
    ) -> None:
        """
        Args:
            signals: Signals that announce it. A handler that was set before is called, too; if
                there was none, the process goes on after the first such signal, and the training
                loop has to end it; a second one ends the process. In a thread other than the main
                one no signal is handled, which is logged.
            is_due: A function that returns whether it is due, such as a check of the instance's
                metadata; it is called at each step, and must not block. If it raises, that is
                logged, and it is called again at the next step.
            deadline: When to save for the last time, in seconds since 1970: the end of the job
                minus the time that a save takes.

        Raises:
            ConfigError: If one of them is of another type.
        """
        are_many: object = isinstance(signals, Iterable)
        for name, given, fits, instead in (
            ("signals", signals, are_many, "a list of signals, such as [signal.SIGUSR1]"),
            ("is_due", is_due, is_due is None or callable(is_due), "a function"),
            (
                "deadline",
                deadline,
                deadline is None or _is_time(deadline),
                "seconds since 1970, such as time.time() + 3600",
            ),
        ):
            if not fits:
                raise ConfigError(f"Preemption({name}={given!r}): give {instead}")
        self._signals = tuple(signals)
        self._is_due = is_due
        self._deadline = deadline
        # no lock guards it: a signal handler would wait for the very code that it interrupts
        self._noticed = False
        self._has_failed = False
        self._handled: set[int] = set()
        self._first: dict[int, float] = {}  # when each signal came first, by the monotonic clock
        self._watchers = 0
        self._pid = os.getpid()

    @property
    def noticed(self) -> bool:
        """Whether this rank itself has noticed it; once True, never False again."""
        if not self._noticed:
            is_late = self._deadline is not None and time.time() >= self._deadline
            self._noticed = is_late or self._is_told()
        return self._noticed

    def _is_told(self) -> bool:
        """The result of the function."""
        if self._is_due is None:
            return False
        try:
            told = bool(self._is_due())
        except Exception:
            if not self._has_failed:  # log only the first: it may fail at every step
                logger.exception(
                    "the is_due= of Preemption raised an error; it is called again at each step"
                )
            self._has_failed = True
            return False
        self._has_failed = False
        return told

    def watch(self) -> None:
        """Begins to handle the signals, until :meth:`ignore` was called as many times.

        Outside of the main thread, where Python sets no handlers, it handles none and logs that.

        Raises:
            ConfigError: If one of the signals can't be handled.
        """
        self._watchers += 1
        self._pid = os.getpid()
        if self._signals and threading.current_thread() is not threading.main_thread():
            logger.warning(
                "signals can be handled in the main thread only, so none announces the end of this "
                "job: its last steps are saved if Preemption(is_due=...) or deadline= tells of it"
            )
            return
        try:
            for number in self._signals:
                self._handle(number)
        except BaseException:
            self.ignore()
            raise

    def _handle(self, number: int) -> None:
        """Handles a signal, unless it is handled already."""
        try:
            before = signal.getsignal(number)
            if isinstance(before, _Handler) and before.owner is self:
                return
            signal.signal(number, _Handler(self, before))
        except (OSError, TypeError, ValueError) as error:
            raise ConfigError(
                f"Preemption(signals=...): {number!r} can't be handled: give signals that a "
                "process may handle, such as signal.SIGTERM",
                cause=error,
            ) from error
        self._handled.add(number)

    def ignore(self) -> None:
        """Restores the previous handlers.

        A handler that was set since, and calls ours, stays; ours then only calls the previous one.
        """
        self._watchers -= 1
        if self._watchers or threading.current_thread() is not threading.main_thread():
            return
        for number in self._handled:
            handler = signal.getsignal(number)
            if isinstance(handler, _Handler) and handler.owner is self:
                before = handler.before
                signal.signal(number, before if before is not None else signal.SIG_DFL)

    def _on_signal(self, number: int, frame: FrameType | None, before: Any) -> None:
        is_elsewhere, is_second = os.getpid() != self._pid, False
        if self._watchers and not is_elsewhere:
            self._noticed = True
            now = time.monotonic()
            is_second = now - self._first.setdefault(number, now) > _TOGETHER
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL and (
            # a forked child must still end when its parent ends it, as multiprocessing does
            not self._watchers or is_second or (is_elsewhere and number == signal.SIGTERM)
        ):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


@dataclass(frozen=True, eq=False)
class _Handler:
    """What is set as a handler of a signal, and tells its owner.

    Each has what was there before it. So if the program sets a handler of its own, which may call
    ours, and the signal is handled again, the new one calls that of the program, and no two of them
    call each other.

    Attributes:
        owner: Whom it tells.
        before: What handled the signal before; None if that is not known to Python.
    """

    owner: Preemption
    before: Any

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.owner._on_signal(number, frame, self.before)


class Agreement:
    """Lets all ranks learn at the same step what one of them has noticed.

    Schedulers signal one rank, or each rank at another moment, while all ranks must save the same
    step. So each step starts a collective, and the next step has its result: no rank waits for it.
    If steps take seconds, a step later may be too late, and waiting for the result takes little
    time in comparison: the ranks tell each other whether their last step was long, and if it was on
    all ranks, all of them wait for the result at once.
    """

    def __init__(self, parent: dist.ProcessGroup | None) -> None:
        """``parent``: The ranks, which get a separate group; None if this rank is alone."""
        self._group: dist.ProcessGroup | None = None
        self._asked: tuple[torch.Tensor, dist.Work | None] = _flags(told=False, is_short=True), None
        self._last: float | None = None  # time of the previous step, by the monotonic clock
        if parent is not None:
            self._group = open_group(parent, start_timeout=_START, collective_timeout=_PATIENCE)

    def close(self) -> None:
        """Releases the group, after waiting for a collective in progress."""
        if self._group is not None:
            with contextlib.suppress(RuntimeError):  # a rank that is gone no longer matters
                self._answer()
            give_back(self._group)
            self._group = None

    def step(self, noticed: bool) -> bool:
        """Whether a rank noticed it by the last step, or by now after long steps; same on all.

        Args:
            noticed: Whether this rank has noticed it by now.

        Raises:
            ProcessGroupError: If the ranks lost each other.
        """
        if self._group is None:
            return noticed
        now, last = time.monotonic(), self._last
        self._last = now
        try:
            told, some_are_short = self._answer()
            flags = _flags(told=noticed or told, is_short=last is None or now - last < _LONG)
            work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group, async_op=True)
            self._asked = flags, work
            if not some_are_short:
                told, _ = self._answer()
        except RuntimeError as exc:
            raise ProcessGroupError(
                "the ranks lost contact while they agreed whether the job is about to end: "
                "find out which one ended first and why",
                cause=exc,
            ) from exc
        return told

    def _answer(self) -> tuple[bool, bool]:
        """Whether a rank has noticed it, and whether the last step was short on some rank."""
        flags, work = self._asked
        if work is not None:
            with all_expected(None if work.is_completed() else self._group):
                work.wait()
            self._asked = flags, None
        told, is_short = flags.tolist()
        return bool(told), bool(is_short)


def _flags(*, told: bool, is_short: bool) -> torch.Tensor:
    return torch.tensor([told, is_short], dtype=torch.int32, device="cpu")
