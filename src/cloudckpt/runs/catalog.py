"""Lists the checkpoints of a run: a folder whose direct subfolders are checkpoints."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cloudckpt.checkpoint.notes import Notes, read_notes
from cloudckpt.checkpoint.objects import (
    CLAIM,
    KEPT_FOR,
    METADATA,
    OF_RANKS,
    find_commit,
    is_keep_name,
    is_pending_name,
)
from cloudckpt.config import Config, config_or_default
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CloudCheckpointError,
    ConfigError,
    StoreError,
    TransientStoreError,
)
from cloudckpt.runs.line import Owner
from cloudckpt.runs.steps import DEFAULT_PATTERN, StepNames
from cloudckpt.stores.base import ObjectInfo, ObjectStore
from cloudckpt.transfer.retry import Retrier, open_store
from cloudckpt.transfer.view import AT_FIRST, View
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["CheckpointSummary", "Run", "latest", "list_checkpoints"]

logger = logging.getLogger("cloudckpt")

_OURS = re.compile(r"__\d+_\d+(\.[0-9a-f]+)?\.distcp|__\d+\.metadata|__\d+\.[0-9a-f]+\.pending")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """One checkpoint of a run, as the store lists it.

    Attributes:
        uri: The location of the checkpoint.
        step: The step of the checkpoint; None if its folder is not named like a step.
        is_committed: Whether the checkpoint is committed. If not, its save is in progress, or was
            killed; or it was deleted, except for objects that others need (``is_referred_to``).
        is_pending: Whether the checkpoint is uncommitted, and saving processes whose trainers have
            ended are sending its data, or have sent it. When all data is sent, the next job's
            ``restore()`` or ``cloudckpt recover`` commits it.
        is_referred_to: Whether other checkpoints of the run, or saves in progress, may refer to
            objects of this checkpoint: these objects stay when it is deleted.
        is_abandoned: Whether the checkpoint is committed, but not on the line of its run: its
            training was given up, or its job was replaced (:mod:`cloudckpt.runs.line`).
        job: The name of the job that saved the checkpoint; empty if that is not known.
        nbytes: Bytes of all objects directly in the checkpoint's folder that cloudckpt or torch has
            written, including leftovers of killed saves.
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
        config: Options; None reads them from the environment.

    Raises:
        InvalidURIError: If ``run`` is not a valid location.
        ConfigError: If ``step_name`` is not a valid pattern, or ``run`` is a checkpoint.
        StoreError: If the store refuses or stays unreachable.
    """
    return Run(run, step_name=step_name, config=config).summaries()


def latest(
    run: URILike, *, step_name: str = DEFAULT_PATTERN, config: Config | None = None
) -> str | None:
    """Returns the URI of a run's newest committed checkpoint; None if there is none.

    Abandoned steps are skipped (:mod:`cloudckpt.runs.line`), and so are steps whose notes are
    damaged, which is logged. A call takes one request per thousand folders, one for the claim of
    the run, and two for the newest step, if that is on the line. While a job saves, ranks that call
    this separately may get different results: call it on one rank and broadcast the result, as
    :class:`CheckpointManager` does.

    Args:
        run: The folder of the run, for example ``s3://bucket/run``.
        step_name: The pattern of the checkpoints' folder names.
        config: Options; None reads them from the environment.

    Raises:
        InvalidURIError: If ``run`` is not a valid location.
        ConfigError: If ``step_name`` is not a valid pattern, or ``run`` is a checkpoint.
        StoreError: If the store refuses or stays unreachable.
    """
    the_run = Run(run, step_name=step_name, config=config)
    step = the_run.newest()
    return None if step is None else str(the_run.uri(step))


@dataclass(frozen=True)
class History:
    """The committed steps of a run, with their notes, oldest first.

    Attributes:
        line: For each step on the run's line (:mod:`cloudckpt.runs.line`), its notes.
        abandoned: For each abandoned step, its notes.
        unread: For each step whose notes can't be read, the error: it is not known whether such a
            step is on the line.
    """

    line: dict[int, Notes]
    abandoned: dict[int, Notes]
    unread: dict[int, CloudCheckpointError]

    def scores(self, metric: str) -> dict[int, float]:
        """Returns the values of a metric by step, for the steps on the line that have it.

        Steps with the value NaN are left out.
        """
        values = {step: notes.metrics.get(metric, math.nan) for step, notes in self.line.items()}
        return {step: score for step, score in values.items() if not math.isnan(score)}


class Run:
    """The folder of a run, with the options to reach it; its store is opened on first use.

    The methods that send requests raise a :class:`StoreError` if the store refuses or stays
    unreachable.
    """

    def __init__(
        self,
        run: URILike,
        *,
        step_name: str = DEFAULT_PATTERN,
        config: Config | None = None,
        view: View | None = None,
    ) -> None:
        """
        Args:
            run: The folder of the run.
            step_name: The pattern of the checkpoints' folder names.
            config: Options; None reads them from the environment.
            view: The view through which the store is read; None to make one at each use.
        """
        self.root = CheckpointURI.parse(run)
        self.names = StepNames(step_name)
        self.config = config_or_default(config)
        self.retrier = Retrier(self.config.retry)
        self._view = view

    @property
    def store(self) -> ObjectStore:
        """The store that holds the run."""
        return open_store(self.root, self.config)

    @property
    def view(self) -> View:
        """The given view, through which the store is read; if none was given, a new one."""
        return View(self.root, self.config) if self._view is None else self._view

    def through(self, view: View) -> Run:
        """Returns a copy of this run that reads the store through ``view``."""
        return Run(self.root, step_name=self.names.pattern, config=self.config, view=view)

    def uri(self, step: int) -> CheckpointURI:
        """Returns the location of a step's checkpoint, whether or not it exists."""
        return self.root.join(self.names.name(step))

    def steps_among(self, folders: Iterable[str]) -> list[int]:
        """Returns the steps that folder names stand for, oldest first; ignores other names."""
        return sorted(step for step in map(self.names.step, folders) if step is not None)

    def steps(self, *, warns: bool = True) -> list[int]:
        """Lists the steps that have a folder, committed or not; oldest first.

        With ``warns``, logs a warning if the run has folders, but none with the name of a step.

        Raises:
            ConfigError: With ``warns``, if the location has no steps and is a checkpoint.
        """
        folders = self.view.folders(self.root.key(""))
        steps = self.steps_among(folders)
        if warns and not steps:
            self.check_is_run()
        if warns and folders and not steps:
            logger.warning(
                "%s: no folder name matches step_name=%r. If the folders that are there, such as "
                "%s, are checkpoints, give the pattern of their names as step_name",
                self.root,
                self.names.pattern,
                ", ".join(map(repr, folders[:3])),
            )
        return steps

    def owner(self) -> Owner | None:
        """Reads the run's claim, which names the job that may save there; None if there is none."""
        view = self.view
        with view.asking() as store:
            return Owner.read(store, self.root.key(CLAIM), view.retrier)

    def notes(self, step: int) -> Notes:
        """Reads the notes of a step; sets ``Notes.step`` to this step, whatever was stored.

        Raises:
            CheckpointNotFoundError: If the step is not committed.
            CheckpointCorruptError: If the notes are damaged.
        """
        view = self.view
        with view.asking() as store:
            return replace(read_notes(store, self.uri(step), view.retrier), step=step)

    def is_committed(self, step: int) -> bool:
        """Returns whether the checkpoint of a step is committed."""
        return find_commit(self.view.look, self.uri(step)) is not None

    def walk(
        self, steps: Sequence[int] | None = None, adopt: Callable[[int], None] | None = None
    ) -> Iterator[tuple[int, Notes | CloudCheckpointError, bool]]:
        """Yields each committed step, newest first, as (step, notes, whether it is on the line).

        :mod:`cloudckpt.runs.line` says which steps are on the line. Notes are read on demand, so
        an unreadable old step does not fail a caller that needs a newer one. If the notes of a step
        can't be read, the error is yielded in their place, and the step counts as on the line.

        A step may be yielded twice:

        - If no step is left on the line of the claim, all steps are first yielded with False. Then
          the steps on the line of the newest step are yielded again, with True.
        - If other steps are committed before a step on the line was yielded, the run may be listed
          again, and all its steps are then yielded.

        Args:
            steps: The steps to read, oldest first; they have to include the run's newest step. None
                reads all.
            adopt: Called with each uncommitted step that is newer than the newest committed one on
                the line, to commit it if possible. None leaves such steps uncommitted.
        """
        run = self.through(self.view)
        # the claim is read after the listing: else steps of a job that claims the run, saves and
        # prunes between the two requests would count as abandoned, and an older step as the newest
        listed, missing = run.steps() if steps is None else [*steps], set[int]()
        owner, is_gone, passed = run.owner(), True, list[tuple[int, Notes]]()
        line = None if owner is None else owner.line

        def is_on_line(notes: Notes) -> bool:
            nonlocal line
            line = notes if line is None else line  # without a claim, the newest step decides
            return line.is_same_training(notes)

        def has_come(above: int) -> bool:
            """Returns whether a step above ``above`` was committed since the listing."""
            if steps is not None or not missing:
                return False
            now = {step for step in run.steps(warns=False) if step > above}
            return any(run.view.each(run.is_committed, now - {*listed} | now & missing))

        for step, notes in run._read(listed):
            if notes is None and adopt is not None:
                adopt(step)
                # read again: this job, or another one meanwhile, may have committed the step
                notes = run._notes_or_error(step)
            if notes is None:
                missing.add(step)
            elif isinstance(notes, Notes) and not is_on_line(notes):
                passed.append((step, notes))
                yield step, notes, False
            elif is_gone and has_come(step):
                yield from run.walk(adopt=adopt)
                return
            else:
                is_gone, adopt = False, None if isinstance(notes, Notes) else adopt
                yield step, notes, True
        if is_gone and has_come(-1):
            yield from run.walk(adopt=adopt)
            return
        if passed and is_gone and steps is not None:  # the line may have other steps than these
            others = run._read(sorted({*run.steps(warns=False)} - {*steps}))
            is_gone = all(
                notes is None or (isinstance(notes, Notes) and not is_on_line(notes))
                for _, notes in others
            )
        for step, notes in passed if is_gone else ():
            if passed[0][1].is_same_training(notes):
                yield step, notes, True

    def _read(
        self, steps: Sequence[int]
    ) -> Iterator[tuple[int, Notes | CloudCheckpointError | None]]:
        """Yields each step, newest first, with the result of :meth:`_notes_or_error`.

        The notes of the newest step are read first, then those of 2, 4, 8 and more steps in
        parallel, at most ``Config.requests_at_once``.
        """
        left, count = [*steps], 1
        while left:
            left, batch = left[:-count], left[-count:][::-1]
            yield from zip(batch, self.view.each(self._notes_or_error, batch), strict=True)
            count = min(2 * count, self.config.requests_at_once)

    def _notes_or_error(self, step: int) -> Notes | CloudCheckpointError | None:
        """Returns the notes of a step, or the error of reading them; None if not committed."""
        try:
            return self.notes(step)
        except (CheckpointError, StoreError) as error:
            return None if isinstance(error, CheckpointNotFoundError) else error

    def newest(self, steps: Sequence[int] | None = None) -> int | None:
        """Returns the newest committed step of the run's present training; None if it has none.

        The training's steps are those on the run's line (:mod:`cloudckpt.runs.line`). Steps whose
        notes are damaged are logged and skipped.

        Args:
            steps: The steps that have a folder, oldest first; None lists them.

        Raises:
            CloudCheckpointError: If notes can't be read for another reason.
        """
        for step, notes, is_on_line in self.walk(steps):
            if isinstance(notes, CheckpointCorruptError):
                self.log_unread({step: notes})
            elif isinstance(notes, CloudCheckpointError):
                raise notes
            elif is_on_line:
                return step
        return None

    def history(self, steps: Sequence[int] | None = None) -> History:
        """Reads the notes of all committed steps of the run, or of those among ``steps``.

        Args:
            steps: The steps to read, as for :meth:`walk`.

        Raises:
            TransientStoreError: If the store can't be reached. All other errors of reading the
                notes of a step are in ``unread`` of the result.
        """
        line, abandoned = dict[int, Notes](), dict[int, Notes]()
        unread = dict[int, CloudCheckpointError]()
        for step, notes, is_on_line in self.walk(steps):
            if isinstance(notes, TransientStoreError):
                raise notes
            if isinstance(notes, CloudCheckpointError):
                unread[step] = notes
            else:
                (line if is_on_line else abandoned)[step] = notes
        return History(
            line=dict(sorted(line.items())),
            abandoned={step: abandoned[step] for step in sorted(abandoned.keys() - line)},
            unread=dict(sorted(unread.items())),
        )

    def log_unread(self, unread: Mapping[int, CloudCheckpointError]) -> None:
        """Logs one error for all steps whose notes can't be read; it names the oldest of them."""
        if unread:
            logger.error(
                "%s: the notes of %s can't be read, so the step is neither "
                "restored nor deleted%s: %s",
                self.root,
                self.names.name(min(unread)),
                f" (the same holds for {len(unread) - 1} more)" if len(unread) > 1 else "",
                unread[min(unread)],
            )

    def is_checkpoint(self) -> bool:
        """Returns whether the run's location is itself a committed checkpoint."""
        return find_commit(self.view.look, self.root) is not None

    def check_is_run(self) -> None:
        """Checks that the run's location is not itself a checkpoint.

        Raises:
            ConfigError: If it is a checkpoint.
        """
        if self.root.prefix and self.is_checkpoint():
            raise ConfigError(
                f"this is a checkpoint, not a run: give a run's folder, such as {self.root.parent}"
                ". If this folder is meant to be the run, copy this checkpoint to another location "
                "with cloudckpt cp first, and only then delete it here with cloudckpt rm",
                uri=str(self.root),
            )

    def summaries(self) -> list[CheckpointSummary]:
        """Lists all checkpoints of the run, as :func:`list_checkpoints` does."""
        run = self.through(self.view)
        listed = run.view.each(run.summary, run.view.folders(self.root.key("")))
        summaries = [item for item in listed if item is not None]
        if not summaries:
            run.check_is_run()
        steps = [item.step for item in summaries if item.is_committed and item.step is not None]
        if steps:
            history = run.history(sorted(steps))
            notes = history.line | history.abandoned
            for at, item in enumerate(summaries):
                if item.step in notes:
                    is_abandoned, job = item.step in history.abandoned, notes[item.step].job
                    summaries[at] = replace(item, is_abandoned=is_abandoned, job=job)
        return sorted(summaries, key=lambda item: (item.step is None, item.step or 0, item.uri))

    def summary(self, folder: str) -> CheckpointSummary | None:
        """Describes the checkpoint in a folder of the run, committed or not.

        ``job`` and ``is_abandoned`` are not determined, and keep their defaults. Returns None if
        the folder has no objects of a checkpoint, or only marks by which other checkpoints refer to
        it; or if the folder's name is not valid in a location, such as a name with "?" in a bucket.
        """
        if not self.root.can_join(folder):
            return None
        uri = self.root.join(folder)
        below = uri.key("")
        objects = objects_of_ours(self.view, below)
        if all(is_keep_name(info.key.removeprefix(below)) for info in objects):
            return None  # only marks remain, from a killed save whose data is gone
        names = {info.key.removeprefix(below) for info in objects}
        return CheckpointSummary(
            uri=str(uri),
            step=self.names.step(folder),
            is_committed=METADATA in names,
            is_pending=METADATA not in names and any(map(is_pending_name, names)),
            is_referred_to=any(map(is_keep_name, names)),
            nbytes=sum(info.size for info in objects),
            modified=max(
                (info.modified for info in objects if info.modified is not None), default=None
            ),
        )


def objects_of_ours(view: View, below: str) -> list[ObjectInfo]:
    """Lists the objects directly in a folder whose names are those of a checkpoint's objects.

    ``below`` is the key of the folder, with a slash at its end. After the first thousand names,
    only names with the prefixes of a checkpoint's objects are requested.
    """
    level = view.level(below)
    objects = [entry for entry in level if isinstance(entry, ObjectInfo)]
    if len(level) >= AT_FIRST:  # a checkpoint of many ranks, or another program's folder
        # the names of marks sort first, so the first page has them
        objects = [entry for entry in objects if entry.key.startswith(below + KEPT_FOR)]
        for start in (METADATA, OF_RANKS):
            objects += view.objects(below + start)
    return [info for info in objects if is_ours(info.key.removeprefix(below))]


def is_ours(name: str) -> bool:
    """Returns whether a name is that of a commit object, data object, rank's record or mark."""
    return name == METADATA or _OURS.fullmatch(name) is not None or is_keep_name(name)
