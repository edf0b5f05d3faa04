"""What tells a job that it is about to be ended, and lets all ranks hear of it at the same step."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from cloudckpt.background.groups import give_back, open_group
from cloudckpt.errors import ConfigError, ProcessGroupError

__all__ = ["Agreement", "Preemption"]

_PATIENCE = 600.0  # seconds in which all ranks come to a step that one has reached


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
                called at each step, and must not wait.
            deadline: When to save for the last time, in seconds since 1970: the end of the job
                less the time that a save takes.
        """
        self._signals = tuple(signals)
        self._is_due = is_due
        self._deadline = deadline
        self._noticed = threading.Event()
        self._before: dict[int, Any] = {}

    @property
    def noticed(self) -> bool:
        """Whether this rank has been told, as far as it knows by itself; never False again."""
        if not self._noticed.is_set():
            late = self._deadline is not None and time.time() >= self._deadline
            if late or (self._is_due is not None and self._is_due()):
                self._noticed.set()
        return self._noticed.is_set()

    def watch(self) -> None:
        """Begins to heed the signals.

        Raises:
            ConfigError: If this is not the main thread, where alone Python can do so.
        """
        if not self._signals or self._before:
            return
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "signals can only be heeded by the main thread: make the manager there, or give "
                "preemption=Preemption(signals=())"
            )
        for number in self._signals:
            self._before[number] = signal.signal(number, self._on_signal)

    def ignore(self) -> None:
        """Sets the handlers that were there before."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._noticed.set()
        before = self._before.get(number)
        if callable(before):
            before(number, frame)


class Agreement:
    """Lets all ranks know at the same step what one of them has noticed.

    Schedulers signal one rank, or each at another moment, while all ranks must save the same step.
    So each step begins to ask all ranks, and the next one has their answer: nobody waits for it.
    """

    def __init__(self, parent: dist.ProcessGroup | None) -> None:
        """``parent``: The ranks, which get a group of their own; None if this one is alone."""
        self._parent = parent
        self._group: dist.ProcessGroup | None = None
        self._asked: tuple[torch.Tensor, dist.Work | None] | None = None
        if parent is not None:
            self._group = open_group(parent, start_timeout=_PATIENCE, collective_timeout=_PATIENCE)

    def close(self) -> None:
        """Gives the group back; a collective that is under way is waited for."""
        if self._group is not None:
            with contextlib.suppress(RuntimeError):  # a rank that is gone is no concern any more
                self._answer()
            give_back(self._group)
            self._group = None

    def step(self, noticed: bool) -> bool:
        """Whether some rank had noticed it at the step before; the same on all ranks.

        Args:
            noticed: Whether this rank has now.

        Raises:
            ProcessGroupError: If the ranks lost each other.
        """
        if self._group is None:
            return noticed
        try:
            heard = self._answer()
            flag = torch.tensor([int(noticed or heard)], dtype=torch.int32, device="cpu")
            work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
        except RuntimeError as exc:
            raise ProcessGroupError(
                "the ranks did not tell each other whether the job is about to end: look which one "
                "ended first and why",
                cause=exc,
            ) from exc
        self._asked = flag, work
        return heard

    def _answer(self) -> bool:
        if self._asked is None:
            return False
        flag, work = self._asked
        if work is not None:
            work.wait()
        return bool(flag.item())
