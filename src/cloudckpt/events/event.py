"""Events, and who hears of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from cloudckpt.events.telemetry import report_span
from cloudckpt.fork import ModuleLock

__all__ = ["Event", "Phase", "Span", "emit", "has_listeners", "relay", "subscribe"]

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
        detail: Of ``retry`` and ``throttle``, and of what failed: the class of the error.
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


Listener = Callable[[Event], None]


@dataclass(frozen=True, eq=False)
class _Subscription:
    listener: Listener
    progress: bool


_lock = ModuleLock()  # the threads that save come and go as listeners
_subscriptions: tuple[_Subscription, ...] = ()
_relay: Listener | None = None


def subscribe(listener: Listener, *, progress: bool = True) -> Callable[[], None]:
    """Has a function called with each event of this process, and of its saving processes.

    It is called on the threads that save and load, and should be quick; what it raises is logged.

    Args:
        listener: The function.
        progress: Whether it is also told of ``progress``, which costs nothing if nobody is.

    Returns:
        A function that ends the subscription.
    """
    global _subscriptions
    subscription = _Subscription(listener, progress)
    with _lock:
        _subscriptions = (*_subscriptions, subscription)

    def unsubscribe() -> None:
        global _subscriptions
        with _lock:
            _subscriptions = tuple(held for held in _subscriptions if held is not subscription)

    return unsubscribe


def relay(listener: Listener) -> None:
    """Has a function called with each event, and nobody else.

    For a process whose events another one tells: else what hears of both, as a log or a collector
    of spans, would hear twice.
    """
    global _relay
    _relay = listener


def has_listeners() -> bool:
    """Whether anybody would hear of progress."""
    return _relay is not None or any(held.progress for held in _subscriptions)


def emit(event: Event) -> None:
    """Tells all listeners, the log (at level DEBUG), and OpenTelemetry if it is installed.

    It never raises what they raise: nothing that listens may fail a save.
    """
    if _relay is not None:
        _tell(_relay, event)
        return
    has_ended = event.phase != "progress"
    for held in _subscriptions:
        if has_ended or held.progress:
            _tell(held.listener, event)
    if has_ended:
        _tell(_log, event)
        _tell(report_span, event)


def _tell(listener: Listener, event: Event) -> None:
    try:
        listener(event)
    except Exception:
        logger.exception("a listener failed")


def _log(event: Event) -> None:
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


class Span:
    """Measures a phase; emits its event at the end of the ``with`` block, failed or not.

    Attributes:
        bytes: What was moved; to be set within the block.
    """

    def __init__(self, phase: Phase, uri: str, rank: int) -> None:
        self._phase = phase
        self._uri = uri
        self._rank = rank
        self.bytes = 0

    def __enter__(self) -> Span:
        self._wall, self._clock = time.time(), time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        emit(
            Event(
                phase=self._phase,
                uri=self._uri,
                rank=self._rank,
                began=self._wall,
                seconds=time.perf_counter() - self._clock,
                bytes=self.bytes,
                detail="" if kind is None else kind.__name__,
                failed=kind is not None,
            )
        )
