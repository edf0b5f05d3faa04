"""The functions of :mod:`cloudckpt` that only read, as coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Literal

from cloudckpt import files
from cloudckpt.aio.threads import asked, in_thread
from cloudckpt.checkpoint.objects import find_commit
from cloudckpt.config import Config, config_or_default
from cloudckpt.errors import TransferCancelledError
from cloudckpt.runs import contents, verifying
from cloudckpt.runs.catalog import CheckpointSummary, Run, newest_step, summaries
from cloudckpt.runs.contents import CheckpointContents
from cloudckpt.runs.steps import DEFAULT_PATTERN
from cloudckpt.runs.verifying import Verified
from cloudckpt.runs.watching import Polls
from cloudckpt.transfer.view import View
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["exists", "inspect", "latest", "list_checkpoints", "load_file", "verify", "watch"]


async def exists(uri: URILike, *, config: Config | None = None) -> bool:
    """As :func:`cloudckpt.exists`."""
    location = CheckpointURI.parse(uri)
    view = View(location, config_or_default(config))
    return await asked(view, lambda view: find_commit(view.look, location)) is not None


async def latest(
    run: URILike, *, step_name: str = DEFAULT_PATTERN, config: Config | None = None
) -> str | None:
    """As :func:`cloudckpt.latest`."""
    found = Run(run, step_name=step_name, config=config)
    step = await asked(found.view, lambda view: newest_step(view, found))
    return None if step is None else str(found.uri(step))


async def list_checkpoints(
    run: URILike, *, step_name: str = DEFAULT_PATTERN, config: Config | None = None
) -> list[CheckpointSummary]:
    """As :func:`cloudckpt.list_checkpoints`."""
    found = Run(run, step_name=step_name, config=config)
    return await asked(found.view, lambda view: summaries(view, found), is_wide=True)


def watch(
    run: URILike,
    *,
    interval: float = 30.0,
    start: int | Literal["latest"] = 0,
    step_name: str = DEFAULT_PATTERN,
    config: Config | None = None,
) -> AsyncIterator[CheckpointSummary]:
    """As :func:`cloudckpt.watch`, whose arguments and errors it has.

    ::

        async for checkpoint in aio.watch("s3://bucket/run", start=last_evaluated + 1):
            await evaluate(checkpoint.uri)

    Between polls, and while the caller is busy with a checkpoint, no thread waits. Leaving the
    loop, or being cancelled, ends the watch.
    """
    return _found(Polls(Run(run, step_name=step_name, config=config), interval, start))


async def _found(polls: Polls) -> AsyncIterator[CheckpointSummary]:
    while True:
        found = await asked(polls.run.view, polls.first)
        while found is not None:
            yield found
            found = await asked(polls.run.view, polls.next)
        await asyncio.sleep(polls.pause())


async def inspect(uri: URILike, *, config: Config | None = None) -> CheckpointContents:
    """As :func:`cloudckpt.inspect`, in a thread, which runs to its end if this is cancelled."""
    return await in_thread(contents.inspect, uri, config=config)


async def verify(uri: URILike, *, config: Config | None = None) -> Verified:
    """As :func:`cloudckpt.verify`, in threads, which stop at the next block if it is cancelled."""
    cancelled = threading.Event()

    def look(done: int, total: int) -> None:
        if cancelled.is_set():
            raise TransferCancelledError("the verification was cancelled")

    try:
        return await in_thread(verifying.verify, uri, config=config, progress=look)
    finally:
        cancelled.set()


async def load_file(
    uri: URILike, *, if_version: str | None = None, config: Config | None = None
) -> files.FileContent:
    """As :func:`cloudckpt.files.load_file`, in threads, which run to their end if cancelled."""
    return await in_thread(files.load_file, uri, if_version=if_version, config=config)
