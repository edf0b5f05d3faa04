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

import concurrent.futures
import contextvars
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from cloudckpt.checkpoint.commit import conditions_work
from cloudckpt.checkpoint.objects import CLAIM, trial_name
from cloudckpt.config import Config
from cloudckpt.dcp.writer import CommitHook
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointConflictError,
    ObjectNotFoundError,
    PreconditionFailedError,
)
from cloudckpt.runs.line import Owner
from cloudckpt.stores.base import random_suffix
from cloudckpt.transfer.retry import Retrier, open_store
from cloudckpt.transfer.upload import creates_only, put_whole
from cloudckpt.uri import CheckpointURI

__all__ = ["Claim", "ClaimHook", "copy_claim"]

logger = logging.getLogger("cloudckpt")

PATIENCE = 10.0  # seconds that a call of save() waits for the claim


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


class ClaimHook(CommitHook):
    """Claims a run, checks the claim before each commit and deletion, and calls the user's hook.

    Only rank 0 claims the run; the other ranks get the job's name from it.

    Attributes:
        job: The job's name, which is part of each step's notes; empty until the job claims the run.
    """

    def __init__(self, inner: CommitHook | None) -> None:
        self.job = ""
        self._inner = inner if inner is not None else CommitHook()
        self._claim: Future[Claim] | None = None
        self._drawn: set[str] = set()  # all random names of this job
        self._deciding = threading.Lock()
        self._is_late = False  # saves have used the job's name before the claim was answered

    @property
    def claimed_by(self) -> str:  # type: ignore[override]
        """The name of this job; empty until it claims the run."""
        return self.job

    @property
    def is_wanting(self) -> bool:
        """Whether the job has not tried to claim the run yet, or the last try has failed."""
        return self._claim is None or (
            self._claim.done() and self._claim.exception(timeout=0) is not None
        )

    def begin(
        self,
        run: CheckpointURI,
        config: Config,
        continues: Mapping[str, int],
        opened: Owner | None,
        first: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins to claim the run under a new job name, in a thread of its own.

        Args:
            run: The folder of the run.
            config: Options.
            continues: The jobs that this job continues, each with its last step on the line.
            opened: The claim that the job read when it opened the run.
            first: Called in that thread before the claim is written.
        """
        before, job = self._claim, random_suffix()
        made: Future[Claim] = Future()
        self._claim, self._is_late, self.job = made, False, job
        here = contextvars.copy_context()

        def claim() -> Claim:
            first()
            seen: Owner | Claim | None = opened
            if before is not None and before.exception() is None:
                seen = before.result()
            elif before is not None:  # the failed request may have been carried out by the store
                retrier = Retrier(config.retry)
                now = Owner.read(open_store(run, config), run.key(CLAIM), retrier)
                seen = now if now is not None and now.job in self._drawn else opened
            self._drawn.add(job)
            try:
                return Claim.make(run, config, job, continues, seen)
            except AccessDeniedError as error:
                with self._deciding:
                    if seen is None or self._is_late:
                        raise
                    self.job = seen.job
                logger.warning(
                    "%s can't be replaced (is there a retention policy?), so another job that "
                    "saves into this run would not be noticed: %s",
                    CLAIM,
                    error,
                )
                return Claim(run, config, seen.version, seen.job)

        def run_it() -> None:
            try:
                made.set_result(here.run(claim))
            except BaseException as error:  # noqa: BLE001 - raised where the claim is needed
                made.set_exception(error)

        # a daemon thread: a program that ends does not wait for an unanswered claim
        threading.Thread(target=run_it, name="cloudckpt-claim", daemon=True).start()

    def wait(self, seconds: float | None) -> bool:
        """Waits up to ``seconds`` for the claim; returns whether the store has answered.

        If it has not, the commits of saves that begin now wait for the claim, and fail if it fails.

        Raises:
            CheckpointConflictError: If another job has claimed the run since it was opened.
            CloudCheckpointError: If the run can't be claimed.
        """
        assert self._claim is not None
        concurrent.futures.wait([self._claim], seconds)
        with self._deciding:
            if not self._claim.done():
                self._is_late = True
                return False
        self._claim.result()
        return True

    def check_claim(self) -> None:
        """Waits for the claim if one was begun, checks it, and calls the user's hook."""
        if self._claim is not None:
            self._claim.result().check()
        self._inner.check_claim()

    def before_commit(self, uri: str, metadata: Metadata) -> None:
        """Calls the user's hook."""
        self._inner.before_commit(uri, metadata)

    def after_commit(self, uri: str, metadata: Metadata) -> None:
        """Calls the user's hook."""
        self._inner.after_commit(uri, metadata)
