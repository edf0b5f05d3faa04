"""Module locks, which are released in a forked child, and imports, which a fork waits for.

A child has only the thread that forked. A lock that another thread of its parent held at that
moment would stay locked in the child for good, and with it whatever the module guards. So would the
lock of a module that another thread was importing.
"""

from __future__ import annotations

import os
import threading
import weakref

__all__ = ["ModuleLock", "late_imports"]


class ModuleLock:
    """A lock that is replaced in a forked child; for blocks that do not fork themselves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _all.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Replaces the lock with an unlocked one."""
        self._lock = threading.Lock()


_all: weakref.WeakSet[ModuleLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in _all:
        lock.renew()


os.register_at_fork(after_in_child=_after_fork)

late_imports = threading.RLock()
"""Held while the packages of a store are imported, on whichever thread first needs them."""

os.register_at_fork(
    before=late_imports.acquire,
    after_in_parent=late_imports.release,
    after_in_child=late_imports.release,
)
