"""Which step a job restores: the newest on the line of its run, or the one that it asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from cloudckpt.checkpoint.notes import Notes, read_notes
from cloudckpt.checkpoint.objects import find_commit
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
from cloudckpt.runs.adopting import adopt_pending
from cloudckpt.runs.catalog import NewestFirst, Run, newest_step, notes_of
from cloudckpt.runs.verifying import verify as verify_checkpoint

__all__ = ["checkpoint_in", "goal_of", "load_from", "restore_newest"]

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
        hook: Called around the commit of a step that is adopted.
        until: When to stop waiting for processes that still send a step, by
            :func:`time.monotonic`; None adopts nothing.
        load: Loads a step.

    Raises:
        CheckpointCorruptError: If all steps are damaged.
        CloudCheckpointError: As ``load``.
    """
    adopt = None if until is None else partial(_adopt, run, hook, until)
    line = NewestFirst(run.view, run, adopt=adopt)  # of the first rank
    steps, damages = iter(line), list[CloudCheckpointError]()
    restored = None
    while (found := meeting.broadcast_from_first(lambda: next(steps, None))) is not None:
        step, notes = found
        try:
            if not isinstance(notes, Notes):
                raise notes
            load(step, notes)
        except (CheckpointCorruptError, CheckpointNotFoundError) as error:
            damages.append(error)
            if isinstance(error, CheckpointCorruptError):
                distrust(error)
            logger.error("step %d can't be restored, so the previous one is tried: %s", step, error)
        else:
            restored = step
            break
    _log_abandoned(run, line, restored)
    if restored is None and damages:
        raise damages[0]
    return restored


def _adopt(run: Run, hook: CommitHook, until: float, step: int) -> None:
    """Commits a step that its trainers could not, if their processes have sent all of it."""
    try:
        if run.is_pending(step):
            adopt_pending(run.uri(step), run.config, until=until, hook=hook)
    except (IncompleteSaveError, CheckpointCorruptError, AccessDeniedError) as error:
        logger.warning("the unfinished step %d could not be committed: %s", step, error)


def _log_abandoned(run: Run, line: NewestFirst, restored: int | None) -> None:
    """Names what is passed over; of the first rank, which alone knows it."""
    if line.is_line_gone:
        logger.warning(
            "%s: no step of the latest job's line is left, so the newest step of the run is "
            "restored",
            run.root,
        )
    passed_over = [
        f"step {step} of {f'job {one.job}' if one.job else 'an unknown job'}"
        for step, one in line.passed.items()
    ]
    if passed_over:
        logger.warning(
            "%s: %s restored; these newer steps were not, because they are abandoned: %s. To "
            "load one of them, call restore(step=...)",
            run.root,
            "no step was" if restored is None else f"step {restored} was",
            ", ".join(passed_over),
        )


def goal_of(run: Run, step: int, *, says: bool = True) -> Notes:
    """The notes of a step that is to be restored; logs what going there means if ``says``.

    Raises:
        CheckpointNotFoundError: If it is not committed; the message has those that are.
    """
    notes = notes_of(run.view, run, step)
    if notes is None:
        history = run.history()
        there = ", ".join(map(str, history.line)) or "none"
        others = ", ".join(map(str, history.abandoned))
        raise CheckpointNotFoundError(
            f"step {step} has no committed checkpoint; the committed steps are {there}"
            + (f", and the abandoned ones {others}" if others else ""),
            uri=str(run.uri(step)),
        )
    if not says:
        return notes
    line = NewestFirst(run.view, run)
    newest = next((one for one, found in line if isinstance(found, Notes)), step)
    if newest != step:
        logger.warning(
            "%s is restored, although %s: the first save starts a new line of steps, and older "
            "steps that do not belong to it count as abandoned",
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
                f"source= is a single checkpoint, so it has no step={step}: leave step= out, or "
                "give the run",
                uri=str(source.root),
            )
        return str(source.root), read_notes(source.store, source.root, source.retrier).step
    if step is not None:
        goal_of(source, step, says=False)
        return str(source.uri(step)), step
    if (newest := newest_step(view, source)) is None:
        raise CheckpointNotFoundError(
            "source= is neither a checkpoint nor a run with a checkpoint: check the location",
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
    """Loads a checkpoint, or those of its entries whose names match, into a state dict.

    Raises:
        ConfigError: If nothing matches on some rank.
        CloudCheckpointError: As of a checkpointer.
    """

    def select() -> dict[str, Any]:
        if keys is None:
            return state
        found = _selected(state, [keys] if isinstance(keys, str) else keys)
        if not found:
            raise ConfigError(
                f"keys={keys!r} match nothing in the state, which has the keys "
                f"{', '.join(map(str, state))}"
            )
        return found

    part = meeting.begin(select)
    if verify:
        verify_checkpoint(uri, config=config, process_group=meeting.group)
    checkpointer.load(uri, part, strict=strict, leave_misfits=not strict)
    if part is not state:
        _put_back(state, part)


def _selected(state: dict[str, Any], keys: Collection[str], path: str = "") -> dict[str, Any]:
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
        elif is_nested and (inner := _selected(value, keys, f"{name}.")):
            found[key] = inner
    return found


def _put_back(state: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Takes what was loaded into a selection of a state dict's entries."""
    for key, value in loaded.items():
        if isinstance(value, dict) and value is not state[key] and isinstance(state[key], dict):
            _put_back(state[key], value)
        else:
            state[key] = value
