"""What the driver asks of the ranks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

__all__ = ["Job", "step_uri"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the ranks are to do.

    Attributes:
        run: The URI beneath which the checkpoints stand.
        resume: The checkpoint to go on from, or None to begin.
        last_step: Where to stop.
        save_every: Steps from one checkpoint to the next.
        stall_at: The step in whose save rank 1 stops, for the driver to kill it there.
        measure: Whether the last save is to be synchronous, so that its CPU can be told apart.
    """

    run: str
    resume: str | None
    last_step: int
    save_every: int
    stall_at: int | None = None
    measure: bool = False

    def to_json(self) -> str:
        """The job as an argument of a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The reverse of :meth:`to_json`."""
        return cls(**json.loads(text))


def step_uri(run: str, step: int) -> str:
    """Where the checkpoint of a step stands; the names sort by step."""
    return f"{run}/step-{step:08d}"
