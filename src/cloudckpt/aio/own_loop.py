"""cloudckpt's own event loop, in a thread: all requests of :mod:`cloudckpt.aio` run there.

The vendors' SDKs are asynchronous, but not light: signing a request, parsing a page of a listing
and loading their service descriptions takes milliseconds to tenths of a second, in which an event
loop does nothing else. A service that answers its users on its loop must not pay for that. So the
service's loop only waits, and the requests run here.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from cloudckpt.fork import module_lock

__all__ = ["aside"]

T = TypeVar("T")

_LAST_WAIT = 1.0  # seconds to close connections at the end of the process


async def aside(question: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine run on cloudckpt's own loop; it is cancelled with its caller."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(question, _own_loop()))


_lock = module_lock()
_loop: asyncio.AbstractEventLoop | None = None
_process = 0


def _own_loop() -> asyncio.AbstractEventLoop:
    """The loop of this process; a forked child gets its own."""
    global _loop, _process
    with _lock:
        if _loop is None or _process != os.getpid():
            _loop, _process = asyncio.new_event_loop(), os.getpid()
            thread = threading.Thread(target=_loop.run_forever, name="cloudckpt-loop", daemon=True)
            thread.start()
        return _loop


@atexit.register
def _end() -> None:
    """Lets tasks that were just cancelled close their connections."""
    if _loop is not None and _process == os.getpid():
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(_cancel_all(), _loop).result(_LAST_WAIT)


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
