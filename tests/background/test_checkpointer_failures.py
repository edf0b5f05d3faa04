"""Failures of an asynchronous checkpointer: each is told once, and no rank is left behind by it."""

import os
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from cloudckpt import BackgroundOptions
from cloudckpt.background.saver import AsyncSaver
from cloudckpt.checkpointer import AsyncCheckpointer, CheckpointerConfig, make_async_checkpointer
from cloudckpt.errors import (
    CheckpointError,
    ConfigError,
    ProcessGroupError,
    SaveInProgressError,
)
from dcp.places import Place
from faults.states import SMALL, filled

from .saves import PATIENCE, Gate, Refusing, SlowEnd, of_rank, step_at
from .waiting import eventually

THREAD, PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS


def checkpointer(place: Place, kind=THREAD, **options) -> AsyncCheckpointer:
    config = place.having(background=BackgroundOptions(**options)).config
    return make_async_checkpointer(CheckpointerConfig(config=config, kind=kind))


def _failed_on_one(place: Place, kind, when_busy: str) -> list[str]:
    """What a rank is told whose save before had failed, when that of the other had not."""
    told = []
    one = checkpointer(place, kind, when_busy=when_busy)
    for step in (1, 2, 3):
        try:
            _, written = one.save(place.at(f"step-{step}").uri, of_rank(step))
            error = written.exception(PATIENCE)
            told.append("saved" if error is None else type(error).__name__)
        except CheckpointError as raised:
            told.append(f"raised {type(raised).__name__}: {raised}")
        if step == 1 and dist.get_rank() == 0:
            written._exception = ArithmeticError("lost after the commit")
        dist.barrier()
    one.close()
    return told


@pytest.mark.parametrize("when_busy", ["wait", "skip", "auto"])
@pytest.mark.parametrize("kind", [THREAD, PROCESS], ids=["thread", "process"])
def test_a_failure_of_one_rank_never_lets_the_ranks_save_different_steps(
    kind, when_busy, local, ranks
):
    """If only one raised, its next save would be carried out with this one of the others."""
    first, second = ranks(2, _failed_on_one, local, kind, when_busy)
    assert first == second
    assert first[0] == first[2] == "saved"
    assert first[1].startswith("raised RanksFailedError")
    assert "rank 0: ArithmeticError: lost after the commit" in first[1]
    assert step_at(local.at("step-3"), ranks=2) == 3
    assert local.at("step-2").names() == []


def _told_at_different_times(place: Place) -> list[str]:
    """A save fails on both ranks, and rank 1 hears of it only after the next call."""
    told = []
    one = checkpointer(place, when_busy="skip")
    with SlowEnd(rank=1) as late:
        first = one.save(place.at("step-1").uri, of_rank(1), planner=Refusing())[1]
        if dist.get_rank() == 0:
            assert first.exception(PATIENCE) is not None
        for step in (2, 3, 4):
            try:
                _, written = one.save(place.at(f"step-{step}").uri, of_rank(step))
                late.may_end.set()
                error = written.exception(PATIENCE)
                told.append("saved" if error is None else repr(error))
            except CheckpointError as raised:
                told.append(f"raised {type(raised).__name__}: {raised}")
                late.may_end.set()
            assert first.exception(PATIENCE) is not None
    one.close()
    return told


def test_a_failure_costs_one_save_also_where_the_ranks_hear_of_it_at_different_times(local, ranks):
    first, second = ranks(2, _told_at_different_times, local)
    assert first == second
    assert "the dog ate it" in first[0]
    assert first[1:] == ["saved", "saved"]


def test_a_failure_is_told_although_a_save_was_skipped_in_between(local, tmp_path):
    gate = Gate(tmp_path)
    one = checkpointer(local, when_busy="skip")
    first = one.save(local.uri, filled(1, SMALL), planner=Failing(gate))[1]
    gate.wait()
    assert one.save(local.uri, filled(2, SMALL))[1].skipped
    gate.open()
    assert first.exception(PATIENCE) is not None
    with pytest.raises(CheckpointError, match="the dog ate it"):
        one.close()


class Failing(Gate):
    """Fails behind its gate."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(gate._folder)

    def resolve_data(self, write_item):
        found = super().resolve_data(write_item)
        if self._reads == 2:
            raise ArithmeticError("the dog ate it")
        return found


def test_closing_before_the_save_has_ended_says_that_it_has_not(local, tmp_path):
    gate = Gate(tmp_path)
    one = checkpointer(local, patience=0.05)
    written = one.save(local.uri, filled(1, SMALL), planner=gate)[1]
    gate.wait()
    with pytest.raises(SaveInProgressError, match=r"not finished within 0\.05 s") as caught:
        one.close()
    assert caught.value.uri == local.uri
    gate.open()
    written.result(PATIENCE)


def test_an_error_of_the_training_is_not_hidden_by_one_of_the_last_save(local, caplog):
    def train() -> None:
        with checkpointer(local) as one:
            one.save(local.uri, filled(1, SMALL), planner=Refusing())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert "the dog ate it" in caplog.text


# ---- the default process group comes late, or goes early


class Waiting(AsyncStager):
    """Its copy is done when it is said to be."""

    def __init__(self) -> None:
        self.copy: Future[dict] = Future()

    def stage(self, state_dict: dict, **_: object) -> Future[dict]:
        return self.copy

    def synchronize_staging(self) -> None: ...

    def close(self) -> None: ...


def _destroyed_before_it_begins(place: Place, folder: Path) -> None:
    stager, rank = Waiting(), dist.get_rank()
    saver = AsyncSaver(stager=stager)
    written = saver.save(of_rank(1), place.writer()).written
    dist.barrier()
    dist.destroy_process_group()
    (folder / f"destroyed-{rank}").touch()
    assert eventually(lambda: len(list(folder.glob("destroyed-*"))) == 2, PATIENCE)
    stager.copy.set_result({f"w.{rank}": torch.ones(3)})
    assert isinstance(written.exception(PATIENCE), ProcessGroupError)
    saver.close()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_a_save_that_outlives_the_default_group_is_not_committed_without_the_other_ranks(
    local, ranks, tmp_path
):
    ranks(2, _destroyed_before_it_begins, local, tmp_path)
    assert ".metadata" not in local.names()


def _destroyed_while_one_is_slow(place: Place, folder: Path) -> list[object]:
    """What the ranks are told, of whom the first is still writing when the group is destroyed."""
    rank = dist.get_rank()
    gate = Gate(folder)
    saver = AsyncSaver()
    written = saver.save(of_rank(1), place.writer(), planner=gate if rank == 0 else None).written
    if rank == 0:
        gate.wait()
    dist.barrier()
    dist.destroy_process_group()
    (folder / f"destroyed-{rank}").touch()
    assert eventually(lambda: len(list(folder.glob("destroyed-*"))) == 2, PATIENCE)
    if rank == 0:
        gate.open()
    error = written.exception(PATIENCE)
    saver.close()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return [type(error).__name__, getattr(error, "committed", "")]


def test_no_rank_waits_for_another_when_the_group_is_destroyed_during_a_save(
    local, ranks, tmp_path
):
    told = ranks(2, _destroyed_while_one_is_slow, local, tmp_path)
    assert told == [["ProcessGroupError", False], ["ProcessGroupError", None]]
    assert ".metadata" not in local.names()


def _made_before_the_group(place: Place, store: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    saver, alone = AsyncSaver(), AsyncSaver(no_dist=True)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    with saver, alone:
        with pytest.raises(ConfigError, match=r"before torch\.distributed was initialized"):
            saver.save(of_rank(1), place.writer())
        own = place.at(f"of-{rank}")
        alone.save(filled(1, SMALL), own.writer()).written.result(PATIENCE)
        assert step_at(own) == 1


def test_a_saver_that_does_not_know_of_the_other_ranks_refuses_to_save(local, ranks, tmp_path):
    ranks(2, _made_before_the_group, local, os.fspath(tmp_path / "store"))
    assert ".metadata" not in local.names()
