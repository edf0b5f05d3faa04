"""The functions that read runs and checkpoints, as coroutines.

Arguments, results and errors are those of the functions of the same names in :mod:`cloudckpt` and
:mod:`cloudckpt.files`, except that :func:`verify` takes neither a process group nor ``progress``.
They serve programs that evaluate or deploy what a training job writes. The work is done in threads,
so that the caller's event loop never blocks. There is nothing to close.
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
from cloudckpt.runs.catalog import CheckpointSummary, Run
from cloudckpt.runs.contents import CheckpointContents
from cloudckpt.runs.steps import DEFAULT_PATTERN
from cloudckpt.runs.verifying import Verified
from cloudckpt.runs.watching import Watch
from cloudckpt.transfer.view import View
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["exists", "inspect", "latest", "list_checkpoints", "load_file", "verify", "watch"]

T = TypeVar("T")

_AT_ONCE = 8
"""The maximum number of small requests that an event loop sends to a bucket at the same time. With
16, the loop's longest delay was twice as long, as it competes with the threads of the requests for
the GIL, and the responses came hardly sooner.
"""


async def exists(uri: URILike, *, config: Config | None = None) -> bool:
    """Returns whether there is a committed checkpoint at `uri`; see :func:`cloudckpt.exists`."""
    location = CheckpointURI.parse(uri)
    view = View(location, config_or_default(config))
    return await _request(view, lambda view: find_commit(view.look, location)) is not None


async def latest(
    run: URILike, *, step_name: str = DEFAULT_PATTERN, config: Config | None = None
) -> str | None:
    """Returns the URI of a run's newest committed checkpoint; None if there is none.

    See :func:`cloudckpt.latest`, also for the checkpoints that are skipped.
    """
    found = Run(run, step_name=step_name, config=config)
    step = await _request(found.view, lambda view: found.through(view).newest())
    return None if step is None else str(found.uri(step))


async def list_checkpoints(
    run: URILike, *, step_name: str = DEFAULT_PATTERN, config: Config | None = None
) -> list[CheckpointSummary]:
    """Lists all checkpoints of a run, committed or not; see :func:`cloudckpt.list_checkpoints`."""
    found = Run(run, step_name=step_name, config=config)
    return await _request(found.view, lambda view: found.through(view).summaries(), is_wide=True)


def watch(
    run: URILike,
    *,
    interval: float = 30.0,
    start: int | Literal["latest"] = 0,
    step_name: str = DEFAULT_PATTERN,
    config: Config | None = None,
) -> AsyncIterator[CheckpointSummary]:
    """Yields the committed checkpoints of a run: first the existing ones, then each new one.

    Arguments and errors are those of :func:`cloudckpt.watch`.

    ::

        async for checkpoint in aio.watch("s3://bucket/run", start=last_evaluated + 1):
            await evaluate(checkpoint.uri)

    Between polls, and while the caller processes a checkpoint, no thread waits. Leaving the loop,
    or cancelling it, ends the watch.
    """
    return _new_checkpoints(Watch(Run(run, step_name=step_name, config=config), interval, start))


async def _new_checkpoints(watch: Watch) -> AsyncIterator[CheckpointSummary]:
    while True:
        for step in await _request(watch.run.view, watch.due):
            found = await _request(watch.run.view, partial(watch.look, step=step))
            if found is not None:
                yield found
        await asyncio.sleep(watch.pause())


async def inspect(uri: URILike, *, config: Config | None = None) -> CheckpointContents:
    """Returns the contents of a checkpoint; see :func:`cloudckpt.inspect`.

    The work is done in a thread, which continues to its end if the coroutine is cancelled.
    """
    return await _in_thread(lambda: contents.inspect(uri, config=config))


async def verify(uri: URILike, *, config: Config | None = None) -> Verified:
    """Reads a checkpoint completely and checks its checksums; see :func:`cloudckpt.verify`.

    The work is done in threads. If the coroutine is cancelled, they stop when they have received
    the next bytes.
    """
    cancelled = threading.Event()

    def progress(done: int, total: int) -> None:
        if cancelled.is_set():
            raise TransferCancelledError("the verification was cancelled", uri=str(uri))

    return await _in_thread(
        lambda: verifying.verify(uri, config=config, progress=progress), cancelled.set
    )


async def load_file(
    uri: URILike, *, if_version: str | None = None, config: Config | None = None
) -> files.FileContent:
    """Returns the content of a file; see :func:`cloudckpt.files.load_file`.

    The work is done in threads, which continue to their end if the coroutine is cancelled.
    """
    return await _in_thread(lambda: files.load_file(uri, if_version=if_version, config=config))


_Gates = dict[tuple[object, ...], asyncio.Semaphore]
_gates: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Gates] = weakref.WeakKeyDictionary()


async def _request(view: View, call: Callable[[View], T], *, is_wide: bool = False) -> T:
    """Runs `call` with `view` in a thread, and returns its result.

    An event loop runs up to eight such calls per bucket and options at a time, or
    ``config.connections`` if that is less. In addition, it runs one call with `is_wide` at a time,
    which may send several requests at once. If the coroutine is cancelled, the requests are
    interrupted.
    """
    config = view.config
    most = 1 if is_wide else min(_AT_ONCE, config.requests_at_once)
    gates = _gates.setdefault(asyncio.get_running_loop(), {})
    async with gates.setdefault((view.location.root, config, is_wide), asyncio.Semaphore(most)):
        return await _in_thread(lambda: call(view), view.cancel)


async def _in_thread(call: Callable[[], T], cancel: Callable[[], Any] = lambda: None) -> T:
    """Returns the result of `call`, run in a new daemon thread.

    If the coroutine is cancelled, it calls `cancel`, and does not wait for the thread. The
    interpreter does not wait for the thread either when it exits, unlike for an executor's.
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
