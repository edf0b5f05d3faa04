"""The machine and the versions behind a run's numbers."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from benchmarks.children import ROOT
from benchmarks.contenders import CONTENDERS

BUSY_LOAD = 1.0
"""From this load average on, what is measured says little."""


@dataclass(frozen=True)
class Conditions:
    """Where and with what a run was made."""

    started: str
    """UTC, ISO 8601."""
    commit: str
    cpu: str
    cores: int
    memory_gib: float
    kernel: str
    python: str
    load_before: float
    """One-minute load average before the run: what else was going on."""
    versions: dict[str, str]
    load_after: float | None = None
    """The same when the run was over; the run itself makes one to two."""


def conditions(contenders: Iterable[str]) -> Conditions:
    """Reads the present conditions."""
    versions = {"torch": metadata.version("torch")}
    for name in contenders:
        if CONTENDERS[name].installed:
            versions |= CONTENDERS[name].versions
    return Conditions(
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        commit=_commit(),
        cpu=_field("/proc/cpuinfo", "model name"),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(int(_field("/proc/meminfo", "MemTotal").split()[0]) / 2**20, 1),
        kernel=platform.release(),
        python=platform.python_version(),
        load_before=load_average(),
        versions=versions,
    )


def load_average() -> float:
    """Returns the one-minute load average."""
    return round(os.getloadavg()[0], 2)


def _commit() -> str:
    """The commit that is measured, with a plus if the tree has changed since."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"
