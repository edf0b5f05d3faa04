"""Spans for OpenTelemetry, where that is installed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

__all__ = ["report_span"]


@functools.cache
def _tracer() -> Any:
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    return trace.get_tracer("cloudckpt")


def report_span(
    phase: str, began: float, seconds: float, attributes: Mapping[str, str | int | bool]
) -> None:
    """Reports a phase that has ended; ``began`` is in seconds since the epoch."""
    tracer = _tracer()
    if tracer is None:
        return
    start = int(began * 1e9)
    span = tracer.start_span(f"cloudckpt.{phase}", start_time=start, attributes=dict(attributes))
    span.end(end_time=start + int(seconds * 1e9))
