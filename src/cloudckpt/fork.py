"""Locks and imports that are safe to use when the process forks.

A forked child has only the thread that forked. A lock that another thread of its parent held at
that moment would stay locked in the child forever, and so would the lock of a module that another
thread was importing. So module locks are reset in the child, and a fork waits for imports.
"""

from __future__ import annotations

import os
import threading
import weakref

__all__ = ["late_imports", "module_lock"]


def module_lock() -> threading.Lock:
    """Returns a lock that is always unlocked in a forked child; code that holds it must not fork.

    It is one of Python's own locks: with a lock implemented in Python code, an interrupt (Ctrl-C)
    could arrive between its acquisition and the ``with`` block, and it would never be released.
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
"""Held while packages are imported on first use, on any thread; a fork waits for it."""

os.register_at_fork(
    before=late_imports.acquire,
    after_in_parent=late_imports.release,
    after_in_child=late_imports.release,
)
