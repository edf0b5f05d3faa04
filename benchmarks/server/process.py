"""The server as a process of its own, and the handle that steers it."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.server.serve import CONTROL
from benchmarks.server.shaping import Shape

_START_TIMEOUT = 20.0
_CONTROL_TIMEOUT = 20.0
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Counts:
    """The server's statistics since the last reset."""

    operations: Mapping[str, Mapping[str, int]]
    """For each operation: `requests`, `bytes_in`, `bytes_out`."""
    statuses: Mapping[str, int]
    connections_opened: int
    connections_peak: int
    cpu_seconds: float
    log: tuple[tuple[str, str, str, int, int], ...]
    """Operation, bucket, key, offset and length of each data request, while recording."""

    def total(self, what: str) -> int:
        """Sums `requests`, `bytes_in` or `bytes_out` over all operations."""
        return sum(counts[what] for counts in self.operations.values())


@dataclass(frozen=True)
class ServerHandle:
    """A running server, steered over its control endpoint."""

    port: int

    @property
    def endpoint(self) -> str:
        """The URL that S3 clients take as their endpoint."""
        return f"http://127.0.0.1:{self.port}"

    def shape(self, shape: Shape) -> None:
        """Puts `shape` in force for new connections."""
        self._control("PUT", vars(shape))

    def inject(self, *faults: Mapping[str, object]) -> None:
        """Sets the faults of the next data requests; none clears them."""
        self._control("PUT", {"faults": [dict(fault) for fault in faults]})

    def record(self, on: bool) -> None:
        """Starts or stops keeping a log of data requests."""
        self._control("PUT", {"record": on})

    def clear(self, bucket: str = "") -> None:
        """Drops all objects of `bucket`, or of every bucket."""
        self._control("PUT", {"clear": bucket})

    def reset(self) -> None:
        """Sets the statistics to zero."""
        self._control("DELETE")

    def counts(self) -> Counts:
        """Returns the statistics."""
        raw = self._control("GET")
        return Counts(**{**raw, "log": tuple(tuple(entry) for entry in raw["log"])})

    def _control(self, method: str, settings: Mapping[str, object] | None = None) -> dict[str, Any]:
        data = json.dumps(settings).encode() if settings is not None else None
        url = f"{self.endpoint}/{CONTROL}"
        request = urllib.request.Request(url, data=data, method=method)
        with urllib.request.urlopen(request, timeout=_CONTROL_TIMEOUT) as response:
            snapshot: dict[str, Any] = json.load(response)
            return snapshot


@contextmanager
def running_server() -> Iterator[ServerHandle]:
    """Starts a server on a free port and stops it at the end, whatever happens in between.

    Raises:
        RuntimeError: If the server does not say its port within 20 seconds.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.server", "--lifeline"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=_ROOT,
        text=True,
    )
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], _START_TIMEOUT)
        line = process.stdout.readline() if ready else ""
        if not line:
            raise RuntimeError("the benchmark server did not start")
        yield ServerHandle(int(line))
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
