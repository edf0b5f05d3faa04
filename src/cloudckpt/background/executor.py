"""``Executor``: carries out saves of staged copies, here or in the process beside the trainer."""

from __future__ import annotations

import concurrent.futures
import logging
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from cloudckpt import api
from cloudckpt.background.groups import exists
from cloudckpt.background.job import PickledResult, SaveJob
from cloudckpt.background.process import SaveProcess
from cloudckpt.dcp.failures import release_frames
from cloudckpt.dcp.writer import CloudStorageWriter
from cloudckpt.errors import ProcessGroupError, SaveInProgressError
from cloudckpt.events import subscribe
from cloudckpt.stores.listings import forget_listings

__all__ = ["Executor"]

logger = logging.getLogger("cloudckpt")


class Executor:
    """Carries out one save after the other, in a thread that waits for their copies.

    Attributes:
        is_broken: Whether a collective of a save that failed may still be under way in the group.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, process: SaveProcess | None, *, no_dist: bool
    ) -> None:
        """
        Args:
            group: The ranks that save together; None for this process alone.
            process: What saves in the place of this process, if anything.
            no_dist: As in torch.
        """
        self._group, self._process, self._no_dist = group, process, no_dist
        self.is_broken = False

    def run(self, job: SaveJob, staged: Future[None]) -> None:
        """Saves when the copy is there, and tells its future the outcome.

        Args:
            job: The save.
            staged: Done when the copy is.
        """
        if job.written.done():  # a thread could not be started, and then could
            return
        told = job.failure
        unsubscribe = subscribe(job.listen, progress=False)
        result, error = self._carry_out(job, staged)
        forget_listings()  # those of the trainer: a saving process has its own
        unsubscribe()
        job.end()
        if error is None:
            job.written.set_result(result)
            return
        release_frames(error, apart_from=told)
        if isinstance(error, ProcessGroupError) or not isinstance(error, Exception):
            self.is_broken = True
        job.written.set_exception(error)
        if not isinstance(error, SaveInProgressError):  # that is raised by save itself
            # nobody may ever ask the future, as when the trainer ends
            logger.error("the save to %s failed in the background: %s", job.where, error)

    def _carry_out(
        self, job: SaveJob, staged: Future[None]
    ) -> tuple[Any, None] | tuple[None, BaseException]:
        """The result, or the error; a frame of its own, which the error keeps."""
        try:
            concurrent.futures.wait([staged])
            job.take_copy()
            return self._save(job), None
        except BaseException as error:  # noqa: BLE001 - told by the future
            return None, error

    def _save(self, job: SaveJob) -> Any:
        if self._process is not None:
            arena = None if job.staged is None else job.staged.arena
            others = (job.writer, job.planner, job.use_collectives, self._no_dist)
            data = self._process.save(job.number, job.content, arena, others, job.failure)
            made = PickledResult(data)
            if isinstance(job.writer, CloudStorageWriter):
                job.writer.transferred = job.written.transferred = made.transferred()
            return made
        if self._group is not None and not exists(self._group):
            raise ProcessGroupError(  # torch would save each rank alone, as if it were all
                "the process group was destroyed before this save was begun; wait for saves first",
                uri=job.where,
                committed=False,
            )
        try:
            metadata = api.save_prepared(
                job.content,
                job.prepared,
                process_group=self._group,
                no_dist=self._no_dist,
                use_collectives=job.use_collectives,
            )
        finally:
            if isinstance(job.planner, DefaultSavePlanner):
                job.planner.state_dict = {}  # it would keep the copy until it plans the next save
        if isinstance(job.writer, CloudStorageWriter):
            job.written.transferred = job.writer.transferred
        return metadata
