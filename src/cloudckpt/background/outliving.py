"""What a saving process does when its trainer has ended before the commit.

It sends on what it was given, which lies in memory that it holds itself, and leaves word in the
store: at once that it is at it, again every two seconds, and at last what a commit needs
(:mod:`cloudckpt.checkpoint.pending`). It never commits: whether that step is still wanted is for
the next job to say.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Sequence

from cloudckpt.background.channel import Job
from cloudckpt.checkpoint.objects import METADATA, WrittenObject, pending_name
from cloudckpt.checkpoint.pending import Pending
from cloudckpt.errors import CloudCheckpointError, ObjectNotFoundError
from cloudckpt.transfer.deleting import delete_quietly
from cloudckpt.transfer.retry import Retrier, open_store
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.upload import creates_only, put_whole

__all__ = ["Duty", "finish"]

logger = logging.getLogger("cloudckpt")

_BETWEEN = 2.0  # seconds between two words of one that is sending


class Duty:
    """The save in hand: what is owed to the store should the trainer end now.

    One thread sends; another one looks after the trainer, and does what is left to do.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._job: Job | None = None
        self._stats: TransferStats | None = None
        self._objects: tuple[WrittenObject, ...] | None = None
        self._is_orphaned = False

    def begin(self, job: Job, stats: TransferStats) -> None:
        """A save begins."""
        with self._changed:
            self._job, self._stats, self._objects = job, stats, None
            self._changed.notify_all()

    def sent(self, objects: Sequence[WrittenObject]) -> None:
        """The store has all of it; whether it is committed is for the trainers to say."""
        with self._changed:
            self._objects = tuple(objects)
            self._changed.notify_all()

    def end(self) -> None:
        """The save is over: it has failed here, or the trainer knows what became of it."""
        with self._changed:
            self._job = self._stats = self._objects = None
            self._changed.notify_all()

    def orphaned(self) -> None:
        """The trainer is gone."""
        with self._changed:
            self._is_orphaned = True
            self._changed.notify_all()

    def wait_until_orphaned(self, timeout: float) -> bool:
        """Whether the trainer is gone; it is waited for that up to ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_orphaned, timeout)

    def wait_until_known(self, timeout: float) -> None:
        """Waits until a save is in hand, or all that the trainer has said was read."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_orphaned or self._job is not None, timeout)

    @property
    def job(self) -> Job | None:
        """The save in hand."""
        with self._changed:
            return self._job

    def pending(self, wait: float) -> Pending | None:
        """What is to be said of the save, when it has been sent, or after some seconds.

        None if there is nothing to be said, or no more.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._job is None or self._objects is not None, wait)
            if self._job is None or self._job.pending is None or self._stats is None:
                return None
            pending = self._job.pending.so_far(self._stats.snapshot().nbytes)
            return pending if self._objects is None else pending.finished(self._objects)


def finish(duty: Duty, limit: float) -> None:
    """Leaves word of the save in hand until it is sent; returns when nothing is left to do.

    Args:
        duty: The save.
        limit: Seconds after which this process ends, wherever it is; 0 if at once.
    """
    job = duty.job
    if job is None or job.pending is None or limit <= 0:
        return
    end = threading.Timer(limit, os._exit, (0,))
    end.daemon = True
    end.start()
    _let_go_of_output()
    destination = job.destination
    config, policy = destination.config, destination.config.retry
    key = destination.uri.key(pending_name(destination.rank, destination.attempt))
    try:
        store, retrier = open_store(destination.uri, config), Retrier(policy)
        with contextlib.suppress(ObjectNotFoundError):
            retrier.call(lambda: store.head(destination.uri.key(METADATA)))
            return  # it is committed, or was to replace one that is
        conditional, version = creates_only(store, config), None
        wait = 0.0
        while (pending := duty.pending(wait)) is not None:
            data, wait = memoryview(pending.to_bytes()), _BETWEEN
            found = put_whole(
                store,
                key,
                data,
                retrier,
                if_absent=conditional and version is None,
                if_version=version if conditional else None,
            )
            version = found.version
            if pending.objects is not None:
                return
        if version is not None:
            delete_quietly(store, [key], policy, threads=1)  # it could not be sent
    except CloudCheckpointError as error:
        logger.debug("what was left of a save could not be told: %s", error)


def _let_go_of_output() -> None:
    """Whoever reads what the trainer prints waits for the end of that, and not for this."""
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
        for descriptor in (1, 2):
            os.dup2(nowhere.fileno(), descriptor)
