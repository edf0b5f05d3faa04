"""How much memory a staged copy may take, by the files in which the kernel says so."""

from pathlib import Path

import pytest

from cloudckpt.background.arena import available_memory
from cloudckpt.config import MIB

V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
UNLIMITED = 2**63 - 4096  # of the first version of cgroups

P, PJ = f"{V2}/p", f"{V2}/p/j"

# cgroups; by folder: limit, usage, and what of it can be reclaimed; what is left
MACHINES = {
    "no cgroups": ("", {}, 8000),
    "what can be reclaimed is free": ("0::/job", {f"{V2}/job": (1000, 700, 200)}, 500),
    "an ancestor is the tightest": ("0::/p/j", {P: (300, 9, 9), PJ: (900, 9, 9)}, 300),
    "a child is the tightest": ("0::/p/j", {P: (900, 9, 9), PJ: (300, 9, 9)}, 300),
    "a limit above the machine's memory": ("0::/job", {f"{V2}/job": (9999, 1, 0)}, 8000),
    "no limit": ("0::/job", {f"{V2}/job": ("max", 5, 0)}, 8000),
    "beyond its limit": ("0::/job", {f"{V2}/job": (10, 20, 0)}, 0),
    "the first version": (
        "5:cpu,cpuacct:/other\n4:memory:/slurm/job\n0::/",
        {
            f"{V1}/slurm/job": (1000, 900, 50),
            f"{V1}/slurm": (UNLIMITED, 0, 0),
            f"{V1}/other": (1, 1, 0),
        },
        150,
    ),
    "a container's cgroup is the root": ("4:memory:/docker/0123abc", {V1: (64, 4, 0)}, 60),
    "a path outside of the namespace": ("0::/../job", {f"{V2}/job": (64, 4, 0)}, 60),
}


def left(root: Path, groups: str, folders: dict, changed: dict[str, str | None]) -> int | None:
    """What is left on a machine with 8,000 MiB; limits of cgroups in MiB, or as the kernel writes.

    Args:
        root: A folder that looks like ``/`` then.
        groups: The process's cgroups.
        folders: By folder of a cgroup its limit, what is used, and what of that can be reclaimed.
        changed: By the name of a file, of any folder, other contents; None: it is not there.
    """
    kib = 8000 * MIB // 1024
    files = {"proc/self/cgroup": f"{groups}\n"}
    files["proc/meminfo"] = f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable: {kib} kB\n"
    for folder, (limit, used, reclaimable) in folders.items():
        is_first = folder.startswith(V1)
        names = ("limit_in_bytes", "usage_in_bytes") if is_first else ("max", "current")
        size = limit * MIB if isinstance(limit, int) and limit < 2**40 else limit
        files[f"{folder}/memory.{names[0]}"] = f"{size}\n"
        files[f"{folder}/memory.{names[1]}"] = f"{used * MIB}\n"
        stat = f"inactive_file {0 if is_first else reclaimable * MIB}\n"
        files[f"{folder}/memory.stat"] = f"{stat}total_inactive_file {reclaimable * MIB}\n"
    for name, text in files.items():
        path = root / name
        text = changed.get(path.name, text)
        if text is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="latin-1")
    return available_memory(str(root))


@pytest.mark.parametrize("name", MACHINES)
def test_what_is_left_is_what_the_tightest_limit_leaves(tmp_path, name):
    groups, folders, expected = MACHINES[name]
    assert left(tmp_path, groups, folders, {}) == expected * MIB


@pytest.mark.parametrize("missing", ["memory.max", "memory.current", "memory.stat"])
@pytest.mark.parametrize("text", [None, "", "lots\n", "-5\n", "inactive_file\n", "\xff\n"])
def test_what_can_not_be_read_limits_nothing(tmp_path, missing, text):
    folders = {f"{V2}/job": (64, 4, 0)}
    assert left(tmp_path, "0::/job", folders, {missing: text}) == 8000 * MIB


def test_nothing_is_known_where_there_are_no_such_files(tmp_path):
    assert available_memory(str(tmp_path)) is None
