"""Decides when a failed request is retried, and when a whole load starts again."""

from __future__ import annotations

import dataclasses
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from cloudckpt.config import Config, RetryPolicy
from cloudckpt.errors import (
    CheckpointReplacedError,
    CloudCheckpointError,
    DifferentCheckpointsError,
    ObjectNotFoundError,
    StoreError,
    TransientStoreError,
)
from cloudckpt.stores import registry
from cloudckpt.stores.base import ObjectInfo, ObjectStore
from cloudckpt.transfer.group import Cancellation
from cloudckpt.uri import CheckpointURI
from cloudckpt.waiting import Waiting

__all__ = ["Retrier", "check_unchanged", "open_store", "retry_if_replaced"]

T = TypeVar("T")
logger = logging.getLogger("cloudckpt")

_CLEANUP_TRIES = 3
_RESTARTS = 5
_LONGEST_ASKED = 60.0  # seconds; bounds Retry-After, as a gateway may send any value
_FIRST_PAUSE = 0.1  # seconds before a load is restarted; doubled each time


class Retrier:
    """Retries an operation until it succeeds, fails permanently, or its deadline passes.

    Transient failures are retried until the deadline, unless ``attempts`` of the policy ends the
    tries earlier: a store that restarts refuses connections for a minute, and clouds need minutes
    to scale up. The pauses are drawn between ``base`` and three times the previous pause, up to
    ``cap`` (decorrelated jitter); a longer pause that the store asks for is observed, up to a
    minute. Long waits are logged (:mod:`cloudckpt.waiting`). A cancellation ends the wait at once.

    Args:
        policy: The deadline, the pauses, and how many tries there may be.
        cancellation: Ends the retries; None if nothing does.
        on_retry: Called with each failure that is retried.
        clock: Returns the seconds of a monotonic clock.
        draw: Returns a random number between two others, as the next pause.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        cancellation: Cancellation | None = None,
        *,
        on_retry: Callable[[StoreError], None] = lambda error: None,
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
        """Returns a retrier with at most 3 tries in 10 s, for clean-up after a failure."""
        attempts = min(policy.attempts or _CLEANUP_TRIES, _CLEANUP_TRIES)
        deadline = min(policy.deadline, 10.0)
        return cls(dataclasses.replace(policy, attempts=attempts, deadline=deadline))

    def call(
        self, operation: Callable[[], T], *, made: Callable[[StoreError], T | None] | None = None
    ) -> T:
        """Returns the result of `operation`, retrying transient failures.

        Args:
            operation: The operation.
            made: Called with the final failure, if a try that failed transiently may have been
                carried out nevertheless. Returns the result of that try, or None to have the
                failure raised. For example, a request whose response was lost has succeeded, but is
                refused when it is repeated (the object exists, is locked, the upload is gone).

        Raises:
            StoreError: The last failure, if it is permanent or the retries are used up. The message
                of a transient failure then says how often and how long it was retried. With
                ``made``, the error is certain only if those of all tries were.
            TransferCancelledError: If the transfer was cancelled.
        """
        doubtful = False
        with Waiting(self.policy.deadline, self._clock) as waiting:
            pauses = _Pauses(self.policy, self._clock, self._draw, waiting)
            while True:
                self._cancellation.check()
                try:
                    return operation()
                except StoreError as error:
                    pause = None
                    if isinstance(error, TransientStoreError):
                        doubtful = doubtful or not error.certain
                        pause = pauses.after(error)
                    if pause is None:
                        if doubtful and made is not None:
                            if (result := made(error)) is not None:
                                return result
                            error.certain = False  # earlier tries may have been carried out
                        raise
                    self._on_retry(error)
                    self._cancellation.wait(pause)

    def wait_for(self, look: Callable[[], T | None]) -> T | None:
        """Calls `look` until its result is not None; returns the result, None after the deadline.

        ``attempts`` of the policy limits the calls only if there are no pauses (``cap`` is 0): it
        is meant for failures, and a result of None is not a failure. Transient errors of `look`
        count as None.

        Raises:
            StoreError: If `look` fails permanently.
            TransferCancelledError: If the transfer was cancelled.
        """

        def seen() -> T:
            if (result := look()) is None:
                raise TransientStoreError("the store does not show the uploaded object yet")
            return result

        # without pauses only the attempts end the looks
        attempts = None if self.policy.cap else self.policy.attempts
        patient = dataclasses.replace(self.policy, attempts=attempts)
        looks = Retrier(patient, self._cancellation, clock=self._clock, draw=self._draw)
        try:
            return looks.call(seen)
        except TransientStoreError:
            return None


def open_store(uri: CheckpointURI, config: Config) -> ObjectStore:
    """Opens the store of a URI, with the retries of ``config.retry``.

    Credentials may come from services (of an instance or an identity provider) that fail for a
    moment, which would end a save before its first request.

    Raises:
        StoreError: If there are no usable credentials, or none are available in time.
        ConfigError: If the options or variables are not valid for this store.
        MissingDependencyError: If the store's packages are not installed.
    """
    return Retrier(config.retry).call(lambda: registry.open_store(uri, config))


@dataclass(slots=True)
class _Pauses:
    """The pauses between the tries of one operation."""

    policy: RetryPolicy
    clock: Callable[[], float]
    draw: Callable[[float, float], float]
    waiting: Waiting
    failures: int = 0
    first: float = 0.0  # when it failed first
    last: float = 0.0  # seconds of the last pause

    def after(self, error: TransientStoreError) -> float | None:
        """Returns the seconds until the next try after a failure; None if it was the last."""
        policy, now = self.policy, self.clock()
        if not self.failures:
            self.first = now
        self.failures += 1
        spent = now - self.first
        left = policy.deadline - spent
        if left <= 0 or self.failures == policy.attempts:
            error.message += f" (gave up after try {self.failures}, {spent:.1f} s after the first)"
            return None
        last = self.last or policy.base or policy.cap / 100  # a base of 0 would never grow
        # jitter, also at the cap: many ranks fail together, and would otherwise return together
        self.last = self.draw(policy.base, min(policy.cap, 3 * last))
        asked = min(error.retry_after or 0.0, _LONGEST_ASKED)
        pause = min(max(self.last, asked), left)
        self.waiting.failed(error, left=left, pause=pause)
        logger.info("trying again in %.2f s: %s", pause, error)
        return pause


def check_unchanged(
    store: ObjectStore,
    read: ObjectInfo,
    uri: str,
    policy: RetryPolicy,
    error: CloudCheckpointError,
    *,
    known_save: str | None = None,
) -> None:
    """Raises an error if a load failed because the checkpoint was replaced meanwhile.

    A writer that overwrites a checkpoint commits first, and then deletes the old objects. A load of
    the old checkpoint then misses them, though nothing is damaged. So the current version of the
    object that was read first, and that names all others, is compared with the version that was
    read.

    Args:
        store: The store.
        read: The object that was read first.
        uri: The checkpoint, for the message.
        policy: The retries of the request to the store.
        error: The failure.
        known_save: The id of the save whose metadata another rank has read and sent; None if this
            rank has read it itself. If set, this rank may also be using another store.

    Raises:
        CheckpointReplacedError: If the object has been replaced or deleted since.
        StoreError: If the store does not respond.
    """
    try:
        version = Retrier(policy).call(lambda: store.head(read.key)).version
    except ObjectNotFoundError:
        version = None
    if version != read.version:
        raise CheckpointReplacedError(
            "the checkpoint or file was replaced or deleted while it was read; read it again",
            saves=None if known_save is None else (known_save, version),
            uri=uri,
            cause=error,
        ) from error


def retry_if_replaced(load: Callable[[], T]) -> T:
    """Returns the result of `load`, restarted up to 4 times if the checkpoint was replaced.

    Raises:
        CheckpointReplacedError: If that happened five times, or ``load`` has raised it for repeated
            replacements.
        DifferentCheckpointsError: If the ranks read the same two saves again: they use different
            stores.
    """
    overtaken = 0
    saves: tuple[str | None, str | None] | None = None
    while True:
        try:
            return load()
        except CheckpointReplacedError as error:
            if error.times > 1:
                raise
            if error.saves is not None and error.saves == saves:
                raise DifferentCheckpointsError(
                    "the ranks read different saves at this location, repeatedly: they read "
                    "from different stores. Compare endpoint_url (AWS_ENDPOINT_URL), account "
                    "and mount on all ranks",
                    uri=error.uri,
                ) from error
            saves = error.saves
            overtaken += 1
            if overtaken >= _RESTARTS:
                raise CheckpointReplacedError(
                    f"the checkpoint or file was replaced or deleted {overtaken} times while it "
                    "was read: use another location, or stop the job that overwrites this one",
                    times=overtaken,
                    uri=error.uri,
                    cause=error.cause,
                ) from error
            logger.info("the read starts again: %s", error)
        time.sleep(_FIRST_PAUSE * 2 ** (overtaken - 1))
