"""Detects that a job is about to end, and makes all ranks learn it at the same step."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from cloudckpt.background.groups import give_back, open_group
from cloudckpt.config import whole_number
from cloudckpt.dcp.meeting import all_expected
from cloudckpt.errors import ConfigError, ProcessGroupError

__all__ = ["Agreement", "Preemption"]

logger = logging.getLogger("cloudckpt")

_START = 600.0  # seconds in which all ranks must join the creation of the group
_PATIENCE = 1800.0  # seconds that a rank waits in a collective for the others, as in torch
_TOGETHER = 0.3  # seconds in which two signals of one number, from two senders, count as one
_LONG = 1.0  # seconds; after steps of this length, waiting for a collective costs little


class Preemption:
    """Detects that this job is about to end, by a signal, a function or a deadline.

    Pass it to a :class:`CheckpointManager` as ``preemption``: when any rank has detected the end,
    all ranks save a last time at the same step.
    """

    def __init__(
        self,
        *,
        signals: Sequence[int] = (signal.SIGTERM,),
        is_due: Callable[[], bool] | None = None,
        deadline: float | None = None,
    ) -> None:
        """
        Args:
            signals: The signals that announce the end of the job; may be empty. A handler that was
                set before is called, too. Without such a handler the first signal does not end the
                process: the training loop has to end it; a second signal ends it. Outside of the
                main thread no signal is handled, and a warning is logged.
            is_due: A function that returns whether the job is about to end, for example by the
                instance's metadata; None for no function. It is called at each step, and must not
                block. If it raises, it is called again at the next step; only the first error is
                logged.
            deadline: When to save for the last time, in seconds since 1970: the end of the job
                minus the duration of a save. None: the job has no deadline.

        Raises:
            ConfigError: If an argument has a wrong type, or a signal can't be handled.
        """
        self._signals = tuple(signals) if isinstance(signals, Iterable) else (None,)  # refused
        possible = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
        are_possible = all(whole_number(number) in possible for number in self._signals)
        after_epoch: object = deadline
        is_time = isinstance(after_epoch, Real) and not math.isnan(after_epoch)
        for name, given, fits, instead in (
            ("signals", signals, are_possible, "a list of signals that a process can handle"),
            ("is_due", is_due, is_due is None or callable(is_due), "a function"),
            ("deadline", deadline, deadline is None or is_time, "seconds since 1970"),
        ):
            if not fits:
                raise ConfigError(f"Preemption({name}={given!r}): give {instead}")
        self._is_due = is_due
        self._deadline = deadline
        # not guarded by a lock: a signal handler would wait for the code that it interrupts
        self._noticed = False
        self._has_failed = False

    @property
    def noticed(self) -> bool:
        """Whether this rank has detected that the job is about to end; never False after True."""
        if not self._noticed:
            is_late = self._deadline is not None and time.time() >= self._deadline
            self._noticed = is_late or self._calls_is_due()
        return self._noticed

    def _calls_is_due(self) -> bool:
        """Calls the ``is_due`` function; False if it is missing or raises, which is logged once."""
        try:
            return self._is_due is not None and bool(self._is_due())
        except Exception:
            if not self._has_failed:  # it may fail at every step
                logger.exception(
                    "the is_due function of Preemption raised an error; it is called again at "
                    "each step, but its further errors are not logged"
                )
            self._has_failed = True
            return False

    def watch(self) -> None:
        """Sets handlers of the signals; each call has to be undone by one call of :meth:`ignore`.

        Outside of the main thread, where Python can't set handlers, it logs a warning instead.
        """
        if self._signals and threading.current_thread() is not threading.main_thread():
            logger.warning(
                "signals that announce the end of the job are not noticed, as only the main thread "
                "can handle them: create the manager there and save there, or pass "
                "Preemption(signals=[], is_due=...) or deadline=..."
            )
            return
        for number in self._signals:
            _handled.setdefault(number, _Signal(number)).watch(self)

    def ignore(self) -> None:
        """Undoes one call of :meth:`watch`; does nothing without such a call.

        When no object watches a signal any more, the signal's previous handler is restored. This is
        not possible outside of the main thread, or if the program has set another handler since:
        the handler of this class then stays, and only calls the previous one.
        """
        for number in self._signals:
            if number in _handled:
                _handled[number].ignore(self)

    def notice(self) -> None:
        """Records that the job is about to end."""
        self._noticed = True


class _Signal:
    """One signal of this process, with one handler for all objects that watch the signal."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._watchers: list[Preemption] = []
        self._before: list[Any] = []  # the handlers that ours replaced, in the order of watch()
        self._depth = 0  # how many of them are running: each may itself call ours
        self._first: float | None = None  # when the signal came first, by the monotonic clock
        self._pid = os.getpid()

    def watch(self, watcher: Preemption) -> None:
        """Adds a watcher, and sets the handler unless it is the current one."""
        if os.getpid() != self._pid:
            self._watchers, self._pid = [], os.getpid()
        if not self._watchers:
            self._first = None
        before = signal.getsignal(self._number)
        if before != self._on_signal:
            signal.signal(self._number, self._on_signal)
            self._before.append(before if before is not None else signal.SIG_DFL)
        self._watchers.append(watcher)

    def ignore(self, watcher: Preemption) -> None:
        """Removes a watcher; if it was the last one, restores the previous handler if possible."""
        if watcher not in self._watchers:
            return
        self._watchers.remove(watcher)
        is_set = signal.getsignal(self._number) == self._on_signal
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and is_set and not self._watchers:
            signal.signal(self._number, self._before.pop())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Tells the watchers that the job is about to end, and calls the previous handler.

        If the previous handler is the default one, a second signal ends the process. The first
        signal ends the process if no watcher is left, or in a forked child if it is SIGTERM.
        """
        is_elsewhere, is_second = os.getpid() != self._pid, False
        if self._watchers and not is_elsewhere:
            for watcher in self._watchers:
                watcher.notice()
            self._first = time.monotonic() if self._first is None else self._first
            is_second = time.monotonic() - self._first > _TOGETHER
        older = self._before[: len(self._before) - self._depth]
        before = older[-1] if older else signal.SIG_IGN
        if callable(before):
            self._depth += 1
            try:
                before(number, frame)
            finally:
                self._depth -= 1
        elif before == signal.SIG_DFL and (
            # SIGTERM must still end a forked child, as multiprocessing expects
            not self._watchers or is_second or (is_elsewhere and number == signal.SIGTERM)
        ):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


_handled: dict[int, _Signal] = {}


class Agreement:
    """Combines two flags of all ranks once a step: the job is about to end, and a save is due.

    Schedulers signal a single rank, or the ranks at different times, but all ranks must save the
    same step. So each step starts an all-reduce of the flags, and the next step uses the result: no
    rank waits. If steps take more than a second on all ranks, the next step may be too late, and a
    wait is short in comparison: then all ranks wait for the result in the same step. For that, the
    all-reduce also has a flag for a short step.
    """

    def __init__(self, parent: dist.ProcessGroup | None) -> None:
        """Opens a new process group for the ranks of ``parent``, if that is not None.

        ``parent`` is None if this rank is alone.
        """
        self._group: dist.ProcessGroup | None = None
        # what the ranks know: whether the job ends, a save is due, and a rank's last step was short
        self._known = (False, False, True)
        self._asked: tuple[torch.Tensor, dist.Work] | None = None  # the collective in progress
        self._last: float | None = None  # time of the previous step, by the monotonic clock
        if parent is not None:
            self._group = open_group(parent, start_timeout=_START, collective_timeout=_PATIENCE)

    def close(self) -> None:
        """Waits for a collective in progress, and releases the process group."""
        if self._group is not None:
            with contextlib.suppress(RuntimeError):  # another rank may have ended before
                self._answer()
            give_back(self._group)
            self._group = None

    def step(self, noticed: bool, is_due: bool = False) -> tuple[bool, bool]:
        """Passes on this rank's flags; returns which flags any rank has set, the same on all ranks.

        The result has the flags of the previous step; after steps that took more than a second on
        all ranks, also those of this step. A rank that is alone gets its own flags of this step.

        Args:
            noticed: Whether this rank has detected that the job is about to end. Once a rank has
                passed True, the result stays True.
            is_due: Whether a save is due on this rank; pass True in one step only.

        Returns:
            Whether the job is about to end, and whether a save is due.

        Raises:
            ProcessGroupError: If the ranks lost contact with each other.
        """
        if self._group is None:
            return noticed, is_due
        now, last = time.monotonic(), self._last
        self._last = now
        try:
            is_ending, due, some_are_short = self._answer()
            is_short = last is None or now - last < _LONG
            given = [noticed or is_ending, is_due, is_short]
            flags = torch.tensor(given, dtype=torch.int32, device="cpu")
            work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group, async_op=True)
            self._asked = flags, work
            if not some_are_short:
                is_ending, due_now, is_short = self._answer()
                due = due or due_now
                # a due save was returned in this step, so the next one must not return it again
                self._known = is_ending, False, is_short
        except RuntimeError as exc:
            raise ProcessGroupError(
                "the ranks lost contact while they agreed whether the job is about to end: "
                "find out which rank ended first and why",
                cause=exc,
            ) from exc
        return is_ending, due

    def _answer(self) -> tuple[bool, bool, bool]:
        """Waits for the collective in progress, if there is one.

        Returns:
            The result of the last collective: whether the job is about to end, whether a save is
            due, and whether the last step of some rank was short.
        """
        if self._asked is not None:
            flags, work = self._asked
            with all_expected(None if work.is_completed() else self._group):
                work.wait()
            is_ending, is_due, is_short = flags.tolist()
            self._known, self._asked = (bool(is_ending), bool(is_due), bool(is_short)), None
        return self._known
