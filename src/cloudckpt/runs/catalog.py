"""Which checkpoints there are in a run: a folder whose own folders are checkpoints."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from cloudckpt.checkpoint.notes import Notes, read_notes
from cloudckpt.checkpoint.objects import METADATA, is_committed, metadata_name
from cloudckpt.config import Config
from cloudckpt.runs.steps import DEFAULT_PATTERN, StepNames
from cloudckpt.stores.base import ObjectInfo, ObjectStore
from cloudckpt.transfer.group import TaskGroup
from cloudckpt.transfer.retry import Retrier, open_store
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["CheckpointSummary", "Run", "latest", "list_checkpoints"]

logger = logging.getLogger("cloudckpt")

T = TypeVar("T")
S = TypeVar("S")

_OURS = re.compile(r"__\d+_\d+(\.[0-9a-f]+)?\.distcp|\.manifest\.[0-9a-f]+\.json|__\d+\.metadata")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """What a listing tells of a checkpoint.

    Attributes:
        uri: Where it is.
        step: Its step; None if its name is not that of a step.
        is_committed: Whether it can be loaded. One that can't was left by a save that was killed,
            or is being written.
        nbytes: Bytes of its objects, leftovers of killed saves included.
        modified: When the newest of them was written, in seconds since 1970 by the store's clock;
            None if the store does not tell.
    """

    uri: str
    step: int | None
    is_committed: bool
    nbytes: int
    modified: float | None


def list_checkpoints(
    run: URILike, *, step_name: str = DEFAULT_PATTERN, config: Config | None = None
) -> list[CheckpointSummary]:
    """The checkpoints in the folders of a run, torn ones too; oldest step first, others by name.

    Folders in which neither cloudckpt nor torch has written are not listed. It takes a request for
    each thousand folders, and one for each thousand objects of a checkpoint.

    Args:
        run: The folder, for example ``s3://bucket/run``.
        step_name: What its checkpoints are called.
        config: Options.

    Raises:
        InvalidURIError: If it is no location.
        ConfigError: If ``step_name`` is no pattern.
        StoreError: If the store refuses or stays unreachable.
    """
    return Run(run, step_name=step_name, config=config).checkpoints()


def latest(
    run: URILike, *, step_name: str = DEFAULT_PATTERN, config: Config | None = None
) -> str | None:
    """The URI of the newest committed checkpoint of a run; None if there is none.

    It takes a request for each thousand folders, and one for the newest step, if that is committed.
    Ranks that ask by themselves may be told different things beside a writer: let one ask, and
    tell the rest, as :class:`CheckpointManager` does.

    Args and errors are those of :func:`list_checkpoints`.
    """
    found = Run(run, step_name=step_name, config=config)
    step = next(found.committed_steps(), None)
    return None if step is None else str(found.uri(step))


class Run:
    """The folder of a run, as its store shows it."""

    def __init__(
        self, run: URILike, *, step_name: str = DEFAULT_PATTERN, config: Config | None = None
    ) -> None:
        self.root = CheckpointURI.parse(run)
        self.names = StepNames(step_name)
        self.config = config if config is not None else Config()
        self.retrier = Retrier(self.config.retry)

    @property
    def store(self) -> ObjectStore:
        """The store, which is opened when it is first asked for."""
        return open_store(self.root, self.config)

    def uri(self, step: int) -> CheckpointURI:
        """Where the checkpoint of a step is, or would be."""
        return self.root.join(self.names.name(step))

    def folders(self) -> list[str]:
        """The names of all folders of the run."""
        below = self.root.key("")
        return self.retrier.call(lambda: list(self.store.list_folders(below)))

    def steps(self) -> list[int]:
        """The steps that have a folder, whether they are committed or not; oldest first."""
        folders = self.folders()
        steps = sorted(step for step in map(self.names.step, folders) if step is not None)
        if folders and not steps:
            logger.warning(
                "%s: no folder is called %r; there are %s%s",
                self.root,
                self.names.pattern,
                ", ".join(repr(name) for name in folders[:3]),
                " and others" if len(folders) > 3 else "",
            )
        return steps

    def is_committed(self, step: int) -> bool:
        """Whether the checkpoint of a step can be loaded."""
        return is_committed(self.store, self.uri(step), self.retrier)

    def notes(self, step: int) -> Notes:
        """What is noted with the checkpoint of a step."""
        return read_notes(self.store, self.uri(step), self.retrier)

    def committed(self) -> list[int]:
        """The steps whose checkpoints can be loaded, oldest first; all are looked at."""
        steps = self.steps()
        found = self.each(self.is_committed, steps)
        return [step for step, is_there in zip(steps, found, strict=True) if is_there]

    def scores(self, steps: list[int], metric: str) -> dict[int, float]:
        """A metric of some steps, as they were saved with it; not a number where they were not."""
        notes = self.each(self.notes, steps)
        pairs = zip(steps, notes, strict=True)
        return {step: found.metrics.get(metric, math.nan) for step, found in pairs}

    def committed_steps(self) -> Iterator[int]:
        """The steps whose checkpoints can be loaded, newest first; each is looked at in turn."""
        return (step for step in reversed(self.steps()) if self.is_committed(step))

    def checkpoints(self) -> list[CheckpointSummary]:
        """See :func:`list_checkpoints`."""
        summaries = self.each(self._summary, self.folders())
        found = [one for one in summaries if one is not None]
        return sorted(found, key=lambda one: (one.step is None, one.step or 0, one.uri))

    def each(self, look: Callable[[S], T], wanted: Iterable[S]) -> list[T]:
        """What ``look`` returns for each of ``wanted``, in its order; several at a time."""
        found: dict[int, T] = {}

        def keep(index: int, one: S) -> None:
            found[index] = look(one)

        group = TaskGroup(
            self.config.connections, name="cloudckpt-list", interrupt=self.store.interrupt
        )

        def produce() -> None:
            for index, one in enumerate(wanted):
                group.submit(partial(keep, index, one))

        group.run(produce)
        return [found[index] for index in sorted(found)]

    def _summary(self, folder: str) -> CheckpointSummary | None:
        uri = self.root.join(folder)
        below = uri.key("")
        listed = self.retrier.call(lambda: list(self.store.list(below)))
        objects = [info for info in listed if is_ours(info.key.removeprefix(below))]
        if not objects:
            return None
        return CheckpointSummary(
            uri=str(uri),
            step=self.names.step(folder),
            is_committed=any(_commits(info.key.removeprefix(below)) for info in objects),
            nbytes=sum(info.size for info in objects),
            modified=_newest(objects),
        )


def is_ours(name: str) -> bool:
    """Whether an object of this name beneath a checkpoint is one of cloudckpt's or torch's."""
    return _commits(name) or _OURS.fullmatch(name) is not None


def _commits(name: str) -> bool:
    return name in (METADATA, metadata_name(0))


def _newest(objects: list[ObjectInfo]) -> float | None:
    times = [info.modified for info in objects if info.modified is not None]
    return max(times, default=None)
