"""Logs which ranks have not arrived at a call that all ranks of a group must make.

``if rank == 0: cloudckpt.save(...)`` would wait for the other ranks until the timeout of the
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
import itertools
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

__all__ = ["all_expected", "collective", "no_more_expected"]

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger("cloudckpt")

FIRST_LINE = 15.0
"""Seconds of waiting before the first line is logged; each further pause is twice as long."""
_MARKED_AFTER = 0.5  # seconds of waiting after which a rank is marked as waiting
_LAST_CALL = 10.0  # seconds that a call of the store may take when the interpreter ends
# ranks of one group that check for the others: each check costs a request per rank
_MOST_LOOKS = 16

_call: ContextVar[str | None] = ContextVar("cloudckpt_call", default=None)
_groups: ContextVar[tuple[dist.ProcessGroup, ...]] = ContextVar("cloudckpt_groups", default=())


def collective(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorates a collective function so that logged lines about missing ranks call it ``name``.

    In nested calls the outermost function gives the name.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            token = _call.set(_call.get() or name)
            try:
                return function(*args, **kwargs)
            finally:
                _call.reset(token)

        return call

    return decorate


@contextlib.contextmanager
def all_expected(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Watches a block that all ranks of a group must enter before any rank can leave it.

    Inside another such block of the same group, it does nothing. Outside a :func:`collective`
    function nothing is logged, as the call has no name.
    """
    groups, call = _groups.get(), _call.get()
    if group is None or call is None or group in groups:
        yield
        return
    token = _groups.set((*groups, group))
    wait = _Wait(group, call)
    try:
        yield
    finally:
        wait.over.set()
        _groups.reset(token)


class _Wait:
    """This rank's wait in an :func:`all_expected` block, and the thread that watches it.

    The thread is not started by ``Thread.start``, which would return only once it runs: the
    training loop could wait long for the GIL. It must not be in a call of torch's rendezvous store
    (C++) when the interpreter exits: ending it there ends the process by ``std::terminate``. So an
    exit handler ends it first.
    """

    def __init__(self, group: dist.ProcessGroup, call: str) -> None:
        self._group = weakref.ref(group)  # the group may be destroyed once the wait is over
        self._call = call
        self.over, self.ended = threading.Event(), threading.Event()
        if _closed.is_set():
            return
        _waits.add(self)
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError:  # the interpreter ends, or the system has no thread left
            _waits.discard(self)

    def _run(self) -> None:
        try:
            # the store is gone when the job ends; the job itself reports its failures
            with contextlib.suppress(RuntimeError, ValueError, KeyError):
                self._watch()
        finally:
            self.ended.set()
            _waits.discard(self)

    def _watch(self) -> None:
        """Marks this rank as waiting and, if the wait lasts, logs which ranks are missing."""
        began = time.monotonic()
        if self.over.wait(_MARKED_AFTER) or (group := self._group()) is None:
            return
        store, ranks = store_of_group(group), dist.get_process_group_ranks(group)
        own = dist.get_rank(group)
        del group
        if store is None:
            return
        looks, *marks = (f"cloudckpt/{self._call}/{n}" for n in ("looks", *range(len(ranks))))
        store.set(marks[own], "waits")
        try:
            pause = FIRST_LINE - _MARKED_AFTER
            while not self.over.wait(pause):
                pause = waited = time.monotonic() - began
                if len(ranks) <= _MOST_LOOKS or store.add(looks, 1) <= _MOST_LOOKS:
                    self._look(store, dict(zip(ranks, marks, strict=True)), ranks[own], waited)
        finally:
            store.delete_key(marks[own])
            store.delete_key(looks)

    def _look(self, store: Store, marks: dict[int, str], own: int, waited: float) -> None:
        missing = sorted(rank for rank, mark in marks.items() if not store.check([mark]))
        if missing and not self.over.is_set():
            logger.warning(
                "%s has waited on rank %d for %.0f s, because %s not called it. All ranks of "
                "the process group must call it; is the call inside an `if rank == 0:`? It "
                "continues when they call it, and fails at the group's time limit",
                self._call,
                own,
                waited,
                _listed(missing),
            )


def _listed(ranks: Sequence[int]) -> str:
    """Returns a text such as ``rank 3 has`` or ``ranks 1-7, 9 have``."""
    spans = []
    for _, span in itertools.groupby(enumerate(ranks), lambda numbered: numbered[1] - numbered[0]):
        (_, first), *_, (_, last) = [*span] * 2
        spans.append(str(first) if first == last else f"{first}-{last}")
    more = f" and others, {len(ranks)} in all" if len(spans) > 8 else ""
    noun, verb = ("rank", "has") if len(ranks) == 1 else ("ranks", "have")
    return f"{noun} {', '.join(spans[:8])}{more} {verb}"


_waits: set[_Wait] = set()
_closed = threading.Event()


def no_more_expected() -> None:
    """Ends all watching threads, for good; called before a process destroys its groups and ends."""
    _closed.set()
    waits = [*_waits]
    for wait in waits:
        wait.over.set()
    for wait in waits:
        wait.ended.wait(_LAST_CALL)


def _forget() -> None:
    """Drops the waits in a forked child, which has none of their threads."""
    _waits.clear()
    _closed.clear()


os.register_at_fork(after_in_child=_forget)
atexit.register(no_more_expected)
