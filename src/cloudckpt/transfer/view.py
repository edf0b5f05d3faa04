"""Reads and lists objects with retries, in threads if wanted, until it is cancelled."""

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
"""The most entries that :meth:`View.level` returns: one page, in every store."""

T = TypeVar("T")
S = TypeVar("S")


class View:
    """A bucket, opened by the first request; requests are retried as the options say.

    Methods that send requests raise :class:`~cloudckpt.errors.StoreError` or a subclass, and
    :class:`~cloudckpt.errors.TransferCancelledError` after :meth:`cancel`; if the store can't be
    opened, also ConfigError or MissingDependencyError. A view serves one caller, who may use
    several threads; it can't be used after a fork.

    Attributes:
        retrier: The retrier for requests made outside of the view; :meth:`cancel` stops it, too.
    """

    def __init__(self, location: CheckpointURI, config: Config) -> None:
        """Prepares a view; `location` is any location in the bucket."""
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
        """Returns an object's size and version; see :class:`~cloudckpt.stores.base.ObjectStore`."""
        with self.asking() as store:
            return self.retrier.call(lambda: store.look(key))

    def read(self, key: str, *, limit: int) -> bytearray:
        """Returns the content of an object; raises ObjectTooLargeError above `limit` bytes."""
        with self.asking() as store:
            return self.retrier.call(lambda: store.get(key, limit=limit))[0]

    def objects(self, prefix: str) -> list[ObjectInfo]:
        """Returns the objects whose key begins with `prefix`, ordered by key."""
        with self.asking() as store:
            return [*store.list(prefix, self.retrier.call)]

    def level(self, prefix: str, *, is_patient: bool = True) -> list[ObjectInfo | str]:
        """Returns the first :data:`AT_FIRST` entries directly beneath `prefix`, or all if fewer.

        An entry is an object, or the name of a folder. This takes one request, however many keys
        begin with `prefix`.

        Args:
            prefix: The folder; empty, or ends in a slash.
            is_patient: Whether to retry as the options say; if False, only a few times.
        """
        retrier = self.retrier if is_patient else Retrier.for_cleanup(self.config.retry)
        with self.asking() as store:
            return [*itertools.islice(store.list_level(prefix, retrier.call), AT_FIRST)]

    def folders(self, prefix: str) -> list[str]:
        """Returns the names of the folders directly beneath `prefix`, in order."""
        with self.asking() as store:
            entries = store.list_level(prefix, self.retrier.call)
            return [entry for entry in entries if isinstance(entry, str)]

    def each(self, look: Callable[[S], T], wanted: Iterable[S]) -> list[T]:
        """Returns the results of `look` for each of `wanted`, in the same order.

        At most ``config.requests_at_once`` calls run at a time. The first failure is raised and
        cancels the view, as Ctrl-C does: requests still running must not be retried for minutes.
        """

        def stop(threads: Collection[int]) -> None:
            self._cancellation.cancel()
            registry.open_store(self.location, self.config).interrupt(threads)  # opened before

        group = TaskGroup(self.config.requests_at_once, name="cloudckpt-list", interrupt=stop)
        return group.map(look, wanted)

    def cancel(self) -> None:
        """Interrupts the requests of all threads, and refuses further ones."""
        self._cancellation.cancel()
        if (store := vars(self).get("_store")) is not None:
            with self._leaving:  # no thread may leave and begin another caller's request meanwhile
                store.interrupt([*self._asking])

    @contextlib.contextmanager
    def asking(self) -> Iterator[ObjectStore]:
        """Yields the store, for requests without a method here; :meth:`cancel` interrupts them."""
        thread = threading.get_ident()
        self._asking.add(thread)
        try:
            yield self._store
        finally:
            with self._leaving:
                self._asking.discard(thread)
