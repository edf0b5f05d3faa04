"""When a failed request is tried again: the one place that decides it."""

from __future__ import annotations

import dataclasses
import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from cloudckpt.config import RetryPolicy
from cloudckpt.errors import TransientStoreError
from cloudckpt.transfer.group import Cancellation

__all__ = ["Retrier"]

T = TypeVar("T")
logger = logging.getLogger("cloudckpt")


class Retrier:
    """Tries an operation until it succeeds, fails for good, or runs out of tries or time.

    Pauses are drawn from ``[0, min(cap, base * 2**n)]`` (full jitter), or are what the store asks
    for if that is longer. A cancelled group ends the wait at once.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        cancellation: Cancellation | None = None,
        *,
        on_retry: Callable[[TransientStoreError], None] = lambda error: None,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self.policy = policy
        self._cancellation = cancellation or Cancellation()
        self._clock = clock
        self._draw = draw
        self._on_retry = on_retry

    @classmethod
    def for_cleanup(cls, policy: RetryPolicy) -> Retrier:
        """For what is done after a failure: a few tries, so that the error is soon told."""
        brief = dataclasses.replace(
            policy, attempts=min(policy.attempts, 3), deadline=min(policy.deadline, 10.0)
        )
        return cls(brief)

    def call(self, operation: Callable[[], T]) -> T:
        """The result of ``operation``.

        Raises:
            StoreError: The last failure, when it is not worth another try. A transient one then
                says in its message how often and how long it was tried.
        """
        policy = self.policy
        first_failure: float | None = None
        tries = 0
        while True:
            self._cancellation.check()
            try:
                return operation()
            except TransientStoreError as error:
                tries += 1
                now = self._clock()
                first_failure = now if first_failure is None else first_failure
                bound = min(policy.cap, policy.base * 2 ** min(tries - 1, 32))
                pause = max(self._draw(0.0, bound), error.retry_after or 0.0)
                spent = now - first_failure
                if tries >= policy.attempts or spent + pause > policy.deadline:
                    error.message += f" (gave up after {tries} tries in {spent:.1f} s)"
                    raise
                self._on_retry(error)
                logger.warning("trying again in %.2f s: %s", pause, error)
                self._cancellation.wait(pause)
