"""What a saving process does when its trainer has ended before the commit.

It keeps sending what it was given, from memory that it holds itself, and records its progress in
the store: at once that it is sending, again every two seconds, and finally what a commit needs
(:mod:`cloudckpt.checkpoint.pending`). It never commits: the next job decides whether that step is
still wanted.
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

__all__ = ["CurrentSave", "finish"]

logger = logging.getLogger("cloudckpt")

_BETWEEN = 2.0  # seconds between two progress records


class CurrentSave:
    """The current save, and what to record in the store if the trainer ends now.

    One thread sends; another watches the trainer, and does what is left to do.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._job: Job | None = None
        self._stats: TransferStats | None = None
        self._objects: tuple[WrittenObject, ...] | None = None
        self._is_orphaned = False

    def begin(self, job: Job, stats: TransferStats) -> None:
        """Notes that a save begins."""
        with self._changed:
            self._job, self._stats, self._objects = job, stats, None
            self._changed.notify_all()

    def sent(self, objects: Sequence[WrittenObject]) -> None:
        """Notes that the store has everything; the trainers decide whether to commit it."""
        with self._changed:
            self._objects = tuple(objects)
            self._changed.notify_all()

    def end(self) -> None:
        """Notes that the save is over: it failed here, or the trainer knows its outcome."""
        with self._changed:
            self._job = self._stats = self._objects = None
            self._changed.notify_all()

    def orphaned(self) -> None:
        """Notes that the trainer is gone."""
        with self._changed:
            self._is_orphaned = True
            self._changed.notify_all()

    def wait_until_orphaned(self, timeout: float) -> bool:
        """Waits up to ``timeout`` seconds for the trainer to be gone; returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_orphaned, timeout)

    def wait_until_known(self, timeout: float) -> None:
        """Waits until there is a current save, or all of the trainer's messages were read."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_orphaned or self._job is not None, timeout)

    @property
    def job(self) -> Job | None:
        """The current save."""
        with self._changed:
            return self._job

    def pending(self, wait: float) -> Pending | None:
        """What to record about the save, once it has been sent or ``wait`` seconds have passed.

        None if there is nothing (more) to record.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._job is None or self._objects is not None, wait)
            if self._job is None or self._job.pending is None or self._stats is None:
                return None
            pending = self._job.pending.so_far(self._stats.snapshot().nbytes)
            return pending if self._objects is None else pending.finished(self._objects)


def finish(current: CurrentSave, limit: float) -> None:
    """Records the progress of the current save until it is sent; returns when nothing is left.

    Args:
        current: The save.
        limit: Seconds after which this process ends, finished or not; 0 for at once.
    """
    job = current.job
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
        while (pending := current.pending(wait)) is not None:
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
        logger.debug(
            "the file with the state of an unfinished save could not be written, so the next "
            "job can't finish it: %s",
            error,
        )


def _let_go_of_output() -> None:
    """Closes the trainer's output, so that its readers do not wait for this process."""
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
        for descriptor in (1, 2):
            os.dup2(nowhere.fileno(), descriptor)
