"""Deletes many objects, or aborts uploads, in parallel; one failure does not stop the others.

An object that can't be deleted, because of a hold or temporarily, must not keep the others in the
store, where they are billed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from typing import TypeVar

from cloudckpt.config import RetryPolicy
from cloudckpt.errors import ConnectionLostError, StoreError, TransientStoreError
from cloudckpt.stores.base import ObjectStore, Upload
from cloudckpt.transfer.group import TaskGroup
from cloudckpt.transfer.retry import Retrier

__all__ = ["delete_all", "delete_each", "delete_quietly"]

logger = logging.getLogger("cloudckpt")

K = TypeVar("K", bound=str | Upload)


def delete_each(
    store: ObjectStore, wanted: Iterable[K], policy: RetryPolicy, *, threads: int
) -> dict[K, StoreError]:
    """Deletes objects, or aborts uploads, in parallel; returns the error of each that is left.

    Deletions that may succeed later are retried together, as often and as long as `policy` says: it
    bounds the whole, not each key. After a lost connection, the remaining keys are tried only after
    the next pause, as each might wait just as long in vain.

    Args:
        store: The store.
        wanted: The keys of objects, or uploads. Repeated ones are deleted once; that an object is
            missing is not a failure.
        policy: How often and how long to retry.
        threads: The most requests at a time.
    """
    left = list(dict.fromkeys(wanted))
    refused: dict[K, StoreError] = {}
    passing: dict[K, StoreError] = {}

    def attempt() -> None:
        nonlocal left, passing
        failed = _try_each(store, left, threads)
        passing = {key: e for key, e in failed.items() if isinstance(e, TransientStoreError)}
        refused.update((key, e) for key, e in failed.items() if key not in passing)
        left = list(passing)
        if passing:
            raise passing[left[0]]

    with contextlib.suppress(StoreError):  # returned with its key
        Retrier(policy).call(attempt)
    return refused | passing


def delete_all(
    store: ObjectStore, keys: Iterable[str], policy: RetryPolicy, *, threads: int, what: str
) -> None:
    """Deletes objects as :func:`delete_each` does, but raises an error if any are left.

    Args:
        store: The store.
        keys: The keys.
        policy: How often and how long to retry.
        threads: The most requests at a time.
        what: The kind of objects, for the message.

    Raises:
        StoreError: The error of one of the objects left, raised after the other deletions.
    """
    if left := delete_each(store, keys, policy, threads=threads):
        reason = next(iter(left.values()))
        reason.message += f" ({what} that could not be deleted: {len(left)})"
        raise reason


def delete_quietly(
    store: ObjectStore, keys: Iterable[str], policy: RetryPolicy, *, threads: int
) -> None:
    """Deletes unneeded objects, with a few retries; objects left are logged, not raised.

    A failure loses nothing, and must not hide another error or undo a commit.
    """
    few = Retrier.for_cleanup(policy).policy
    try:
        delete_all(store, keys, few, threads=threads, what="objects")
    except Exception as error:  # noqa: BLE001 - see above
        logger.warning(
            "unneeded objects could not be deleted; those that are there only take up space, until "
            "you delete them, for example with cloudckpt sweep: %s",
            error,
        )


def _try_each(store: ObjectStore, wanted: list[K], threads: int) -> dict[K, StoreError]:
    """Tries each deletion once, until the connection is lost; returns the keys left, with errors.

    Keys that were not tried come first, with the error of the lost connection.
    """
    group = TaskGroup(threads, name="cloudckpt-delete", interrupt=store.interrupt)
    failed: dict[K, StoreError] = {}
    lost: list[ConnectionLostError] = []
    tried: set[K] = set()

    def attempt(one: K) -> None:
        if lost:
            return
        tried.add(one)
        try:
            if isinstance(one, Upload):
                store.abort_upload(one)
            else:
                store.delete(one)
        except StoreError as error:
            failed[one] = error
            if isinstance(error, ConnectionLostError):
                lost.append(error)

    group.map(attempt, wanted)
    return {one: lost[0] for one in wanted if one not in tried} | failed
