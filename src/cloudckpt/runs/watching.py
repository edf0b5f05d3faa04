"""``watch``: the checkpoints of a run as they are committed."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from typing import Literal

from cloudckpt.checkpoint.objects import find_commit
from cloudckpt.config import Config, whole_number
from cloudckpt.errors import ConfigError
from cloudckpt.runs.catalog import CheckpointSummary, Run, newest_of, steps_of, summary
from cloudckpt.runs.steps import DEFAULT_PATTERN
from cloudckpt.transfer.view import View
from cloudckpt.uri import URILike

__all__ = ["Polls", "watch"]

_AGAIN = 3  # older steps that a poll checks again, besides the newest


def watch(
    run: URILike,
    *,
    interval: float = 30.0,
    start: int | Literal["latest"] = 0,
    step_name: str = DEFAULT_PATTERN,
    config: Config | None = None,
) -> Iterator[CheckpointSummary]:
    """Yields each committed checkpoint of a run once: the existing ones, then new ones.

    ::

        for checkpoint in cloudckpt.watch("s3://bucket/run", start=last_evaluated + 1):
            evaluate(checkpoint.uri)

    The checkpoints of a poll are yielded in the order of steps, and each is checked just before it
    is yielded. After that it may be deleted at any time, by the training's retention for example.

    - A run that does not exist yet has no checkpoints; a bucket that does not exist is an error.
    - A checkpoint that was deleted before its turn is left out.
    - A checkpoint that was replaced, or deleted and saved again, is yielded again: at the next poll
      if it is the newest, otherwise when its turn comes, since a poll checks three of the older
      ones again. The same goes for a step that is committed later than a higher one, as after a
      return to an older step.
    - Clocks do not matter: versions are compared, not times.

    A poll takes one request per thousand folders of the run, one for each new folder, and at most
    four to check older steps again. They are retried as ``config.retry`` says; an error that
    remains is raised, and ends the watch. The wait between polls is a sleep in the caller's thread:
    leave the loop, or press Ctrl-C, to end the watch. :func:`cloudckpt.aio.watch` is the same for
    an event loop.

    Args:
        run: The folder, for example ``s3://bucket/run``.
        interval: Seconds from the start of one poll to that of the next, if the caller is ready.
        start: The first step to yield; or ``"latest"`` for the newest at the beginning.
        step_name: What its checkpoints are called.
        config: Options.

    Raises:
        InvalidURIError: If it is not a valid location.
        ConfigError: If an option is invalid.
        StoreError: If the store refuses or stays unreachable.
    """
    return _found(Polls(Run(run, step_name=step_name, config=config), interval, start))


def _found(polls: Polls) -> Iterator[CheckpointSummary]:
    while True:
        found = polls.first(polls.run.view)
        while found is not None:
            yield found
            found = polls.next(polls.run.view)
        time.sleep(polls.pause())


class Polls:
    """The polls of a watch: what it has yielded so far, and what it checks next."""

    def __init__(self, run: Run, interval: float, start: int | Literal["latest"]) -> None:
        """Arguments and errors are those of :func:`watch`."""
        if not (0 < interval < math.inf):
            raise ConfigError(f"interval={interval!r}: give a number of seconds above 0")
        first: int | Literal["latest"] | None = (
            "latest" if start == "latest" else whole_number(start)
        )
        if first is None or (first != "latest" and first < 0):
            raise ConfigError(
                f"start={start!r}: give a step, a whole number from 0 on, or 'latest'"
            )
        self.run = run
        self._interval = interval
        self._start = first
        self._told: dict[int, str] = {}  # the version of each step's commit object
        self._due: deque[int] = deque()
        self._turn = -1  # the older step that was checked again last
        self._began: float | None = None  # the last poll, by time.monotonic

    def first(self, view: View) -> CheckpointSummary | None:
        """Lists the steps; returns the first checkpoint to yield."""
        began = time.monotonic()
        steps = self._steps(view)
        self._began = began
        if self._start == "latest":
            self._start = newest_of(view, self.run, steps) or 0
        self._due.extend(self._worth_a_look([s for s in steps if s >= self._start]))
        return self.next(view)

    def next(self, view: View) -> CheckpointSummary | None:
        """The next checkpoint of this poll to yield."""
        while self._due:
            step = self._due.popleft()
            commit = find_commit(view.look, self.run.uri(step))
            if commit is None:
                self._told.pop(step, None)
            elif self._told.get(step) != commit.version:
                found = summary(view, self.run, self.run.names.name(step))
                if found is not None and found.is_committed:
                    self._told[step] = commit.version
                    return found
        return None

    def pause(self) -> float:
        """Seconds until the next poll is due."""
        assert self._began is not None
        return max(0.0, self._began + self._interval - time.monotonic())

    def _steps(self, view: View) -> list[int]:
        if self._began is not None:
            return self.run.steps_among(view.folders(self.run.root.key("")))
        return steps_of(view, self.run)  # logs it if folders exist but none has a step's name

    def _worth_a_look(self, steps: list[int]) -> list[int]:
        """The steps above all those yielded, the newest of the others, and some older ones."""
        self._told = {step: self._told[step] for step in steps if step in self._told}
        known = bisect_right(steps, max(self._told, default=-1))
        older, newest, new = steps[: known - 1], steps[known - 1 : known], steps[known:]
        if not known:
            return new
        turn = bisect_right(older, self._turn)
        again = (older[turn:] + older[:turn])[:_AGAIN]
        self._turn = again[-1] if again else -1
        return sorted(again) + newest + new
