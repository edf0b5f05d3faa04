"""Parallel tasks; the first failure stops the rest."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from cloudckpt.errors import TransferCancelledError

__all__ = ["Cancellation", "Pace", "TaskGroup"]


_PATIENCE = 0.2
"""Seconds for what was broken off to end. No wait is longer: a signal that comes between the last
look and the wait would else be handled only when the wait ends."""


class Cancellation:
    """A flag that running transfers check; see :meth:`check`."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def cancel(self) -> None:
        """Asks everything that checks this flag to stop."""
        self._event.set()

    @property
    def is_set(self) -> bool:
        """Whether it was cancelled."""
        return self._event.is_set()

    def check(self) -> None:
        """Raises TransferCancelledError once cancelled."""
        if self._event.is_set():
            raise TransferCancelledError("cancelled, because another transfer failed")

    def wait(self, seconds: float) -> None:
        """Sleeps, at most until cancelled."""
        if seconds > 0 and self._event.wait(seconds):
            self.check()


class Pace(Protocol):
    """Says how many threads a group should have while it runs."""

    @property
    def tick(self) -> float:
        """Seconds until it wants to be asked again."""

    def width(self, threads: Sequence[int], *, is_full: bool) -> int:
        """How many there should be from now on.

        Args:
            threads: The identifiers of those there are.
            is_full: Whether each of them has a task.
        """

    def ended(self) -> None:
        """Called when all tasks have ended."""


class TaskGroup:
    """Runs tasks on up to ``width`` threads; see :meth:`run`.

    ``submit`` blocks while two tasks wait, so that a producer can't run ahead of the network: what
    waits keeps memory alive.

    Attributes:
        cancellation: What running tasks look at.
        few: Lets two of the threads in at a time, for what gives the GIL away often and for short:
            more of them would mostly queue for it.
    """

    def __init__(
        self,
        width: int,
        *,
        name: str = "cloudckpt",
        most_waiting: float = 2,
        interrupt: Callable[[Collection[int]], None] = lambda threads: None,
        pace: Pace | None = None,
    ) -> None:
        """
        Args:
            width: The most threads.
            name: How they are called.
            most_waiting: How many tasks may wait for a thread before ``submit`` blocks; infinite
                for tasks that keep no memory alive, as the producer has to be woken for each one.
            interrupt: Breaks off what threads, given by their identifiers, are waiting for.
            pace: Says how many threads there should be once ``width`` of them are busy; by default
                these are the most.
        """
        self.cancellation = Cancellation()
        self.few = threading.Semaphore(2)
        self._width = width
        self._most_waiting = most_waiting
        self._name = name
        self._interrupt = interrupt
        self._pace = pace
        self._over = threading.Event()
        self._tasks: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._working = 0  # of these threads, those that carry out tasks
        self._ended = 0
        self._idle = 0
        self._closed = False
        self._is_paced = False
        self._workers: set[int] = set()
        self._error: BaseException | None = None

    def run(self, produce: Callable[[], None]) -> None:
        """Calls ``produce``, which submits tasks, and waits until all have ended.

        The first error, of a task or of ``produce``, cancels the rest and is raised when every
        thread has stopped. So does Ctrl-C whenever it strikes, except that a second one, while
        threads are stopped for the first, may leave some behind.
        """
        try:
            try:
                produce()
            except Exception as error:  # noqa: BLE001 - raised below, if it is the first
                self._fail(error)
            self._finish()
        except BaseException as interrupt:
            self._fail(interrupt)
            self._finish()
            raise
        if self._error is not None:
            raise self._error
        if self._pace is not None:
            self._pace.ended()

    def fail(self, error: BaseException) -> None:
        """Stops all, as if a task had raised this: :meth:`run` raises it, if it is the first."""
        self._fail(error)

    def submit(self, task: Callable[[], None], *, patient: bool = True) -> None:
        """Queues a task.

        Args:
            task: The task.
            patient: Whether to wait while many are queued. A task that submits another must not:
                if all did, nobody would be left to carry any out.

        Raises:
            TransferCancelledError: If an earlier task has failed.
        """
        with self._changed:
            while patient and len(self._tasks) >= self._most_waiting and self._error is None:
                self._changed.wait(_PATIENCE)
            if self._error is not None:
                self.cancellation.check()
            self._tasks.append(task)
            if self._idle >= len(self._tasks):
                self._changed.notify_all()
            elif self._working < self._width:
                self._add_worker()
                if self._pace is not None and self._working == self._width and not self._is_paced:
                    self._is_paced = True
                    self._start(self._keep_pace, "pace")

    def _add_worker(self) -> None:
        self._working += 1
        self._start(self._work, str(len(self._threads)))

    def _start(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(
            target=self._until_end, args=(work,), name=f"{self._name}-{name}", daemon=True
        )
        self._threads.append(thread)
        try:
            thread.start()
        except BaseException:  # Ctrl-C: the thread begins within moments, or never
            patience = time.monotonic() + _PATIENCE
            while thread.ident is None and time.monotonic() < patience:
                time.sleep(0.001)
            raise

    def _until_end(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            with self._changed:
                self._ended += 1
                self._changed.notify_all()

    def _work(self) -> None:
        self._workers.add(threading.get_ident())
        self._work_off()

    def _keep_pace(self) -> None:
        """Adds threads, and has others end, as the pace says, until the last of them has ended."""
        pace = self._pace
        assert pace is not None
        while not self._over.wait(pace.tick):
            with self._changed:
                workers = [*self._workers]
                is_full = not self._idle and len(workers) == self._working >= self._width
            width = pace.width(workers, is_full=is_full)
            with self._changed:
                self._width = width
                missing = min(len(self._tasks) - self._idle, width - self._working)
                for _ in range(missing if self._error is None else 0):
                    self._add_worker()

    def _work_off(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                while not self._tasks and not self._closed:
                    self._changed.wait()
                self._idle -= 1
                if not self._tasks or self._working > self._width:
                    self._workers.discard(threading.get_ident())
                    self._working -= 1
                    if self._closed and not self._working:
                        self._over.set()
                    return
                task = self._tasks.popleft()
                self._changed.notify_all()
            try:
                task()
            except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
                self._fail(error)
            del task  # its buffers must not live on while this thread waits for the next

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._error is None:
                self._error = error
            self._tasks.clear()
            self._over.set()
            self.cancellation.cancel()
            self._changed.notify_all()
        self._break_off()

    def _break_off(self) -> None:
        with self._changed:
            alive = [thread for thread in self._threads if thread.is_alive()]
        self._interrupt([thread.ident for thread in alive if thread.ident is not None])

    def _started(self) -> list[threading.Thread]:
        """Those that can be waited for: an interrupt may have prevented a start, and the garbage
        collector may end a forgotten upload in one of its own threads.
        """
        here = threading.current_thread()
        return [one for one in self._threads if one.ident is not None and one is not here]

    def _finish(self) -> None:
        with self._changed:
            self._closed = True
            if not self._working:
                self._over.set()
            self._changed.notify_all()
        # not Thread.join first: interrupted, it takes a running thread for a finished one
        while not self._has_ended():
            self._break_off()  # again: a wait may have begun since the last time
        for thread in self._started():
            thread.join()

    def _has_ended(self) -> bool:
        """Waits for the threads; after a failure, not for long."""
        with self._changed:
            while self._ended < len(self._started()):
                if not self._changed.wait(_PATIENCE) and self._error is not None:
                    return False
            return True
