"""Threads that wait for a store, so that an event loop does not."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from cloudckpt.fork import module_lock
from cloudckpt.transfer.view import View

__all__ = ["asked", "in_thread"]

T = TypeVar("T")

_AT_ONCE = 8
"""Questions to a bucket at a time. Each takes a millisecond or more of the GIL, for which the loop
queues behind all threads: with 16, its longest wait was twice as long and answers hardly faster."""


class _Threads:
    """Up to ``most`` daemon threads: started when calls wait, ended when none is left.

    The executors of the standard library keep their threads, do not survive a fork, and have the
    interpreter wait for them when it ends, for minutes if a network is silent.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._running = 0
        self._free = 0  # of those that run: about to look for a call

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Has ``call`` made as soon as a thread is free, unless it is cancelled before."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.append(partial(_make, call, future))
            is_missing = self._counts_another()
        if is_missing:
            try:
                self._start()
            except RuntimeError:  # no more can be had: those that are busy do it later
                if not self._running:
                    raise
        return future

    def _counts_another(self) -> bool:
        """Whether a thread is to be started, which is counted already."""
        is_missing = not self._free and self._running < self._most
        self._running += is_missing
        self._free += is_missing
        return is_missing

    def _start(self) -> None:
        try:
            threading.Thread(target=self._work, name="cloudckpt-aio", daemon=True).start()
        except BaseException:
            with self._lock:
                self._running -= 1
                self._free -= 1
            raise

    def _work(self) -> None:
        while True:
            with self._lock:
                self._free -= 1
                if not self._waiting:
                    self._running -= 1
                    return
                make = self._waiting.popleft()
                is_missing = bool(self._waiting) and self._counts_another()
            if is_missing:  # not from the loop: it would wait for each of many threads to begin
                with contextlib.suppress(RuntimeError):
                    self._start()
            make()
            del make  # nothing is kept alive by a thread that waits
            with self._lock:
                self._free += 1


def _make(call: Callable[[], T], future: Future[T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised where it is awaited
        future.set_exception(error)


_all: dict[tuple[object, ...], _Threads] = {}
_lock = module_lock()


def _threads(most: float, *purpose: object) -> _Threads:
    """Those for one purpose in this process: a fork has none of its parent's."""
    with _lock:
        return _all.setdefault((os.getpid(), most, *purpose), _Threads(most))


async def asked(view: View, question: Callable[[View], T], *, is_wide: bool = False) -> T:
    """What a thread finds by asking a store. If the caller is cancelled, the thread stops at once.

    A process asks a bucket up to eight questions at a time, or fewer if ``config.connections`` says
    so; beside them one that ``is_wide``, which sends several requests at a time itself.
    """
    config = view.config
    most = 1 if is_wide else min(_AT_ONCE, config.requests_at_once)
    threads = _threads(most, view.location.root, config)
    return await _awaited(threads.submit(partial(question, view)), view.cancel)


async def in_thread(call: Callable[..., T], *args: Any, **options: Any) -> T:
    """What ``call`` returns in a thread of its own, which goes on if the caller is cancelled."""
    return await _awaited(_threads(math.inf).submit(partial(call, *args, **options)), lambda: None)


async def _awaited(future: Future[T], cancel: Callable[[], None]) -> T:
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        cancel()
        raise
