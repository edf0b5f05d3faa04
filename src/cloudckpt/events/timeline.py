"""The events of a save or a load, as a table and as a trace."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator

from cloudckpt.events.event import Event, subscribe

__all__ = ["Timeline", "record"]

_MIB = 1024 * 1024


class Timeline:
    """Events in the order in which they ended.

    Attributes:
        events: All but ``progress``.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, event: Event) -> None:
        """Appends an event."""
        if event.phase != "progress":
            self.events.append(event)

    def table(self) -> str:
        """A line for each event: phase, begin and duration in seconds, MiB, rank, URI."""
        if not self.events:
            return "nothing was recorded"
        first = min(event.began for event in self.events)
        lines = [f"{'phase':<9} {'begin s':>9} {'took s':>9} {'MiB':>10} {'rank':>5}  uri"]
        for event in sorted(self.events, key=lambda event: event.began):
            note = " FAILED" if event.failed else ""
            note += f" ({event.detail})" if event.detail else ""
            lines.append(
                f"{event.phase:<9} {event.began - first:>9.3f} {event.seconds:>9.3f} "
                f"{event.bytes / _MIB:>10.1f} {event.rank:>5}  {event.uri}{note}"
            )
        return "\n".join(lines)

    def chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes a file for ``chrome://tracing`` and Perfetto."""
        entries = [
            {
                "name": event.phase,
                "cat": "cloudckpt",
                "ph": "X" if event.seconds > 0 else "i",
                "ts": event.began * 1e6,
                "dur": event.seconds * 1e6,
                "pid": event.rank,
                "tid": event.phase,
                "args": {
                    "uri": event.uri,
                    "bytes": event.bytes,
                    "detail": event.detail,
                    "failed": event.failed,
                },
            }
            for event in self.events
        ]
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": entries, "displayTimeUnit": "ms"}, file)


@contextlib.contextmanager
def record(uri: str | None = None) -> Iterator[Timeline]:
    """Collects the events of a ``with`` block, of one checkpoint if its URI is given.

    Args:
        uri: As events name it: ``s3://bucket/run/step-1000``, or ``file:///path``. None for all.
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
