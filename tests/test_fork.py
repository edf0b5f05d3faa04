"""Locks of modules: free in a forked child, and never left behind by Ctrl-C."""

import sys

from cloudckpt.fork import module_lock
from dcp.children import in_a_child

_LOCK = module_lock()


def test_a_forked_child_does_not_inherit_a_lock_that_is_held():
    with _LOCK:
        assert in_a_child("fork", _LOCK.acquire, False)
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
