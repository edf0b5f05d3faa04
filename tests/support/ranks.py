"""Runs a function on several gloo ranks, each a process of a pool that outlives the test."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.planner import SavePlanner

from support.emulators import free_port
from support.forks import context

_START = 200.0  # seconds that a process may take to begin
_GRACE = 40.0  # seconds that the others have left once a rank has raised
_COLLECTIVE = 150.0  # seconds that a collective may take


class RanksTimeoutError(AssertionError):
    """Ranks were still busy at the deadline; all of the pool was killed."""


class RanksDiedError(AssertionError):
    """A rank's process ended; all of the pool was killed."""


@dataclass(frozen=True)
class Outcome:
    """What became of one rank: what it returned, or what it raised and where."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""


@dataclass(frozen=True)
class _Job:
    rank: int
    world: int
    store: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class Ranks:
    """A pool of processes that form a new process group for each call.

    All tests of a session share one, as the fixture ``ranks``::

        def _save(place):  # at the top level of a module, which the ranks import
            cloudckpt.save(state_of(dist.get_rank()), place.uri, config=place.config)
            return dist.get_world_size()

        def test_ranks_save_together(ranks, s3):
            assert ranks(2, _save, s3) == [2, 2]

    A rank is a process that lives on: a test gives back what it takes there (options, environment,
    installed hooks, savers in the background). It may kill a rank or leave it hanging, which ends
    all of the pool; the next call forks another in milliseconds.
    """

    def __init__(self, size: int = 4) -> None:
        self._size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __call__(
        self, world: int, function: Callable[..., Any], *arguments: Any, deadline: float = 240.0
    ) -> list[Any]:
        """What ``function(*arguments)`` returns on each rank.

        Raises:
            AssertionError: If it raised on any.
        """
        outcomes = self.outcomes(world, function, *arguments, deadline=deadline)
        failed = [f"rank {rank}:\n{o.trace}" for rank, o in enumerate(outcomes) if o.error]
        if failed:
            raise AssertionError("\n".join(failed))
        return [outcome.value for outcome in outcomes]

    def errors(
        self, world: int, function: Callable[..., Any], *arguments: Any, deadline: float = 240.0
    ) -> list[BaseException | None]:
        """What ``function(*arguments)`` raises on each rank, None where it returns."""
        outcomes = self.outcomes(world, function, *arguments, deadline=deadline)
        return [outcome.error for outcome in outcomes]

    def outcomes(
        self, world: int, function: Callable[..., Any], *arguments: Any, deadline: float
    ) -> list[Outcome]:
        """What becomes of ``function(*arguments)`` on each rank.

        Raises:
            RanksTimeoutError: If a rank is busy after ``deadline`` seconds, or long after another
                one has raised.
            RanksDiedError: If a rank's process ended.
        """
        assert 1 <= world <= self._size
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            store = os.path.join(folder, "store")
            jobs = [_Job(rank, world, store, function, arguments) for rank in range(world)]
            messages = [pickle.dumps(job) for job in jobs]
            try:
                self._start(world)
                for pipe, message in zip(self._pipes, messages, strict=False):
                    pipe.send_bytes(message)
                return self._collect(world, time.monotonic() + deadline)
            except BaseException:  # a test's time limit, too: no later call may get these answers
                self.kill()
                raise

    def _collect(self, world: int, deadline: float) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < world:
            waiting = {self._pipes[rank]: rank for rank in range(world) if rank not in outcomes}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                known = "\n".join(o.trace for o in outcomes.values() if o.error)
                raise RanksTimeoutError(f"ranks {sorted(waiting.values())} hang\n{known}")
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    outcomes[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    process = self._processes[rank]
                    process.join(5)
                    raise RanksDiedError(
                        f"rank {rank} died, exit code {process.exitcode}"
                    ) from None
                if outcomes[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + _GRACE)
        return [outcomes[rank] for rank in range(world)]

    def _start(self, world: int) -> None:
        """Makes the processes that are missing."""
        new = range(len(self._processes), world)
        for number in new:
            ours, theirs = context.Pipe()
            # no daemon: it must be able to have children of its own
            process = context.Process(target=_serve, args=(theirs,), name=f"rank-{number}")
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        for rank in new:
            if not self._pipes[rank].poll(_START):
                raise RanksTimeoutError(f"rank {rank} did not start within {_START} s")
            self._pipes[rank].recv_bytes()

    def kill(self) -> None:
        """Ends the processes whatever they do."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        self._processes, self._pipes = [], []


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what was imported needs no look at each collection
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    _async_process_executor.get_free_port = free_port  # torch's may be given away meanwhile
    pipe.send_bytes(b"ready")
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        answer, failed = _answer(message)
        if failed:
            # frames of the traceback keep the group's connections open, and others waiting on them
            gc.collect()
        pipe.send_bytes(answer)


def _answer(message: bytes) -> tuple[bytes, bool]:
    """The pickled outcome, and whether it is a failure."""
    try:
        return pickle.dumps(Outcome(value=_run(pickle.loads(message)))), False
    except BaseException as error:  # noqa: BLE001 - it is what the test wants to see
        trace = traceback.format_exc()
        try:
            answer = pickle.dumps(Outcome(error=error, trace=trace))
            pickle.loads(answer)
        except Exception as reason:  # noqa: BLE001
            lost = AssertionError(f"{error!r} does not survive pickling: {reason!r}")
            answer = pickle.dumps(Outcome(error=lost, trace=trace))
        return answer, True


def _run(job: _Job) -> Any:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(job.store, job.world),
        rank=job.rank,
        world_size=job.world,
        timeout=datetime.timedelta(seconds=_COLLECTIVE),
    )
    try:
        # a rank that ends the group while another one still connects to it fails that one
        dist.barrier()
        return job.function(*job.arguments)
    finally:
        dist.destroy_process_group()
        for name, cache in vars(SavePlanner).items():
            if name.startswith("_cached_"):
                cache.clear()
