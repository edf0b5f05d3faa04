"""The machine and the versions behind a run's numbers."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from benchmarks.contenders import CONTENDERS

_BUSY_LOAD = 0.5


@dataclass(frozen=True)
class Conditions:
    """Where and with what a run was made."""

    started: str
    """UTC, ISO 8601."""
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

    @property
    def busy(self) -> bool:
        """Whether something else was using the machine: at least half a core before the run."""
        return self.load_before >= _BUSY_LOAD


def conditions(contenders: Iterable[str]) -> Conditions:
    """Reads the present conditions."""
    versions = {"torch": metadata.version("torch")}
    for name in contenders:
        if CONTENDERS[name].installed:
            versions |= CONTENDERS[name].versions
    return Conditions(
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
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


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"
