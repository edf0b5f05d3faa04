"""Locks of modules: free in a forked child, and never left behind by Ctrl-C."""

import os
import sys

from cloudckpt.fork import module_lock

_LOCK = module_lock()


def _take() -> bool:
    return _LOCK.acquire(blocking=False)


def test_a_forked_child_does_not_inherit_a_lock_that_is_held():
    with _LOCK:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if _take() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not _LOCK.locked()


def test_no_python_code_runs_between_the_acquisition_and_the_block():
    """An interrupt of such code would leave the lock acquired, and nobody would release it."""
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(event == "call"))
    try:
        with _LOCK:
            pass
    finally:
        sys.setprofile(None)
    assert not any(calls)
