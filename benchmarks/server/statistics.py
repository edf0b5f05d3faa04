"""What the server counted: requests and bytes by operation, connections, its own CPU."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class LogEntry:
    """One data request, kept only while recording."""

    operation: str
    bucket: str
    key: str
    offset: int
    length: int


class Statistics:
    """Counters since the last reset."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self.recording = False
        self.reset()

    def reset(self) -> None:
        """Sets every counter to zero; connections now open still count as open."""
        with self._lock:
            self._requests: Counter[str] = Counter()
            self._bytes_in: Counter[str] = Counter()
            self._bytes_out: Counter[str] = Counter()
            self._statuses: Counter[str] = Counter()
            self._opened = 0
            self._peak = self._open
            self._log: list[LogEntry] = []
            self._cpu_start = time.process_time()

    def connection_opened(self) -> None:
        """Counts a connection in."""
        with self._lock:
            self._opened += 1
            self._open += 1
            self._peak = max(self._peak, self._open)

    def connection_closed(self) -> None:
        """Counts a connection out."""
        with self._lock:
            self._open -= 1

    def count(self, operation: str, status: int, bytes_in: int, bytes_out: int) -> None:
        """Counts one answered request and the payload bytes it moved."""
        with self._lock:
            self._requests[operation] += 1
            self._bytes_in[operation] += bytes_in
            self._bytes_out[operation] += bytes_out
            self._statuses[str(status)] += 1

    def record(self, entry: LogEntry) -> None:
        """Keeps `entry` while recording."""
        if self.recording:
            with self._lock:
                self._log.append(entry)

    def snapshot(self) -> dict[str, object]:
        """Returns all counters as JSON-ready values."""
        with self._lock:
            return {
                "operations": {
                    name: {
                        "requests": count,
                        "bytes_in": self._bytes_in[name],
                        "bytes_out": self._bytes_out[name],
                    }
                    for name, count in sorted(self._requests.items())
                },
                "statuses": dict(self._statuses),
                "connections_opened": self._opened,
                "connections_peak": self._peak,
                "cpu_seconds": time.process_time() - self._cpu_start,
                "log": [list(vars(entry).values()) for entry in self._log],
            }
