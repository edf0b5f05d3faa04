"""Reads about a store from an event loop, in threads for stores without another way."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import TypeVar

from cloudckpt.errors import RangeNotSatisfiableError
from cloudckpt.stores.base import ObjectInfo, ObjectStore, first_of_level, folders_of

__all__ = ["AsyncStore", "ThreadedStore", "in_thread", "look_at"]

T = TypeVar("T")


def look_at(store: ObjectStore, key: str) -> ObjectInfo:
    """Size and version of an object, by a request for its first byte.

    Unlike HEAD, this distinguishes a missing bucket from a missing object.

    Raises:
        ObjectNotFoundError: If the store says that there is no such object.
    """
    try:
        return store.get_range(key, 0, [memoryview(bytearray(1))])
    except RangeNotSatisfiableError:  # it is empty
        return ObjectInfo(key, 0, "")


class AsyncStore(ABC):
    """One bucket. Makes one attempt at each call, and never blocks the event loop.

    It belongs to one loop and must be closed there. Errors are those of
    :class:`~cloudckpt.stores.base.ObjectStore`.
    """

    @abstractmethod
    async def look(self, key: str) -> ObjectInfo:
        """As :func:`look_at`."""

    @abstractmethod
    async def objects(self, prefix: str) -> list[ObjectInfo]:
        """The objects whose key begins with ``prefix``, in the order of keys."""

    @abstractmethod
    async def level(self, prefix: str) -> list[ObjectInfo | str]:
        """As :func:`~cloudckpt.stores.base.first_of_level`."""

    @abstractmethod
    async def folders(self, prefix: str) -> list[str]:
        """The names beneath ``prefix`` that have keys beneath them, in order."""

    async def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Releases connections."""


class ThreadedStore(AsyncStore):
    """Any store: each call runs in its own thread, up to a limited number of threads."""

    def __init__(self, store: ObjectStore, threads: int) -> None:
        self._store = store
        self._free = asyncio.Semaphore(threads)

    async def look(self, key: str) -> ObjectInfo:
        return await self._asked(lambda: look_at(self._store, key))

    async def objects(self, prefix: str) -> list[ObjectInfo]:
        return await self._asked(lambda: list(self._store.list(prefix)))

    async def level(self, prefix: str) -> list[ObjectInfo | str]:
        return await self._asked(lambda: first_of_level(self._store, prefix))

    async def folders(self, prefix: str) -> list[str]:
        return await self._asked(lambda: list(folders_of(self._store, prefix)))

    async def _asked(self, question: Callable[[], T]) -> T:
        async with self._free:
            return await in_thread(question, self._store.interrupt)


async def in_thread(
    call: Callable[[], T], interrupt: Callable[[Collection[int]], None] = lambda threads: None
) -> T:
    """Runs ``call`` in its own thread and returns its result.

    It does not use the loop's executor: that has few threads, in which the loop also looks up host
    names, and a call may wait minutes for a network. If the caller is cancelled, ``interrupt``
    breaks off the thread, and nobody waits for it.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[T] = loop.create_future()

    def end(result: T | None, error: BaseException | None) -> None:
        if ended.done():  # cancelled
            return
        if error is not None:
            ended.set_exception(error)
        else:
            ended.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(end, result, failure)

    thread = threading.Thread(target=run, name="cloudckpt-aio", daemon=True)
    thread.start()
    try:
        return await ended
    except asyncio.CancelledError:
        interrupt([thread.ident or 0])
        raise
