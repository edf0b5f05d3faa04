"""Claims a run for one job: a small object in the run names the only job that may write to it.

Two jobs that save into one run would delete each other's checkpoints and mix two trainings under
consecutive steps, while each of their commits succeeds. So a job writes the claim object with its
first save or deletion, on the condition that the object is still the version that the job read
when it opened the run: a job that another job replaced before its own first save can't take the run
back. Before each commit, and before each deletion of a step, the job checks that the claim is still
its own. A restarted job takes over the claim of the killed job. If the old job is still running
somewhere, its next commit fails, and it deletes nothing that the new job has saved. A job that only
restores does not claim the run.

The first save waits up to ten seconds for the claim, so that a missing bucket or a wrong key is
reported there. If the store does not answer in that time, training goes on, and the commit waits.

A claim also lists the jobs that this job continues, each with its last step: readers decide by it
which steps are on the line of the run (:mod:`cloudckpt.runs.line`).
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cloudckpt.checkpoint.commit import conditions_work
from cloudckpt.checkpoint.objects import CLAIM, trial_name
from cloudckpt.config import Config
from cloudckpt.errors import (
    CheckpointConflictError,
    ObjectNotFoundError,
    PreconditionFailedError,
)
from cloudckpt.runs.line import Owner
from cloudckpt.stores.base import random_suffix
from cloudckpt.transfer.retry import Retrier, open_store
from cloudckpt.transfer.upload import creates_only, put_whole
from cloudckpt.uri import CheckpointURI

__all__ = ["Claim", "copy_claim"]


@dataclass(frozen=True)
class Claim:
    """The claim object that a job has written: no other job may write to the run.

    Attributes:
        run: The folder of the run.
        config: The options to reach the run.
        version: The version of the claim object.
        job: The name of this job; the name of the previous job if the store did not allow to
            replace its claim.
    """

    run: CheckpointURI
    config: Config
    version: str
    job: str

    @classmethod
    def make(
        cls,
        run: CheckpointURI,
        config: Config,
        job: str,
        continues: Mapping[str, int],
        seen: Owner | Claim | None,
    ) -> Claim:
        """Claims a run, unless another job has done so since its claim was read.

        Args:
            run: The folder of the run.
            config: Options.
            job: The job's name.
            continues: The jobs that this job continues, each with its last step on the line.
            seen: The claim that the job read when it opened the run, or its own earlier claim.

        Raises:
            CheckpointConflictError: If another job has claimed the run meanwhile.
            ConfigError: If the store ignores conditions.
            StoreError: If the store refuses or stays unreachable.
        """
        document = {
            "job": job,
            "continues": [*continues.items()],
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "began": time.time(),
        }
        content = memoryview(json.dumps(document).encode())
        store, key, retrier = open_store(run, config), run.key(CLAIM), Retrier(config.retry)
        trial, condition = run.key(trial_name(random_suffix())), dict[str, Any]()
        setting = config.conditional_writes
        if setting != "off" and conditions_work(store, setting, trial, retrier):
            condition = {"if_absent": True} if seen is None else {"if_version": seen.version}
        else:
            now = Owner.read(store, key, retrier)
            if (now and now.version) != (seen and seen.version):
                raise _taken(run, now)
        try:
            made = put_whole(store, key, content, retrier, **condition)
        except (PreconditionFailedError, ObjectNotFoundError) as error:
            raise _taken(run, Owner.read(store, key, retrier)) from error
        return cls(run, config, made.version, job)

    def check(self) -> None:
        """Checks that no other job has claimed the run since this claim.

        Raises:
            CheckpointConflictError: If another job has claimed the run, or the claim was deleted.
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
    """Copies the claim of a run to its copy, so that both have the same line.

    Does nothing if the source has no claim, or the target has one.

    Raises:
        StoreError: If a store refuses or stays unreachable.
    """
    origin, goal = open_store(source, config), open_store(target, target_config)
    retrier = Retrier(target_config.retry)
    try:
        data, _ = Retrier(config.retry).call(lambda: origin.get(source.key(CLAIM)))
        if Owner.read(goal, target.key(CLAIM), retrier) is None:
            only = creates_only(goal, target_config)
            put_whole(goal, target.key(CLAIM), memoryview(data), retrier, if_absent=only)
    except (ObjectNotFoundError, PreconditionFailedError):
        return


def _taken(run: CheckpointURI, by: Owner | None) -> CheckpointConflictError:
    """Makes the error for a job whose run was claimed by another job, or whose claim is gone."""
    what = f"the object {CLAIM} of this run was deleted, so something may be deleting the run"
    if by is not None:
        what = f"another job has started to save into this run: {by.who}"
    return CheckpointConflictError(
        f"{what}. Two training jobs in one run would delete and replace each other's checkpoints: "
        "give one of them its own folder, or stop it",
        uri=str(run),
    )
