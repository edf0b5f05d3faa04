"""Checkpoints of runs, read from an event loop.

The read-only functions of :mod:`cloudckpt` as coroutines, with the same arguments, results and
errors; and :func:`watch`, for services that evaluate or serve what a training job writes. Threads
do the work: the caller's event loop only waits. Nothing has to be closed.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal, TypeVar

from cloudckpt import files
from cloudckpt.checkpoint.objects import find_commit
from cloudckpt.config import Config, config_or_default
from cloudckpt.errors import TransferCancelledError
from cloudckpt.runs import contents, verifying
from cloudckpt.runs.catalog import CheckpointSummary, Run, newest_step, summaries
from cloudckpt.runs.contents import CheckpointContents
from cloudckpt.runs.steps import DEFAULT_PATTERN
from cloudckpt.runs.verifying import Verified
from cloudckpt.runs.watching import Watch
from cloudckpt.transfer.view import View
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["exists", "inspect", "latest", "list_checkpoints", "load_file", "verify", "watch"]

T = TypeVar("T")

_AT_ONCE = 8
"""Questions to a bucket at a time. Each takes a millisecond or more of the GIL, for which the loop
queues behind all threads: with 16, its longest wait was twice as long and answers hardly faster."""


async def exists(uri: URILike, *, config: Config | None = None) -> bool:
    """As :func:`cloudckpt.exists`."""
    location = CheckpointURI.parse(uri)
    view = View(location, config_or_default(config))
    return await _asked(view, lambda view: find_commit(view.look, location)) is not None


async def latest(
    run: URILike, *, step_name: str = DEFAULT_PATTERN, config: Config | None = None
) -> str | None:
    """As :func:`cloudckpt.latest`."""
    found = Run(run, step_name=step_name, config=config)
    step = await _asked(found.view, lambda view: newest_step(view, found))
    return None if step is None else str(found.uri(step))


async def list_checkpoints(
    run: URILike, *, step_name: str = DEFAULT_PATTERN, config: Config | None = None
) -> list[CheckpointSummary]:
    """As :func:`cloudckpt.list_checkpoints`."""
    found = Run(run, step_name=step_name, config=config)
    return await _asked(found.view, lambda view: summaries(view, found), is_wide=True)


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
    return _found(Watch(Run(run, step_name=step_name, config=config), interval, start))


async def _found(watch: Watch) -> AsyncIterator[CheckpointSummary]:
    while True:
        for step in await _asked(watch.run.view, watch.due):
            found = await _asked(watch.run.view, partial(watch.look, step=step))
            if found is not None:
                yield found
        await asyncio.sleep(watch.pause())


async def inspect(uri: URILike, *, config: Config | None = None) -> CheckpointContents:
    """As :func:`cloudckpt.inspect`, in a thread, which runs to its end if this is cancelled."""
    return await _in_thread(lambda: contents.inspect(uri, config=config))


async def verify(uri: URILike, *, config: Config | None = None) -> Verified:
    """As :func:`cloudckpt.verify`, in threads, which stop at the next block if it is cancelled."""
    cancelled = threading.Event()

    def look(done: int, total: int) -> None:
        if cancelled.is_set():
            raise TransferCancelledError("the verification was cancelled before it had finished")

    return await _in_thread(
        lambda: verifying.verify(uri, config=config, progress=look), cancelled.set
    )


async def load_file(
    uri: URILike, *, if_version: str | None = None, config: Config | None = None
) -> files.FileContent:
    """As :func:`cloudckpt.files.load_file`, in threads, which run to their end if cancelled."""
    return await _in_thread(lambda: files.load_file(uri, if_version=if_version, config=config))


_Gates = dict[tuple[object, ...], asyncio.Semaphore]
_gates: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Gates] = weakref.WeakKeyDictionary()


async def _asked(view: View, question: Callable[[View], T], *, is_wide: bool = False) -> T:
    """What a thread learns by asking a store. If the caller is cancelled, it stops at once.

    An event loop asks a bucket up to eight questions at a time, or fewer if ``config.connections``
    says so; beside them one that ``is_wide``, which sends several requests at a time itself.
    """
    config = view.config
    most = 1 if is_wide else min(_AT_ONCE, config.requests_at_once)
    gates = _gates.setdefault(asyncio.get_running_loop(), {})
    async with gates.setdefault((view.location.root, config, is_wide), asyncio.Semaphore(most)):
        return await _in_thread(lambda: question(view), view.cancel)


async def _in_thread(call: Callable[[], T], cancel: Callable[[], Any] = lambda: None) -> T:
    """What ``call`` returns in a daemon thread of its own; ``cancel`` is called if nobody waits.

    The interpreter's end does not wait for it, as it would for the threads of an executor: for
    minutes, if a network is silent.
    """
    future: Future[T] = Future()

    def work() -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - raised where it is awaited
                future.set_exception(error)

    threading.Thread(target=work, name="cloudckpt-aio", daemon=True).start()
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        cancel()
        raise
