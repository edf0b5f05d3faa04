"""What tells a job that it is about to be ended, and lets all ranks hear of it at the same step."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from cloudckpt.background.groups import give_back, open_group
from cloudckpt.dcp.arrivals import all_expected
from cloudckpt.errors import ConfigError, ProcessGroupError

__all__ = ["Agreement", "Preemption"]

logger = logging.getLogger("cloudckpt")

_START = 600.0  # seconds in which all ranks come to make the group
_PATIENCE = 1800.0  # seconds in which all ranks come to a step that one has reached, as torch's
_LONG = 1.0  # seconds of a step beside which a word among all ranks costs nothing


class Preemption:
    """Notices that this job is to be ended: by a signal, a function, or a point in time."""

    def __init__(
        self,
        *,
        signals: Sequence[int] = (signal.SIGTERM,),
        is_due: Callable[[], bool] | None = None,
        deadline: float | None = None,
    ) -> None:
        """
        Args:
            signals: Those that say so. A handler that was set before is called, too; if none was,
                the process goes on, and it is for the training loop to end.
            is_due: A function that says so, such as a look at what the instance is told; it is
                called at each step, and must not wait. If it raises, that is logged, and it is
                asked again at the next step.
            deadline: When to save for the last time, in seconds since 1970: the end of the job
                less the time that a save takes.
        """
        self._signals = tuple(signals)
        self._is_due = is_due
        self._deadline = deadline
        # no lock guards it: the handler of a signal would wait for the very code it interrupts
        self._noticed = False
        self._has_failed = False
        self._before: dict[int, Any] = {}
        self._watchers = 0
        self._pid = os.getpid()

    @property
    def noticed(self) -> bool:
        """Whether this rank has been told, as far as it knows by itself; never False again."""
        if not self._noticed:
            is_late = self._deadline is not None and time.time() >= self._deadline
            self._noticed = is_late or self._is_told()
        return self._noticed

    def _is_told(self) -> bool:
        """What the function says."""
        if self._is_due is None:
            return False
        try:
            told = bool(self._is_due())
        except Exception:
            if not self._has_failed:  # it may fail at each of a million steps
                logger.exception(
                    "the is_due= of Preemption raised an error; it is called again at each step"
                )
            self._has_failed = True
            return False
        self._has_failed = False
        return told

    def watch(self) -> None:
        """Begins to heed the signals, until :meth:`ignore` was called as often.

        Raises:
            ConfigError: If this is not the main thread, where alone Python can do so.
        """
        if self._signals and threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "only the main thread can handle signals: make the manager there, or give "
                "preemption=Preemption(signals=())"
            )
        self._watchers += 1
        self._pid = os.getpid()
        for number in self._signals:
            if number not in self._before:
                self._before[number] = signal.signal(number, self._on_signal)

    def ignore(self) -> None:
        """Sets the handlers that were there before.

        One that was set since, and calls ours, stays; ours then only passes on.
        """
        self._watchers -= 1
        if self._watchers or threading.current_thread() is not threading.main_thread():
            return
        for number, before in list(self._before.items()):
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, before if before is not None else signal.SIG_DFL)
                del self._before[number]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_elsewhere = os.getpid() != self._pid
        if self._watchers and not is_elsewhere:
            self._noticed = True
        before = self._before.get(number)
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL and (
            # a forked child must still end when its parent ends it, as multiprocessing does
            not self._watchers or (is_elsewhere and number == signal.SIGTERM)
        ):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


class Agreement:
    """Lets all ranks know at the same step what one of them has noticed.

    Schedulers signal one rank, or each at another moment, while all ranks must save the same step.
    So each step begins to ask all ranks, and the next one has their answer: nobody waits for it.
    Where steps take seconds, a step later may be too late, and a wait for the answer takes no time
    in comparison: the ranks tell each other whether their last step was long, and if it was so for
    all, they wait for the answer at once, all of them.
    """

    def __init__(self, parent: dist.ProcessGroup | None) -> None:
        """``parent``: The ranks, which get a group of their own; None if this one is alone."""
        self._group: dist.ProcessGroup | None = None
        self._asked: tuple[torch.Tensor, dist.Work | None] = _flags(told=False, is_short=True), None
        self._last: float | None = None  # when the step before was, by the monotonic clock
        if parent is not None:
            self._group = open_group(parent, start_timeout=_START, collective_timeout=_PATIENCE)

    def close(self) -> None:
        """Gives the group back; a collective that is under way is waited for."""
        if self._group is not None:
            with contextlib.suppress(RuntimeError):  # a rank that is gone is no concern any more
                self._answer()
            give_back(self._group)
            self._group = None

    def step(self, noticed: bool) -> bool:
        """Whether some rank had noticed it, at the step before or at a long one: on all the same.

        Args:
            noticed: Whether this rank has now.

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
        """Whether a rank was told, and whether the last step of one was short."""
        flags, work = self._asked
        if work is not None:
            with all_expected(None if work.is_completed() else self._group):
                work.wait()
            self._asked = flags, None
        told, is_short = flags.tolist()
        return bool(told), bool(is_short)


def _flags(*, told: bool, is_short: bool) -> torch.Tensor:
    return torch.tensor([told, is_short], dtype=torch.int32, device="cpu")
