"""What saving and loading are doing, told while they do it."""

from cloudckpt.events.event import Event, Phase, emit, has_listeners, subscribe
from cloudckpt.events.progress import progress_bar
from cloudckpt.events.timeline import Timeline, record

__all__ = [
    "Event",
    "Phase",
    "Timeline",
    "emit",
    "has_listeners",
    "progress_bar",
    "record",
    "subscribe",
]
