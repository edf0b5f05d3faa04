"""What happened: the phases of the demo, and what was found out about them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from statistics import mean, median

from cloudckpt.demo.events import Committed, Event, Failed, Measured, Resumed, Staged, Stepped

__all__ = ["Check", "Phase"]


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
        stalls: Seconds that each call of ``async_save`` took on a rank.
        uploads: What each rank sent, by step.
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
    uploads: defaultdict[int, list[Committed]] = field(default_factory=lambda: defaultdict(list))
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
            case Committed(step):
                self.uploads[step].append(event)
            case Resumed():
                self.resumed = event
            case Measured():
                self.measured = event
            case Failed(error):
                self.failures[rank] = error

    @property
    def committed(self) -> list[int]:
        """The steps whose checkpoint is committed."""
        return sorted(self.uploads)

    @property
    def checkpoint_bytes(self) -> float:
        """Bytes of a checkpoint, over all ranks."""
        return mean(sum(part.bytes for part in parts) for parts in self.uploads.values())

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
        return mean(max(part.seconds for part in parts) for parts in self.uploads.values())
