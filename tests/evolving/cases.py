"""Cases: what a job saves, one save after the other. As text they are code that makes them."""

from __future__ import annotations

from dataclasses import dataclass

from .states import State

__all__ = ["ALONE", "ALWAYS", "CHECKS", "IN_PROCESS", "THEN", "WAYS", "WAYS_OF_TORCH"]
__all__ += ["Case", "Fault", "Save", "Segment"]

WAYS = (
    "save",
    "by torch's planner",
    "by a planner of one's own",
    "by cached plans",
    "by one planner",
    "by one writer",
    "to the lowest rank",
    "adopted",
    "async thread",
    "async process",
    "sync checkpointer",
    "thread checkpointer",
    "process checkpointer",
    "manager",
    "thread manager",
    "process manager",
    "dcp.save",
    "dcp.save of a URI",
)
"""By what a state is saved."""

WAYS_OF_TORCH = ("dcp.save", "dcp.save of a URI")
"""Those that know no values of each rank, nor objects within a dict."""

ALONE = ("alone", "everything", "verify", "inspect", "stock alone")
"""Checks that one rank makes by itself."""

CHECKS = ("together", "placed otherwise", *ALONE, "stock together", "another group")
"""What is looked at behind a save."""

ALWAYS = ("together", "stock alone")
"""Those of each save that is drawn; of the others there are some."""

IN_PROCESS = tuple(way for way in WAYS if "process" not in way)
"""Those that save in the process of the trainer."""

THEN = ("copied", "copied by other tools", "deleted", "swept", "run copied", "run copied by others")
"""What may become of a checkpoint, or of all there are, before the next save. Of a run that was
copied, the next process group goes on with the copy."""


@dataclass(frozen=True)
class Fault:
    """What is wrong in a save.

    Attributes:
        kind: ``unpicklable``: a value of the state; ``disk``: it is full; ``unlike``: ranks have
            different values under one name, if any of the named is something of which several have
            a copy.
        rank: On which rank.
        skip: Calls or requests of that rank that go well before.
        names: What differs, see `states.names`.
    """

    kind: str
    rank: int = 0
    skip: int = 0
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Save:
    """A save, and how it is looked at.

    Attributes:
        state: What is saved.
        by: Of `WAYS`.
        to: The name of a place; managers save steps of a run.
        overwrite: Whether what is at the place may be replaced.
        fault: What is wrong.
        checks: Of `CHECKS`.
        later: Whether the next save begins before it is known what became of this one.
        incremental: Whether it sends only what has changed.
        then: Of `THEN`; empty if nothing happens.
    """

    state: State
    by: str = "save"
    to: str = "a"
    overwrite: bool = True
    fault: Fault | None = None
    checks: tuple[str, ...] = CHECKS
    later: bool = False
    incremental: bool = False
    then: str = ""


@dataclass(frozen=True)
class Segment:
    """What one process group saves."""

    world: int
    saves: list[Save]


@dataclass(frozen=True)
class Case:
    """A case.

    Attributes:
        segments: Process groups, one after the other, in the same processes.
        store: ``local`` or ``s3``.
        tight: Whether objects are small, so that a rank has several.
    """

    segments: list[Segment]
    store: str = "local"
    tight: bool = False

    @property
    def saves(self) -> list[Save]:
        return [save for segment in self.segments for save in segment.saves]
