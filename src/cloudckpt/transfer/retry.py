"""When a failed request is tried again, and when a whole load: the one place that decides it."""

from __future__ import annotations

import dataclasses
import logging
import random
import time
from collections.abc import Callable
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

__all__ = ["Pauses", "Retrier", "retry_if_replaced", "check_unchanged", "open_store"]

T = TypeVar("T")
logger = logging.getLogger("cloudckpt")

_CLEANUP_TRIES = 3
_RESTARTS = 5
_LONGEST_ASKED = 60.0  # seconds that a store can have us wait: a gateway may name any time
_FIRST_PAUSE = 0.1  # seconds before a load begins anew; each further pause is twice as long


class Retrier:
    """Tries an operation until it succeeds, fails for good, or runs out of time.

    What may pass by itself is tried until the deadline, however often: a store that is started
    anew refuses connections for a minute, and clouds need minutes to spread a load. Pauses are
    drawn between ``base`` and three times the one before, up to ``cap`` (decorrelated jitter), or
    are what the store asks for if that is longer, up to a minute. What takes long is said in the
    log (:mod:`cloudckpt.waiting`). A cancelled group ends the wait at once.
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
        """For what is done after a failure: a few tries, so that the error is soon told."""
        attempts = min(policy.attempts or _CLEANUP_TRIES, _CLEANUP_TRIES)
        deadline = min(policy.deadline, 10.0)
        return cls(dataclasses.replace(policy, attempts=attempts, deadline=deadline))

    def call(
        self, operation: Callable[[], T], *, made: Callable[[StoreError], T | None] | None = None
    ) -> T:
        """The result of ``operation``.

        Args:
            operation: What to try.
            made: Asked before a failure is raised, if the store has perhaps carried out a try: what
                came of it, or None. A request whose answer was lost is refused when it is repeated
                (the object exists, is locked, the upload is gone) although all is well.

        Raises:
            StoreError: The last failure, when it is not worth another try. A transient one then
                says in its message how often and how long it was tried. It is certain only if
                all tries were, for operations with ``made``.
        """
        pauses = self._pauses()
        doubtful = False
        with pauses.waiting:
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
                            error.certain = False  # of the tries before, nothing is known
                        raise
                    self._on_retry(error)
                    self._cancellation.wait(pause)

    def wait_for(self, look: Callable[[], T | None]) -> T | None:
        """What ``look`` finds, as soon as it finds anything; None after the deadline."""
        pauses = self._pauses()
        looks = 0
        with pauses.waiting:
            while (found := self.call(look)) is None:
                looks += 1
                pause = pauses.next("the uploaded bytes are not visible yet")
                if pause is None or (self.policy.cap == 0 and looks == self.policy.attempts):
                    return None
                self._cancellation.wait(pause)
        return found

    def _pauses(self) -> Pauses:
        return Pauses(self.policy, self._clock, self._draw)


def open_store(uri: CheckpointURI, config: Config) -> ObjectStore:
    """The store that the registry opens, tried as ``config.retry`` says.

    Its credentials come from services, of an instance or of an identity platform, which may fail
    for a moment: that would end a save before its first request.

    Raises:
        StoreError: If there are no credentials for it, none that can be used, or none in time.
        ConfigError: If it can't be reached with these options.
        MissingDependencyError: If its packages are not installed.
    """
    return Retrier(config.retry).call(lambda: registry.open_store(uri, config))


class Pauses:
    """The pauses between the tries of one operation.

    Attributes:
        waiting: Says what takes long; to be entered around the operation.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self.waiting = Waiting(policy.deadline, clock)
        self._policy = policy
        self._clock = clock
        self._draw = draw
        self._began: float | None = None
        self._failures = 0
        self._last = policy.base or policy.cap / 100  # a base of 0 would never grow

    def after(self, error: TransientStoreError) -> float | None:
        """The seconds until the next try, or None if there is to be none."""
        self._failures += 1
        spent = self._spent()
        is_last = self._failures == self._policy.attempts
        pause = None if is_last else self.next(error, error.retry_after or 0.0)
        if pause is None:
            error.message += f" (gave up after {self._failures} tries in {spent:.1f} s)"
        else:
            logger.info("trying again in %.2f s: %s", pause, error)
        return pause

    def next(self, why: object, least: float = 0.0) -> float | None:
        """A pause in seconds; None if the time is over.

        Args:
            why: What the failure was, for the log.
            least: Seconds that the store asks for: a hint, which can't end what would succeed.
        """
        policy, left = self._policy, self._policy.deadline - self._spent()
        if left <= 0:
            return None
        # never all at the cap: many ranks fail together, and would come back together
        self._last = self._draw(policy.base, min(policy.cap, 3 * self._last))
        pause = min(max(self._last, min(least, _LONGEST_ASKED)), left)
        self.waiting.failed(why, left=left, pause=pause)
        return pause

    def _spent(self) -> float:
        """Seconds since this was asked for the first time."""
        now = self._clock()
        self._began = now if self._began is None else self._began
        return now - self._began


def check_unchanged(
    store: ObjectStore,
    read: ObjectInfo,
    uri: str,
    policy: RetryPolicy,
    error: CloudCheckpointError,
    *,
    told: str | None = None,
) -> None:
    """Finds out whether the failure of a load comes from a replacement.

    A writer that overwrites a checkpoint commits first, and then deletes the older objects. Whoever
    still reads these finds them gone, though nothing is damaged. The object that was read first,
    and that names all others, tells the two apart.

    Args:
        store: The store.
        read: The object that was read first.
        uri: What is loaded, for the message.
        policy: For the question to the store.
        error: The failure.
        told: Which save it is, if another rank has read that object: here, there may be another
            one, because this is another store.

    Raises:
        CheckpointReplacedError: If the object has been replaced or deleted since.
        StoreError: If the store does not answer.
    """
    try:
        version = Retrier(policy).call(lambda: store.head(read.key)).version
    except ObjectNotFoundError:
        version = None
    if version != read.version:
        raise CheckpointReplacedError(
            "the checkpoint was replaced or deleted while it was loaded; load it again",
            saves=None if told is None else (told, version),
            uri=uri,
            cause=error,
        ) from error


def retry_if_replaced(load: Callable[[], T]) -> T:
    """What ``load`` returns, which is called again when what it loads was replaced meanwhile.

    Raises:
        CheckpointReplacedError: If that happened too often, or ``load`` has given up a part of it.
        DifferentCheckpointsError: If two ranks read the same two saves again: nobody replaces them.
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
                    f"the checkpoint was replaced {overtaken} times while it was loaded: load a "
                    "location that is not overwritten, or stop the job that saves there",
                    times=overtaken,
                    uri=error.uri,
                    cause=error.cause,
                ) from error
            logger.info("the load starts again: %s", error)
        time.sleep(_FIRST_PAUSE * 2 ** (overtaken - 1))
