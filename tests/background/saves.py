"""Saves that stop where a test wants them to, and what they leave."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import cloudckpt
from cloudckpt import api
from cloudckpt.background.saver import AsyncSaver
from dcp.places import Place
from faults.states import SMALL, filled, step_of
from support.wire.faults import Call

from .waiting import eventually, is_running

__all__ = ["PATIENCE", "PROCESS", "THREAD", "Gate", "Late", "Lock", "Refusing", "Slow", "SlowEnd"]
__all__ += ["WireGate", "begin", "given", "kill", "of_rank", "pid_of", "step_at", "stopped"]

THREAD, PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS

PATIENCE = 120.0  # seconds that anything may take


class Gate(DefaultSavePlanner):
    """Stops before its second tensor is read until it is opened, perhaps by another process."""

    def __init__(self, folder: Path, rank: int | None = None) -> None:
        """
        Args:
            folder: Where its processes meet.
            rank: The only rank that stops.
        """
        super().__init__()
        self._folder, self._rank = folder, rank
        self._reads = 0

    def resolve_data(self, write_item):
        self._reads += 1
        own = dist.get_rank() if dist.is_initialized() else 0
        if self._reads == 2 and self._rank in (None, own):
            (self._folder / "reached").touch()
            if not eventually(lambda: self.is_open, PATIENCE):
                raise TimeoutError("nobody has opened the gate")
        return super().resolve_data(write_item)

    def wait(self) -> None:
        """Until a save stands before it."""
        assert eventually((self._folder / "reached").exists, PATIENCE)

    def open(self) -> None:
        (self._folder / "opened").touch()

    @property
    def is_open(self) -> bool:
        return (self._folder / "opened").exists()


class WireGate:
    """Holds up the first request that sends data."""

    def __init__(self, proxy, operation: str = "*") -> None:
        self._reached, self._opened = threading.Event(), threading.Event()
        fault = Call(self._hold)
        proxy.inject(fault, operation=operation, path="*.distcp*", times=1)

    def _hold(self, _: object) -> None:
        self._reached.set()
        assert self._opened.wait(PATIENCE)

    def wait(self) -> None:
        assert self._reached.wait(PATIENCE)

    def open(self) -> None:
        self._opened.set()


class Refusing(DefaultSavePlanner):
    """Fails when its data is asked for."""

    def resolve_data(self, write_item):
        raise ArithmeticError("the dog ate it")


class SlowEnd:
    """On one rank, the outcome of a save is known only when it may be."""

    def __init__(self, rank: int) -> None:
        self.saved, self.may_end = threading.Event(), threading.Event()
        here, original = dist.get_rank() == rank, api.save_prepared

        def late(*arguments, **options):
            try:
                return original(*arguments, **options)
            finally:
                self.saved.set()
                if here:
                    assert self.may_end.wait(PATIENCE)

        self._patch = mock.patch.object(api, "save_prepared", late)

    def __enter__(self) -> SlowEnd:
        self._patch.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.__exit__(*error)


class Slow(DefaultSavePlanner):
    """Takes its time."""

    def resolve_data(self, write_item):
        time.sleep(0.2)
        return super().resolve_data(write_item)


class Late:
    """An asynchronous stager whose copy is made when it is told to."""

    def __init__(self) -> None:
        self.copied: Future[dict] = Future()

    def stage(self, state_dict: dict) -> Future[dict]:
        return self.copied


class Lock:
    """A value that can neither be copied nor sent."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def of_rank(step: int, nbytes: int = SMALL) -> dict:
    """A state dict in which every rank has items of its own."""
    rank = dist.get_rank()
    return {f"{name}.{rank}": value for name, value in filled(step, nbytes).items()}


def begin(saver: AsyncSaver, step: int, place: Place, planner=None, nbytes: int = SMALL):
    """The future of a save of a step."""
    state = of_rank(step, nbytes) if dist.is_initialized() else filled(step, nbytes)
    return saver.save(state, place.writer(), planner=planner).written


def step_at(place: Place, nbytes: int = SMALL, ranks: int | None = None) -> int:
    """The one step that a checkpoint is of; all ranks' parts are looked at."""
    suffixes = [""] if ranks is None else [f".{rank}" for rank in range(ranks)]
    state = {f"{n}{s}": value for s in suffixes for n, value in filled(-1, nbytes).items()}
    cloudckpt.load(state, checkpoint_id=place.uri, config=place.config, no_dist=True)
    steps = {
        step_of({name: state[f"{name}{suffix}"] for name in filled(-1, nbytes)})
        for suffix in suffixes
    }
    assert len(steps) == 1, f"a mix of steps: {steps}"
    return steps.pop()


# ---- saving processes


def pid_of(saver: AsyncSaver) -> int:
    assert saver._process is not None
    assert saver._process.pid is not None
    return saver._process.pid


def kill(pid: int) -> None:
    """Ends a process, and waits until it has ended."""
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not is_running(pid))


@contextlib.contextmanager
def stopped(saver: AsyncSaver) -> Iterator[int]:
    """The saving process does nothing meanwhile."""
    saver._process._worker.wait_until_ready()
    pid = pid_of(saver)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def given(saver: AsyncSaver) -> bool:
    """Whether the saving process is given a save."""
    return eventually(lambda: saver._process._worker.is_busy, PATIENCE)
