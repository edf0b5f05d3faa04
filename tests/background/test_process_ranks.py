"""The saving processes of two ranks: what one can't do is told to all, and they go on together."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from cloudckpt.background import process
from cloudckpt.background.saver import AsyncSaver
from cloudckpt.errors import (
    SaveProcessError,
)
from dcp.places import Place

from .saves import PATIENCE, begin, step_at
from .waiting import eventually, is_running

SOON = 45.0  # seconds: on a busy machine, new processes take some


def _pid(saver: AsyncSaver) -> int:
    assert saver._process is not None
    assert saver._process.pid is not None
    return saver._process.pid


def _kill(saver: AsyncSaver) -> None:
    pid = _pid(saver)
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not is_running(pid))


@contextlib.contextmanager
def _dies_in_a_save(saver: AsyncSaver, rank: int) -> Iterator[None]:
    """The process of a rank is killed when it has been given the save that begins meanwhile."""
    if dist.get_rank() == rank:
        saver._process._worker.wait_until_ready()
        os.kill(_pid(saver), signal.SIGSTOP)
    yield
    if dist.get_rank() == rank:
        assert eventually(lambda: saver._process._worker.is_busy, PATIENCE)
        _kill(saver)


def _works(saver: AsyncSaver, step: int, place: Place) -> None:
    begin(saver, step, place).result(PATIENCE)
    assert step_at(place, ranks=2) == step
    dist.barrier()


# each check runs on both ranks


def goes_on_after_a_death_between_two_saves(saver: AsyncSaver, place: Place):
    _works(saver, 1, place)
    other = _pid(saver)
    if dist.get_rank() == 1:
        _kill(saver)
    dist.barrier()
    _works(saver, 2, place)
    assert (_pid(saver) == other) == (dist.get_rank() == 0)  # only the dead one is replaced


def _tells_all(saver: AsyncSaver, place: Place, rank: int) -> None:
    with _dies_in_a_save(saver, rank):
        future = begin(saver, 1, place)
    error = future.exception(SOON)
    assert isinstance(error, SaveProcessError), repr(error)
    assert "was ended by signal 9" in str(error), str(error)
    dist.barrier()
    assert place.names() == []
    dist.barrier()
    _works(saver, 2, place)


def tells_all_of_a_death_in_a_save(saver: AsyncSaver, place: Place):
    _tells_all(saver, place, rank=1)


def tells_all_of_the_death_of_the_rank_that_commits(saver: AsyncSaver, place: Place):
    _tells_all(saver, place, rank=0)


def goes_on_after_deaths_before_the_first_save(_: AsyncSaver, place: Place):
    with AsyncSaver(kind=AsyncCheckpointerType.PROCESS) as saver:
        if dist.get_rank() == 0:
            _kill(saver)
        _works(saver, 1, place)


def tells_all_of_a_process_that_one_cannot_replace(saver: AsyncSaver, place: Place):
    _works(saver, 1, place)
    if dist.get_rank() == 1:
        _kill(saver)
        with mock.patch.object(process, "_start", side_effect=OSError("no processes left")):
            error = begin(saver, 2, place).exception(SOON)
    else:
        error = begin(saver, 2, place).exception(SOON)
    assert isinstance(error, SaveProcessError)
    assert "no processes left" in str(error)
    _works(saver, 3, place)


def _with_processes(place: Place, check: Callable[[AsyncSaver, Place], None]) -> None:
    with AsyncSaver(kind=AsyncCheckpointerType.PROCESS) as saver:
        check(saver, place)


@pytest.mark.parametrize(
    "check",
    [
        goes_on_after_a_death_between_two_saves,
        tells_all_of_a_death_in_a_save,
        tells_all_of_the_death_of_the_rank_that_commits,
        goes_on_after_deaths_before_the_first_save,
        tells_all_of_a_process_that_one_cannot_replace,
    ],
)
def test_a_save_of_ranks_with_a_process_each(check, ranks, local):
    ranks(2, _with_processes, local, check)
