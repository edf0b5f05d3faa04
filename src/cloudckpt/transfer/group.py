"""Runs tasks on threads in parallel; the first failure stops the rest."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol, TypeVar

from cloudckpt.errors import TransferCancelledError

__all__ = ["Cancellation", "Pace", "TaskGroup"]

S = TypeVar("S")
T = TypeVar("T")

_PATIENCE = 0.2
"""The longest single wait in seconds; a longer wait is divided.

A signal that arrives just before a wait would be handled only after the wait.
"""


class Cancellation:
    """A flag that asks running transfers to stop; see :meth:`check`."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def cancel(self) -> None:
        """Asks everything that checks this flag to stop."""
        self._event.set()

    @property
    def is_set(self) -> bool:
        """Whether :meth:`cancel` was called."""
        return self._event.is_set()

    def check(self) -> None:
        """Raises TransferCancelledError if :meth:`cancel` was called."""
        if self._event.is_set():
            why = "the transfer was stopped by the failure of another transfer, or by an interrupt"
            raise TransferCancelledError(why)

    def wait(self, seconds: float) -> None:
        """Sleeps for `seconds`; raises TransferCancelledError as soon as cancelled.

        If `seconds` is 0, it neither sleeps nor raises.
        """
        if seconds > 0 and self._event.wait(seconds):
            self.check()


class Pace(Protocol):
    """Determines how many threads a group should have while it runs."""

    @property
    def tick(self) -> float:
        """Seconds until `width` should be called again."""

    def width(self, threads: Sequence[int], *, is_full: bool) -> int:
        """Returns the number of threads that the group should have from now on.

        Args:
            threads: The identifiers of the present threads.
            is_full: Whether each of them has a task.
        """

    def ended(self) -> None:
        """Called after all tasks have ended without an error."""


class TaskGroup:
    """Runs tasks on several threads; see :meth:`run`.

    `submit` blocks while `most_waiting` tasks are queued, so that a producer can't run
    ahead of the network: queued tasks keep memory alive.

    Attributes:
        cancellation: The flag that running tasks should check.
        few: A semaphore that admits two threads at a time, for work that releases the GIL often and
            briefly: more threads would mostly wait for the GIL.
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
        """Prepares a group; threads start when tasks are submitted.

        Args:
            width: The most threads; with ``pace``, the most to begin with.
            name: The beginning of the threads' names.
            most_waiting: How many tasks may be queued before ``submit`` blocks; pass infinity for
                tasks that keep no memory alive, so that the producer need not be woken for each.
            interrupt: Interrupts the network waits of threads, given their identifiers.
            pace: Determines the number of threads once ``width`` of them are busy; None to keep it.
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
        self._working = 0  # threads that run tasks
        self._ended = 0
        self._idle = 0
        self._closed = False
        self._is_paced = False
        self._workers: set[int] = set()
        self._error: BaseException | None = None

    def run(self, produce: Callable[[], None]) -> None:
        """Calls `produce`, which submits tasks, and waits until all tasks have ended; call it once.

        The first error, of a task or of `produce`, cancels the rest and is raised when every thread
        has stopped. The same holds for Ctrl-C at any time, except that a second one, while threads
        are being stopped, may leave some running.
        """
        try:
            try:
                produce()
            except Exception as error:  # noqa: BLE001 - raised below, if it is the first
                self.fail(error)
            self._finish()
        except BaseException as interrupt:
            self.fail(interrupt)
            self._finish()
            raise
        if self._error is not None:
            raise self._error
        if self._pace is not None:
            self._pace.ended()

    def map(self, task: Callable[[S], T], wanted: Iterable[S]) -> list[T]:
        """Returns the results of `task` for each of `wanted`, in their order; see :meth:`run`."""
        results: dict[int, T] = {}

        def keep(index: int, one: S) -> None:
            results[index] = task(one)

        def produce() -> None:
            for index, one in enumerate(wanted):
                self.submit(functools.partial(keep, index, one))

        self.run(produce)
        return [results[index] for index in sorted(results)]

    def submit(self, task: Callable[[], None]) -> None:
        """Queues a task; tasks begin in the order in which they were submitted.

        A task must not submit another: if all waited to do so, no thread would be left to run any.

        Raises:
            TransferCancelledError: If a task has failed, or :meth:`fail` was called.
        """
        with self._changed:
            while len(self._tasks) >= self._most_waiting and self._error is None:
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
        except BaseException:  # Ctrl-C: the thread starts within moments, or never
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

    def _keep_pace(self) -> None:
        """Adjusts the number of threads to what `pace` returns, until the group has ended."""
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

    def _work(self) -> None:
        self._workers.add(threading.get_ident())
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
            except BaseException as error:  # noqa: BLE001 - run() raises it
                self.fail(error)
            del task  # releases the task's buffers while this thread waits for the next

    def fail(self, error: BaseException) -> None:
        """Stops all tasks, as if a task had raised `error`; :meth:`run` raises the first error."""
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
        """Returns the threads that can be joined: those started, except the current one.

        Ctrl-C may have kept a thread from starting. The current thread may be one of the group if
        the garbage collector ends a forgotten upload.
        """
        here = threading.current_thread()
        return [one for one in self._threads if one.ident is not None and one is not here]

    def _finish(self) -> None:
        with self._changed:
            self._closed = True
            if not self._working:
                self._over.set()
            self._changed.notify_all()
        # not Thread.join at first: if interrupted, it takes a running thread for a finished one
        while not self._has_ended():
            self._break_off()  # repeated, as a wait may have begun since
        for thread in self._started():
            thread.join()

    def _has_ended(self) -> bool:
        """Waits for the threads (only briefly after a failure); returns whether all ended."""
        with self._changed:
            while self._ended < len(self._started()):
                if not self._changed.wait(_PATIENCE) and self._error is not None:
                    return False
            return True
