"""Deletes the steps of a run that retention does not keep: after each save, or by ``prune()``."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Literal

from cloudckpt.background.save import SaveFuture
from cloudckpt.checkpoint.objects import find_commit
from cloudckpt.config import Config
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointConflictError,
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CloudCheckpointError,
    ConfigError,
    StorageFullError,
    StoreError,
    TransientStoreError,
)
from cloudckpt.runs.catalog import History, Run
from cloudckpt.runs.claim import OwnLine
from cloudckpt.runs.contents import inspect
from cloudckpt.runs.deleting import delete_at
from cloudckpt.runs.steps import DEFAULT_PATTERN, Retention
from cloudckpt.runs.sweeping import clock_of
from cloudckpt.uri import URILike

__all__ = ["Pruner", "best_step", "delete_steps", "prune"]

logger = logging.getLogger("cloudckpt")

_ATTEMPTS = 3  # how often best_step() reads the notes again if steps were deleted meanwhile


def prune(
    run: URILike,
    *,
    max_to_keep: int | None = None,
    best_to_keep: int | None = None,
    keep_younger_than: float | None = None,
    keep_period: int | None = None,
    best_metric: str | None = None,
    best_mode: Literal["min", "max"] | None = None,
    abandoned: bool = False,
    only: Collection[str] | None = None,
    dry_run: bool = False,
    step_name: str = DEFAULT_PATTERN,
    config: Config | None = None,
    deleted: Callable[[str], object] = lambda uri: None,
) -> list[str]:
    """Deletes the committed checkpoints of a run that no retention rule keeps.

    The rules are those of :class:`CheckpointManager`. They apply to the steps on the run's line
    (:mod:`cloudckpt.runs.line`); the newest of these is always kept. Checkpoints whose notes can't
    be read are kept and logged, and so are checkpoints that are saved anew meanwhile. Before steps
    are deleted, the metadata of the newest checkpoint is read (the newest on the line, or a newer
    one whose notes can't be read); if it is damaged, nothing is deleted, because intact checkpoints
    would be lost in favour of a damaged one. If a checkpoint can't be deleted, the others are
    deleted all the same; if the store becomes unreachable, or a job claims the run meanwhile, the
    rest is not tried.

    Args:
        run: The folder of the run.
        max_to_keep: How many of the newest checkpoints to keep; at least the newest is kept. With
            ``best_metric`` and without ``best_to_keep``, it is used as ``best_to_keep``.
        best_to_keep: How many of the best checkpoints to keep; checkpoints without the metric are
            kept, too. Needs ``best_metric``.
        keep_younger_than: Keep checkpoints younger than so many seconds, by the store's clock.
        keep_period: Keep steps that are multiples of this number.
        best_metric: The name of the metric by which checkpoints are ranked; give ``best_mode`` with
            it.
        best_mode: Whether the lowest (``"min"``) or the highest values (``"max"``) are best.
        abandoned: Whether abandoned steps are deleted, too.
        only: The result of a dry run that a user has confirmed: only these checkpoints are deleted,
            if the rules still do not keep them. None deletes all that the rules do not keep.
        dry_run: Whether to delete nothing, and only return what would be deleted.
        step_name: The pattern of the checkpoints' folder names.
        config: Options; None reads them from the environment.
        deleted: Called with the URI of each checkpoint when its commit object is deleted.

    Returns:
        The URIs of the deleted checkpoints (in a dry run, of those that would be deleted): the
        steps on the line, oldest first, then abandoned ones.

    Raises:
        CheckpointConflictError: If a job claims the run meanwhile; the message lists the steps that
            were deleted, and those that were not.
        CheckpointCorruptError: If the metadata of the newest checkpoint is damaged, and others
            would be deleted.
        ConfigError: If an option is invalid, no checkpoint has the metric, or ``run`` is a
            checkpoint.
        InvalidURIError: If ``run`` is not a valid location.
        StoreError: If the store refuses or stays unreachable; the message lists the steps that were
            deleted, and those that were not.
    """
    kept = Retention(
        max_to_keep=max_to_keep,
        best_to_keep=best_to_keep,
        keep_younger_than=keep_younger_than,
        keep_period=keep_period,
        best_metric=best_metric,
        best_mode=best_mode,
    )
    the_run = Run(run, step_name=step_name, config=config)
    claim = the_run.owner()
    history = the_run.history()
    _log_damaged(the_run, history)
    if best_metric is not None and history.line and not history.scores(best_metric):
        raise ConfigError(
            f"no checkpoint of this training has the metric {best_metric!r}: cloudckpt inspect "
            "shows the metrics of a checkpoint",
            uri=str(the_run.root),
        )
    steps = _unneeded(the_run, history, kept)
    steps += history.abandoned if abandoned else ()
    if steps:
        try:
            newest = max([*history.line, *history.unread])  # the notes of abandoned steps are read
            inspect(the_run.uri(newest), config=the_run.config)
        except CheckpointCorruptError as error:
            error.message += (
                "; this is the newest checkpoint, which prune() always keeps, so "
                "nothing was deleted: delete this checkpoint with cloudckpt rm, then prune again"
            )
            raise
    uris = {step: str(the_run.uri(step)) for step in steps}
    uris = {step: uri for step, uri in uris.items() if only is None or uri in only}
    if dry_run:
        return [*uris.values()]

    def check() -> None:
        if the_run.owner() != claim:
            text = "a job has claimed this run meanwhile, and may need its steps: prune again"
            raise CheckpointConflictError(text, uri=str(the_run.root))

    gone = delete_steps(the_run, history, uris, check, lambda step: deleted(uris[step]))
    return [uris[step] for step in gone]


def delete_steps(
    run: Run,
    history: History,
    steps: Iterable[int],
    check: Callable[[], None],
    deleted: Callable[[int], object] = lambda step: None,
    in_use: StepsInUse | None = None,
) -> list[int]:
    """Deletes steps of a history, unless they were saved anew since their notes were read.

    If a step can't be deleted, the others are deleted all the same. But if the store can't be
    reached, or another job has claimed the run, the rest is not tried.

    Args:
        run: The run.
        history: The notes of its steps.
        steps: The steps.
        check: Called right before each deletion; if it raises, the step is not deleted.
        deleted: Called with each step that is gone, even if its data can't be deleted afterwards.
        in_use: The steps that this job saves or loads now; they are not deleted. None if it neither
            saves nor loads.

    Returns:
        The steps that are gone, by this call or another process.

    Raises:
        CloudCheckpointError: The first failure; the message lists the steps that were deleted, and
            those that were not.
    """
    notes, steps = history.line | history.abandoned, [*steps]
    in_use = StepsInUse() if in_use is None else in_use
    gone, failures = list[int](), list[CloudCheckpointError]()

    def check_notes(step: int) -> None:
        if run.notes(step) != notes[step]:
            raise CheckpointReplacedError(
                "this step was saved anew meanwhile, so it was not deleted",
                uri=str(run.uri(step)),
            )
        check()

    def note(step: int) -> None:
        gone.append(step)
        deleted(step)

    for step in steps:
        uri = run.uri(step)
        try:
            with in_use.deleted(step) as is_free:
                if is_free:
                    delete_at(uri, run.config, partial(check_notes, step), partial(note, step))
        except CheckpointReplacedError as error:
            logger.warning("%s", error)
        except CheckpointNotFoundError:  # another process has deleted it
            note(step)
        except CloudCheckpointError as error:
            failures.append(error)
            if isinstance(error, (CheckpointConflictError, TransientStoreError)):
                break
    if failures:
        left = [step for step in steps if step not in gone]
        texts = [", ".join(map(str, part)) or "none" for part in (gone, left)]
        failures[0].message += f" | steps that were deleted: {texts[0]}; not deleted: {texts[1]}"
        raise failures[0]
    return gone


def best_step(run: Run, retention: Retention) -> tuple[int, float] | None:
    """Returns the best step on the line of a run, and its score; None if no step has the metric.

    Raises:
        StoreError: If the store refuses or stays unreachable.
    """
    for _ in range(_ATTEMPTS):
        steps = run.steps()
        history = run.history(steps)
        if run.steps() == steps:
            break  # otherwise steps were deleted or saved meanwhile, and the notes are read again
    _log_damaged(run, history)
    scores = history.scores(str(retention.best_metric))
    return next(((step, scores[step]) for step in retention.ranked(scores)), None)


def _log_damaged(run: Run, history: History) -> None:
    """Logs which steps have damaged notes.

    Raises:
        StoreError: If the notes of a step could not be requested.
    """
    for error in history.unread.values():
        if isinstance(error, StoreError):
            raise error
    run.log_unread(history.unread)


def _unneeded(run: Run, history: History, retention: Retention) -> list[int]:
    """Returns the steps on the line that no retention rule keeps, oldest first."""

    @cache
    def clock() -> float:
        try:
            return clock_of(run)
        except (AccessDeniedError, StorageFullError):  # the store's clock takes a write
            return time.time()

    youngest = retention.keep_younger_than
    steps = retention.unneeded(history.line, history.scores(retention.best_metric or ""))
    if youngest is None:
        return steps
    view, old = run.view, list[int]()
    commits = view.each(lambda step: find_commit(view.look, run.uri(step)), steps)
    for step, commit in zip(steps, commits, strict=True):
        if commit is not None and commit.modified is not None:
            # a disk's answers have no time, and its server may have another clock than this machine
            now = commit.answered if commit.answered is not None else clock()
            if now - commit.modified >= youngest:
                old.append(step)
    return old


class Pruner:
    """Deletes the steps that the rules do not keep, after each save, in a thread of rank 0.

    It lists the run anew after each save, because other processes may delete steps meanwhile.

    Attributes:
        in_use: The steps that are being saved or loaded, which are not deleted.
    """

    def __init__(self, run: Run, retention: Retention, line: OwnLine) -> None:
        """
        Args:
            run: The run.
            retention: The rules by which steps are kept.
            line: Checks that this job still holds the claim of the run.
        """
        self._run = run
        self._retention = retention
        self._line = line
        self.in_use = StepsInUse()
        self._logged: set[int] = set()  # unreadable and abandoned steps that were logged
        self._has_logged_conflict = False  # whether it was logged that another job has the claim
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cloudckpt-prune")

    def after(self, saved: SaveFuture | None, *, keep_abandoned: bool) -> None:
        """Deletes steps that retention does not keep, in the background, after a save.

        Args:
            saved: The save to wait for; None if it is committed already.
            keep_abandoned: Whether abandoned steps stay.
        """
        self._thread.submit(self._after, saved, keep_abandoned)

    def delete(self, step: int) -> None:
        """Deletes a step, after the saves and deletions that began before.

        Raises:
            CheckpointConflictError: If another job has claimed the run.
            CheckpointNotFoundError: If the step has no committed checkpoint.
            CheckpointReplacedError: If another writer has saved the step anew meanwhile.
            StoreError: If the store refuses or stays unreachable.
        """
        uri, check = self._run.uri(step), self._line.check_claim
        self._thread.submit(delete_at, uri, self._run.config, check).result()

    def wait(self) -> None:
        """Waits until all requested deletions have ended."""
        self._thread.submit(lambda: None).result()

    def close(self, *, wait: bool) -> None:
        """Ends the thread after the requested deletions; ``wait`` says whether to wait for it."""
        self._thread.shutdown(wait=wait)

    def _after(self, saved: SaveFuture | None, keep_abandoned: bool) -> None:
        """Waits for a save, and deletes steps that retention does not keep if the save succeeded.

        Nothing is deleted after another job has claimed the run, or if the run has no step of this
        job left. Errors are only logged.
        """
        if saved is not None and (saved.exception() is not None or saved.skipped):
            return
        if self._retention.keeps_all and keep_abandoned:
            return
        try:
            self._line.check_claim()
            history = self._run.history()
            job = self._line.claimed_by
            if job and all(notes.job != job for notes in history.line.values()):
                return  # another process has deleted all steps of this job
            self._log_new(history, keep_abandoned)
            unneeded = _unneeded(self._run, history, self._retention)
            unneeded += () if keep_abandoned else history.abandoned
            delete_steps(self._run, history, unneeded, self._line.check_claim, in_use=self.in_use)
        except CheckpointConflictError as error:
            if not self._has_logged_conflict:
                logger.error("%s: old checkpoints are no longer deleted: %s", self._run.root, error)
            self._has_logged_conflict = True
        except Exception as error:
            text = "%s: not all old checkpoints could be deleted; the next save tries again: %s"
            is_ours = isinstance(error, CloudCheckpointError)
            logger.error(text, self._run.root, error, exc_info=not is_ours)

    def _log_new(self, history: History, keep_abandoned: bool) -> None:
        """Logs, once for each step, that unreadable and abandoned steps are kept.

        Abandoned steps are logged only if ``keep_abandoned`` is set.
        """
        new = {step: why for step, why in history.unread.items() if step not in self._logged}
        self._run.log_unread(new)
        abandoned = [step for step in history.abandoned if step not in self._logged]
        if abandoned and keep_abandoned:
            run = self._run.through(self._run.view)
            summaries = run.view.each(run.summary, map(run.names.name, abandoned))
            logger.warning(
                "%s: abandoned steps are kept (%s), %d bytes in all: the training went back to an "
                "earlier step, or another job saved them. To delete them, run cloudckpt prune "
                "--abandoned on this run, or use CheckpointManager(..., keep_abandoned=False)",
                self._run.root,
                ", ".join(map(str, abandoned)),
                sum(summary.nbytes for summary in summaries if summary is not None),
            )
        self._logged = {*history.unread, *history.abandoned}


class StepsInUse:
    """The steps that a job is saving or loading, which are not deleted meanwhile.

    A deletion of a step that is being saved anew would make the save fail, because the checkpoint
    that it replaces would be gone. A deletion of a step that is being loaded would delete the
    objects that the load reads.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._used: Counter[int] = Counter()
        self._deleted: set[int] = set()

    @contextlib.contextmanager
    def kept(self, step: int) -> Iterator[None]:
        """Marks a step as in use during the block; first waits for a deletion of it to end."""
        with self._changed:
            self._changed.wait_for(lambda: step not in self._deleted)
            self._used[step] += 1
        try:
            yield
        finally:
            with self._changed:
                self._used[step] -= 1

    @contextlib.contextmanager
    def deleted(self, step: int) -> Iterator[bool]:
        """Yields whether a step may be deleted: True if nothing is saving or loading it.

        If True, saves and loads of the step wait until the block ends.
        """
        with self._changed:
            is_free = not self._used[step]
            if is_free:
                self._deleted.add(step)
        try:
            yield is_free
        finally:
            with self._changed:
                self._deleted.discard(step)
                self._changed.notify_all()
