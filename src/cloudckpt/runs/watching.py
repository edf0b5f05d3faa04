"""``watch``: yields the checkpoints of a run as they are committed, by polling the store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Literal

from cloudckpt.checkpoint.objects import find_commit
from cloudckpt.config import Config
from cloudckpt.runs.catalog import CheckpointSummary, Run
from cloudckpt.runs.steps import DEFAULT_PATTERN, check_seconds, check_step
from cloudckpt.transfer.view import View
from cloudckpt.uri import URILike

__all__ = ["Watch", "watch"]


def watch(
    run: URILike,
    *,
    interval: float = 30.0,
    start: int | Literal["latest"] = 0,
    step_name: str = DEFAULT_PATTERN,
    config: Config | None = None,
) -> Iterator[CheckpointSummary]:
    """Yields the committed checkpoints of a run: first the existing ones, then each new one.

    ::

        for checkpoint in cloudckpt.watch("s3://bucket/run", start=last_evaluated + 1):
            evaluate(checkpoint.uri)

    The checkpoints of one poll are yielded in the order of steps. Each is checked just before it is
    yielded; after that it may be deleted at any time, for example by the training's retention.

    - A run that does not exist yet has no checkpoints; a bucket that does not exist is an error.
    - A checkpoint that is deleted before it is yielded is left out.
    - Abandoned checkpoints are left out, as by :func:`cloudckpt.latest`.
    - A checkpoint that was deleted and saved again is yielded again; so is the newest checkpoint if
      it was replaced. When another job claims the run, all steps are compared again: if that job
      went back to an older step, the steps that it saves again are yielded again.
    - Versions are compared, not times, so clocks may differ.

    A poll takes one request per thousand folders, one for the run's claim, and up to four for the
    newest step and for each step that is new, not committed, or compared again. Requests are
    retried as ``config.retry`` says; an error that remains is raised, and ends the watch. Between
    polls the caller's thread sleeps: leave the loop, or press Ctrl-C, to end the watch. For an
    event loop use :func:`cloudckpt.aio.watch`.

    Args:
        run: The folder of the run, for example ``s3://bucket/run``.
        interval: Seconds from the start of one poll to the start of the next; a poll starts later
            if the caller has not taken all checkpoints of the previous one.
        start: The first step to yield; ``"latest"`` for the step that is newest at the first poll.
        step_name: The pattern of the checkpoints' folder names.
        config: Options; None reads them from the environment.

    Raises:
        InvalidURIError: If ``run`` is not a valid location.
        ConfigError: If an option is invalid, or ``run`` is a checkpoint.
        StoreError: If the store refuses or stays unreachable.
    """
    return _poll(Watch(Run(run, step_name=step_name, config=config), interval, start))


def _poll(watch: Watch) -> Iterator[CheckpointSummary]:
    """Polls without end, and yields new checkpoints."""
    while True:
        for step in watch.due(watch.run.view):
            if (summary := watch.look(watch.run.view, step)) is not None:
                yield summary
        time.sleep(watch.pause())


class Watch:
    """The state of a watch: the versions of the checkpoints that it has yielded.

    Both :func:`watch` and :func:`cloudckpt.aio.watch` are loops over its methods.
    """

    def __init__(self, run: Run, interval: float, start: int | Literal["latest"]) -> None:
        """Takes ``interval`` and ``start`` as :func:`watch` does.

        Raises:
            ConfigError: If one of them is invalid.
        """
        check_seconds("interval", interval)
        first = start if start == "latest" else check_step(start, "start")
        self.run, self._interval, self._start = run, interval, first
        self._known: dict[int, str] = {}  # the yielded version of each step; empty if abandoned
        self._claim: str | None = None  # the version of the claim at the last poll
        self._began: float | None = None  # when the last poll began, by time.monotonic

    def due(self, view: View) -> list[int]:
        """Begins a poll: lists the steps, and returns those to check with :meth:`look`."""
        is_first, self._began = self._began is None, time.monotonic()
        run = self.run.through(view)
        steps = run.steps(warns=is_first)
        if self._start == "latest":
            self._start = run.newest() or 0
        owner, before = run.owner(), self._claim
        self._claim = None if owner is None else owner.version
        has_changed = self._claim != before  # other steps may be abandoned now
        listed = {*steps}
        known = {
            step: version
            for step, version in self._known.items()
            if step in listed and (version or not has_changed)
        }
        newest = max((step for step, version in known.items() if version), default=None)
        due = [step for step in steps if has_changed or step not in known or step == newest]
        due = [step for step in due if step >= self._start]
        abandoned = run.history(due).abandoned
        self._known = known | dict.fromkeys(abandoned, "")
        return [step for step in due if step not in abandoned]

    def look(self, view: View, step: int) -> CheckpointSummary | None:
        """Returns a step's checkpoint if it is committed and was not returned before; else None.

        If the checkpoint was replaced since, it is returned again.
        """
        commit = find_commit(view.look, self.run.uri(step))
        if commit is None:
            self._known.pop(step, None)
        elif self._known.get(step) != commit.version:
            summary = self.run.through(view).summary(self.run.names.name(step))
            if summary is not None and summary.is_committed:
                self._known[step] = commit.version
                return summary
        return None

    def pause(self) -> float:
        """Returns the seconds until the next poll is due; 0 if it is due now."""
        assert self._began is not None
        return max(0.0, self._began + self._interval - time.monotonic())
