"""A store as an event loop sees it: shared by concurrent calls, and closed after the last."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from cloudckpt.config import Config, RetryPolicy
from cloudckpt.errors import TransientStoreError
from cloudckpt.stores import registry
from cloudckpt.stores.asynchronous import AsyncStore, in_thread
from cloudckpt.stores.base import ObjectInfo
from cloudckpt.transfer.retry import Pauses
from cloudckpt.transfer.view import View
from cloudckpt.uri import CheckpointURI

__all__ = ["LoopView", "opened"]

T = TypeVar("T")
S = TypeVar("S")


class LoopView(View):
    """The view for an event loop, which keeps running while the store answers."""

    def __init__(self, store: AsyncStore, policy: RetryPolicy) -> None:
        self._store = store
        self._policy = policy

    async def look(self, key: str) -> ObjectInfo:
        return await tried(lambda: self._store.look(key), self._policy)

    async def objects(self, prefix: str) -> list[ObjectInfo]:
        return await tried(lambda: self._store.objects(prefix), self._policy)

    async def level(self, prefix: str) -> list[ObjectInfo | str]:
        return await tried(lambda: self._store.level(prefix), self._policy)

    async def folders(self, prefix: str) -> list[str]:
        return await tried(lambda: self._store.folders(prefix), self._policy)

    async def each(
        self, look: Callable[[S], Coroutine[Any, Any, T]], wanted: Iterable[S]
    ) -> list[T]:
        # the store limits the number of concurrent requests
        tasks = [asyncio.ensure_future(look(one)) for one in wanted]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise


async def tried(operation: Callable[[], Awaitable[T]], policy: RetryPolicy) -> T:
    """The result of ``operation``, retried as :class:`~cloudckpt.transfer.retry.Retrier` does."""
    pauses = Pauses(policy)
    with pauses.waiting:
        while True:
            try:
                return await operation()
            except TransientStoreError as error:
                pause = pauses.after(error)
                if pause is None:
                    raise
            await asyncio.sleep(pause)


@dataclass
class _Opened:
    """A store in use, or about to be."""

    store: asyncio.Task[AsyncStore]
    users: int = 0


_Key = tuple[str, Config]
_opened: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Key, _Opened]]
_opened = weakref.WeakKeyDictionary()


@contextlib.asynccontextmanager
async def opened(uri: CheckpointURI, config: Config) -> AsyncIterator[LoopView]:
    """The store of a bucket, as the running loop sees it.

    Calls to the same bucket at the same time share its connections, which are closed when the last
    of them has its answer: callers have nothing to close, and nothing is left open.

    Raises:
        StoreError: If there are no credentials for it, none that can be used, or none in time.
        ConfigError: If it can't be reached with these options.
        MissingDependencyError: If its packages are not installed.
    """
    of_loop = _opened.setdefault(asyncio.get_running_loop(), {})
    key = (uri.root, config)
    if key not in of_loop:
        of_loop[key] = _Opened(asyncio.ensure_future(_open(uri, config)))
    shared = of_loop[key]
    shared.users += 1
    try:
        yield LoopView(await asyncio.shield(shared.store), config.retry)
    finally:
        shared.users -= 1
        if not shared.users:
            del of_loop[key]
            await _close(shared.store)


async def _open(uri: CheckpointURI, config: Config) -> AsyncStore:
    # credentials and endpoints come from files and services
    return (
        await tried(lambda: in_thread(partial(registry.open_async, uri, config)), config.retry)
    )()


async def _close(opening: asyncio.Task[AsyncStore]) -> None:
    if not opening.done():
        opening.cancel()
        await asyncio.wait([opening])
    if not opening.cancelled() and opening.exception() is None:
        await opening.result().close()
