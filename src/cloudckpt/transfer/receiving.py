"""Reads ranges of objects that must not change while they are read."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from cloudckpt.errors import (
    CheckpointCorruptError,
    ConnectionLostError,
    Damage,
    ObjectNotFoundError,
    PreconditionFailedError,
    RangeNotSatisfiableError,
)
from cloudckpt.stores.base import ObjectInfo, Progress, RangeReader, nbytes, skip
from cloudckpt.transfer.retry import Retrier

__all__ = ["Receiver"]

_REASONS = {
    ObjectNotFoundError: "an object of the checkpoint is gone",
    PreconditionFailedError: "an object was replaced while it was read",
    RangeNotSatisfiableError: "an object is shorter than it was written",
}


class Receiver:
    """Fills memory with ranges of objects; all ranges of an object are of the same version of it.

    Safe to use from many threads.
    """

    def __init__(self, store: RangeReader, retrier: Retrier, progress: Progress) -> None:
        """
        Args:
            store: Where the objects are.
            retrier: Tries a range again; it goes on where the connection broke.
            progress: See :data:`~cloudckpt.stores.base.Progress`.
        """
        self._store = store
        self._retrier = retrier
        self._progress = progress
        self._seen: dict[str, ObjectInfo] = {}
        self._lock = threading.Lock()

    def receive(
        self,
        key: str,
        start: int,
        views: Sequence[memoryview],
        *,
        size: int | None,
        item: str,
        version: str | None = None,
    ) -> None:
        """Fills ``views``, one after the other, with the object's bytes from ``start``.

        Args:
            key: The object.
            start: The first byte.
            views: Writable byte views, not empty in total.
            size: What the object's size must be, or None if that is unknown.
            item: What is read, for messages.
            version: What the object's version must be, or None if that is unknown.

        Raises:
            CheckpointCorruptError: If the object is gone, was replaced since its first range was
                read, or has another size.
            StoreError: If the store refuses or stays unreachable.
        """
        at, rest = start, list(views)
        with self._lock:
            seen = self._seen.get(key)
        version = seen.version if seen is not None else version

        def once() -> ObjectInfo:
            nonlocal at, rest, version
            try:
                return self._store.get_range(
                    key, at, rest, if_version=version, progress=self._progress
                )
            except ConnectionLostError as error:
                if error.received < nbytes(rest):
                    version = version or error.version
                    at, rest = at + error.received, skip(rest, error.received)
                raise

        try:
            info = self._retrier.call(once)
        except tuple(_REASONS) as error:
            uri, what = self._store.uri(key), _REASONS[type(error)]
            raise CheckpointCorruptError(
                f"{what}: was the checkpoint deleted or overwritten meanwhile? Load another one",
                uri=uri,
                item=item,
                cause=error,
                damages=[Damage(uri, item, what)],
            ) from error
        with self._lock:
            first = self._seen.setdefault(key, info)
        if first.version != info.version or size not in (None, info.size):
            uri = self._store.uri(key)
            what = f"the object has {info.size} bytes instead of {size}"
            if size in (None, info.size):
                what = "the object was replaced while it was read"
            raise CheckpointCorruptError(
                f"{what}; load another checkpoint",
                uri=uri,
                item=item,
                damages=[Damage(uri, item, what)],
            )
