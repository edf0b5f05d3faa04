"""Which step a job restores: the newest on the line of its run, or the one that it asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from cloudckpt.checkpoint.notes import Notes, read_notes
from cloudckpt.checkpoint.objects import find_commit
from cloudckpt.checkpoint.references import distrust
from cloudckpt.dcp.meeting import Meeting
from cloudckpt.dcp.writer import CommitHook
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CloudCheckpointError,
    ConfigError,
    IncompleteSaveError,
)
from cloudckpt.runs.adopting import adopt_pending
from cloudckpt.runs.catalog import Run, line_of, newest_step, notes_of
from cloudckpt.runs.line import Line

__all__ = ["Candidates", "checkpoint_in", "goal_of", "put_back", "restore_newest", "selected"]

logger = logging.getLogger("cloudckpt")


def restore_newest(
    run: Run,
    meeting: Meeting,
    hook: CommitHook,
    until: float | None,
    load: Callable[[int, Notes], None],
) -> int | None:
    """Loads the newest intact step of the line, on all ranks alike; None if there is no step.

    Args:
        run: The run.
        meeting: The ranks.
        hook: As of :class:`Candidates`.
        until: As of :class:`Candidates`.
        load: Loads a step.

    Raises:
        CheckpointCorruptError: If all steps are damaged.
        CloudCheckpointError: As ``load``.
    """
    damages: list[CloudCheckpointError] = []
    candidates = Candidates(run, hook, until)
    steps = meeting.broadcast_from_first(lambda: run.steps()[::-1])

    def in_turn() -> Iterator[int]:
        """All again if the line has none, damaged ones included."""
        yield from steps
        if not damages and meeting.broadcast_from_first(candidates.begin_anew):
            yield from steps

    for step in in_turn():
        notes, error = meeting.broadcast_from_first(partial(candidates.look, step))
        try:
            if error is not None:
                raise error
            if notes is None:
                continue
            load(step, notes)
        except (CheckpointCorruptError, CheckpointNotFoundError) as error:
            damages.append(error)
            if isinstance(error, CheckpointCorruptError):
                distrust(error)
            logger.error("step %d can't be restored, so an older one is tried: %s", step, error)
            continue
        candidates.log(step)
        return step
    candidates.log(None)
    if damages:
        raise damages[0]
    return None


class Candidates:
    """Which steps of a run may be restored, asked newest first; of the first rank."""

    def __init__(self, run: Run, hook: CommitHook, until: float | None) -> None:
        """
        Args:
            run: The run.
            hook: Called around the commit of a step that is adopted.
            until: When to stop waiting for processes that still send a step, by
                :func:`time.monotonic`; None adopts nothing.
        """
        self._run, self._hook, self._until = run, hook, until
        self._line: Line | None = None
        self._steps: dict[int, Notes] = {}  # passed over, as they are abandoned

    def _is_on_line(self, step: int, notes: Notes) -> bool:
        """Whether a step is on the line of the run; asked of the steps newest first."""
        if self._line is None:
            self._line = line_of(self._run.view, self._run)
        is_there = self._line.has(step, notes)
        if not is_there:
            self._steps[step] = notes
        return is_there

    def begin_anew(self) -> bool:
        """Whether the line has no step, though there are others: the newest then decides."""
        if not self._steps:
            return False
        logger.warning(
            "%s: nothing is left of the line that was claimed last; the newest step decides",
            self._run.root,
        )
        self._line, self._steps = Line(), {}
        return True

    def log(self, restored: int | None) -> None:
        """Names them."""
        if self._steps:
            logger.warning(
                "%s: %s restored; passed over, as they are abandoned: %s. To load one of them, "
                "call restore(step=...)",
                self._run.root,
                "nothing was" if restored is None else f"step {restored} was",
                ", ".join(
                    f"step {step} of {f'job {one.job}' if one.job else 'an unknown job'}"
                    for step, one in self._steps.items()
                ),
            )

    def look(self, step: int) -> tuple[Notes | None, CheckpointCorruptError | None]:
        """The notes of a step that may be restored, or why they can't be read.

        If its trainers were killed, it may be adopted first.
        """
        try:
            notes = notes_of(self._run.view, self._run, step)
            if notes is None and self._adopts(step):
                notes = notes_of(self._run.view, self._run, step)
        except CheckpointCorruptError as error:
            return None, error
        return (notes if notes is not None and self._is_on_line(step, notes) else None), None

    def _adopts(self, step: int) -> bool:
        """Commits a step that its trainers could not commit, if it is there."""
        if self._until is None or not self._run.is_pending(step):
            return False
        try:
            adopt_pending(self._run.uri(step), self._run.config, until=self._until, hook=self._hook)
        except (IncompleteSaveError, AccessDeniedError) as error:
            logger.warning("step %d is left as its trainers left it: %s", step, error)
        return True


def goal_of(run: Run, step: int, *, says: bool = True) -> Notes:
    """The notes of a step that is to be restored; logs what going there means if ``says``.

    Raises:
        CheckpointNotFoundError: If it is not committed; the message has those that are.
    """
    notes = notes_of(run.view, run, step)
    history = run.history()
    if notes is None:
        there = ", ".join(map(str, history.line)) or "none"
        others = ", ".join(map(str, history.abandoned))
        raise CheckpointNotFoundError(
            f"step {step} has no committed checkpoint; there are {there}"
            + (f", and abandoned {others}" if others else ""),
            uri=str(run.uri(step)),
        )
    newest = max(history.line, default=step)
    if says and (step in history.abandoned or newest > step):
        logger.warning(
            "%s is restored, although %s: the first save begins a new line here, and from then "
            "on steps that it does not continue are abandoned",
            f"step {step}",
            f"step {newest} is newer" if newest > step else "it is abandoned",
        )
    return notes


def checkpoint_in(source: Run, step: int | None) -> tuple[str, int | None]:
    """Where a checkpoint is, and its step, for a location that may be a checkpoint or a run.

    Args:
        source: The location.
        step: The step of a run; None is the newest on its line.

    Raises:
        CheckpointNotFoundError: If there is none.
        ConfigError: If a step of a single checkpoint is asked for.
    """
    view = source.view
    if find_commit(view.look, source.root) is not None:
        if step is not None:
            raise ConfigError(
                f"source= is a single checkpoint, so there is no step={step} in it: leave step= "
                "out, or name the run",
                uri=str(source.root),
            )
        return str(source.root), read_notes(source.store, source.root, source.retrier).step
    if step is not None:
        goal_of(source, step, says=False)
        return str(source.uri(step)), step
    if (newest := newest_step(view, source)) is None:
        raise CheckpointNotFoundError(
            "source= is neither a checkpoint nor a run that has one", uri=str(source.root)
        )
    return str(source.uri(newest)), newest


def selected(state: dict[str, Any], keys: Collection[str], path: str = "") -> dict[str, Any]:
    """The entries of a nested state dict whose names match one of some patterns.

    Names are the keys from the outermost to the innermost dict, with dots between them. A pattern
    that matches a dict selects all of it.
    """
    found: dict[str, Any] = {}
    for key, value in state.items():
        name = f"{path}{key}"
        is_nested = isinstance(value, dict)  # else it may be an object with a state_dict()
        if any(fnmatchcase(name, one) for one in keys) or (f"{name}.*" in keys and not is_nested):
            found[key] = value
        elif is_nested and (inner := selected(value, keys, f"{name}.")):
            found[key] = inner
    return found


def put_back(state: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Takes what was loaded into a selection of a state dict's entries."""
    for key, value in loaded.items():
        if isinstance(value, dict) and value is not state[key] and isinstance(state[key], dict):
            put_back(state[key], value)
        else:
            state[key] = value
