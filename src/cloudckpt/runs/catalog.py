"""Lists the checkpoints of a run: a folder whose direct subfolders are checkpoints."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from cloudckpt.checkpoint.notes import Notes, read_notes
from cloudckpt.checkpoint.objects import (
    CLAIM,
    KEPT_FOR,
    METADATA,
    OF_RANKS,
    find_commit,
    is_committed,
    is_keep_name,
    is_pending_name,
)
from cloudckpt.config import Config, config_or_default
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CloudCheckpointError,
    ConfigError,
    StoreError,
    TransientStoreError,
)
from cloudckpt.runs.line import Line, Owner
from cloudckpt.runs.steps import DEFAULT_PATTERN, StepNames
from cloudckpt.stores.base import ObjectInfo, ObjectStore
from cloudckpt.transfer.retry import Retrier, open_store
from cloudckpt.transfer.view import AT_FIRST, View
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["CheckpointSummary", "Run", "latest", "list_checkpoints"]

logger = logging.getLogger("cloudckpt")

T = TypeVar("T")

_OURS = re.compile(r"__\d+_\d+(\.[0-9a-f]+)?\.distcp|__\d+\.metadata|__\d+\.[0-9a-f]+\.pending")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """One checkpoint of a run, as the store lists it.

    Attributes:
        uri: The location of the checkpoint.
        step: The step of the checkpoint; None if its folder is not named like a step.
        is_committed: Whether the checkpoint can be loaded. If not, its save is in progress, or was
            killed.
        is_pending: Whether the checkpoint is uncommitted, and its saving processes have outlived
            their trainers and are sending the data, or have sent it. The next job's ``restore()``
            or ``cloudckpt recover`` commits it.
        is_referred_to: Whether other checkpoints of the run, or saves in progress, may refer to
            objects of this checkpoint: these objects stay when it is deleted.
        is_abandoned: Whether the checkpoint is committed, but not on the line of its run: its
            training was given up, or its job was replaced (:mod:`cloudckpt.runs.line`).
        job: The job that saved the checkpoint; empty if that is not known.
        nbytes: Bytes of all objects in the checkpoint's folder, with leftovers of killed saves.
        modified: When the newest of these objects was written, in seconds since 1970 by the store's
            clock; None if the store does not report it.
    """

    uri: str
    step: int | None
    is_committed: bool
    is_pending: bool = False
    is_referred_to: bool = False
    is_abandoned: bool = False
    job: str = ""
    nbytes: int
    modified: float | None


def list_checkpoints(
    run: URILike, *, step_name: str = DEFAULT_PATTERN, config: Config | None = None
) -> list[CheckpointSummary]:
    """Lists all checkpoints of a run, committed or not, by step; those without a step come last.

    Folders in which neither cloudckpt nor torch has written are left out, and subfolders of
    checkpoints are not searched. A call takes one request per thousand folders, one for the claim
    of the run, one per folder, and two more per committed step. A checkpoint with a thousand names
    or more directly in its folder takes two more, plus one per further thousand of its objects.

    Args:
        run: The folder of the run, for example ``s3://bucket/run``.
        step_name: The pattern of the checkpoints' folder names.
        config: Options.

    Raises:
        InvalidURIError: If ``run`` is not a valid location.
        ConfigError: If ``step_name`` is not a valid pattern.
        StoreError: If the store refuses or stays unreachable.
    """
    found = Run(run, step_name=step_name, config=config)
    return summaries(found.view, found)


def latest(
    run: URILike, *, step_name: str = DEFAULT_PATTERN, config: Config | None = None
) -> str | None:
    """Returns the URI of a run's newest committed checkpoint; None if no checkpoint is committed.

    Abandoned steps are skipped (:mod:`cloudckpt.runs.line`), and so are steps whose notes are
    damaged, which is logged. A call takes one request per thousand folders, one for the claim of
    the run, and two for the newest step, if that is on the line. While a job saves, ranks that call
    this separately may get different results: call it on one rank and broadcast the result, as
    :class:`CheckpointManager` does.

    Args:
        run: The folder of the run, for example ``s3://bucket/run``.
        step_name: The pattern of the checkpoints' folder names.
        config: Options.

    Raises:
        InvalidURIError: If ``run`` is not a valid location.
        ConfigError: If ``step_name`` is not a valid pattern, or ``run`` is a checkpoint.
        StoreError: If the store refuses or stays unreachable.
    """
    found = Run(run, step_name=step_name, config=config)
    step = newest_step(found.view, found)
    if step is None:
        check_is_run(found.view, found)
    return None if step is None else str(found.uri(step))


def steps_of(view: View, run: Run) -> list[int]:
    """Lists the steps of the run that have a folder, committed or not; oldest first.

    Logs a warning if the run has folders, but none with the name of a step.
    """
    names = view.folders(run.root.key(""))
    found = run.steps_among(names)
    if names and not found:
        logger.warning(
            "%s: no folder has a name like %r; the folders are %s%s",
            run.root,
            run.names.pattern,
            ", ".join(repr(name) for name in names[:3]),
            " and others" if len(names) > 3 else "",
        )
    return found


def newest_step(view: View, run: Run) -> int | None:
    """Returns the newest committed step on the run's line; None if the line has none."""
    return newest_of(view, run, steps_of(view, run))


def newest_of(view: View, run: Run, steps: Sequence[int]) -> int | None:
    """Returns the newest step of ``steps`` (oldest first) that is committed and on the run's line.

    Steps whose notes are damaged are logged and skipped.

    Raises:
        StoreError: If the store refuses or stays unreachable.
    """
    for step, notes in NewestFirst(view, run, steps):
        if isinstance(notes, Notes):
            return step
        if not isinstance(notes, CheckpointCorruptError):
            raise notes
        run.log_unread({step: notes})
    return None


class NewestFirst:
    """Iterates over the committed steps on a run's line, newest first, with their notes.

    If the notes of a step can't be read, the iterator yields the error instead of them. Notes are
    read on demand, so an unreadable old step does not fail a caller that needs a newer one.

    Attributes:
        passed: The abandoned steps skipped so far, with their notes.
        is_line_gone: Whether no step is left on the line that the claim describes, so that the
            newest step of the run decides the line.
    """

    def __init__(
        self,
        view: View,
        run: Run,
        steps: Sequence[int] | None = None,
        adopt: Callable[[int], None] | None = None,
    ) -> None:
        """
        Args:
            view: The view through which the store is read.
            run: The run.
            steps: The steps that have a folder, oldest first; None lists them.
            adopt: Commits an uncommitted step if possible; called for each uncommitted step that is
                newer than the newest committed one on the line. None adopts no step.
        """
        self.passed: dict[int, Notes] = {}
        self.is_line_gone = False
        self._view, self._run, self._steps, self._adopt = view, run, steps, adopt

    def __iter__(self) -> Iterator[tuple[int, Notes | CloudCheckpointError]]:
        line, has_any, adopts = line_of(self._view, self._run), False, True
        for step, notes in self._read():
            if notes is None and adopts and self._adopt is not None:
                self._adopt(step)
                # read again: this job, or another one meanwhile, may have committed the step
                notes = _notes_or_error(self._view, self._run, step)
            if isinstance(notes, Notes) and not line.has(step, notes):
                self.passed[step] = notes
            elif notes is not None:
                has_any, adopts = True, adopts and not isinstance(notes, Notes)
                yield step, notes
        if not has_any and self.passed:
            line, passed, self.passed, self.is_line_gone = Line(), self.passed, {}, True
            for step, notes in passed.items():
                if line.has(step, notes):
                    yield step, notes
                else:
                    self.passed[step] = notes

    def _read(self) -> Iterator[tuple[int, Notes | CloudCheckpointError | None]]:
        """Yields each step, newest first, with its notes, its error, or None if not committed.

        The notes of the newest step are read alone, then those of 2, 4, 8 ... steps at once.
        """
        steps = steps_of(self._view, self._run) if self._steps is None else self._steps
        left, count = [*steps], 1
        while left:
            left, some = left[:-count], left[-count:][::-1]
            found = self._view.each(partial(_notes_or_error, self._view, self._run), some)
            yield from zip(some, found, strict=True)
            count = min(2 * count, self._run.config.requests_at_once)


def owner_of(view: View, run: Run) -> Owner | None:
    """Reads the run's claim; None if the run is not claimed."""
    with view.asking() as store:
        return Owner.read(store, run.root.key(CLAIM), view.retrier)


def line_of(view: View, run: Run) -> Line:
    """Reads the run's line from its claim; all functions that choose among steps use this line."""
    return Line.of(owner_of(view, run))


def notes_of(view: View, run: Run, step: int) -> Notes | None:
    """Reads the notes of a step; None if the step is not committed.

    Raises:
        CheckpointCorruptError: If the notes are damaged.
        StoreError: If the store refuses or stays unreachable.
    """
    with view.asking() as store:
        try:
            return read_notes(store, run.uri(step), view.retrier)
        except CheckpointNotFoundError:
            return None


def _notes_or_error(view: View, run: Run, step: int) -> Notes | CloudCheckpointError | None:
    """Reads the notes of a step, and returns the error instead of raising it."""
    try:
        return notes_of(view, run, step)
    except (CheckpointCorruptError, StoreError) as error:
        return error


@dataclass(frozen=True)
class History:
    """The committed steps of a run, with their notes, oldest first.

    Attributes:
        line: The notes of the steps on the run's line.
        abandoned: The notes of the abandoned steps.
        unread: For each step whose notes can't be read, the error: it is not known whether such a
            step is on the line.
        is_line_gone: Whether no step is left on the line that the claim describes, so that the
            newest step of the run decides the line.
    """

    line: dict[int, Notes] = field(default_factory=dict)
    abandoned: dict[int, Notes] = field(default_factory=dict)
    unread: dict[int, CloudCheckpointError] = field(default_factory=dict)
    is_line_gone: bool = False

    def scores(self, metric: str) -> dict[int, float]:
        """Returns a metric of each step on the line; NaN for a step saved without that metric."""
        return {step: one.metrics.get(metric, math.nan) for step, one in self.line.items()}


def history_of(view: View, run: Run, steps: Sequence[int] | None = None) -> History:
    """Reads the notes of all committed steps of a run, or of those among ``steps``.

    Raises:
        StoreError: If the store refuses the listing, or stays unreachable.
    """

    def look(step: int) -> Notes | CloudCheckpointError | None:
        found = _notes_or_error(view, run, step)
        if isinstance(found, TransientStoreError):
            raise found
        return found

    steps = steps_of(view, run) if steps is None else steps
    line, found = line_of(view, run), History()
    pairs = [*zip(steps, view.each(look, steps), strict=True)]
    for step, one in pairs:
        if isinstance(one, Notes):
            found.abandoned[step] = one
        elif one is not None:
            found.unread[step] = one
    known = [*found.abandoned.items()][::-1]
    on_line = [step for step, one in known if line.has(step, one)]
    if known and not on_line and not found.unread:
        line, found = Line(), replace(found, is_line_gone=True)
        on_line = [step for step, one in known if line.has(step, one)]
    for step in on_line[::-1]:
        found.line[step] = found.abandoned.pop(step)
    return found


def check_is_run(view: View, run: Run) -> None:
    """Checks that the run's location is not itself a checkpoint.

    Raises:
        ConfigError: If it is a checkpoint.
    """
    if run.root.prefix and find_commit(view.look, run.root) is not None:
        raise ConfigError(
            "this is a checkpoint, not a run: did you mean the folder that contains it, "
            f"{run.root.parent}? If there are checkpoints in it, delete this one with cloudckpt "
            "rm",
            uri=str(run.root),
        )


def summaries(view: View, run: Run) -> list[CheckpointSummary]:
    """Lists all checkpoints of a run, as :func:`list_checkpoints` does, through a given view."""
    found = view.each(partial(summary, view, run), view.folders(run.root.key("")))
    known = [one for one in found if one is not None]
    if not known:
        check_is_run(view, run)
    steps = sorted(one.step for one in known if one.is_committed and one.step is not None)
    history = history_of(view, run, steps) if steps else History()
    notes = history.line | history.abandoned
    told = [
        one
        if one.step not in notes
        else replace(one, is_abandoned=one.step in history.abandoned, job=notes[one.step].job)
        for one in known
    ]
    return sorted(told, key=lambda one: (one.step is None, one.step or 0, one.uri))


def summary(view: View, run: Run, folder: str) -> CheckpointSummary | None:
    """Describes the checkpoint in a folder of the run; None if it is another program's folder.

    Other programs' folders may have names that are not valid in a location (``..``, ``what?``).
    """
    if not CheckpointURI.accepts(f"{run.root}/{folder}"):
        return None
    uri = run.root.join(folder)
    below = uri.key("")
    objects = objects_of_ours(view, below)
    if all(is_keep_name(info.key.removeprefix(below)) for info in objects):
        return None  # only marks remain, from a killed save whose data is gone
    names = {info.key.removeprefix(below) for info in objects}
    return CheckpointSummary(
        uri=str(uri),
        step=run.names.step(folder),
        is_committed=METADATA in names,
        is_pending=METADATA not in names and any(map(is_pending_name, names)),
        is_referred_to=any(map(is_keep_name, names)),
        nbytes=sum(info.size for info in objects),
        modified=_newest(objects),
    )


def objects_of_ours(view: View, below: str) -> list[ObjectInfo]:
    """Lists the objects directly beneath a folder whose names are cloudckpt's or torch's.

    In a folder with a thousand names or more, only the prefixes of such names are listed further.
    """
    level = view.level(below)
    found: Iterable[ObjectInfo | str] = level
    if len(level) >= AT_FIRST:  # a checkpoint of many ranks, or another program's folder
        # the names of marks sort first, so the first page has them
        marks = [info for info in level if _name(info, below).startswith(KEPT_FOR)]
        found = marks + [
            info for start in (METADATA, OF_RANKS) for info in view.objects(below + start)
        ]
    return [info for info in found if isinstance(info, ObjectInfo) and is_ours(_name(info, below))]


def _name(info: ObjectInfo | str, below: str) -> str:
    """Returns the name of an object or subfolder, without the key of the folder around it."""
    return info.key.removeprefix(below) if isinstance(info, ObjectInfo) else info


class Run:
    """The folder of a run, with the options to reach it; its store is opened on first use."""

    def __init__(
        self, run: URILike, *, step_name: str = DEFAULT_PATTERN, config: Config | None = None
    ) -> None:
        self.root = CheckpointURI.parse(run)
        self.names = StepNames(step_name)
        self.config = config_or_default(config)
        self.retrier = Retrier(self.config.retry)

    @property
    def store(self) -> ObjectStore:
        """The store in which the run is."""
        return open_store(self.root, self.config)

    @property
    def view(self) -> View:
        """A new view for a series of listings and reads of the run."""
        return View(self.root, self.config)

    def uri(self, step: int) -> CheckpointURI:
        """Returns the location of a step's checkpoint, whether or not it exists."""
        return self.root.join(self.names.name(step))

    def steps_among(self, folders: Iterable[str]) -> list[int]:
        """Returns the steps that folder names stand for, oldest first; ignores other names."""
        return sorted(step for step in map(self.names.step, folders) if step is not None)

    def steps(self) -> list[int]:
        """Lists the steps that have a folder, committed or not; oldest first."""
        return steps_of(self.view, self)

    def is_committed(self, step: int) -> bool:
        """Returns whether the checkpoint of a step is committed."""
        return is_committed(self.store, self.uri(step), self.retrier)

    def is_pending(self, step: int) -> bool:
        """Returns whether a step is pending, as :attr:`CheckpointSummary.is_pending` defines it."""
        found = summary(self.view, self, self.names.name(step))
        return found is not None and found.is_pending

    def notes(self, step: int) -> Notes:
        """Reads the notes saved with the checkpoint of a step."""
        return read_notes(self.store, self.uri(step), self.retrier)

    def history(self) -> History:
        """Reads the notes of all committed steps of the run."""
        return history_of(self.view, self)

    def committed(self) -> list[int]:
        """Lists the committed steps, oldest first; checks all steps at once."""
        found, view = self.steps(), self.view
        are_there = view.each(
            lambda step: is_committed(self.store, self.uri(step), view.retrier), found
        )
        return [step for step, is_there in zip(found, are_there, strict=True) if is_there]

    def log_unread(self, unread: Mapping[int, CloudCheckpointError]) -> None:
        """Logs one error that names the steps whose notes can't be read, if there are any."""
        if unread:
            logger.error(
                "%s: the notes of %s can't be read, so it is neither restored nor deleted%s: %s",
                self.root,
                self.names.name(min(unread)),
                f" (nor are {len(unread) - 1} others)" if len(unread) > 1 else "",
                unread[min(unread)],
            )

    def committed_steps(self) -> Iterator[int]:
        """Yields the committed steps, newest first; each step is checked when it is its turn."""
        return (step for step in reversed(self.steps()) if self.is_committed(step))


def is_ours(name: str) -> bool:
    """Returns whether cloudckpt or torch writes objects of this name into a checkpoint."""
    return name == METADATA or _OURS.fullmatch(name) is not None or is_keep_name(name)


def _newest(objects: list[ObjectInfo]) -> float | None:
    """Returns the latest modification time of the objects; None if the store reports no times."""
    times = [info.modified for info in objects if info.modified is not None]
    return max(times, default=None)
