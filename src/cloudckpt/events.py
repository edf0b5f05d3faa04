"""Events about saves and loads, reported to listeners, the log and OpenTelemetry."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from cloudckpt.errors import MissingDependencyError
from cloudckpt.fork import module_lock

__all__ = [
    "Event",
    "Phase",
    "Timeline",
    "Transferred",
    "progress_bar",
    "record",
    "subscribe",
]

logger = logging.getLogger("cloudckpt.events")

Phase = Literal[
    "plan",
    "stage",
    "upload",
    "commit",
    "load",
    "verify",
    "retry",
    "throttle",
    "progress",
    "failure",
]


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event of a save or load on one rank: the end of a phase, a retry, progress, or a failure.

    Attributes:
        phase: ``plan``: from the start of a save to its first byte; ``stage``: the copy of an
            asynchronous save; ``upload``: the data of this rank; ``commit``: the metadata, on the
            coordinator; ``load``: the data of this rank, including ``verify``, whose time is summed
            over threads; ``retry`` and ``throttle``: a request is retried, because it failed or
            because the store throttles; ``progress``: bytes so far, several times a second;
            ``failure``: a step of a run was not saved, and training continues.
        uri: The checkpoint, without secrets.
        rank: The rank in the group that saves or loads.
        began: The start, in seconds since the epoch.
        seconds: The duration (for ``progress``: so far); 0 for events without one.
        nbytes: Bytes moved.
        total: For ``progress``: the expected bytes; 0 if unknown.
        detail: For ``retry``, ``throttle``, ``failure`` and a phase that failed: the class of the
            error. Otherwise empty.
        failed: Whether the phase ended with an error; True for ``failure``.
        step: For ``failure``: the step that was not saved; else None.
        newest_step: For ``failure``: the newest committed step that this rank knows of; None if it
            knows of none.
        newest_age: For ``failure``: seconds since ``newest_step`` was committed; None if there is
            none, or another job committed it.
    """

    phase: Phase
    uri: str
    rank: int
    began: float
    seconds: float = 0.0
    nbytes: int = 0
    total: int = 0
    detail: str = ""
    failed: bool = False
    step: int | None = None
    newest_step: int | None = None
    newest_age: float | None = None


@dataclass(frozen=True)
class Transferred:
    """The totals of one save or load on one rank.

    Attributes:
        nbytes: Payload bytes sent or received, including those of retried requests.
        requests: Data requests that succeeded.
        retries: Retried requests.
        seconds: The time from the start of the transfer until these totals were taken.
    """

    nbytes: int
    requests: int
    retries: int
    seconds: float


Listener = Callable[[Event], None]


_lock = module_lock()  # several saving threads subscribe and unsubscribe
_subscriptions: tuple[tuple[Listener, bool], ...] = ()  # with whether it wants progress
_relay: Listener | None = None


def subscribe(listener: Listener, *, progress: bool = True) -> Callable[[], None]:
    """Registers a function to be called with each event of this process and its saving processes.

    The function is called on the threads that save and load, and should be quick; exceptions that
    it raises are logged.

    Args:
        listener: The function.
        progress: Whether to report ``progress`` as well; it costs nothing if no listener wants it.

    Returns:
        A function that ends the subscription.
    """
    global _subscriptions
    subscription = (listener, progress)
    with _lock:
        _subscriptions = (*_subscriptions, subscription)

    def unsubscribe() -> None:
        global _subscriptions
        with _lock:
            _subscriptions = tuple(held for held in _subscriptions if held is not subscription)

    return unsubscribe


def relay(listener: Listener) -> None:
    """Passes all further events of this process to one function, in place of all other listeners.

    A saving process sends its events to the trainer by this. Only the trainer then reports them to
    the log, OpenTelemetry and other listeners.
    """
    global _relay
    _relay = listener


def has_listeners() -> bool:
    """Returns whether any listener, or the function of :func:`relay`, gets ``progress`` events."""
    return _relay is not None or any(progress for _, progress in _subscriptions)


def emit(event: Event) -> None:
    """Reports an event to all listeners, the log (at level DEBUG), and OpenTelemetry if installed.

    ``progress`` goes to the listeners that want it only. After :func:`relay` all events go to its
    function instead. Exceptions of listeners are logged, not raised: no listener may make a save
    fail.
    """
    if _relay is not None:
        _tell(_relay, event)
        return
    has_ended = event.phase != "progress"
    for listener, progress in _subscriptions:
        if has_ended or progress:
            _tell(listener, event)
    if has_ended:
        _tell(_log, event)
        _tell(_report_span, event)


def _tell(listener: Listener, event: Event) -> None:
    try:
        listener(event)
    except Exception:
        logger.exception("the event listener %r failed; the save or load goes on", listener)


def _log(event: Event) -> None:
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug(
            "%s of %s by rank %d: %.3f s, %d bytes%s%s",
            event.phase,
            event.uri,
            event.rank,
            event.seconds,
            event.nbytes,
            ", failed" if event.failed else "",
            f" ({event.detail})" if event.detail else "",
            extra={"cloudckpt_event": event},
        )


@functools.cache
def _tracer() -> Any:
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    return trace.get_tracer("cloudckpt")


def _report_span(event: Event) -> None:
    """Reports an event with a duration to OpenTelemetry, beneath this thread's current span.

    Without OpenTelemetry, it does nothing.
    """
    tracer = _tracer() if event.seconds > 0 else None
    if tracer is None:
        return
    start = int(event.began * 1e9)
    # a span of verify would end in the future, as its time is summed over parallel threads
    end = min(start + int(event.seconds * 1e9), max(start, time.time_ns()))
    attributes: dict[str, str | int | float | bool] = {
        "cloudckpt.uri": event.uri,
        "cloudckpt.rank": event.rank,
        "cloudckpt.bytes": event.nbytes,
        "cloudckpt.seconds": event.seconds,
        "cloudckpt.failed": event.failed,
    }
    if event.failed:
        attributes["error.type"] = event.detail
    span = tracer.start_span(f"cloudckpt.{event.phase}", start_time=start, attributes=attributes)
    if event.failed:
        from opentelemetry.trace import Status, StatusCode

        span.set_status(Status(StatusCode.ERROR, event.detail))
    span.end(end_time=end)


class Span:
    """Measures a phase; emits its event at the end of the ``with`` block, even if the block fails.

    Attributes:
        nbytes: Bytes moved; set it within the block.
    """

    def __init__(self, phase: Phase, uri: str, rank: int) -> None:
        self._phase = phase
        self._uri = uri
        self._rank = rank
        self.nbytes = 0

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
                nbytes=self.nbytes,
                detail="" if kind is None else kind.__name__,
                failed=kind is not None,
            )
        )


class Timeline:
    """A list of events, in the order in which they were reported.

    Attributes:
        events: The events, without ``progress``.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, event: Event) -> None:
        """Appends an event, unless it is ``progress``."""
        if event.phase != "progress":
            self.events.append(event)

    def table(self) -> str:
        """Returns the events as a table with a line for each, sorted by start.

        Its columns are the phase, the seconds from the first event's start to this one's, the
        duration in seconds, MiB moved, the rank, and the URI, followed by ``FAILED`` if the phase
        failed, and by the class of the error, if any. Without events, the result says so.
        """
        if not self.events:
            return "no events were recorded"
        first = min(event.began for event in self.events)
        lines = [f"{'phase':<9} {'start s':>9} {'seconds':>9} {'MiB':>10} {'rank':>5}  uri"]
        for event in sorted(self.events, key=lambda event: event.began):
            note = " FAILED" if event.failed else ""
            note += f" ({event.detail})" if event.detail else ""
            lines.append(
                f"{event.phase:<9} {event.began - first:>9.3f} {event.seconds:>9.3f} "
                f"{event.nbytes / 1024**2:>10.1f} {event.rank:>5}  {event.uri}{note}"
            )
        return "\n".join(lines)


@contextlib.contextmanager
def record(uri: str | None = None) -> Iterator[Timeline]:
    """Collects the events of a ``with`` block, of one checkpoint if its URI is given.

    Args:
        uri: The checkpoint, as events name it: ``s3://bucket/run/step-1000``, or ``file:///path``.
            None for all checkpoints.

    Yields:
        The events, without ``progress``: a timeline that grows while the block runs.
    """
    timeline = Timeline()

    def listen(event: Event) -> None:
        if uri is None or event.uri == uri:
            timeline.add(event)

    unsubscribe = subscribe(listen, progress=False)
    try:
        yield timeline
    finally:
        unsubscribe()


@contextlib.contextmanager
def progress_bar() -> Iterator[None]:
    """Shows progress bars of the saves and loads in a ``with`` block, on standard error.

    It does nothing if standard error is not a terminal.

    Raises:
        MissingDependencyError: If rich is not installed.
    """
    if not sys.stderr.isatty():
        yield
        return
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TransferSpeedColumn
    except ImportError as exc:
        raise MissingDependencyError(
            "a progress bar needs rich; install it with: pip install rich", cause=exc
        ) from exc
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tasks: dict[tuple[str, int], TaskID] = {}
        lock = threading.Lock()  # events come from all threads that move bytes

        def listen(event: Event) -> None:
            if event.phase not in ("progress", "upload", "load"):
                return
            name = f"{escape(event.uri)} rank {event.rank}"
            key, has_ended = (event.uri, event.rank), event.phase != "progress"
            with lock:
                if key not in tasks:
                    tasks[key] = progress.add_task(name, total=None)
                task = tasks.pop(key) if has_ended else tasks[key]
            if event.failed:
                progress.update(task, description=f"{name} FAILED", completed=event.nbytes)
            else:
                total = event.total or (event.nbytes if has_ended else None)
                progress.update(task, completed=event.nbytes, total=total)
            if has_ended:
                progress.stop_task(task)

        unsubscribe = subscribe(listen)
        try:
            yield
        finally:
            unsubscribe()
