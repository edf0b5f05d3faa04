"""The saving processes of two ranks: what one can't do is told to all, and they go on together."""

import contextlib
import os
import signal
import traceback
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from cloudckpt import BackgroundOptions
from cloudckpt.background import arena as arenas
from cloudckpt.background import process
from cloudckpt.background.saver import AsyncSaver
from cloudckpt.errors import (
    ConfigError,
    RanksFailedError,
    SaveProcessError,
    StagingError,
    StagingMemoryError,
)
from cloudckpt.hf import SafetensorsWriter
from dcp.places import Place

from .saves import PATIENCE, Lock, Refusing, begin, of_rank, step_at
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
        assert eventually(lambda: saver._process.is_busy, PATIENCE)
        _kill(saver)


def _works(saver: AsyncSaver, step: int, place: Place) -> None:
    begin(saver, step, place).result(PATIENCE)
    assert step_at(place, ranks=2) == step
    dist.barrier()


# Each check runs on both ranks, one after the other in one launch: processes are costly.


def saves_again_and_again_with_the_same_processes(saver: AsyncSaver, place: Place):
    pid = _pid(saver)
    for step in range(5):
        _works(saver, step, place)
    assert _pid(saver) == pid


def tells_all_of_a_value_that_one_cannot_copy(saver: AsyncSaver, place: Place):
    state = of_rank(1)
    if dist.get_rank() == 1:
        state["deep"] = {"lock": Lock()}
    error = saver.save(state, place.writer()).written.exception(SOON)
    assert isinstance(error, StagingError), repr(error)
    assert error.item == "deep.lock"
    _works(saver, 2, place)


def tells_all_of_a_lack_of_memory_on_one(saver: AsyncSaver, place: Place):
    left = 1000 if dist.get_rank() == 1 else 2**40
    with mock.patch.object(arenas, "available_memory", return_value=left):
        error = begin(saver, 1, place, nbytes=40 * 2**20).exception(SOON)
    assert isinstance(error, StagingMemoryError), repr(error)
    assert "needs 41 MiB" in str(error)
    _works(saver, 2, place)


def tells_all_of_a_planner_that_fails_on_one(saver: AsyncSaver, place: Place):
    planner = Refusing() if dist.get_rank() == 1 else None
    error = begin(saver, 1, place, planner).exception(SOON)
    assert isinstance(error, RanksFailedError), repr(error)
    assert "rank 1: ArithmeticError: the dog ate it" in str(error)
    dist.barrier()
    assert place.names() == []
    _works(saver, 2, place)


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


def goes_on_after_an_interrupt_behind_the_meeting(saver: AsyncSaver, place: Place):
    if dist.get_rank() == 0:
        with (
            mock.patch.object(saver, "_hand_over", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            begin(saver, 1, place)
    else:
        assert isinstance(begin(saver, 1, place).exception(SOON), StagingError)
    dist.barrier()
    assert place.names() == []
    dist.barrier()
    _works(saver, 2, place)


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


def tells_all_of_a_process_that_one_cannot_start(_: AsyncSaver, place: Place):
    failing = contextlib.nullcontext()
    if dist.get_rank() == 1:
        failing = mock.patch.object(process, "_start", side_effect=OSError("no processes left"))
    with failing, pytest.raises(SaveProcessError, match="no processes left"):
        AsyncSaver(kind=AsyncCheckpointerType.PROCESS)


def refuses_on_all_a_writer_that_the_process_of_one_does_not_know(saver: AsyncSaver, place: Place):
    writer = place.writer()
    if dist.get_rank() == 1:
        writer = SafetensorsWriter("/nowhere")
    with pytest.raises(ConfigError, match="a saving process works with CloudStorageWriter only"):
        saver.save(of_rank(1), writer)
    _works(saver, 2, place)


CHECKS = [
    saves_again_and_again_with_the_same_processes,
    tells_all_of_a_value_that_one_cannot_copy,
    tells_all_of_a_lack_of_memory_on_one,
    tells_all_of_a_planner_that_fails_on_one,
    goes_on_after_a_death_between_two_saves,
    tells_all_of_a_death_in_a_save,
    tells_all_of_the_death_of_the_rank_that_commits,
    goes_on_after_deaths_before_the_first_save,
    goes_on_after_an_interrupt_behind_the_meeting,
    tells_all_of_a_process_that_one_cannot_replace,
    tells_all_of_a_process_that_one_cannot_start,
    refuses_on_all_a_writer_that_the_process_of_one_does_not_know,
]


def _run_all(place: Place, folder: Path) -> dict[str, str]:
    """What went wrong, by check."""
    found = {}
    options = BackgroundOptions(patience=120)
    with AsyncSaver(kind=AsyncCheckpointerType.PROCESS, options=options) as saver:
        for check in CHECKS:
            (folder / "last").write_text(check.__name__)
            wrong = None
            try:
                check(saver, place.at(check.__name__))
            except Exception:  # noqa: BLE001 - told by the test of this check
                wrong = traceback.format_exc()
            everywhere = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, wrong)
            if any(everywhere):
                found[check.__name__] = "\n".join(filter(None, everywhere))
    return found


_found: dict[str, str] = {}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_it(check, ranks, local, tmp_path):
    if not _found:
        names = [one.__name__ for one in CHECKS]
        _found.update(dict.fromkeys(names, "the ranks have failed"))
        try:
            found = ranks(2, _run_all, local, tmp_path, deadline=550)[0]
        except AssertionError as error:
            raise AssertionError((tmp_path / "last").read_text()) from error
        _found.update(dict.fromkeys(names, "") | found)
    if _found[check]:
        raise AssertionError(_found[check])
