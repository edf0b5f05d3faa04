"""Module locks, which are released in a forked child, and imports, which a fork waits for.

A child has only the thread that forked. A lock that another thread of its parent held at that
moment would stay locked in the child for good, and with it whatever the module guards. So would the
lock of a module that another thread was importing.
"""

from __future__ import annotations

import os
import threading
import weakref

__all__ = ["late_imports", "module_lock"]


def module_lock() -> threading.Lock:
    """A lock that is unlocked in a forked child; for blocks that do not fork themselves.

    It is Python's own: an interrupt (Ctrl-C) can arrive between a lock's acquisition and the block
    of a ``with`` if either is Python code, and then nobody would release it.
    """
    lock = threading.Lock()
    _all.add(lock)
    return lock


_all: weakref.WeakSet[threading.Lock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in _all:
        lock._at_fork_reinit()  # type: ignore[attr-defined] # as in threading and logging


os.register_at_fork(after_in_child=_after_fork)

late_imports = threading.RLock()
"""Held while the packages of a store are imported, on whichever thread first needs them."""

os.register_at_fork(
    before=late_imports.acquire,
    after_in_parent=late_imports.release,
    after_in_child=late_imports.release,
)
