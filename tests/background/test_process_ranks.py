"""The saving processes of two ranks: when one dies or fails, all hear of it and go on together."""

import dataclasses
import os
import signal
import sys
import traceback
import types
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from cloudckpt import (
    BackgroundOptions,
    CheckpointError,
    CloudStorageWriter,
    CommitHook,
    ProcessGroupError,
    RanksFailedError,
    SaveProcessError,
    StagingError,
    StagingMemoryError,
)
from cloudckpt.background import arena as arenas
from cloudckpt.background import process
from cloudckpt.background.process import SaveProcess
from cloudckpt.background.saver import AsyncSaver
from dcp.places import Place

from .saves import PATIENCE, Gate, Lock, Refusing, begin, of_rank, step_at
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


def _works(saver: AsyncSaver, step: int, place: Place) -> None:
    begin(saver, step, place).result(PATIENCE)
    assert step_at(place, ranks=2) == step
    dist.barrier()


# Each check runs on both ranks, one after the other in one launch: processes are costly.


def saves_again_and_again_with_the_same_processes(saver: AsyncSaver, place: Place, _: Path):
    pid = _pid(saver)
    for step in range(5):
        _works(saver, step, place)
    assert _pid(saver) == pid


def tells_all_of_a_value_that_one_cannot_copy(saver: AsyncSaver, place: Place, _: Path):
    state = of_rank(1)
    if dist.get_rank() == 1:
        state["deep"] = {"lock": Lock()}
    error = saver.save(state, place.writer()).written.exception(SOON)
    assert isinstance(error, StagingError), repr(error)
    assert error.item == "deep.lock"
    _works(saver, 2, place)


def tells_all_of_a_value_that_one_cannot_send(saver: AsyncSaver, place: Place, _: Path):
    state = of_rank(1)
    if dist.get_rank() == 1:
        state["schedule"] = lambda: 1
    error = saver.save(state, place.writer()).written.exception(SOON)
    assert isinstance(error, CheckpointError), repr(error)
    assert "'schedule' (a function) can't be sent" in str(error)
    _works(saver, 2, place)


def tells_all_of_a_lack_of_memory_on_one(saver: AsyncSaver, place: Place, _: Path):
    left = 1000 if dist.get_rank() == 1 else 2**40
    with mock.patch.object(arenas, "available_memory", return_value=left):
        error = begin(saver, 1, place, nbytes=40 * 2**20).exception(SOON)
    assert isinstance(error, StagingMemoryError), repr(error)
    assert "needs 41 MiB" in str(error)
    _works(saver, 2, place)


def tells_all_of_a_planner_that_one_cannot_import(saver: AsyncSaver, place: Place, _: Path):
    module = types.ModuleType("only_in_the_trainer")
    module.Planner = type("Planner", (Refusing,), {"__module__": module.__name__})  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {module.__name__: module}):
        planner = module.Planner() if dist.get_rank() == 1 else None
        error = begin(saver, 1, place, planner).exception(SOON)
    assert isinstance(error, CheckpointError), repr(error)
    assert "only_in_the_trainer" in str(error)
    _works(saver, 2, place)


def tells_all_of_a_planner_that_fails_on_one(saver: AsyncSaver, place: Place, _: Path):
    planner = Refusing() if dist.get_rank() == 1 else None
    error = begin(saver, 1, place, planner).exception(SOON)
    assert isinstance(error, RanksFailedError), repr(error)
    assert "rank 1: ArithmeticError: the dog ate it" in str(error)
    dist.barrier()
    assert place.names() == []
    _works(saver, 2, place)


def goes_on_after_a_death_between_two_saves(saver: AsyncSaver, place: Place, _: Path):
    _works(saver, 1, place)
    if dist.get_rank() == 1:
        _kill(saver)
    dist.barrier()
    _works(saver, 2, place)


def tells_all_of_a_death_in_a_save(saver: AsyncSaver, place: Place, folder: Path):
    gate = Gate(folder, rank=1)
    future = begin(saver, 1, place, gate)
    if dist.get_rank() == 1:
        gate.wait()
        _kill(saver)
    error = future.exception(SOON)
    if dist.get_rank() == 1:
        assert isinstance(error, SaveProcessError), repr(error)
        assert "was ended by signal 9" in str(error), str(error)
    else:
        assert isinstance(error, (ProcessGroupError, SaveProcessError)), repr(error)
    dist.barrier()
    assert ".metadata" not in place.names()
    dist.barrier()
    _works(saver, 2, place)


def tells_all_of_the_death_of_the_rank_that_commits(saver: AsyncSaver, place: Place, folder: Path):
    gate = Gate(folder, rank=0)
    future = begin(saver, 1, place, gate)
    if dist.get_rank() == 0:
        gate.wait()
        _kill(saver)
    assert isinstance(future.exception(SOON), (ProcessGroupError, SaveProcessError))
    dist.barrier()
    assert ".metadata" not in place.names()
    dist.barrier()
    _works(saver, 2, place)


class DiesCommitted(CommitHook):
    """Ends its process when the checkpoint is committed, and nobody knows."""

    def after_commit(self, uri, metadata):
        os.kill(os.getpid(), signal.SIGKILL)


def tells_the_others_that_a_rank_has_committed_before_it_died(
    saver: AsyncSaver, place: Place, _: Path
):
    writer = CloudStorageWriter(place.uri, config=place.config, commit_hook=DiesCommitted())
    error = saver.save(of_rank(1), writer).written.exception(SOON)
    if dist.get_rank() == 0:
        assert isinstance(error, SaveProcessError), repr(error)
        assert "unless it had committed" in str(error), str(error)
    else:
        assert isinstance(error, ProcessGroupError), repr(error)
        assert error.committed is True
        assert "is committed all the same" in str(error), str(error)
    dist.barrier()
    assert step_at(place, ranks=2) == 1
    dist.barrier()
    _works(saver, 2, place)


def _dies_before_the_other_has_begun(
    saver: AsyncSaver, place: Place, folder: Path, dying: int
) -> None:
    """The trainers have met, and the copy of one takes longer."""
    dead, save = folder / "dead", SaveProcess.save
    if dist.get_rank() == dying:
        future = begin(saver, 1, place)
        assert eventually(lambda: saver._process._life._is_busy, PATIENCE)
        _kill(saver)
        assert isinstance(future.exception(SOON), SaveProcessError)
        dead.touch()
    else:

        def late(*arguments):
            assert eventually(dead.exists, PATIENCE)
            return save(saver._process, *arguments)

        with mock.patch.object(saver._process, "save", late):
            error = begin(saver, 1, place).exception(PATIENCE)
        assert isinstance(error, ProcessGroupError), repr(error)
        assert error.committed is False
    dist.barrier()
    assert place.names() == []
    dist.barrier()
    _works(saver, 2, place)


def tells_a_rank_that_begins_after_a_death(saver: AsyncSaver, place: Place, folder: Path):
    _dies_before_the_other_has_begun(saver, place, folder, dying=1)


def tells_a_rank_that_begins_after_the_death_of_the_first(
    saver: AsyncSaver, place: Place, folder: Path
):
    _dies_before_the_other_has_begun(saver, place, folder, dying=0)


def tells_all_of_a_death_before_the_processes_have_met(_: AsyncSaver, place: Place, __: Path):
    save, fork = SaveProcess.save, process.fork_worker

    def astray(channel, settings):
        """A process that looks for the others where they are not."""
        own = "elsewhere" if dist.get_rank() == 1 else settings.place
        return fork(channel, dataclasses.replace(settings, place=own))

    with mock.patch.object(process, "fork_worker", astray):
        saver = AsyncSaver(kind=AsyncCheckpointerType.PROCESS)

    def dies_first(*arguments):
        if dist.get_rank() == 1:
            _kill(saver)
        return save(saver._process, *arguments)

    with saver:
        with mock.patch.object(saver._process, "save", dies_first):
            error = begin(saver, 1, place).exception(SOON)
        assert isinstance(error, SaveProcessError), repr(error)
        assert "before it was ready" in str(error)
        dist.barrier()
        _works(saver, 2, place)


def goes_on_after_deaths_before_the_first_save(_: AsyncSaver, place: Place, __: Path):
    with AsyncSaver(kind=AsyncCheckpointerType.PROCESS) as saver:
        if dist.get_rank() == 0:
            _kill(saver)
        _works(saver, 1, place)


def fails_what_was_queued_behind_a_death_on_all(_: AsyncSaver, place: Place, folder: Path):
    options = BackgroundOptions(when_busy="double_buffer")
    with AsyncSaver(kind=AsyncCheckpointerType.PROCESS, options=options) as saver:
        gate = Gate(folder, rank=1)
        first = begin(saver, 1, place.at("1"), gate)
        second = begin(saver, 2, place.at("2"))
        if dist.get_rank() == 1:
            gate.wait()
            _kill(saver)
        for future in (first, second):
            error = future.exception(SOON)
            assert isinstance(error, (ProcessGroupError, SaveProcessError)), repr(error)
        dist.barrier()
        assert place.at("2").names() == []
        _works(saver, 3, place.at("3"))


def goes_on_after_an_interrupt_behind_the_meeting(saver: AsyncSaver, place: Place, _: Path):
    if dist.get_rank() == 0:
        with (
            mock.patch.object(saver, "_hand_over", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            begin(saver, 1, place)
    else:
        error = begin(saver, 1, place).exception(SOON)
        assert isinstance(error, ProcessGroupError), repr(error)
    dist.barrier()
    assert place.names() == []
    dist.barrier()
    _works(saver, 2, place)


def tells_all_of_a_process_that_one_cannot_replace(saver: AsyncSaver, place: Place, _: Path):
    _works(saver, 1, place)
    if dist.get_rank() == 1:
        _kill(saver)
        failure = SaveProcessError("no processes left")
        with (
            mock.patch.object(process, "_Life", side_effect=failure),
            pytest.raises(SaveProcessError, match="no processes left"),
        ):
            begin(saver, 2, place)
    else:
        with pytest.raises(SaveProcessError, match="no processes left"):
            begin(saver, 2, place)
    _works(saver, 3, place)


FAILURES = [
    saves_again_and_again_with_the_same_processes,
    tells_all_of_a_value_that_one_cannot_copy,
    tells_all_of_a_value_that_one_cannot_send,
    tells_all_of_a_lack_of_memory_on_one,
    tells_all_of_a_planner_that_one_cannot_import,
    tells_all_of_a_planner_that_fails_on_one,
    goes_on_after_a_death_between_two_saves,
    tells_all_of_a_death_in_a_save,
]
DEATHS = [
    tells_all_of_the_death_of_the_rank_that_commits,
    tells_the_others_that_a_rank_has_committed_before_it_died,
    tells_a_rank_that_begins_after_a_death,
    tells_a_rank_that_begins_after_the_death_of_the_first,
    goes_on_after_an_interrupt_behind_the_meeting,
    tells_all_of_a_process_that_one_cannot_replace,
    tells_all_of_a_death_before_the_processes_have_met,
    goes_on_after_deaths_before_the_first_save,
    fails_what_was_queued_behind_a_death_on_all,
]


def _run_all(checks: list, place: Place, folder: Path) -> dict[str, str]:
    """What went wrong, by check."""
    found = {}
    options = BackgroundOptions(close_timeout=5)
    with AsyncSaver(kind=AsyncCheckpointerType.PROCESS, options=options) as saver:
        for check in checks:
            (folder / "last").write_text(check.__name__)
            own = folder / check.__name__
            own.mkdir(exist_ok=True)
            wrong = None
            try:
                check(saver, place.at(check.__name__), own)
            except Exception:  # noqa: BLE001 - told by the test of this check
                wrong = traceback.format_exc()
            everywhere = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, wrong)
            if any(everywhere):
                found[check.__name__] = "\n".join(filter(None, everywhere))
    return found


_found: dict[str, str] = {}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("check", [check.__name__ for check in FAILURES + DEATHS])
def test_it(check, ranks, local, tmp_path):
    [checks] = [group for group in (FAILURES, DEATHS) if check in {one.__name__ for one in group}]
    if check not in _found:
        names = [one.__name__ for one in checks]
        _found.update(dict.fromkeys(names, "the ranks have failed"))
        try:
            found = ranks(2, _run_all, checks, local, tmp_path, deadline=550)[0]
        except AssertionError as error:
            raise AssertionError((tmp_path / "last").read_text()) from error
        _found.update(dict.fromkeys(names, "") | found)
    if _found[check]:
        raise AssertionError(_found[check])
