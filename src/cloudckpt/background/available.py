"""How much memory is left to this process: what the machine has, and what its cgroups allow.

Staged copies count against both: shared memory of a memfd is charged to the cgroup of the process
that touches it first, and a cgroup beyond its limit has a process killed instead of told.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

__all__ = ["available_memory"]

_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def available_memory(root: str = "/") -> int | None:
    """Bytes that can be had without swapping, or None if nothing is known.

    A file that can't be read, or says something unexpected, limits nothing.

    Args:
        root: Where ``proc`` and ``sys`` are.
    """
    known = [_of_machine(_read(root, "proc/meminfo"))]
    for folder, names in _cgroups(_read(root, "proc/self/cgroup")):
        limit, used = (_read(root, folder, name) for name in names[:2])
        known.append(_of_cgroup(limit, used, _read(root, folder, "memory.stat"), names[2]))
    return min((size for size in known if size is not None), default=None)


def _cgroups(memberships: str) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """The folders of the cgroups that this process is in, and how their files are called.

    In a container, a cgroup's folder may be mounted as the root, so that its path leads nowhere;
    its ancestors' paths end at that root.
    """
    for line in memberships.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, names = ("sys/fs/cgroup/memory", _V1) if controllers else ("sys/fs/cgroup", _V2)
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for count in range(len(parts), -1, -1):
            yield os.path.join(mount, *parts[:count]), names


def _of_machine(meminfo: str) -> int | None:
    kib = _numbers(meminfo).get("MemAvailable:")
    return None if kib is None else kib * 1024


def _of_cgroup(limit: str, used: str, stat: str, reclaimable: str) -> int | None:
    """What is left of a limit; pages of files that nobody has used lately make room."""
    files = _numbers(stat).get(reclaimable)
    if files is None or not (limit.strip().isdigit() and used.strip().isdigit()):
        return None  # "max" is no limit
    return max(0, int(limit) - int(used) + files)


def _numbers(text: str) -> dict[str, int]:
    """The second word of each line, where it is a number, by the first."""
    words = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) > 1 and pair[1].isdigit()}


def _read(*parts: str) -> str:
    """A file's text, or nothing if it can't be read."""
    try:
        with open(os.path.join(*parts), encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
