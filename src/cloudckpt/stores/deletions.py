"""The deletion of many objects: each is tried, whatever became of the others.

One object that can't be deleted, for a hold or for the moment, must not keep the rest in the store,
where they are billed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence

from cloudckpt.errors import (
    ConnectionLostError,
    ObjectNotFoundError,
    StoreError,
    TransientStoreError,
)

__all__ = ["Failures", "delete_all", "one_by_one"]

Failures = list[tuple[str, StoreError]]
"""The keys that could not be deleted, and why."""


def delete_all(keys: Iterable[str], most: int, delete: Callable[[Sequence[str]], Failures]) -> None:
    """Deletes objects in batches.

    Args:
        keys: The keys; one that is repeated counts once.
        most: Keys of a batch.
        delete: Deletes the objects of a batch; returns those that it could not delete. What it
            raises holds for all of them.

    Raises:
        StoreError: If any could not be deleted: why the first could not, or the first of those that
            are worth another try. Its ``left`` names them all.
    """
    wanted = list(dict.fromkeys(keys))
    failures, untried = _in_batches(wanted, most, delete)
    if not failures:
        return
    passing = (error for _, error in failures if isinstance(error, TransientStoreError))
    error = next(passing, failures[0][1])
    # what was not tried comes first when it is tried again
    error.left = (*untried, *(key for key, _ in failures))
    if len(wanted) > 1:
        error.message += f" ({len(error.left)} of {len(wanted)} objects could not be deleted)"
    raise error


def one_by_one(keys: Sequence[str], delete: Callable[[str], None]) -> Failures:
    """Deletes objects by a request for each; those that are not there are no failures."""

    def single(keys: Sequence[str]) -> Failures:
        with contextlib.suppress(ObjectNotFoundError):
            delete(keys[0])
        return []

    failures, untried = _in_batches(keys, 1, single)
    return [*failures, *((key, failures[-1][1]) for key in untried)]


def _in_batches(
    keys: Sequence[str], most: int, delete: Callable[[Sequence[str]], Failures]
) -> tuple[Failures, Collection[str]]:
    """The failures, and the keys that were not tried, as the connection was lost before."""
    failures: Failures = []
    for start in range(0, len(keys), most):
        batch = keys[start : start + most]
        try:
            failed = delete(batch)
        except StoreError as error:
            failed = [(key, error) for key in batch]
        failures += failed
        if any(isinstance(error, ConnectionLostError) for _, error in failed):
            return failures, keys[start + most :]  # the next request may wait as long for nothing
    return failures, ()
