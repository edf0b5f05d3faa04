"""``watch``: the checkpoints of a run as they are committed."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator
from typing import Literal

from cloudckpt.aio.own_loop import aside
from cloudckpt.aio.view import opened
from cloudckpt.checkpoint.objects import find_commit
from cloudckpt.config import Config, whole_number
from cloudckpt.errors import ConfigError
from cloudckpt.runs.catalog import CheckpointSummary, Run, steps_of, summary
from cloudckpt.runs.steps import DEFAULT_PATTERN
from cloudckpt.transfer.view import View
from cloudckpt.uri import URILike

__all__ = ["watch"]

_AGAIN = 3  # older steps that a poll checks again, besides the newest


def watch(
    run: URILike,
    *,
    interval: float = 30.0,
    start: int | Literal["latest"] = 0,
    step_name: str = DEFAULT_PATTERN,
    config: Config | None = None,
) -> AsyncIterator[CheckpointSummary]:
    """Yields each committed checkpoint of a run once: the existing ones, then new ones.

    ::

        async for checkpoint in aio.watch("s3://bucket/run", start=last_evaluated + 1):
            await evaluate(checkpoint.uri)

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
    remains is raised, and ends the watch. Between polls, and while the caller is busy with a
    checkpoint, nothing is open. Leaving the loop, or being cancelled, ends the watch.

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
    if not (0 < interval < math.inf):
        raise ConfigError(f"interval={interval!r}: give a number of seconds above 0")
    first: int | Literal["latest"] | None = "latest" if start == "latest" else whole_number(start)
    if first is None or (first != "latest" and first < 0):
        raise ConfigError(f"start={start!r}: give a step, a whole number from 0 on, or 'latest'")
    return _told(_Watch(Run(run, step_name=step_name, config=config), first), interval)


async def _told(watch: _Watch, interval: float) -> AsyncIterator[CheckpointSummary]:
    loop = asyncio.get_running_loop()
    while True:
        began = loop.time()
        found = await aside(watch.poll())
        while found is not None:
            yield found
            found = await aside(watch.go_on())
        await asyncio.sleep(max(0.0, began + interval - loop.time()))


class _Watch:
    """What was yielded of a run so far, and what to check next."""

    def __init__(self, run: Run, start: int | Literal["latest"]) -> None:
        self._run = run
        self._start = start
        self._told: dict[int, str] = {}  # the version of each step's commit object
        self._due: deque[int] = deque()
        self._turn = -1  # the older step that was checked again last
        self._has_polled = False

    async def poll(self) -> CheckpointSummary | None:
        """Lists the steps; returns the first checkpoint to yield."""
        async with opened(self._run.root, self._run.config) as view:
            steps = await self._steps(view)
            if self._start == "latest":
                self._start = await self._newest(view, steps)
            self._due.extend(self._worth_a_look([s for s in steps if s >= self._start]))
            return await self._next(view)

    async def go_on(self) -> CheckpointSummary | None:
        """The next checkpoint of this poll to yield."""
        if not self._due:
            return None
        async with opened(self._run.root, self._run.config) as view:
            return await self._next(view)

    async def _steps(self, view: View) -> list[int]:
        if not self._has_polled:  # logs once if folders exist but none has a step's name
            self._has_polled = True
            return await steps_of(view, self._run)
        return self._run.steps_among(await view.folders(self._run.root.key("")))

    async def _newest(self, view: View, steps: list[int]) -> int:
        for step in reversed(steps):
            if await find_commit(view, self._run.uri(step)) is not None:
                return step
        return 0

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

    async def _next(self, view: View) -> CheckpointSummary | None:
        while self._due:
            step = self._due.popleft()
            uri = self._run.uri(step)
            commit = await find_commit(view, uri)
            if commit is None:
                self._told.pop(step, None)
            elif self._told.get(step) != commit.version:
                found = await summary(view, self._run, self._run.names.name(step))
                if found is not None and found.is_committed:
                    self._told[step] = commit.version
                    return found
        return None
