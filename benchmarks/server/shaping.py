"""What the link is made to look like: latency, rates, and failures on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

FaultKind = Literal["503", "reset", "truncate", "stall"]

_QUANTUM_SECONDS = 0.01
_SLACK_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The link's character. Zero means unlimited."""

    latency_ms: float = 0.0
    """Milliseconds from the end of a request to the first byte of its answer."""
    connection_rate: float = 0.0
    """Bytes per second of one connection, each way."""
    total_rate: float = 0.0
    """Bytes per second of all connections together."""


class Pacer:
    """Holds whoever takes bytes to a rate; shared between threads it paces their sum.

    A little unused time carries over, so that late timers do not add up to a slower link.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.quantum = max(4096, int(rate * _QUANTUM_SECONDS))
        """Bytes to move in one call for a smooth flow."""

    def take(self, count: int) -> None:
        """Sleeps until `count` more bytes fit the rate."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - _SLACK_SECONDS) + count / self._rate
            delay = self._free_at - now
        if delay > 0:
            time.sleep(delay)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A failure to inject into the next `count` data requests."""

    kind: FaultKind
    count: int = 1
    operations: Sequence[str] = ("PutObject", "UploadPart", "GetObject")
    stall_s: float = 30.0
    """Seconds that a `stall` says nothing before it closes the connection."""


@dataclass
class Link:
    """The shape in force and the faults still to come."""

    shape: Shape = Shape()
    _faults: list[Fault] = field(default_factory=list)
    _total: Pacer | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def reshape(self, shape: Shape) -> None:
        """Puts `shape` in force for connections that open from now on."""
        with self._lock:
            self._total = Pacer(shape.total_rate) if shape.total_rate else None
            self.shape = shape

    def inject(self, faults: list[Fault]) -> None:
        """Replaces the faults still to come."""
        with self._lock:
            self._faults = list(faults)

    def pacers(self) -> tuple[Pacer, ...]:
        """The pacers of one new connection: its own, and the one that all share."""
        with self._lock:
            own = (Pacer(self.shape.connection_rate),) if self.shape.connection_rate else ()
            return own + ((self._total,) if self._total else ())

    def next_fault(self, operation: str) -> Fault | None:
        """Takes the fault that this request shall suffer, if one is due."""
        if not self._faults:
            return None
        with self._lock:
            for index, fault in enumerate(self._faults):
                if operation in fault.operations and fault.count > 0:
                    self._faults[index] = replace(fault, count=fault.count - 1)
                    return fault
        return None
