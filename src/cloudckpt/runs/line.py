"""Decides which steps of a run belong to its current training: the line of the run.

A run may contain steps of several trainings: a replaced job may have gone on saving, a job may have
gone back to an earlier step, or started a new training in a run that already had steps. So the
notes of each step name the *job* that saved it, and what that job *continues*: for each earlier
job, the last step that is part of this training. The claim of the run
(:mod:`cloudckpt.runs.claim`) contains the same for the job that claimed it last. The *line* of the
run consists of the steps that this job has committed, and of the steps that it continues; all other
steps are *abandoned*.

Why does a step not name the step before it? Retention deletes steps, and a chain of such links
would end at the first deleted step. A list of jobs with their last steps stays complete.

Suppose that job A has saved steps 1 to 3, and that job B has restored step 3:

- *A goes on, and saves 4 to 6 before B saves.* They are on the line: A holds the claim.
- *B then saves 4.* B's claim says that B continues A up to step 3. From now on A's steps 4 to 6 are
  abandoned, and A's commits are refused. A step that A commits after its last check of the claim,
  and after B's claim, is abandoned, too.
- *B is killed after its claim and before its first commit.* The line consists of the steps that B
  continues.
- *B is told to restore step 2.* It continues A up to step 2.
- *B has not restored a step.* It continues no job, and its steps are a new line.

Without a claim, as in a copy of single steps or in a run of another program, or if the claim can't
be parsed, the newest step decides: the line consists of the steps of its job, and of the steps that
this job continues. The same applies if no step is left on the line of the claim, for example
because a job that restored nothing was killed before its first commit: a run that has steps is
never treated as empty.
Steps whose notes name no job count as steps of one job.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cloudckpt.checkpoint.notes import Notes, continued_from
from cloudckpt.errors import ObjectNotFoundError
from cloudckpt.stores.base import ObjectStore
from cloudckpt.transfer.retry import Retrier

__all__ = ["Owner"]


@dataclass(frozen=True)
class Owner:
    """The job that claimed a run last.

    Attributes:
        version: The version of the claim object.
        job: The name of the job; empty if the claim can't be parsed.
        continues: For each earlier job that this job continues, that job's last step on the line;
            None if the claim does not contain this, or was not read.
        process: Process and host of the job, for messages.
        document: The content of the claim object; empty if it can't be parsed, or was not read.
    """

    version: str
    job: str = ""
    continues: Mapping[str, int] | None = None
    process: str = "an unknown process"
    document: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, store: ObjectStore, key: str, retrier: Retrier) -> Owner | None:
        """Reads a claim; None if the claim object does not exist.

        If the claim can't be parsed, the result has only its version.

        Raises:
            StoreError: If the store refuses or stays unreachable.
        """
        try:
            data, info = retrier.call(lambda: store.get(key))
        except ObjectNotFoundError:
            return None
        try:
            claim = json.loads(bytes(data))
            continues = continued_from(claim["continues"]) if "continues" in claim else None
            process = f"process {int(claim['pid'])} on host {str(claim['host'])[:100]!r}"
            return cls(info.version, str(claim["job"]), continues, process, claim)
        except (ValueError, KeyError, TypeError, RecursionError):
            return cls(info.version)

    @property
    def line(self) -> Notes | None:
        """Notes that name the job and what it continues; None if ``continues`` is None."""
        return None if self.continues is None else Notes(job=self.job, continues=self.continues)
