"""Which job writes to a run: a small object, written by the job that began last.

Two jobs that save into one run delete each other's checkpoints and mix two trainings under
consecutive steps, while each of their commits succeeds. So a job writes its name into the run
before its first save, and checks before each commit, and before it deletes a step, that the name is
still there. A job that is started again takes over from the one that was killed; if that one is
still running somewhere, its next commit fails, and it deletes nothing that the new job has saved.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from cloudckpt.config import Config
from cloudckpt.dcp.writer import CommitHook
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointConflictError,
    ObjectNotFoundError,
    PreconditionFailedError,
)
from cloudckpt.stores.base import ObjectStore, random_suffix
from cloudckpt.transfer.retry import Retrier, open_store
from cloudckpt.transfer.upload import creates_only, put_whole
from cloudckpt.uri import CheckpointURI

__all__ = ["CLAIM", "Claim", "ClaimHook"]

logger = logging.getLogger("cloudckpt")

CLAIM = ".cloudckpt-job.json"
"""The object beneath the folder of a run."""

_TRIES = 5  # against jobs that begin at the same time


@dataclass(frozen=True)
class Claim:
    """A job's claim to be the one that writes to a run.

    Attributes:
        run: The folder of the run.
        config: The options to reach it.
        version: The version of the claim object.
        job: The job's name, drawn at random; empty if the object could not be written.
    """

    run: CheckpointURI
    config: Config
    version: str
    job: str

    @classmethod
    def make(cls, run: CheckpointURI, config: Config) -> Claim:
        """Claims a run, even if another job has claimed it before.

        Raises:
            StoreError: If the store refuses or stays unreachable.
        """
        who = {
            "job": (job := random_suffix()),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "began": time.time(),
        }
        content = json.dumps(who).encode()
        store, key, retrier = open_store(run, config), run.key(CLAIM), Retrier(config.retry)
        put = partial(put_whole, store, key, memoryview(content), retrier)
        for left in reversed(range(_TRIES)):
            held = _version_of(store, key, retrier)
            condition: dict[str, Any] = {}
            if creates_only(store, config):  # some bucket policies demand a condition
                condition = {"if_absent": True} if held is None else {"if_version": held}
            try:
                return cls(run, config, put(**condition).version, job)
            except PreconditionFailedError:  # another job has claimed the run just now
                if not left:
                    raise
            except AccessDeniedError as error:
                if held is None:
                    raise
                logger.warning(
                    "%s can't be replaced (is there a retention policy?), so another job that "
                    "saves into this run would go unnoticed: %s",
                    CLAIM,
                    error,
                )
                return cls(run, config, held, "")
        raise AssertionError

    @staticmethod
    def holder(run: CheckpointURI, config: Config) -> str:
        """The name of the job that claimed a run last; empty if there is none, or it is unknown.

        Raises:
            StoreError: If the store refuses or stays unreachable.
        """
        store, key = open_store(run, config), run.key(CLAIM)
        try:
            said = Retrier(config.retry).call(lambda: store.get_latest(key))[0]
            return str(json.loads(bytes(said))["job"])
        except (ObjectNotFoundError, ValueError, KeyError, TypeError):
            return ""

    def check(self) -> None:
        """Checks that no other job has claimed the run since.

        Raises:
            CheckpointConflictError: If another job has, or the claim was deleted.
            StoreError: If the store refuses or stays unreachable.
        """
        store, key = open_store(self.run, self.config), self.run.key(CLAIM)
        try:
            if Retrier(self.config.retry).call(lambda: store.head(key)).version == self.version:
                return
            other = f"another job has begun to save into this run: {_who(store, key)}"
        except ObjectNotFoundError:
            other = f"somebody has deleted {CLAIM} from this run, and may delete more"
        raise CheckpointConflictError(
            f"{other}. Two training jobs in one run would delete and replace each other's "
            "checkpoints: give one of them its own folder, or stop it",
            uri=str(self.run),
        )


class ClaimHook(CommitHook):
    """Checks the claim of the run before each commit and deletion, and calls the user's hook."""

    def __init__(self, inner: CommitHook | None) -> None:
        self.claim: Claim | None = None
        self._inner = inner if inner is not None else CommitHook()

    @property
    def claimed_by(self) -> str:  # type: ignore[override]
        """The job of the claim."""
        return "" if self.claim is None else self.claim.job

    def check_claim(self) -> None:
        if self.claim is not None:
            self.claim.check()
        self._inner.check_claim()

    def before_commit(self, uri: str, metadata: Metadata) -> None:
        self._inner.before_commit(uri, metadata)

    def after_commit(self, uri: str, metadata: Metadata) -> None:
        self._inner.after_commit(uri, metadata)


def _version_of(store: ObjectStore, key: str, retrier: Retrier) -> str | None:
    """The version of an object; None if there is none."""
    try:
        return retrier.call(lambda: store.head(key)).version
    except ObjectNotFoundError:
        return None


def _who(store: ObjectStore, key: str) -> str:
    """The other job's identity, for a message."""
    try:
        said = json.loads(bytes(store.get_latest(key)[0]))
        return f"process {int(said['pid'])} on host {str(said['host'])[:100]!r}"
    except Exception:  # noqa: BLE001 - the message does without it
        return "it does not say which"
