"""Memory for the bytes that have to be copied: bounded, reused, pinned where it helps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cloudckpt.transfer.group import Cancellation

__all__ = ["ByteBudget"]


class ByteBudget:
    """Lets holders have ``limit`` bytes in total; whoever wants more waits.

    A single claim above the limit is granted when nobody else holds anything: one item that is
    larger than the budget must still move.
    """

    def __init__(self, limit: int, cancellation: Cancellation) -> None:
        self._limit = limit
        self._held = 0
        self._changed = threading.Condition()
        self._cancellation = cancellation

    def acquire(self, nbytes: int) -> None:
        """Takes ``nbytes``; waits for others to release theirs, or for the cancellation."""
        with self._changed:
            while self._held and self._held + nbytes > self._limit:
                self._changed.wait(0.2)
                self._cancellation.check()
            self._held += nbytes

    def release(self, nbytes: int) -> None:
        """Gives ``nbytes`` back."""
        with self._changed:
            self._held -= nbytes
            self._changed.notify_all()

    @contextmanager
    def holding(self, nbytes: int) -> Iterator[None]:
        """Holds ``nbytes`` for the time of the block."""
        self.acquire(nbytes)
        try:
            yield
        finally:
            self.release(nbytes)
