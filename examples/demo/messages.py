"""What the driver asks of ranks, what they tell it, and what it notes of that."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from statistics import mean, median
from typing import get_args

__all__ = [
    "Check",
    "Committed",
    "Event",
    "Failed",
    "Job",
    "Measured",
    "Phase",
    "Resumed",
    "Staged",
    "Stepped",
    "Uploaded",
    "decode",
    "tell",
]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the ranks are to do.

    Attributes:
        run: The URI beneath which the checkpoints stand.
        last_step: Where to stop.
        save_every: Steps from one checkpoint to the next.
        stall_at: The step in whose save rank 1 stops, for the driver to kill it there.
        measure: Whether the last save is to be synchronous, so that its CPU can be told apart.
    """

    run: str
    last_step: int
    save_every: int
    stall_at: int | None = None
    measure: bool = False


@dataclass(frozen=True)
class Resumed:
    """A checkpoint was loaded; the loss on held-out text was ``recorded`` and is now ``again``."""

    step: int
    recorded: float
    again: float


@dataclass(frozen=True)
class Stepped:
    """A step was trained in so many seconds; ``loss`` is the mean over all ranks."""

    step: int
    loss: float
    seconds: float
    beside_save: bool


@dataclass(frozen=True)
class Staged:
    """``save`` returned, after ``stall`` seconds; training goes on."""

    step: int
    stall: float


@dataclass(frozen=True)
class Uploaded:
    """This rank's part of a checkpoint is in the store."""

    step: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Committed:
    """A save is committed."""

    step: int


@dataclass(frozen=True)
class Measured:
    """A save during which the process did nothing else took so many seconds of CPU."""

    cpu_seconds: float
    bytes: int


@dataclass(frozen=True)
class Failed:
    """The rank ends with this error."""

    error: str


Event = Resumed | Stepped | Staged | Uploaded | Committed | Measured | Failed

_KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}


def tell(event: Event) -> None:
    """Sends an event to the driver, whole even if several threads do so at a time."""
    line = json.dumps({type(event).__name__: asdict(event)})
    sys.stdout.flush()
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def decode(line: str) -> Event | None:
    """The event of a line; None if the line is something else that was printed."""
    if not line.startswith("{"):
        return None
    kind, fields = next(iter(json.loads(line).items()))
    return _KINDS[kind](**fields)


@dataclass(frozen=True)
class Check:
    """A claim that the demo makes, whether it held, and the numbers that say so."""

    claim: str
    holds: bool
    evidence: str


@dataclass
class Phase:
    """One start of the training, with some number of ranks.

    Attributes:
        ranks: How many.
        last_step: Where it was to stop.
        losses: The loss of each step that was trained.
        resumed: What it began with, if not from scratch.
        stalls: Seconds that each call of ``save`` took on a rank.
        uploads: What each rank sent, by step.
        committed: The steps whose checkpoint is committed.
        measured: The CPU time of a save.
        failures: How ranks failed.
        killed: How it came to its end, if that was by force.
        steps_alone: Seconds of each step with no save beside it.
        steps_beside_saves: Seconds of each step during a save.
    """

    ranks: int
    last_step: int
    losses: dict[int, float] = field(default_factory=dict)
    resumed: Resumed | None = None
    stalls: list[float] = field(default_factory=list)
    uploads: defaultdict[int, list[Uploaded]] = field(default_factory=lambda: defaultdict(list))
    committed: list[int] = field(default_factory=list)
    measured: Measured | None = None
    failures: dict[int, str] = field(default_factory=dict)
    killed: str | None = None
    steps_alone: list[float] = field(default_factory=list)
    steps_beside_saves: list[float] = field(default_factory=list)

    def note(self, rank: int, event: Event) -> None:
        """Adds what a rank tells."""
        match event:
            case Stepped(step, loss, seconds, beside_save):
                self.losses[step] = loss
                (self.steps_beside_saves if beside_save else self.steps_alone).append(seconds)
            case Staged(_, stall):
                self.stalls.append(stall)
            case Uploaded(step):
                self.uploads[step].append(event)
            case Committed(step):
                self.committed.append(step)
            case Resumed():
                self.resumed = event
            case Measured():
                self.measured = event
            case Failed(error):
                self.failures[rank] = error

    @property
    def checkpoint_bytes(self) -> float:
        """Bytes of a checkpoint, over all ranks."""
        return mean(sum(part.bytes for part in parts) for parts in self._of_commits)

    @property
    def inflation(self) -> float | None:
        """By how much a save prolongs a step, as a share of it; None if too few were seen."""
        if not self.steps_beside_saves or len(self.steps_alone) < 2:
            return None
        # the first step pays for what torch sets up
        return median(self.steps_beside_saves) / median(self.steps_alone[1:]) - 1

    @property
    def upload_seconds(self) -> float:
        """Seconds that the slowest rank took to upload its part of a checkpoint, on average."""
        return mean(max(part.seconds for part in parts) for parts in self._of_commits)

    @property
    def _of_commits(self) -> list[list[Uploaded]]:
        return [self.uploads[step] for step in self.committed]
