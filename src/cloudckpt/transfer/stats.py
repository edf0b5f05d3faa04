"""Counts the bytes, requests and retries of a save or a load."""

from __future__ import annotations

import threading
import time
from typing import Any

from cloudckpt.errors import StoreError, ThrottledError
from cloudckpt.events import Event, Phase, Transferred, emit, has_listeners

__all__ = ["TransferStats"]

_BETWEEN_EVENTS = 0.2  # seconds


class TransferStats:
    """Thread-safe counters of a running transfer; emits events about its progress.

    Args:
        uri: The location that is transferred, for the events.
        rank: The rank that transfers it.
        total: Total bytes of the transfer; 0 if unknown.
    """

    def __init__(self, uri: str = "", rank: int = 0, total: int = 0) -> None:
        self._uri = uri
        self._rank = rank
        self._total = total
        self._lock = threading.Lock()
        self._bytes = 0
        self._requests = 0
        self._retries = 0
        self._verified = 0
        self._verifying = 0.0
        self._began = self._last_event = time.monotonic()
        self._began_wall = time.time()

    def add_bytes(self, count: int) -> None:
        with self._lock:
            self._bytes += count
            now = time.monotonic()
            if not has_listeners() or now - self._last_event < _BETWEEN_EVENTS:
                return
            self._last_event = now
            moved = self._bytes
        self._emit("progress", seconds=now - self._began, nbytes=moved, total=self._total)

    def add_verified(self, count: int, seconds: float) -> None:
        """Counts bytes whose checksum was compared, and the seconds that the thread spent on it."""
        with self._lock:
            self._verified += count
            self._verifying += seconds

    def emit_verified(self) -> None:
        """Emits a ``verify`` event for all verification so far, if there was any."""
        if self._verified:
            self._emit("verify", seconds=self._verifying, nbytes=self._verified)

    def add_requests(self, count: int) -> None:
        with self._lock:
            self._requests += count

    def add_retry(self, error: StoreError) -> None:
        with self._lock:
            self._retries += 1
        phase: Phase = "throttle" if isinstance(error, ThrottledError) else "retry"
        self._emit(phase, began=time.time(), detail=type(error).__name__)

    def _emit(self, phase: Phase, *, began: float | None = None, **measured: Any) -> None:
        began = self._began_wall if began is None else began
        emit(Event(phase=phase, uri=self._uri, rank=self._rank, began=began, **measured))

    def include(self, others: Transferred) -> None:
        """Adds the counters that another process has reported."""
        with self._lock:
            self._bytes += others.nbytes
            self._requests += others.requests
            self._retries += others.retries

    def snapshot(self) -> Transferred:
        """Returns the counters as they are now."""
        seconds = time.monotonic() - self._began
        with self._lock:
            return Transferred(self._bytes, self._requests, self._retries, seconds)
