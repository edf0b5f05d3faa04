"""How much memory a staged copy may take, by the files in which the kernel says so."""

from pathlib import Path

import pytest

from cloudckpt.background import arena as arenas
from cloudckpt.background.arena import available_memory
from cloudckpt.checkpointer import Stager
from cloudckpt.config import MIB
from cloudckpt.errors import StagingMemoryError
from dcp.values import numbered

UNLIMITED_V1 = "9223372036854771712\n"


class Machine:
    """A folder that looks like ``/``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.has(8000 * MIB)

    def has(self, size: int) -> None:
        text = f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable: {size // 1024} kB\n"
        self.write("proc/meminfo", text)

    def belongs(self, *lines: str) -> None:
        self.write("proc/self/cgroup", "\n".join(lines) + "\n")

    def v2(self, path: str, limit: object, current: int, inactive: int = 0) -> None:
        folder = f"sys/fs/cgroup/{path}"
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.current", f"{current}\n")
        self.write(f"{folder}/memory.stat", f"anon 5\ninactive_file {inactive}\nshmem 7\n")

    def v1(self, path: str, limit: object, usage: int, inactive: int = 0) -> None:
        folder = f"sys/fs/cgroup/memory/{path}"
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{usage}\n")
        text = f"inactive_file 0\ntotal_inactive_file {inactive}\n"
        self.write(f"{folder}/memory.stat", text)

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    @property
    def left(self) -> int | None:
        return available_memory(str(self.root))


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


def test_without_cgroups_it_is_what_the_machine_has(machine):
    assert machine.left == 8000 * MIB


def test_a_limit_counts_what_is_used_and_not_what_can_be_reclaimed(machine):
    machine.belongs("0::/job")
    machine.v2("job", 1000 * MIB, 700 * MIB, inactive=200 * MIB)
    assert machine.left == 500 * MIB


@pytest.mark.parametrize("tightest", ["pod", "pod/job", "pod/job/rank"])
def test_the_tightest_of_all_ancestors_counts(machine, tightest):
    machine.belongs("0::/pod/job/rank")
    for path in ("pod", "pod/job", "pod/job/rank"):
        machine.v2(path, 300 * MIB if path == tightest else 900 * MIB, 100 * MIB)
    assert machine.left == 200 * MIB


def test_a_limit_above_what_the_machine_has_changes_nothing(machine):
    machine.belongs("0::/job")
    machine.v2("job", 9999 * MIB, 1)
    machine.has(20 * MIB)
    assert machine.left == 20 * MIB


def test_no_limit_is_none(machine):
    machine.belongs("0::/job")
    machine.v2("job", "max", 5 * MIB)
    assert machine.left == 8000 * MIB


def test_a_cgroup_beyond_its_limit_has_nothing_left(machine):
    machine.belongs("0::/job")
    machine.v2("job", 10, 20)
    assert machine.left == 0


def test_the_first_version_of_cgroups_limits_too(machine):
    machine.belongs("5:cpu,cpuacct:/elsewhere", "4:memory:/slurm/job", "0::/")
    machine.v1("slurm/job", 1000 * MIB, 900 * MIB, inactive=50 * MIB)
    machine.v1("slurm", UNLIMITED_V1.strip(), 0)
    machine.v1("elsewhere", 1, 1)
    assert machine.left == 150 * MIB


def test_a_container_sees_its_own_cgroup_as_the_root(machine):
    machine.belongs("4:memory:/docker/0123abc")
    machine.v1("", 64 * MIB, 4 * MIB)
    assert machine.left == 60 * MIB


def test_a_path_outside_of_the_namespace_stays_below_the_mount(machine):
    machine.belongs("0::/../job")
    machine.v2("job", 64 * MIB, 4 * MIB)
    assert machine.left == 60 * MIB


@pytest.mark.parametrize("missing", ["memory.max", "memory.current", "memory.stat"])
@pytest.mark.parametrize("text", [None, "", "lots\n", "-5\n", "inactive_file\n", "\xff\n"])
def test_what_can_not_be_read_limits_nothing(machine, missing, text):
    machine.belongs("0::/job")
    machine.v2("job", 64 * MIB, 4 * MIB)
    path = machine.root / "sys/fs/cgroup/job" / missing
    path.unlink()
    if text is not None:
        path.write_text(text, encoding="latin-1")
    assert machine.left == 8000 * MIB


def test_nothing_is_known_where_there_are_no_such_files(tmp_path):
    assert available_memory(str(tmp_path)) is None


def test_the_files_of_this_machine_can_be_read():
    assert 0 < available_memory() < 2**60


def test_a_copy_that_the_cgroup_has_no_room_for_is_refused(machine, monkeypatch):
    machine.belongs("0::/job")
    machine.v2("job", 64 * MIB, 63 * MIB)
    monkeypatch.setattr(arenas, "available_memory", lambda: machine.left)
    with Stager() as stager:
        with pytest.raises(StagingMemoryError, match=r"needs 2 MiB, .* has 1 MiB left"):
            stager.stage({"t": numbered(2 * MIB // 4)})
        machine.v2("job", 64 * MIB, 63 * MIB, inactive=MIB)
        stager.stage({"t": numbered(2 * MIB // 4)})
