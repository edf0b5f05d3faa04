"""Spans for OpenTelemetry, where that is installed."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cloudckpt.events.event import Event

__all__ = ["report_span"]


@functools.cache
def _tracer() -> Any:
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    return trace.get_tracer("cloudckpt")


def report_span(event: Event) -> None:
    """Reports a phase that has ended, beneath the span that this thread is in, if any."""
    tracer = _tracer() if event.seconds > 0 else None
    if tracer is None:
        return
    start = int(event.began * 1e9)
    # that of verify would end in the future: it sums up what threads did at the same time
    end = min(start + int(event.seconds * 1e9), max(start, time.time_ns()))
    attributes: dict[str, str | int | float | bool] = {
        "cloudckpt.uri": event.uri,
        "cloudckpt.rank": event.rank,
        "cloudckpt.bytes": event.bytes,
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
