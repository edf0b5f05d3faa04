"""Events, and who hears of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from cloudckpt.events.telemetry import report_span

__all__ = ["Event", "Phase", "Span", "emit", "has_listeners", "subscribe"]

logger = logging.getLogger("cloudckpt.events")

Phase = Literal[
    "plan", "stage", "upload", "commit", "load", "verify", "retry", "throttle", "progress"
]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that a rank has done, or is doing.

    Attributes:
        phase: ``plan``: from the begin of a save to its first byte; ``stage``: the copy of an
            asynchronous save; ``upload``: the data of this rank; ``commit``: manifest and metadata,
            on the coordinator; ``load``: the data of this rank, with what ``verify`` took of all
            its threads; ``retry`` and ``throttle``: a request is tried again, because it failed or
            because the store asks to slow down; ``progress``: bytes so far, some times a second.
        uri: The checkpoint, without secrets.
        rank: In the group that saves or loads.
        began: Seconds since the epoch.
        seconds: How long it took; 0 for what is only counted.
        bytes: That were moved.
        total: Of ``progress``: the bytes that there will be, as far as that is known.
        detail: Of ``retry`` and ``throttle``: why.
        failed: Whether it ended with an error.
    """

    phase: Phase
    uri: str
    rank: int
    began: float
    seconds: float = 0.0
    bytes: int = 0
    total: int = 0
    detail: str = ""
    failed: bool = False


_listeners: tuple[Callable[[Event], None], ...] = ()


def subscribe(listener: Callable[[Event], None]) -> Callable[[], None]:
    """Has a function called with each event of this process, and of its saving processes.

    It is called on the threads that save and load, and should be quick; what it raises is logged.

    Returns:
        A function that ends the subscription.
    """
    global _listeners
    _listeners = (*_listeners, listener)

    def unsubscribe() -> None:
        global _listeners
        _listeners = tuple(held for held in _listeners if held is not listener)

    return unsubscribe


def has_listeners() -> bool:
    """Whether anybody would hear of progress."""
    return bool(_listeners)


def emit(event: Event) -> None:
    """Tells all listeners, the log (at level DEBUG), and OpenTelemetry if it is installed."""
    for listener in _listeners:
        try:
            listener(event)
        except Exception:
            logger.exception("a listener failed")
    if event.phase == "progress":
        return
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug(
            "%s of %s by rank %d: %.3f s, %d bytes%s%s",
            event.phase,
            event.uri,
            event.rank,
            event.seconds,
            event.bytes,
            ", failed" if event.failed else "",
            f" ({event.detail})" if event.detail else "",
            extra={"cloudckpt_event": event},
        )
    if event.seconds > 0:
        report_span(event.phase, event.began, event.seconds, _attributes(event))


def _attributes(event: Event) -> dict[str, str | int | bool]:
    return {
        "cloudckpt.uri": event.uri,
        "cloudckpt.rank": event.rank,
        "cloudckpt.bytes": event.bytes,
        "cloudckpt.failed": event.failed,
    }


class Span:
    """Measures a phase; emits its event at the end of the ``with`` block, failed or not."""

    def __init__(self, phase: Phase, uri: str, rank: int) -> None:
        self._phase = phase
        self._uri = uri
        self._rank = rank
        self.bytes = 0

    def __enter__(self) -> Span:
        self._wall, self._clock = time.time(), time.perf_counter()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        emit(
            Event(
                phase=self._phase,
                uri=self._uri,
                rank=self._rank,
                began=self._wall,
                seconds=time.perf_counter() - self._clock,
                bytes=self.bytes,
                failed=error is not None,
            )
        )
