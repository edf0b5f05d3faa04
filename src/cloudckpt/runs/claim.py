"""Which job writes to a run: a small object, written by the job that began last.

Two jobs that save into one run delete each other's checkpoints and mix two trainings under
consecutive steps, while each of their commits succeeds. So a job writes its name into the run with
its first write, on the condition that the claim is the one that it saw when it opened the run: a
job that was replaced before it has saved can't take the run back. It checks before each commit, and
before it deletes a step, that its name is still there. A job that is started again takes over from
the one that was killed; if that one is still running somewhere, its next commit fails, and it
deletes nothing that the new job has saved. A job that only restores claims nothing.

The call of the first write waits for the answer, which tells of a missing bucket or a wrong key,
but only for some seconds. If the store is silent, training goes on, and the commit waits.

A claim also says what the job continues: by that readers know which steps are its training's
(:mod:`cloudckpt.runs.line`).
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

PATIENCE = 10.0  # seconds that a call of the training waits for its claim


@dataclass(frozen=True)
class Claim:
    """A job's claim to be the one that writes to a run.

    Attributes:
        run: The folder of the run.
        config: The options to reach it.
        version: The version of the claim object.
        job: The job's name; that of the job before if the object can't be replaced.
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
            continues: What the job continues.
            seen: The claim that was there when the job opened the run, or its own.

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

    Only the first rank claims; the others are told the job's name.

    Attributes:
        job: The job's name, which each commit notes; empty until it claims the run.
    """

    def __init__(self, inner: CommitHook | None) -> None:
        self.job = ""
        self._inner = inner if inner is not None else CommitHook()
        self._claim: Future[Claim] | None = None
        self._drawn: set[str] = set()  # the names of this job
        self._deciding = threading.Lock()
        self._is_late = False  # saves have noted the name without waiting for the answer

    @property
    def claimed_by(self) -> str:  # type: ignore[override]
        """The job of the claim."""
        return self.job

    @property
    def is_wanting(self) -> bool:
        """Whether the run is not claimed, or that has failed."""
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
        """Begins to claim a run anew, under a new name, in a thread of its own.

        Args:
            run: The folder of the run.
            config: Options.
            continues: What the job continues.
            opened: The claim that was there when the job opened the run.
            first: Called before, in that thread.
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
            elif before is not None:  # its request may have been carried out
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

        # a program that ends without the answer does not wait for it
        threading.Thread(target=run_it, name="cloudckpt-claim", daemon=True).start()

    def wait(self, seconds: float | None) -> bool:
        """Waits for the claim; returns whether it is there.

        If not, the commits of saves that begin now wait for it, and fail if it does.

        Raises:
            CheckpointConflictError: If another job has claimed the run since it was opened.
            CloudCheckpointError: If it can't be claimed.
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
        if self._claim is not None:
            self._claim.result().check()
        self._inner.check_claim()

    def before_commit(self, uri: str, metadata: Metadata) -> None:
        self._inner.before_commit(uri, metadata)

    def after_commit(self, uri: str, metadata: Metadata) -> None:
        self._inner.after_commit(uri, metadata)
