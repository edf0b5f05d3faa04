"""The read-only functions of :mod:`cloudckpt`, as coroutines."""

from __future__ import annotations

import threading
from functools import partial

from cloudckpt import files
from cloudckpt.aio.own_loop import aside
from cloudckpt.aio.view import opened
from cloudckpt.checkpoint.objects import find_commit
from cloudckpt.config import Config
from cloudckpt.errors import TransferCancelledError
from cloudckpt.runs import catalog, contents, verifying
from cloudckpt.runs.catalog import CheckpointSummary, Run
from cloudckpt.runs.contents import CheckpointContents
from cloudckpt.runs.steps import DEFAULT_PATTERN
from cloudckpt.runs.verifying import Verified
from cloudckpt.stores.asynchronous import in_thread
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["exists", "inspect", "latest", "list_checkpoints", "load_file", "verify"]


async def exists(uri: URILike, *, config: Config | None = None) -> bool:
    """As :func:`cloudckpt.exists`."""
    location, options = CheckpointURI.parse(uri), config if config is not None else Config()

    async def ask() -> bool:
        async with opened(location, options) as view:
            return await find_commit(view, location) is not None

    return await aside(ask())


async def latest(
    run: URILike, *, step_name: str = DEFAULT_PATTERN, config: Config | None = None
) -> str | None:
    """As :func:`cloudckpt.latest`."""
    found = Run(run, step_name=step_name, config=config)

    async def ask() -> str | None:
        async with opened(found.root, found.config) as view:
            step = await catalog.latest_step(view, found)
            return None if step is None else str(found.uri(step))

    return await aside(ask())


async def list_checkpoints(
    run: URILike, *, step_name: str = DEFAULT_PATTERN, config: Config | None = None
) -> list[CheckpointSummary]:
    """As :func:`cloudckpt.list_checkpoints`."""
    found = Run(run, step_name=step_name, config=config)

    async def ask() -> list[CheckpointSummary]:
        async with opened(found.root, found.config) as view:
            return await catalog.summaries(view, found)

    return await aside(ask())


# What follows moves bytes, which does not belong on an event loop: threads do that without the GIL.


async def inspect(uri: URILike, *, config: Config | None = None) -> CheckpointContents:
    """As :func:`cloudckpt.inspect`, in a thread, which runs to its end if this is cancelled."""
    return await in_thread(partial(contents.inspect, uri, config=config))


async def verify(uri: URILike, *, config: Config | None = None) -> Verified:
    """As :func:`cloudckpt.verify`, in threads, which stop at the next block if it is cancelled."""
    cancelled = threading.Event()

    def look(done: int, total: int) -> None:
        if cancelled.is_set():
            raise TransferCancelledError("the verification was cancelled")

    try:
        return await in_thread(partial(verifying.verify, uri, config=config, progress=look))
    finally:
        cancelled.set()


async def load_file(
    uri: URILike, *, if_version: str | None = None, config: Config | None = None
) -> files.FileContent:
    """As :func:`cloudckpt.files.load_file`, in threads, which run to their end if cancelled."""
    return await in_thread(partial(files.load_file, uri, if_version=if_version, config=config))
