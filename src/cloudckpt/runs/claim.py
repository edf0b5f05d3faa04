"""Which job writes to a run: a small object, written by the job that began last.

Two jobs that save into one run delete each other's checkpoints and mix two trainings under
consecutive steps, while each of their commits succeeds. So a job writes its name into the run with
its first write, on the condition that the claim is the one that it saw when it opened the run: a
job that was replaced before it has saved can't take the run back. It checks before each commit, and
before it deletes a step, that its name is still there. A job that is started again takes over from
the one that was killed; if that one is still running somewhere, its next commit fails, and it
deletes nothing that the new job has saved. A job that only restores claims nothing.

A claim also says what the job continues: by that readers know which steps are its training's
(:mod:`cloudckpt.runs.line`).
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
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
from cloudckpt.runs.line import CLAIM, Owner
from cloudckpt.stores.base import random_suffix
from cloudckpt.transfer.retry import Retrier, open_store
from cloudckpt.transfer.upload import creates_only, put_whole
from cloudckpt.uri import CheckpointURI

__all__ = ["Claim", "ClaimHook", "copy_claim"]

logger = logging.getLogger("cloudckpt")


@dataclass(frozen=True)
class Claim:
    """A job's claim to be the one that writes to a run.

    Attributes:
        run: The folder of the run.
        config: The options to reach it.
        version: The version of the claim object.
        job: The job's name, drawn at random; that of the job before if the object could not be
            replaced.
        continues: By job before it, the last step that it continues.
    """

    run: CheckpointURI
    config: Config
    version: str
    job: str
    continues: Mapping[str, int]

    @classmethod
    def make(
        cls,
        run: CheckpointURI,
        config: Config,
        seen: Owner | Claim | None,
        continues: Mapping[str, int],
    ) -> Claim:
        """Claims a run, unless another job has done so since its claim was read.

        Args:
            run: The folder of the run.
            config: Options.
            seen: The claim that was there when the job opened the run, or its own.
            continues: What the job continues.

        Raises:
            CheckpointConflictError: If another job has claimed the run meanwhile.
            StoreError: If the store refuses or stays unreachable.
        """
        document = {
            "job": (job := random_suffix()),
            "continues": [*continues.items()],
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "began": time.time(),
        }
        content = memoryview(json.dumps(document).encode())
        store, key, retrier = open_store(run, config), run.key(CLAIM), Retrier(config.retry)
        condition: dict[str, Any] = {}
        if creates_only(store, config):  # some bucket policies demand a condition
            condition = {"if_absent": True} if seen is None else {"if_version": seen.version}
        else:
            now = Owner.read(store, key, retrier)
            if (now and now.version) != (seen and seen.version):
                raise _taken(run, now)
        try:
            made = put_whole(store, key, content, retrier, **condition)
        except (PreconditionFailedError, ObjectNotFoundError) as error:
            raise _taken(run, Owner.read(store, key, retrier)) from error
        except AccessDeniedError as error:
            if seen is None:
                raise
            logger.warning(
                "%s can't be replaced (is there a retention policy?), so another job that "
                "saves into this run would go unnoticed: %s",
                CLAIM,
                error,
            )
            return cls(run, config, seen.version, seen.job, continues)
        return cls(run, config, made.version, job, continues)

    def check(self) -> None:
        """Checks that no other job has claimed the run since.

        Raises:
            CheckpointConflictError: If another job has, or the claim was deleted.
            StoreError: If the store refuses or stays unreachable.
        """
        store, key = open_store(self.run, self.config), self.run.key(CLAIM)
        retrier = Retrier(self.config.retry)
        try:
            if retrier.call(lambda: store.head(key)).version == self.version:
                return
        except ObjectNotFoundError:
            pass
        raise _taken(self.run, Owner.read(store, key, retrier))


def copy_claim(
    source: CheckpointURI, config: Config, target: CheckpointURI, target_config: Config
) -> None:
    """Gives the copy of a run its claim, which says what its line is; one that is there stays.

    Raises:
        StoreError: If a store refuses or stays unreachable.
    """
    origin, goal = open_store(source, config), open_store(target, target_config)
    retrier = Retrier(target_config.retry)
    try:
        data, _ = Retrier(config.retry).call(lambda: origin.get_latest(source.key(CLAIM)))
        if Owner.read(goal, target.key(CLAIM), retrier) is None:
            only = creates_only(goal, target_config)
            put_whole(goal, target.key(CLAIM), memoryview(data), retrier, if_absent=only)
    except (ObjectNotFoundError, PreconditionFailedError):
        return


def _taken(run: CheckpointURI, by: Owner | None) -> CheckpointConflictError:
    """The error of a job whose run another one has claimed."""
    what = f"somebody has deleted {CLAIM} from this run, and may delete more"
    if by is not None:
        what = f"another job has begun to save into this run: {by.who}"
    return CheckpointConflictError(
        f"{what}. Two training jobs in one run would delete and replace each other's checkpoints: "
        "give one of them its own folder, or stop it",
        uri=str(run),
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
