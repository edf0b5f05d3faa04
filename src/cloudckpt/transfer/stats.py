"""What a save or a load has moved."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

__all__ = ["Transferred", "TransferStats"]


@dataclass(frozen=True)
class Transferred:
    """The sum of one save or load of one rank.

    Attributes:
        bytes: Payload bytes sent or received, those of repeated tries included.
        requests: Data requests that succeeded.
        retries: Requests that had to be tried again.
        seconds: From the first to the last byte.
    """

    bytes: int
    requests: int
    retries: int
    seconds: float


class TransferStats:
    """Counts while the transfer runs; threads may add at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = 0
        self._requests = 0
        self._retries = 0
        self._began = time.monotonic()

    def add_bytes(self, count: int) -> None:
        with self._lock:
            self._bytes += count

    def add_requests(self, count: int) -> None:
        with self._lock:
            self._requests += count

    def add_retry(self) -> None:
        with self._lock:
            self._retries += 1

    def snapshot(self) -> Transferred:
        """The sums up to now."""
        seconds = time.monotonic() - self._began
        with self._lock:
            return Transferred(self._bytes, self._requests, self._retries, seconds)
