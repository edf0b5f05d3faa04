"""A store as those see it who look at runs: in a thread that waits, or on an event loop.

What looks at runs is written once, as coroutines that await nothing but a :class:`View`. That of a
thread, :class:`BlockingView`, answers before it returns, so that such a coroutine never stops in
between, and :func:`answered` runs it to its end like a function. That of an event loop is in
:mod:`cloudckpt.aio`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, TypeVar

from cloudckpt.stores.asynchronous import look_at
from cloudckpt.stores.base import ObjectInfo, ObjectStore, first_of_level, folders_of
from cloudckpt.transfer.group import TaskGroup
from cloudckpt.transfer.retry import Retrier

__all__ = ["BlockingView", "View", "answered"]

T = TypeVar("T")
S = TypeVar("S")


class View(ABC):
    """What can be asked of one bucket; each question is tried again as the options say.

    All methods raise :class:`~cloudckpt.errors.StoreError` or one of its children.
    """

    @abstractmethod
    async def look(self, key: str) -> ObjectInfo:
        """Size and version of an object; see :func:`~cloudckpt.stores.asynchronous.look_at`."""

    @abstractmethod
    async def objects(self, prefix: str) -> list[ObjectInfo]:
        """The objects whose key begins with ``prefix``, in the order of keys."""

    @abstractmethod
    async def level(self, prefix: str) -> list[ObjectInfo | str]:
        """What is directly beneath ``prefix``; see :func:`~cloudckpt.stores.base.first_of_level`.

        It takes one request, however much is there or beneath the folders.
        """

    @abstractmethod
    async def folders(self, prefix: str) -> list[str]:
        """The names beneath ``prefix`` that have keys beneath them, in order."""

    @abstractmethod
    async def each(
        self, look: Callable[[S], Coroutine[Any, Any, T]], wanted: Iterable[S]
    ) -> list[T]:
        """What ``look`` returns for each of ``wanted``, in its order; several at a time."""


class BlockingView(View):
    """The view of a thread: each method has its answer when it returns."""

    def __init__(self, store: ObjectStore, retrier: Retrier, *, connections: int = 1) -> None:
        """``connections`` is how many questions :meth:`each` asks at a time."""
        self._store = store
        self._retrier = retrier
        self._connections = connections

    async def look(self, key: str) -> ObjectInfo:
        return self._retrier.call(lambda: look_at(self._store, key))

    async def objects(self, prefix: str) -> list[ObjectInfo]:
        return self._retrier.call(lambda: [*self._store.list(prefix)])

    async def level(self, prefix: str) -> list[ObjectInfo | str]:
        return self._retrier.call(lambda: first_of_level(self._store, prefix))

    async def folders(self, prefix: str) -> list[str]:
        return self._retrier.call(lambda: [*folders_of(self._store, prefix)])

    async def each(
        self, look: Callable[[S], Coroutine[Any, Any, T]], wanted: Iterable[S]
    ) -> list[T]:
        found: dict[int, T] = {}

        def keep(index: int, one: S) -> None:
            found[index] = answered(look(one))

        group = TaskGroup(self._connections, name="cloudckpt-list", interrupt=self._store.interrupt)

        def produce() -> None:
            for index, one in enumerate(wanted):
                group.submit(partial(keep, index, one))

        group.run(produce)
        return [found[index] for index in sorted(found)]


def answered(question: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns that awaits nothing but a :class:`BlockingView`."""
    try:
        question.send(None)
    except StopIteration as end:
        found: T = end.value
        return found
    finally:
        question.close()
    raise RuntimeError("a coroutine that was to look at a store waits for something else")
