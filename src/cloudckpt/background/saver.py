"""``AsyncSaver``: stages a state dict and saves the copy behind the trainer's back."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageWriter

from cloudckpt import api
from cloudckpt.background.job import (
    FailingPlanner,
    PendingSave,
    PickledResult,
    SaveFuture,
    SaveJob,
    as_ours,
    skipped,
)
from cloudckpt.background.process import SaveProcess
from cloudckpt.background.stager import Stager
from cloudckpt.config import BackgroundOptions
from cloudckpt.dcp.planners import CloudSavePlanner
from cloudckpt.dcp.writer import CloudStorageWriter
from cloudckpt.errors import ClosedError, ConfigError, SaveInProgressError
from cloudckpt.events.event import Span, subscribe
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["AsyncSaver"]


class AsyncSaver:
    """Saves one state dict after another in the background, in the order in which it was asked.

    The ranks that save together get a process group of their own (gloo): the saver's collectives
    never mix with the trainer's, whatever backend those use. Constructing a saver is therefore a
    collective call.
    """

    def __init__(
        self,
        *,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
        kind: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
        stager: AsyncStager | None = None,
        options: BackgroundOptions | None = None,
    ) -> None:
        """
        Args:
            process_group: The ranks that save together; default: all.
            no_dist: Whether this process saves alone.
            kind: Whether a thread of the trainer saves, or a process beside it.
            stager: A stager of the caller's, which is not closed here.
            options: See there.
        """
        self._options = options if options is not None else BackgroundOptions()
        self._no_dist = no_dist or not (dist.is_available() and dist.is_initialized())
        self._group = None if self._no_dist else self._new_group(process_group)
        skips = self._options.when_busy == "skip"
        self._control = self._new_group(process_group) if self._group and skips else None
        buffers = 2 if self._options.when_busy == "double_buffer" else 1
        self._stager = stager
        self._own_stager: Stager | None = None
        if stager is None:
            pin = {"auto": None, "on": True, "off": False}[self._options.pin_memory]
            self._own_stager = Stager(
                buffers=buffers, threads=self._options.stage_threads, pin_memory=pin
            )
        self._process: SaveProcess | None = None
        if kind == AsyncCheckpointerType.PROCESS:
            self._process = SaveProcess(self._group, self._options)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cloudckpt-async")
        self._rank = 0 if self._group is None else dist.get_rank(self._group)
        self._number = 0
        self._under_way: list[_UnderWay] = []
        self._lock = threading.Lock()
        self._closed = False

    def _new_group(self, parent: dist.ProcessGroup | None) -> dist.ProcessGroup:
        group = parent if parent is not None else dist.group.WORLD
        assert group is not None
        made = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=timedelta(seconds=self._options.collective_timeout),
            backend="gloo",
            use_local_synchronization=True,
            group_desc="cloudckpt",
        )
        if not isinstance(made, dist.ProcessGroup):
            raise ConfigError("this rank is not in the process group that it is to save with")
        return made

    def save(
        self,
        state_dict: dict[str, Any],
        writer: StorageWriter,
        *,
        checkpoint_id: URILike | None = None,
        planner: SavePlanner | None = None,
        use_collectives: bool = True,
    ) -> PendingSave:
        """Stages a state dict and begins to save the copy.

        It returns when the copy is made, or begun if the stager is asynchronous. What goes wrong
        from here on is told by the futures, on all ranks.

        Args:
            state_dict: What to save; ``Stateful`` values are asked for theirs.
            writer: Where to.
            checkpoint_id: Where to lead the writer, once no save before uses it any more.
            planner: As in torch.
            use_collectives: As in torch.

        Raises:
            ClosedError: If the saver was closed.
            SaveInProgressError: If the save before does not end within ``patience``, or one to the
                same place is under way. Ranks that did not have to wait are told by their futures.
        """
        where = _location(writer, checkpoint_id)
        with self._lock:
            if self._closed:
                raise ClosedError("the saver was closed")
            self._under_way = [save for save in self._under_way if not save.written.done()]
            busy = bool(self._under_way)
        if self._options.when_busy == "skip" and self._all_skip(busy):
            return skipped()
        self._number += 1
        written = SaveFuture()
        written.set_running_or_notify_cancel()
        job = SaveJob(
            self._number, where, writer, planner or CloudSavePlanner(), use_collectives, written
        )
        staged: Future[None] = Future()
        raised: BaseException | None = None
        unsubscribe = subscribe(job.listen)
        try:
            self._take_turn(where, writer)
            if checkpoint_id is not None:
                writer.reset(str(checkpoint_id))
            state = {
                key: value.state_dict() if isinstance(value, Stateful) else value
                for key, value in state_dict.items()
            }
            with Span("stage", where, self._rank) as span:
                self._stage(state, job, staged)
                span.bytes = 0 if job.staged is None else job.staged.size
        except BaseException as error:  # noqa: BLE001 - the other ranks must hear of it
            job.failure = as_ours(error, where)
            staged.set_exception(job.failure)
            if isinstance(error, SaveInProgressError) or not isinstance(error, Exception):
                raised = error
        finally:
            unsubscribe()
        with self._lock:
            self._under_way.append(_UnderWay(where, writer, written))
        self._thread.submit(self._run, job, staged)
        if raised is not None:
            raise raised
        return PendingSave(staged, written, job.copying is not None)

    def _all_skip(self, busy: bool) -> bool:
        """Whether some rank is busy: then all skip."""
        if self._control is None:
            return busy
        seen = torch.tensor([int(busy)])
        dist.all_reduce(seen, dist.ReduceOp.MAX, group=self._control)
        return bool(seen.item())

    def _take_turn(self, where: str, writer: StorageWriter) -> None:
        """Waits for the saves under way, if that is the policy, whatever their outcome."""
        deadline = time.monotonic() + self._options.patience
        for save in list(self._under_way):
            if self._options.when_busy == "wait":
                concurrent.futures.wait([save.written], max(0.0, deadline - time.monotonic()))
                if not save.written.done():
                    raise SaveInProgressError(
                        f"the save before has not ended within {self._options.patience:g} s",
                        uri=save.where,
                    )
            elif (save.where == where or save.writer is writer) and not save.written.done():
                raise SaveInProgressError(
                    "a save to this place, or with this writer, is still under way", uri=where
                )

    def _stage(self, state: dict[str, Any], job: SaveJob, staged: Future[None]) -> None:
        if self._own_stager is not None:
            job.staged, copied = self._own_stager.begin(state, self._options.patience)
            copied.result()
            staged.set_result(None)
            return
        assert self._stager is not None
        made = self._stager.stage(state)
        if isinstance(made, Future):
            job.copying = made
            made.add_done_callback(lambda done: _pass_on(done, staged))
        else:
            job.state = made
            staged.set_result(None)

    def _run(self, job: SaveJob, staged: Future[None]) -> None:
        """In the thread that saves."""
        unsubscribe = subscribe(job.listen)
        try:
            concurrent.futures.wait([staged])
            job.take_copy()
            result = self._save(job)
        except BaseException as error:  # noqa: BLE001 - told by the future
            unsubscribe()
            job.end()
            job.written.set_exception(error)
        else:
            unsubscribe()
            job.end()
            job.written.set_result(result)

    def _save(self, job: SaveJob) -> Any:
        if self._process is not None:
            arena = None if job.staged is None else job.staged.arena
            others = (job.writer, job.planner, job.use_collectives, self._no_dist)
            data = self._process.save(job.number, job.content, arena, others, job.failure)
            made = PickledResult(data)
            if isinstance(job.writer, CloudStorageWriter):
                job.writer.transferred = job.written.transferred = made.transferred()
            return made
        metadata = api.save(
            job.content,
            storage_writer=job.writer,
            planner=job.planner if job.failure is None else FailingPlanner(job.failure),
            process_group=self._group,
            no_dist=self._no_dist,
            use_collectives=job.use_collectives,
        )
        if isinstance(job.writer, CloudStorageWriter):
            job.written.transferred = job.writer.transferred
        return metadata

    def close(self) -> None:
        """Waits for the saves under way, up to ``close_timeout`` seconds, and ends the rest.

        Their failures are told by their futures only. Closing again does nothing.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        futures = [save.written for save in self._under_way]
        concurrent.futures.wait(futures, self._options.close_timeout)
        idle = all(future.done() for future in futures)
        if self._process is not None:
            self._process.close(_FAREWELL if idle else 0)
        self._thread.shutdown(wait=idle)
        if self._own_stager is not None:
            self._own_stager.close()

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_FAREWELL = 10.0  # seconds for an idle saving process to end


@dataclass(frozen=True)
class _UnderWay:
    where: str
    writer: StorageWriter
    written: SaveFuture


def _location(writer: StorageWriter, checkpoint_id: URILike | None) -> str:
    if not isinstance(writer, CloudStorageWriter):
        return f"writer {id(writer)}"
    return (
        writer.checkpoint_id if checkpoint_id is None else str(CheckpointURI.parse(checkpoint_id))
    )


def _pass_on(done: Future[Any], staged: Future[None]) -> None:
    error = done.exception()
    if error is not None:
        staged.set_exception(error)
    else:
        staged.set_result(None)
