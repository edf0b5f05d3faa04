"""An event loop of cloudckpt's own, in a thread: all requests of :mod:`cloudckpt.aio` live there.

The vendors' SDKs are asynchronous, but not light: to sign a request, to read a page of a listing
and to load their descriptions takes them milliseconds to tenths of a second, in which an event loop
does nothing else. A service that answers its users on its loop must not pay for that. So its loop
only waits, and what asks the store runs here.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from cloudckpt.fork import ModuleLock

__all__ = ["aside"]

T = TypeVar("T")

_LAST_WAIT = 1.0  # seconds, at the end of the process, for connections to be closed


async def aside(question: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns on cloudckpt's own loop; it is cancelled with its caller."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(question, _own_loop()))


_lock = ModuleLock()
_loop: asyncio.AbstractEventLoop | None = None
_process = 0


def _own_loop() -> asyncio.AbstractEventLoop:
    """The loop of this process; a forked child has another one than its parent."""
    global _loop, _process
    with _lock:
        if _loop is None or _process != os.getpid():
            _loop, _process = asyncio.new_event_loop(), os.getpid()
            thread = threading.Thread(target=_loop.run_forever, name="cloudckpt-loop", daemon=True)
            thread.start()
        return _loop


@atexit.register
def _end() -> None:
    """Lets what was cancelled last close its connections."""
    if _loop is not None and _process == os.getpid():
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(_cancel_all(), _loop).result(_LAST_WAIT)


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
