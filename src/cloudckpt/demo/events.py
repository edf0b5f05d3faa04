"""What ranks tell the driver, one JSON line on standard output for each event."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass

__all__ = [
    "Committed",
    "Event",
    "Failed",
    "Measured",
    "Resumed",
    "Staged",
    "Stepped",
    "decode",
    "tell",
]


@dataclass(frozen=True)
class Resumed:
    """A checkpoint was loaded.

    Attributes:
        step: Its step.
        seconds: How long the load took.
        recorded: The loss on held-out text when it was saved.
        again: The loss on the same text with what was loaded.
    """

    step: int
    seconds: float
    recorded: float
    again: float


@dataclass(frozen=True)
class Stepped:
    """A step was trained.

    Attributes:
        step: Which.
        loss: The mean over all ranks.
        seconds: How long it took.
        beside_save: Whether a save was under way when it ended.
    """

    step: int
    loss: float
    seconds: float
    beside_save: bool


@dataclass(frozen=True)
class Staged:
    """``async_save`` returned, after ``stall`` seconds; training goes on."""

    step: int
    stall: float


@dataclass(frozen=True)
class Committed:
    """A save is committed; ``bytes`` and ``seconds`` are those of this rank's upload."""

    step: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Measured:
    """A save during which the process did nothing else took so many seconds of CPU."""

    cpu_seconds: float
    bytes: int


@dataclass(frozen=True)
class Failed:
    """The rank ends with this error."""

    error: str


Event = Resumed | Stepped | Staged | Committed | Measured | Failed

_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind for kind in (Resumed, Stepped, Staged, Committed, Measured, Failed)
}


def tell(event: Event) -> None:
    """Sends an event to the driver, whole even if several threads do so at a time."""
    line = json.dumps({type(event).__name__: dataclasses.asdict(event)})
    sys.stdout.flush()
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def decode(line: str) -> Event | None:
    """The event of a line; None if the line is something else that was printed."""
    if not line.startswith("{"):
        return None
    kind, fields = next(iter(json.loads(line).items()))
    return _KINDS[kind](**fields)
