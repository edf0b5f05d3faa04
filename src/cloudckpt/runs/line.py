"""Whose step is it: the line of a run, the steps of one training across its jobs.

A run may hold steps of several trainings: of a job that was replaced while it lived on, of one that
went back to an earlier step, of one that began anew beside what was there. So each commit notes the
*job* that made it, and what that job *continues*: for each job before it, the last step that is
part of this training. The job that claimed the run last (:mod:`cloudckpt.runs.claim`) says so in
its claim, too. The *line* of the run is what that job has committed, and what it continues; all
other steps are *abandoned*.

Why not a link from each commit to the one before? Retention deletes commits, and a chain of single
links would end at the first gap. Jobs with their last steps stay complete whatever is deleted.

With a job A that has saved 1 to 3, and a job B that has restored step 3:

- *A lives on, and saves 4 to 6 before B saves.* They are on the line: the claim is A's.
- *B then saves 4.* Its claim says that it continues A up to step 3. From then on A's 4 to 6 are
  abandoned, and what A tries to commit is refused. Should that slip in between A's last look at the
  claim and its commit, it is abandoned as well.
- *B is killed before its first commit.* The line is what B continues.
- *B restores step 2 of its own accord.* It continues A up to step 2.
- *B has not restored anything.* It continues nothing, and its steps are a line of their own.

Without a claim, as in a copy of single steps or a run of other programs, the newest step decides.
So it does if no step is left of what the claim says, as when a job that restored nothing was killed
before its first commit: a run with steps is never taken for a new one.
Steps that note no job count as those of one job.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from cloudckpt.checkpoint.notes import Notes, continued_from
from cloudckpt.errors import ObjectNotFoundError
from cloudckpt.runs.steps import HIGHEST_STEP
from cloudckpt.stores.base import ObjectStore
from cloudckpt.transfer.retry import Retrier

__all__ = ["Line", "Owner"]


@dataclass(frozen=True)
class Owner:
    """The job that claimed a run last, as its claim says.

    Attributes:
        version: The version of the claim object.
        job: The name of the job; empty if the claim makes no sense.
        continues: By job before it, the last step that it continues; None if it does not say.
        who: The process, for messages.
    """

    version: str
    job: str = ""
    continues: Mapping[str, int] | None = None
    who: str = "an unknown process"

    @classmethod
    def read(cls, store: ObjectStore, key: str, retrier: Retrier) -> Owner | None:
        """Reads a claim; None if there is none.

        Raises:
            StoreError: If the store refuses or stays unreachable.
        """
        try:
            data, info = retrier.call(lambda: store.get_latest(key))
        except ObjectNotFoundError:
            return None
        try:
            said = json.loads(bytes(data))
            continues = continued_from(said["continues"]) if "continues" in said else None
            who = f"process {int(said['pid'])} on host {str(said['host'])[:100]!r}"
            return cls(info.version, str(said["job"]), continues, who)
        except (ValueError, KeyError, TypeError, RecursionError):
            return cls(info.version)


@dataclass
class Line:
    """The line of a run.

    Attributes:
        last: By job, its last step on the line; None until the newest step has decided it.
    """

    last: Mapping[str, int] | None = field(default=None)

    @classmethod
    def of(cls, owner: Owner | None) -> Line:
        """The line that a claim says."""
        if owner is None or owner.continues is None:
            return cls()
        return cls({**owner.continues, owner.job: HIGHEST_STEP})

    def has(self, step: int, notes: Notes) -> bool:
        """Whether a committed step is on the line; asked of a run's steps newest first."""
        if self.last is None:
            self.last = {**notes.continues, notes.job: HIGHEST_STEP}
        return step <= self.last.get(notes.job, -1)
