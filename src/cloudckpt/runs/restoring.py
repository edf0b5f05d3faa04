"""Which step a job restores: the newest on the line of its run, or the one that it asks for."""

from __future__ import annotations

import logging

from cloudckpt.checkpoint.notes import Notes
from cloudckpt.dcp.writer import CommitHook
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointCorruptError,
    CheckpointNotFoundError,
    IncompleteSaveError,
)
from cloudckpt.runs.adopting import adopt_pending
from cloudckpt.runs.catalog import Run, line_of, notes_of
from cloudckpt.runs.line import Line

__all__ = ["Candidates", "goal_of"]

logger = logging.getLogger("cloudckpt")


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


def goal_of(run: Run, step: int) -> Notes:
    """The notes of a step that is to be restored; says what going there means."""
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
    if step in history.abandoned or newest > step:
        logger.warning(
            "%s is restored, although %s: the first save begins a new line here, and from then "
            "on steps that it does not continue are abandoned",
            f"step {step}",
            f"step {newest} is newer" if newest > step else "it is abandoned",
        )
    return notes
