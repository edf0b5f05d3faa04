"""Locks of a module, which a forked child finds open.

A child has only the thread that forked. A lock that another thread of its parent held at that
moment would stay locked in it for good, and with it whatever the module guards.
"""

from __future__ import annotations

import os
import threading
import weakref

__all__ = ["ModuleLock"]


class ModuleLock:
    """A lock that is made anew in a forked child; for blocks that do not fork themselves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _all.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Forgets who holds it."""
        self._lock = threading.Lock()


_all: weakref.WeakSet[ModuleLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in _all:
        lock.renew()


os.register_at_fork(after_in_child=_after_fork)
