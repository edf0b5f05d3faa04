"""Reports which ranks have not arrived at a call that all ranks of a group must make.

``if rank == 0: cloudckpt.save(...)`` would wait for the other ranks until the time limit of the
process group, half an hour by default, and then fail with a network error. So after 15 s the
waiting ranks log which ranks they wait for.

The waiting ranks are recorded in the store through which the group's ranks met. A rank puts its
mark there only after waiting for a while, from a separate thread, and removes it when the wait is
over: a call to which all ranks come in time makes no request to the store.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from cloudckpt.checkpoint.torch_private import Store, store_of_group
from cloudckpt.fork import module_lock

__all__ = ["all_expected", "collective", "no_more_expected"]

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger("cloudckpt")

FIRST_LINE = 15.0
"""Seconds of waiting before the first line is logged; each further pause is twice as long."""
_TICK = 0.5  # seconds between two looks of the thread; a rank that has waited for one is marked
_LAST_CALL = 10.0  # seconds that a call of the store may take when the interpreter ends
_MOST_LOOKS = 64  # ranks of one group that look for the others: a look costs a request a rank

_call: ContextVar[str | None] = ContextVar("cloudckpt_call", default=None)
_groups: ContextVar[tuple[dist.ProcessGroup, ...]] = ContextVar("cloudckpt_groups", default=())


def collective(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Names a function ``name`` in messages about ranks that have not called it.

    In nested calls the outermost function gives the name.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if _call.get() is not None:
                return function(*args, **kwargs)
            token = _call.set(name)
            try:
                return function(*args, **kwargs)
            finally:
                _call.reset(token)

        return call

    return decorate


@contextlib.contextmanager
def all_expected(group: dist.ProcessGroup | None) -> Iterator[None]:
    """A block that all ranks of a group enter, and that this one can't leave before they have.

    Inside another such block of the same group it is part of that block. Outside a
    :func:`collective` function nothing is logged: the caller has no name for the call.
    """
    groups, call = _groups.get(), _call.get()
    if group is None or call is None or group in groups:
        yield
        return
    token = _groups.set((*groups, group))
    wait = _Wait(group, call)
    _watcher.begin(wait)
    try:
        yield
    finally:
        _watcher.end(wait)
        _groups.reset(token)


class _Wait:
    """One rank in one such block."""

    def __init__(self, group: dist.ProcessGroup, call: str) -> None:
        self.is_marked = False
        self._group = weakref.ref(group)  # it may be destroyed once the wait is over
        self._call = call
        self._began = time.monotonic()
        self._due = FIRST_LINE

    def look(self) -> None:
        """Marks this rank as waiting and, if that lasts, logs for which ranks; on the watcher."""
        waited, group = time.monotonic() - self._began, self._group()
        if waited < _TICK or group is None or (store := store_of_group(group)) is None:
            return
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if not self.is_marked:
            store.set(self._key(rank), "waits")
            self.is_marked = True
        if waited < self._due:
            return
        self._due *= 2
        if size > _MOST_LOOKS and store.add(self._key("looks"), 1) > _MOST_LOOKS:
            return  # enough other ranks log it
        if missing := _missing(store, [self._key(rank) for rank in range(size)], 0):
            logger.warning("%s", self._message(group, waited, missing))

    def forget(self) -> None:
        """Takes the mark away."""
        group = self._group()
        if group is not None and (store := store_of_group(group)) is not None:
            store.delete_key(self._key(dist.get_rank(group)))
            if dist.get_world_size(group) > _MOST_LOOKS:
                store.delete_key(self._key("looks"))

    def _key(self, rank: int | str) -> str:
        return f"cloudckpt/{self._call}/{rank}"

    def _message(self, group: dist.ProcessGroup, waited: float, missing: Sequence[int]) -> str:
        own = dist.get_global_rank(group, dist.get_rank(group))
        others = sorted(dist.get_global_rank(group, rank) for rank in missing)
        have = "has" if len(others) == 1 else "have"
        return (
            f"{self._call} has waited on rank {own} for {waited:.0f} s: {_listed(others)} {have} "
            "not called it. All ranks of the process group must call it; is the call inside an "
            "`if rank == 0:`? It continues when they arrive, and fails at the group's time limit"
        )


def _missing(store: Store, keys: Sequence[str], first: int) -> list[int]:
    """The numbers of the missing keys, where keys are numbered from ``first`` on."""
    if store.check(list(keys)):
        return []
    if len(keys) == 1:
        return [first]
    half = len(keys) // 2
    return _missing(store, keys[:half], first) + _missing(store, keys[half:], first + half)


def _listed(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 1-7, 9``."""
    spans: list[tuple[int, int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1] = spans[-1][0], rank
        else:
            spans.append((rank, rank))
    texts = [str(start) if start == end else f"{start}-{end}" for start, end in spans]
    more = f" and others, {len(ranks)} in all" if len(texts) > 8 else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(texts[:8]) + more


class _Watcher:
    """A thread that looks at the waits of this process; it ends when there are none.

    Unlike ``Thread.start``, starting it does not wait until it runs: the training loop starts it
    and could wait long for the GIL.

    It must not be in a call of the store when the interpreter exits: ending the thread within C++
    frames ends the process by ``std::terminate``. So it is ended before that, at exit.
    """

    def __init__(self) -> None:
        self._lock = module_lock()
        self._waits: list[_Wait] = []
        self._over: list[_Wait] = []  # whose marks are to be removed
        self._is_looking = False  # whether there is a thread that will look again
        self._ends: list[threading.Event] = []  # of threads that may not have ended yet
        self._pid = os.getpid()
        self._closing = threading.Event()

    def begin(self, wait: _Wait) -> None:
        with self._lock:
            if self._pid != os.getpid():  # those are of the process that forked
                self._waits, self._over, self._ends, self._is_looking = [], [], [], False
                self._closing = threading.Event()
                self._pid = os.getpid()
            self._waits.append(wait)
            if not self._is_looking and not self._closing.is_set():
                ended = threading.Event()
                with contextlib.suppress(RuntimeError):  # the interpreter ends
                    _thread.start_new_thread(self._run, (ended,))
                    self._is_looking = True
                    self._ends = [one for one in self._ends if not one.is_set()] + [ended]

    def end(self, wait: _Wait) -> None:
        with self._lock:
            if wait in self._waits:
                self._waits.remove(wait)
                self._over.append(wait)

    def close(self) -> None:
        """Ends the thread for good."""
        with self._lock:
            self._closing.set()
            ends = list(self._ends) if self._pid == os.getpid() else []
        for ended in ends:
            ended.wait(_LAST_CALL)

    def _run(self, ended: threading.Event) -> None:
        try:
            while not self._closing.wait(_TICK) and self._look():
                pass
        finally:
            ended.set()

    def _look(self) -> bool:
        """Looks at all waits; returns whether to look again."""
        with self._lock:
            waits = list(self._waits)
            over, self._over = self._over, []
            if not waits and not any(wait.is_marked for wait in over):
                self._is_looking = False
                return False
        marked = [wait.forget for wait in over if wait.is_marked]
        for act in [*marked, *(wait.look for wait in waits)]:
            # the store is gone when the job ends; the job itself reports its failures
            with contextlib.suppress(RuntimeError, ValueError, KeyError):
                act()
        return True


_watcher = _Watcher()
atexit.register(_watcher.close)


def no_more_expected() -> None:
    """Looks at no group any more, for good: a process calls it before it destroys them and ends."""
    _watcher.close()
