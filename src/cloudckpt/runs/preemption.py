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
        self._before: dict[int, Any] = {}  # what handled each signal before
        self._calling: set[int] = set()  # signals of which the handler before is called just now
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
                    "the is_due function of Preemption raised an error; it is called again at "
                    "each step"
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
                "signals can only be handled in the main thread, so this job does not notice a "
                "signal that ends it: its last steps are saved only with "
                "Preemption(is_due=...) or deadline="
            )
            return
        try:
            for number in self._signals:
                self._handle(number)
        except BaseException:
            self.ignore()
            raise

    def _handle(self, number: int) -> None:
        """Handles a signal, unless its handler calls this one, if by way of other managers'."""
        try:
            before = handler = signal.getsignal(number)
            while isinstance(owner := getattr(handler, "__self__", None), Preemption):
                if owner is self:
                    return
                handler = owner._before.get(number)
            signal.signal(number, self._on_signal)
            self._before[number] = before
        except (OSError, TypeError, ValueError) as error:
            raise ConfigError(
                f"Preemption(signals=...): {number!r} can't be handled: give signals that a "
                "process may handle, such as signal.SIGTERM",
                cause=error,
            ) from error

    def ignore(self) -> None:
        """Restores the previous handlers.

        A handler that was set since, and calls ours, stays; ours then only calls the previous one.
        """
        self._watchers -= 1
        if self._watchers or threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, before if before is not None else signal.SIG_DFL)

    def _previous(self, number: int) -> Any:
        """The previous handler; of those of other managers only one that is still watching."""
        before = self._before.get(number, signal.SIG_DFL)
        while isinstance(owner := getattr(before, "__self__", None), Preemption):
            if owner._watchers:
                break
            before = owner._before.get(number, signal.SIG_DFL)
        return before

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        before = self._previous(number)
        is_elsewhere, is_second = os.getpid() != self._pid, False
        if self._watchers and not is_elsewhere:
            self._noticed = True
            now = time.monotonic()
            is_second = now - self._first.setdefault(number, now) > _TOGETHER
        if callable(before):
            if number not in self._calling:  # a handler that was set since may call this one
                self._calling.add(number)
                try:
                    before(number, frame)
                finally:
                    self._calling.discard(number)
        elif before == signal.SIG_DFL and (
            # a forked child must still end when its parent ends it, as multiprocessing does
            not self._watchers or is_second or (is_elsewhere and number == signal.SIGTERM)
        ):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


class Agreement:
    """Lets all ranks learn at the same step what one of them has noticed.

    That is: that the job is about to be ended, or that a save is due by the clock. Schedulers
    signal one rank, or each rank at another moment, while all ranks must save the same step. So
    each step starts a collective, and the next step has its result: no rank waits for it. If steps
    take seconds, a step later may be too late, and waiting for the result takes little time in
    comparison: the ranks tell each other whether their last step was long, and if it was on all
    ranks, all of them wait for the result at once.
    """

    def __init__(self, parent: dist.ProcessGroup | None) -> None:
        """``parent``: The ranks, which get a separate group; None if this rank is alone."""
        self._group: dist.ProcessGroup | None = None
        self._asked: tuple[torch.Tensor, dist.Work | None] = (
            _flags(told=False, is_due=False, is_short=True),
            None,
        )
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

    def step(self, noticed: bool, is_due: bool = False) -> tuple[bool, bool]:
        """What some rank noticed by the last step, or by now after long steps; same on all.

        Args:
            noticed: Whether this rank has noticed by now that the job is about to be ended; once
                one has, it stays so.
            is_due: Whether a save is due on this rank since it last said so.

        Returns:
            Whether the job is about to be ended, and whether a save is due.

        Raises:
            ProcessGroupError: If the ranks lost each other.
        """
        if self._group is None:
            return noticed, is_due
        now, last = time.monotonic(), self._last
        self._last = now
        try:
            told, due, some_are_short = self._answer()
            is_short = last is None or now - last < _LONG
            flags = _flags(told=noticed or told, is_due=is_due, is_short=is_short)
            work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group, async_op=True)
            self._asked = flags, work
            if not some_are_short:
                told, due_now, is_short = self._answer()
                due = due or due_now
                # what was heard of is not heard of again at the next step
                self._asked = _flags(told=told, is_due=False, is_short=is_short), None
        except RuntimeError as exc:
            raise ProcessGroupError(
                "the ranks lost contact while they agreed whether the job is about to end: "
                "find out which rank ended first and why",
                cause=exc,
            ) from exc
        return told, due

    def _answer(self) -> tuple[bool, bool, bool]:
        """Whether a rank has noticed it, a save is due, and the last step was short on a rank."""
        flags, work = self._asked
        if work is not None:
            with all_expected(None if work.is_completed() else self._group):
                work.wait()
            self._asked = flags, None
        told, is_due, is_short = flags.tolist()
        return bool(told), bool(is_due), bool(is_short)


def _flags(*, told: bool, is_due: bool, is_short: bool) -> torch.Tensor:
    return torch.tensor([told, is_due, is_short], dtype=torch.int32, device="cpu")
