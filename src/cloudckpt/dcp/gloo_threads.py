"""Lets gloo's threads finish before the interpreter ends.

A thread of gloo reports to the trainer that a collective is complete, and releases its tensors
afterwards. For that it needs the GIL. If the interpreter begins to end while the thread waits for
it, Python (before 3.14) ends the thread there; that is within a destructor of C++, so the whole
process ends by ``std::terminate``: "terminate called without an active exception", and SIGABRT in a
job whose last save is committed. On a busy machine a thread may well get no CPU for that long.

So the end of the interpreter waits until these threads are idle. A group that was destroyed before
has no threads: its destruction waits for them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

__all__ = ["let_finish"]

_NAME = "pt_gloo_runloop"  # the name of the threads that carry out gloo's collectives
_TASKS = "/proc/self/task"
_PAUSE = 0.01
_LONGEST = 10.0


def let_finish() -> None:
    """Waits up to 10 s until all of gloo's threads are idle or wait for other ranks.

    A thread counts as idle if it sleeps, and did not run while the GIL was free for a moment.
    """
    until = time.monotonic() + _LONGEST
    before: list[tuple[str, ...]] = []
    while (now := [*_threads()]) and time.monotonic() < until:
        if now == before and all(state == "S" for _, state, *_ in now):
            return
        before = now
        time.sleep(_PAUSE)


def _threads() -> Iterator[tuple[str, ...]]:
    """Yields, for each thread of gloo, its number, its state, and its counts of context switches.

    On systems other than Linux, it yields nothing.
    """
    try:
        numbers = os.listdir(_TASKS)
    except OSError:
        return
    for number in numbers:
        try:
            with open(f"{_TASKS}/{number}/status", encoding="utf-8", errors="replace") as file:
                fields = dict(line.split(":", 1) for line in file if ":" in line)
        except OSError:  # the thread has ended
            continue
        if fields["Name"].strip() == _NAME:
            switches = fields["voluntary_ctxt_switches"], fields["nonvoluntary_ctxt_switches"]
            yield number, fields["State"].split()[0], *map(str.strip, switches)
