"""The checkpoints in a run: a folder whose direct subfolders are checkpoints."""

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
    """What a listing says about a checkpoint.

    Attributes:
        uri: Where it is.
        step: Its step; None if its name is not that of a step.
        is_committed: Whether it can be loaded. If not, it was left by a killed save, or is being
            written.
        is_pending: Whether it is uncommitted, but saving processes that outlived their trainers are
            finishing it, or have: the next job's ``restore()`` or ``cloudckpt recover`` commits it.
        is_referred_to: Whether other checkpoints of the run refer to its objects, or saves in
            progress may: those objects stay when it is deleted.
        is_abandoned: Whether it is committed, but not on the line of its run: of a training that
            was given up, or of a job that another has replaced (:mod:`cloudckpt.runs.line`).
        job: The job that saved it; empty if that is not known.
        nbytes: Bytes of its objects, including leftovers of killed saves.
        modified: When the newest of them was written, in seconds since 1970 by the store's clock;
            None if the store does not say.
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
    """The checkpoints in a run's folders, uncommitted too; by step, then others by name.

    Folders in which neither cloudckpt nor torch has written are not listed. This takes one request
    per thousand folders, one for the claim of the run, one per folder, and two more per committed
    step; a checkpoint with a thousand names or more directly
    in it takes two more, plus one per further thousand of its objects. Subfolders of checkpoints
    are not searched.

    Args:
        run: The folder, for example ``s3://bucket/run``.
        step_name: What its checkpoints are called.
        config: Options.

    Raises:
        InvalidURIError: If it is not a valid location.
        ConfigError: If ``step_name`` is not a valid pattern.
        StoreError: If the store refuses or stays unreachable.
    """
    found = Run(run, step_name=step_name, config=config)
    return summaries(found.view, found)


def latest(
    run: URILike, *, step_name: str = DEFAULT_PATTERN, config: Config | None = None
) -> str | None:
    """The URI of the newest committed checkpoint of a run; None if there is none.

    Abandoned steps are passed over (:mod:`cloudckpt.runs.line`). It takes one request per thousand
    folders, one for the claim of the run, and two for the newest step, if that is on the line.
    While a job saves, ranks that ask separately may get different answers: ask on one rank and
    broadcast the answer, as :class:`CheckpointManager` does.

    Args and errors are those of :func:`list_checkpoints`.
    """
    found = Run(run, step_name=step_name, config=config)
    step = newest_step(found.view, found)
    if step is None:
        check_is_run(found.view, found)
    return None if step is None else str(found.uri(step))


def steps_of(view: View, run: Run) -> list[int]:
    """The steps that have a folder, whether they are committed or not; oldest first.

    If folders exist but none has a step's name, that is logged.
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
    """The newest committed step on the line of a run."""
    return newest_of(view, run, steps_of(view, run))


def newest_of(view: View, run: Run, steps: Sequence[int]) -> int | None:
    """The newest of some steps, oldest first, that is committed and on the line of its run."""
    for step, notes in NewestFirst(view, run, steps):
        if isinstance(notes, Notes):
            return step
        if not isinstance(notes, CheckpointCorruptError):
            raise notes
        run.log_unread({step: notes})
    return None


class NewestFirst:
    """The committed steps on the line of a run with their notes, newest first.

    Where notes can't be read, their error stands in their place. Only what is asked for is read: an
    older step that can't be reached hinders nobody who needs a newer one.

    Attributes:
        passed: The abandoned steps that were passed over so far.
        is_line_gone: Whether none is left of the line that was claimed, so that the newest decides.
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
            view: What the store is asked through.
            run: The run.
            steps: Those that have a folder, oldest first; None has them listed.
            adopt: Commits a step if it can; called with those that are newer than the line.
        """
        self.passed: dict[int, Notes] = {}
        self.is_line_gone = False
        self._view, self._run, self._steps, self._adopt = view, run, steps, adopt

    def __iter__(self) -> Iterator[tuple[int, Notes | CloudCheckpointError]]:
        line, has_any, adopts = line_of(self._view, self._run), False, True
        for step, notes in self._read():
            if notes is None and adopts and self._adopt is not None:
                self._adopt(step)
                notes = _notes_or_error(self._view, self._run, step)  # or others have committed it
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
        """Reads the newest alone, and then ever more at the same time."""
        steps = steps_of(self._view, self._run) if self._steps is None else self._steps
        left, count = [*steps], 1
        while left:
            left, some = left[:-count], left[-count:][::-1]
            found = self._view.each(partial(_notes_or_error, self._view, self._run), some)
            yield from zip(some, found, strict=True)
            count = min(2 * count, self._run.config.requests_at_once)


def owner_of(view: View, run: Run) -> Owner | None:
    """The job that claimed a run last."""
    with view.asking() as store:
        return Owner.read(store, run.root.key(CLAIM), view.retrier)


def line_of(view: View, run: Run) -> Line:
    """The line of a run; every function that chooses among its steps asks this one."""
    return Line.of(owner_of(view, run))


def notes_of(view: View, run: Run, step: int) -> Notes | None:
    """The notes of a step; None if it is not committed.

    Raises:
        CheckpointCorruptError: If they are damaged.
        StoreError: If the store refuses or stays unreachable.
    """
    with view.asking() as store:
        try:
            return read_notes(store, run.uri(step), view.retrier)
        except CheckpointNotFoundError:
            return None


def _notes_or_error(view: View, run: Run, step: int) -> Notes | CloudCheckpointError | None:
    try:
        return notes_of(view, run, step)
    except (CheckpointCorruptError, StoreError) as error:
        return error


@dataclass(frozen=True)
class History:
    """The committed steps of a run, with their notes, oldest first.

    Attributes:
        line: Those on its line.
        abandoned: Those of other trainings.
        unread: Those whose notes can't be read, and why: whose they are is not known.
        is_line_gone: Whether none is left of the line that was claimed, so that the newest decides.
    """

    line: dict[int, Notes] = field(default_factory=dict)
    abandoned: dict[int, Notes] = field(default_factory=dict)
    unread: dict[int, CloudCheckpointError] = field(default_factory=dict)
    is_line_gone: bool = False

    def scores(self, metric: str) -> dict[int, float]:
        """A metric of the steps on the line; NaN for one that was saved without it."""
        return {step: one.metrics.get(metric, math.nan) for step, one in self.line.items()}


def history_of(view: View, run: Run, steps: Sequence[int] | None = None) -> History:
    """The committed steps of a run, or of some of its steps; reads the notes of all.

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
    """Refuses the location of a checkpoint.

    Raises:
        ConfigError: If there is one.
    """
    if run.root.prefix and find_commit(view.look, run.root) is not None:
        raise ConfigError(
            "this is a checkpoint, not a run: did you mean the folder that contains it, "
            f"{run.root.parent}? If there are checkpoints in it, delete this one with cloudckpt "
            "rm",
            uri=str(run.root),
        )


def summaries(view: View, run: Run) -> list[CheckpointSummary]:
    """See :func:`list_checkpoints`."""
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
    """The checkpoint in a folder of a run; None if neither cloudckpt nor torch has written it.

    Folders of other programs may have names that no location can have, such as ``..`` or ``what?``.
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
    """The objects that cloudckpt or torch has written directly beneath a folder.

    For a folder of another program, this lists only the first page.
    """
    level = view.level(below)
    found: Iterable[ObjectInfo | str] = level
    if len(level) >= AT_FIRST:  # a checkpoint of many ranks, or another program's folder
        marks = [info for info in level if _name(info, below).startswith(KEPT_FOR)]  # come first
        found = marks + [
            info for start in (METADATA, OF_RANKS) for info in view.objects(below + start)
        ]
    return [info for info in found if isinstance(info, ObjectInfo) and is_ours(_name(info, below))]


def _name(info: ObjectInfo | str, below: str) -> str:
    """The name of an object or folder directly beneath a folder."""
    return info.key.removeprefix(below) if isinstance(info, ObjectInfo) else info


class Run:
    """The folder of a run; its store is opened on first use."""

    def __init__(
        self, run: URILike, *, step_name: str = DEFAULT_PATTERN, config: Config | None = None
    ) -> None:
        self.root = CheckpointURI.parse(run)
        self.names = StepNames(step_name)
        self.config = config_or_default(config)
        self.retrier = Retrier(self.config.retry)

    @property
    def store(self) -> ObjectStore:
        """The store of the run."""
        return open_store(self.root, self.config)

    @property
    def view(self) -> View:
        """A new view, through which the store is asked about the run."""
        return View(self.root, self.config)

    def uri(self, step: int) -> CheckpointURI:
        """The location of a step's checkpoint, whether or not it exists."""
        return self.root.join(self.names.name(step))

    def steps_among(self, folders: Iterable[str]) -> list[int]:
        """The steps that have one of these folders, oldest first."""
        return sorted(step for step in map(self.names.step, folders) if step is not None)

    def steps(self) -> list[int]:
        """The steps that have a folder, whether they are committed or not; oldest first."""
        return steps_of(self.view, self)

    def is_committed(self, step: int) -> bool:
        """Whether the checkpoint of a step can be loaded."""
        return is_committed(self.store, self.uri(step), self.retrier)

    def is_pending(self, step: int) -> bool:
        """Whether the checkpoint of a step is pending; see :class:`CheckpointSummary`."""
        found = summary(self.view, self, self.names.name(step))
        return found is not None and found.is_pending

    def notes(self, step: int) -> Notes:
        """The notes saved with the checkpoint of a step."""
        return read_notes(self.store, self.uri(step), self.retrier)

    def history(self) -> History:
        """See :func:`history_of`."""
        return history_of(self.view, self)

    def committed(self) -> list[int]:
        """The steps whose checkpoints can be loaded, oldest first; checks all of them."""
        found, view = self.steps(), self.view
        are_there = view.each(
            lambda step: is_committed(self.store, self.uri(step), view.retrier), found
        )
        return [step for step, is_there in zip(found, are_there, strict=True) if is_there]

    def log_unread(self, unread: Mapping[int, CloudCheckpointError]) -> None:
        """Logs which steps have notes that can't be read, if there are any."""
        if unread:
            logger.error(
                "%s: the notes of %s can't be read, so it is neither restored nor deleted%s: %s",
                self.root,
                self.names.name(min(unread)),
                f" (nor are {len(unread) - 1} others)" if len(unread) > 1 else "",
                unread[min(unread)],
            )

    def committed_steps(self) -> Iterator[int]:
        """The steps whose checkpoints can be loaded, newest first; each is checked in turn."""
        return (step for step in reversed(self.steps()) if self.is_committed(step))


def is_ours(name: str) -> bool:
    """Whether an object of this name beneath a checkpoint is one of cloudckpt's or torch's."""
    return name == METADATA or _OURS.fullmatch(name) is not None or is_keep_name(name)


def _newest(objects: list[ObjectInfo]) -> float | None:
    times = [info.modified for info in objects if info.modified is not None]
    return max(times, default=None)
