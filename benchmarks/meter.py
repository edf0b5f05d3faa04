"""What one operation cost this process: wall time, CPU time of all threads, peak memory."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.counter import counted

_KIB = 1024


@dataclass(frozen=True)
class Cost:
    """The cost of one operation."""

    wall_s: float
    cpu_s: float
    """User and system seconds of this process, native threads included, and of ended children."""
    extra_memory: int
    """Bytes: peak resident memory during the operation less resident memory just before."""
    futex_calls: int | None = None
    """Calls that wait for a lock or wake who does; None where they can't be counted."""


def measure(operation: Callable[[], None]) -> Cost:
    """Runs `operation` once and returns its cost.

    Peak memory is the kernel's own high-water mark, set back to the present by writing 5 to
    ``/proc/self/clear_refs`` (proc(5)), so nothing samples while the operation runs.
    """
    gc.collect()
    resident = start_high_water()
    cpu, wall = cpu_seconds(), time.perf_counter()
    with counted("futex") as futex:
        operation()
        wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
    return Cost(wall, cpu, max(0, high_water() - resident), futex.count)


def start_high_water() -> int:
    """Sets the high-water mark of resident memory to the present, which it returns, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def high_water() -> int:
    """The most resident memory since :func:`start_high_water`, in bytes."""
    return _status("VmHWM")


def cpu_seconds() -> float:
    """User and system seconds of this process, and of its children that have ended."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * _KIB
    raise RuntimeError(f"/proc/self/status has no {field}")
