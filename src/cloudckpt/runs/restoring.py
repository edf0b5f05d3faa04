"""Restores a checkpoint of a run: a requested step, or the newest intact step of the training.

The steps of the training are those on the run's line (:mod:`cloudckpt.runs.line`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from cloudckpt.checkpoint.notes import Notes, read_notes
from cloudckpt.checkpoint.references import distrust
from cloudckpt.checkpointer import Checkpointer
from cloudckpt.config import Config
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
from cloudckpt.runs.adopting import Adoption
from cloudckpt.runs.catalog import Run
from cloudckpt.runs.verifying import verify as verify_checkpoint

__all__ = ["checkpoint_in", "notes_to_restore", "load_from", "restore_newest"]

logger = logging.getLogger("cloudckpt")


def restore_newest(
    run: Run,
    meeting: Meeting,
    hook: CommitHook,
    until: float | None,
    load: Callable[[int, Notes], None],
) -> int | None:
    """Loads the newest intact step on the line, the same on all ranks; a collective call.

    Steps that are damaged, or were deleted meanwhile, are logged and skipped; after a deletion the
    run is listed again.

    Args:
        run: The run.
        meeting: The ranks.
        hook: Called before and after the commit of a pending step, if one is newer than the newest
            committed step on the line.
        until: When to stop waiting for processes that are still sending a step, by
            :func:`time.monotonic`; None commits no pending step.
        load: Loads a step, given its number and notes; called on all ranks.

    Returns:
        The step that was loaded; None if the run has no committed step.

    Raises:
        CheckpointCorruptError: If no step could be loaded, and the newest one is damaged.
        CheckpointNotFoundError: If no step could be loaded, and the newest one was deleted.
        CloudCheckpointError: The other errors of ``load``, and of reading the steps' notes.
    """
    adopt = None if until is None else partial(_adopt, run, hook, until)
    steps, passed = run.walk(adopt=adopt), dict[int, Notes]()  # only rank 0 iterates
    damages, restored = dict[int, CloudCheckpointError](), None

    def next_on_line() -> tuple[int, Notes | CloudCheckpointError] | None:
        for step, notes, is_on_line in steps:
            if step in damages:
                continue
            if not is_on_line and isinstance(notes, Notes):
                passed[step] = notes
                continue
            if passed.pop(step, None) is not None and not damages:
                logger.warning(
                    "%s, the newest step of another training, is restored, as the job that last "
                    "claimed this run, and the jobs that it continues, have no committed step. To "
                    "start from scratch instead, use another location",
                    run.uri(step),
                )
            return step, notes
        return None

    while restored is None and (pair := meeting.broadcast_from_first(next_on_line)) is not None:
        step, notes = pair
        try:
            if not isinstance(notes, Notes):
                raise notes
            load(step, notes)
            restored = step
        except (CheckpointCorruptError, CheckpointNotFoundError) as error:
            damages[step] = error
            if isinstance(error, CheckpointCorruptError):
                distrust(error)
            else:  # another job has deleted it meanwhile, and may have saved newer ones
                steps = run.walk(adopt=adopt)
            logger.error(
                "step %d can't be restored; the newest other step is tried, if any: %s", step, error
            )
    others = [
        f"step {step} of {f'job {notes.job}' if notes.job else 'an unknown job'}"
        for step, notes in passed.items()
        if restored is None or step > restored
    ]
    if others:
        logger.warning(
            "%s: %s restored; these steps were not, because they are abandoned: %s. To load one of "
            "them, call restore(step=...)",
            run.root,
            "no step was" if restored is None else f"step {restored} was",
            ", ".join(others),
        )
    if restored is None and damages:
        raise next(iter(damages.values()))
    return restored


def _adopt(run: Run, hook: CommitHook, until: float, step: int) -> None:
    """Waits for the data of a pending step, and commits the step; does nothing for other steps.

    ``until`` is when to stop waiting, by :func:`time.monotonic`. If the step is incomplete or
    damaged, or access is denied, a warning is logged.

    Raises:
        StoreError: If the store refuses for another reason, or stays unreachable.
        CommitUnknownError: If the store does not say whether the commit took place.
    """
    try:
        summary = run.summary(run.names.name(step))
        if summary is not None and summary.is_pending:
            Adoption(run.uri(step), run.config, hook).carry_out(until)
    except (IncompleteSaveError, CheckpointCorruptError, AccessDeniedError) as error:
        logger.warning("step %d was left unfinished, and is skipped: %s", step, error)


def notes_to_restore(run: Run, step: int) -> Notes:
    """Reads the notes of a step to restore; logs a warning if it is not the newest on the line.

    Raises:
        CheckpointNotFoundError: If the step is not committed; the message lists committed steps.
        CheckpointCorruptError: If the notes are damaged.
    """
    notes = _notes_of(run, step)
    on_line = (at for at, noted, is_on in run.walk() if is_on and isinstance(noted, Notes))
    if (newest := next(on_line, step)) != step:
        logger.warning(
            "%s is restored, although %s. From this job's first save on, steps that are not part "
            "of its training are no longer restored by default (abandoned), and it replaces those "
            "whose numbers it saves again. To keep them all, copy the run first (cloudckpt cp)",
            run.uri(step),
            f"step {newest} is newer" if newest > step else "it is abandoned",
        )
    return notes


def _notes_of(run: Run, step: int) -> Notes:
    try:
        return run.notes(step)
    except CheckpointNotFoundError as error:
        history = run.history()
        committed = ", ".join(map(str, history.line)) or "none"
        abandoned = ", ".join(map(str, history.abandoned)) or "none"
        raise CheckpointNotFoundError(
            f"step {step} has no committed checkpoint: check the number and the location. "
            f"Committed steps: {committed}; abandoned steps: {abandoned}",
            uri=str(run.uri(step)),
        ) from error


def checkpoint_in(source: Run, step: int | None) -> tuple[str, int | None]:
    """Returns the URI and the step of the checkpoint that a ``source=`` stands for.

    Args:
        source: The location: a run, or a single checkpoint.
        step: The step of the run; None takes the newest on its line.

    Returns:
        The URI, and the step, which is None if a single checkpoint was saved without one.

    Raises:
        CheckpointNotFoundError: If the location has no such checkpoint; for a missing step, the
            message lists committed steps.
        ConfigError: If the location is a single checkpoint, and a step was given.
    """
    if source.is_checkpoint():
        if step is not None:
            raise ConfigError(
                f"source= is a single checkpoint, but step={step} is a step of a run: leave step= "
                "out, or give the folder of the run as source=",
                uri=str(source.root),
            )
        return str(source.root), read_notes(source.store, source.root, source.retrier).step
    if step is not None:
        _notes_of(source, step)
        return str(source.uri(step)), step
    if (newest := source.newest()) is None:
        raise CheckpointNotFoundError(
            "source= is neither a checkpoint nor a run with an intact checkpoint: check the "
            "location",
            uri=str(source.root),
        )
    return str(source.uri(newest)), newest


def load_from(
    checkpointer: Checkpointer,
    meeting: Meeting,
    state: dict[str, Any],
    keys: str | Collection[str] | None,
    uri: str,
    config: Config | None,
    *,
    verify: bool,
    strict: bool,
) -> None:
    """Loads a checkpoint into a state dict in place; a collective call.

    Args:
        checkpointer: Loads the checkpoint.
        meeting: The ranks.
        state: The state dict.
        keys: Patterns of the names of the entries to load; None loads all.
        uri: The location of the checkpoint.
        config: Options for the verification.
        verify: Whether to verify the whole checkpoint before it is loaded.
        strict: Whether each entry to load must be in the checkpoint and fit.

    Raises:
        ConfigError: If ``keys`` match no entry of the state dict on some rank.
        CloudCheckpointError: The errors of a checkpointer's ``load``.
    """

    def select() -> dict[str, Any]:
        if keys is None:
            return state
        selected = _selected(state, [keys] if isinstance(keys, str) else keys)
        if not selected:
            raise ConfigError(
                f"keys={keys!r} match nothing in the state: give names or patterns of its entries; "
                f"its top-level keys are {[*map(str, state)]}"
            )
        return selected

    part = meeting.begin(select)
    if verify:
        verify_checkpoint(uri, config=config, process_group=meeting.group)
    checkpointer.load(uri, part, strict=strict, leave_misfits=not strict)
    if part is not state:
        _put_back(state, part)


def _selected(state: dict[str, Any], keys: Collection[str], path: str = "") -> dict[str, Any]:
    """Returns the entries of a nested state dict whose names match any of the patterns.

    A name consists of the keys from the outermost to the innermost dict, joined by dots. A pattern
    that matches the name of a dict selects the whole dict. ``name.*`` also selects an entry
    ``name`` that is not a dict, because the entry may be an object with a state dict.

    Args:
        state: The state dict, or a dict in it.
        keys: The patterns.
        path: The name of ``state`` and a dot; empty for the outermost dict.
    """
    selected: dict[str, Any] = {}
    for key, value in state.items():
        name = f"{path}{key}"
        is_nested = isinstance(value, dict)  # otherwise it may be an object with a state_dict()
        if any(fnmatchcase(name, glob) for glob in keys) or (f"{name}.*" in keys and not is_nested):
            selected[key] = value
        elif is_nested and (inner := _selected(value, keys, f"{name}.")):
            selected[key] = inner
    return selected


def _put_back(state: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Copies loaded entries into the state dict that they were selected from."""
    for key, value in loaded.items():
        if isinstance(value, dict) and value is not state[key] and isinstance(state[key], dict):
            _put_back(state[key], value)
        else:
            state[key] = value
