"""The questions that the functions about runs ask of a store."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TypeVar

from cloudckpt.config import Config
from cloudckpt.stores import registry
from cloudckpt.stores.base import ObjectInfo, ObjectStore
from cloudckpt.transfer.group import Cancellation, TaskGroup
from cloudckpt.transfer.retry import Retrier
from cloudckpt.uri import CheckpointURI

__all__ = ["AT_FIRST", "View"]

AT_FIRST = 1000
"""How many names of a level are requested at first: one page, in every store."""

T = TypeVar("T")
S = TypeVar("S")


class View:
    """One bucket, which is opened by the first question; each request is retried as options say.

    All questions raise :class:`~cloudckpt.errors.StoreError` or one of its children, and
    :class:`~cloudckpt.errors.TransferCancelledError` after :meth:`cancel`. One view serves one
    caller, who may ask from several threads; it does not outlive a fork.

    Attributes:
        retrier: For questions of another kind: it gives up when the view ends.
    """

    def __init__(self, location: CheckpointURI, config: Config) -> None:
        """``location`` is anything in the bucket."""
        self.location = location
        self.config = config
        self._cancellation = Cancellation()
        self.retrier = Retrier(config.retry, self._cancellation)
        self._asking = set[int]()  # threads
        self._leaving = threading.Lock()

    @functools.cached_property
    def _store(self) -> ObjectStore:
        return self.retrier.call(lambda: registry.open_store(self.location, self.config))

    def look(self, key: str) -> ObjectInfo:
        """Size and version of an object; see :meth:`~cloudckpt.stores.base.ObjectStore.look`."""
        with self.asking() as store:
            return self.retrier.call(lambda: store.look(key))

    def read(self, key: str, *, limit: int) -> bytearray:
        """The bytes of an object of at most ``limit`` bytes."""
        with self.asking() as store:
            return self.retrier.call(lambda: store.get_latest(key, limit=limit))[0]

    def objects(self, prefix: str) -> list[ObjectInfo]:
        """The objects whose key begins with ``prefix``, in the order of keys."""
        with self.asking() as store:
            return [*store.list(prefix, self.retrier.call)]

    def level(self, prefix: str, *, is_patient: bool = True) -> list[ObjectInfo | str]:
        """The first :data:`AT_FIRST` entries directly beneath ``prefix``, or all if fewer.

        It takes one request, however much is there or beneath the folders.

        Args:
            prefix: Where.
            is_patient: Whether it is retried as options say, or a few times only.
        """
        retrier = self.retrier if is_patient else Retrier.for_cleanup(self.config.retry)
        with self.asking() as store:
            return [*itertools.islice(store.list_level(prefix, retrier.call), AT_FIRST)]

    def folders(self, prefix: str) -> list[str]:
        """The names beneath ``prefix`` that have keys beneath them, in order."""
        with self.asking() as store:
            found = store.list_level(prefix, self.retrier.call)
            return [one for one in found if isinstance(one, str)]

    def each(self, look: Callable[[S], T], wanted: Iterable[S]) -> list[T]:
        """What ``look`` returns for each of ``wanted``, in its order.

        As many are looked at at a time as ``config.requests_at_once`` says. The first failure is
        raised, and ends the view, as Ctrl-C does: who still asks is not to try again for minutes.
        """
        found: dict[int, T] = {}

        def keep(index: int, one: S) -> None:
            found[index] = look(one)

        def stop(threads: Collection[int]) -> None:
            self._cancellation.cancel()
            registry.open_store(self.location, self.config).interrupt(threads)  # it is open

        group = TaskGroup(self.config.requests_at_once, name="cloudckpt-list", interrupt=stop)

        def produce() -> None:
            for index, one in enumerate(wanted):
                group.submit(functools.partial(keep, index, one))

        group.run(produce)
        return [found[index] for index in sorted(found)]

    def cancel(self) -> None:
        """Ends the questions under way, whichever threads ask them, and refuses others."""
        self._cancellation.cancel()
        if (store := vars(self).get("_store")) is not None:
            with self._leaving:  # none of them may ask for another caller yet
                store.interrupt([*self._asking])

    @contextlib.contextmanager
    def asking(self) -> Iterator[ObjectStore]:
        """The store, for questions of another kind; :meth:`cancel` ends those under way."""
        thread = threading.get_ident()
        self._asking.add(thread)
        try:
            yield self._store
        finally:
            with self._leaving:
                self._asking.discard(thread)
