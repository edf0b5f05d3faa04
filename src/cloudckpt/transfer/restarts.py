"""Loads of what a writer replaces meanwhile: how that is noticed, and when they begin anew.

A writer that overwrites a checkpoint commits first, and then deletes the older objects. Whoever
still reads these finds them gone, though nothing is damaged. The object that was read first, and
that names all others, tells the two apart.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from cloudckpt.config import RetryPolicy
from cloudckpt.errors import (
    CheckpointReplacedError,
    CloudCheckpointError,
    DifferentCheckpointsError,
    ObjectNotFoundError,
)
from cloudckpt.stores.base import ObjectInfo, ObjectStore
from cloudckpt.transfer.retry import Retrier

__all__ = ["Restarts", "begun_anew", "check_unchanged"]

T = TypeVar("T")
logger = logging.getLogger("cloudckpt")

_TRIES = 5
_PAUSE = 0.1  # seconds before the second try; each further pause is twice as long


def check_unchanged(
    store: ObjectStore, read: ObjectInfo, uri: str, policy: RetryPolicy, error: CloudCheckpointError
) -> None:
    """Finds out whether a failure comes from a replacement.

    Args:
        store: The store.
        read: The object that was read first.
        uri: What is loaded, for the message.
        policy: For the question to the store.
        error: The failure.

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
            "it was replaced or deleted while it was loaded; load it again", uri=uri, cause=error
        ) from error


class Restarts:
    """Counts how often one load was overtaken by writers."""

    def __init__(self) -> None:
        self._overtaken = 0
        self._saves: tuple[str | None, str | None] | None = None

    def wait(self, error: CheckpointReplacedError) -> None:
        """Returns, a moment later, if the load may begin anew.

        Raises:
            CheckpointReplacedError: If it was overtaken too often, or a part of it was.
            DifferentCheckpointsError: If two ranks read two saves that nobody replaces.
        """
        if error.times > 1:
            raise error
        if error.saves is not None and error.saves == self._saves:
            raise DifferentCheckpointsError(
                "ranks read different saves under this location, again and again: they reach "
                "different stores by it. Compare their endpoint_url (AWS_ENDPOINT_URL), account or "
                "mount",
                uri=error.uri,
            ) from error
        self._saves = error.saves
        self._overtaken += 1
        if self._overtaken >= _TRIES:
            raise CheckpointReplacedError(
                f"it was replaced {self._overtaken} times while it was loaded: load a location "
                "that nobody overwrites, or stop the writer",
                times=self._overtaken,
                uri=error.uri,
                cause=error.cause,
            ) from error
        logger.info("the load begins anew: %s", error)
        time.sleep(_PAUSE * 2 ** (self._overtaken - 1))


def begun_anew(load: Callable[[], T]) -> T:
    """What ``load`` returns, which is called again when what it loads was replaced meanwhile.

    Raises:
        CheckpointReplacedError: If that happened at every try.
    """
    restarts = Restarts()
    while True:
        try:
            return load()
        except CheckpointReplacedError as error:
            restarts.wait(error)
