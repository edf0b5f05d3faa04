"""Ranks that save together: they begin, skip and fail alike, and none is left behind by another."""

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import cloudckpt
from cloudckpt import BackgroundOptions, errors
from cloudckpt.background import async_save, groups, process
from cloudckpt.background.save import SaveFuture
from cloudckpt.background.saver import AsyncSaver
from cloudckpt.checkpoint.torch_private import Collectives
from cloudckpt.checkpointer import AsyncCheckpointer, CheckpointerConfig, make_async_checkpointer
from dcp.places import Place
from faults.states import SMALL, filled

from .saves import (
    PATIENCE,
    PROCESS,
    THREAD,
    Gate,
    Late,
    Refusing,
    SlowEnd,
    begin,
    given,
    kill,
    of_rank,
    pid_of,
    step_at,
    stopped,
)
from .waiting import eventually

SOON = 45.0  # seconds: on a busy machine, new processes take some


def saver(**options) -> AsyncSaver:
    return AsyncSaver(options=BackgroundOptions(**options))


def checkpointer(place: Place, kind=THREAD, **options) -> AsyncCheckpointer:
    config = place.having(background=BackgroundOptions(**options)).config
    return make_async_checkpointer(CheckpointerConfig(config=config, kind=kind))


# ---- whose turn it is


def _skip_alike(place: Place) -> list:
    with saver(when_busy="skip") as one, SlowEnd(rank=1) as end:
        first = begin(one, 1, place)
        if dist.get_rank() == 0:
            first.result(PATIENCE)  # this rank is not busy, the other one is
        else:
            assert end.saved.wait(PATIENCE)
        second = begin(one, 2, place)
        end.may_end.set()
        first.result(PATIENCE)
        dist.barrier()
        third = begin(one, 3, place)
        third.result(PATIENCE)
        return [first.skipped, second.skipped, second.result(0), third.skipped]


def test_all_ranks_skip_when_one_is_busy(ranks, local):
    assert ranks(2, _skip_alike, local) == [[False, True, None, False]] * 2
    assert step_at(local, ranks=2) == 3


def _impatient_on_one(place: Place) -> None:
    with saver(patience=0.3) as one, SlowEnd(rank=0) as end:
        first = begin(one, 1, place)
        if dist.get_rank() == 0:
            assert end.saved.wait(PATIENCE)
        else:
            first.result(PATIENCE)
        with pytest.raises(errors.SaveInProgressError):
            begin(one, 2, place)
        end.may_end.set()
        first.result(PATIENCE)
        dist.barrier()
        assert step_at(place, ranks=2) == 1
        dist.barrier()
        begin(one, 3, place).result(PATIENCE)


def test_when_one_rank_waits_too_long_no_rank_begins(ranks, local):
    """Otherwise its next save would be carried out together with this one of the others."""
    ranks(2, _impatient_on_one, local)
    assert step_at(local, ranks=2) == 3


def _collectives_meanwhile(place: Place, folder: Path) -> bool:
    gate = Gate(folder)
    with saver() as one:
        future = begin(one, 1, place, gate)
        gate.wait()
        for step in range(50):
            seen = torch.tensor([step + dist.get_rank()])
            dist.all_reduce(seen)
            assert seen.item() == 2 * step + 1
        dist.barrier()
        under_way = not future.done()
        gate.open()
        future.result(PATIENCE)
        return under_way


def test_the_trainer_runs_collectives_while_a_save_is_under_way(ranks, local, tmp_path):
    assert ranks(2, _collectives_meanwhile, local, tmp_path) == [True, True]
    assert step_at(local, ranks=2) == 1


# ---- a failure is told once, to all


def _told(save) -> str:
    """What becomes of a save of a checkpointer."""
    try:
        error = save().exception(PATIENCE)
    except errors.CheckpointError as raised:
        return f"raised {type(raised).__name__}: {raised}"
    return "saved" if error is None else repr(error)


def _failed_on_one(place: Place, kind, when_busy: str) -> list[str]:
    """What a rank is told whose save before had failed, when that of the other had not."""
    told, written = [], []
    with checkpointer(place, kind, when_busy=when_busy) as one:

        def save(step: int):
            written.append(one.save(place.at(f"step-{step}").uri, of_rank(step))[1])
            return written[-1]

        for step in (1, 2, 3):
            told.append(_told(lambda: save(step)))  # noqa: B023
            if step == 1 and dist.get_rank() == 0:
                written[0]._exception = ArithmeticError("lost after the commit")
            dist.barrier()
    return told


@pytest.mark.parametrize(
    ("kind", "when_busy"),
    [(THREAD, "wait"), (THREAD, "skip"), (THREAD, "auto"), (PROCESS, "auto")],
)
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
    with checkpointer(place, when_busy="skip") as one, SlowEnd(rank=1) as late:
        first = one.save(place.at("step-1").uri, of_rank(1), planner=Refusing())[1]
        if dist.get_rank() == 0:
            assert first.exception(PATIENCE) is not None

        def save(step: int):
            try:
                return one.save(place.at(f"step-{step}").uri, of_rank(step))[1]
            finally:
                late.may_end.set()

        for step in (2, 3, 4):
            told.append(_told(lambda: save(step)))  # noqa: B023
            assert first.exception(PATIENCE) is not None
    return told


def test_a_failure_costs_one_save_also_where_the_ranks_hear_of_it_at_different_times(local, ranks):
    first, second = ranks(2, _told_at_different_times, local)
    assert first == second
    assert "the dog ate it" in first[0]
    assert first[1:] == ["saved", "saved"]


class FailingStager:
    """An asynchronous stager of the user's that fails on one rank."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool

    def stage(self, state_dict: dict):
        def copy() -> dict:
            if dist.get_rank() == 1:
                raise OSError("no disk")
            return dict(state_dict)

        return self._pool.submit(copy)


def _bad_stager(place: Place) -> str:
    with ThreadPoolExecutor(1) as pool, AsyncSaver(stager=FailingStager(pool)) as one:
        pending = one.save(of_rank(1), place.writer())
        assert pending.is_staged_in_background
        error = pending.written.exception(SOON)
        assert isinstance(error, errors.CheckpointError)
        assert (pending.staged.exception(SOON) is None) == (dist.get_rank() == 0)
        return str(error)


def test_a_stager_that_fails_on_one_rank_fails_the_save_everywhere(ranks, local):
    for message in ranks(2, _bad_stager, local):
        assert "no disk" in message
    assert local.names() == []


# ---- ranks that lose each other


def _loses(group: dist.ProcessGroup) -> mock._patch:
    """Lets a rank find out, in its next meeting in a group, that it has lost another."""
    gather = dist.all_gather_object

    def fail(found, own, group_=None, **options):
        if options.get("group") is group:
            raise RuntimeError("Connection closed by peer")
        gather(found, own, **options)

    return mock.patch.object(dist, "all_gather_object", fail)


def _one_loses_another(place: Place, kind: str) -> str:
    """The first rank has lost another, and lives on; what do those hear that wait for it?"""
    one = saver()  # whose collectives may take half an hour
    begin(one, 1, place).result(PATIENCE)
    group = one._meeting.group if kind == "meeting" else one._group
    with _loses(group) if dist.get_rank() == 0 else contextlib.nullcontext():
        try:
            error = begin(one, 2, place).exception(PATIENCE)
        except errors.ProcessGroupError as raised:
            error = raised
    dist.barrier()
    return type(error).__name__


@pytest.mark.parametrize("kind", ["meeting", "save"])
def test_a_rank_that_loses_another_keeps_nobody_waiting(ranks, local, kind):
    assert ranks(4, _one_loses_another, local, kind) == ["ProcessGroupError"] * 4
    assert step_at(local, ranks=4) == 1


def _one_is_gone_behind_the_meeting(place: Place) -> str:
    is_gone = dist.get_rank() == 0
    ends = mock.patch.object(async_save, "_saver_for", side_effect=KeyboardInterrupt)
    with (
        mock.patch.object(groups, "_CONNECT", 0.5),
        ends if is_gone else contextlib.nullcontext(),
        pytest.raises(KeyboardInterrupt if is_gone else errors.ProcessGroupError) as caught,
    ):
        cloudckpt.async_save(of_rank(1), checkpoint_id=place.uri, config=place.config)
    dist.barrier()
    return str(caught.value)


def test_a_rank_that_ends_behind_the_first_meeting_is_not_waited_for_long(ranks, local):
    """They find each other by a store then, which does not know who has died."""
    _, told = ranks(2, _one_is_gone_behind_the_meeting, local)
    assert "did not all make a group for their saves within 0.7 s" in told


# ---- the default process group comes late, or goes early


def _destroyed(place: Place, folder: Path, when: str) -> tuple[str, bool | None]:
    """What a rank is told whose default group is destroyed, while the first is still writing."""
    rank, is_begun = dist.get_rank(), when == "while one is slow"
    stager, gate = Late(), Gate(folder)
    one = AsyncSaver(stager=None if is_begun else stager)
    written = one.save(of_rank(1), place.writer(), planner=gate if rank == 0 else None).written
    if is_begun and rank == 0:
        gate.wait()
    dist.barrier()
    dist.destroy_process_group()
    (folder / f"destroyed-{rank}").touch()
    assert eventually(lambda: len(list(folder.glob("destroyed-*"))) == 2, PATIENCE)
    stager.copied.set_result({f"w.{rank}": torch.ones(3)})
    if rank == 0:
        gate.open()
    error = written.exception(PATIENCE)
    one.close()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return type(error).__name__, error.committed


def _destroyed_between_steps(place: Place, *_: object) -> tuple[str, bool | None]:
    divide = Collectives.reduce_scatter

    def divided_at_last(*args: Any) -> Any:
        part = divide(*args)
        dist.barrier()
        dist.destroy_process_group()
        return part

    with (
        mock.patch.object(Collectives, "reduce_scatter", divided_at_last),
        pytest.raises(errors.ProcessGroupError, match="group was destroyed") as caught,
    ):
        cloudckpt.save(of_rank(1), checkpoint_id=place.uri, config=place.config)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return type(caught.value).__name__, caught.value.committed


@pytest.mark.parametrize(
    ("work", "when", "committed"),
    [
        (_destroyed, "before it begins", (False,) * 2),
        (_destroyed, "while one is slow", (False, None)),
        (_destroyed_between_steps, "", (False, None)),
    ],
)
def test_a_save_that_outlives_the_default_group_is_not_committed_without_the_other_ranks(
    local, ranks, tmp_path, work, when, committed
):
    told = ranks(2, work, local, tmp_path, when)
    assert told == [("ProcessGroupError", is_known) for is_known in committed]
    assert ".metadata" not in local.names()


def _made_before_the_group(place: Place, store: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    one, alone = AsyncSaver(), AsyncSaver(no_dist=True)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    with one, alone:
        with pytest.raises(errors.ConfigError, match=r"before torch\.distributed was initialized"):
            one.save(of_rank(1), place.writer())
        own = place.at(f"of-{rank}")
        alone.save(filled(1, SMALL), own.writer()).written.result(PATIENCE)
        assert step_at(own) == 1


def test_a_saver_that_does_not_know_of_the_other_ranks_refuses_to_save(local, ranks, tmp_path):
    ranks(2, _made_before_the_group, local, os.fspath(tmp_path / "store"))
    assert ".metadata" not in local.names()


# ---- a saving process of each


def _works(one: AsyncSaver, place: Place) -> None:
    begin(one, 3, place).result(PATIENCE)
    assert step_at(place, ranks=2) == 3
    dist.barrier()


def _deaths(place: Place) -> None:
    """Before the first save, between two, in one, on the rank that commits and the other."""
    rank = dist.get_rank()
    with AsyncSaver(kind=PROCESS) as one:
        for victim in (0, 1):
            pid = pid_of(one)
            if rank == victim:
                kill(pid)
            dist.barrier()
            _works(one, place.at(f"between-{victim}"))
            assert (pid_of(one) == pid) == (rank != victim)  # only the dead one is replaced
        for victim in (0, 1):
            where = place.at(f"in-{victim}")
            with stopped(one) if rank == victim else contextlib.nullcontext() as pid:
                future = begin(one, 1, where)
                if rank == victim:
                    assert given(one)
                    kill(pid)
            _fails(future, "was ended by signal 9")
            assert where.names() == []
            dist.barrier()
            _works(one, where)
        refuse = mock.patch.object(process, "_start", side_effect=OSError("no processes left"))
        with refuse if rank == 1 else contextlib.nullcontext():
            if rank == 1:
                kill(pid_of(one))
            _fails(begin(one, 2, place), "no processes left")
        dist.barrier()
        _works(one, place)


def _fails(future: SaveFuture, why: str) -> None:
    error = future.exception(SOON)
    assert isinstance(error, errors.SaveProcessError), repr(error)
    assert why in str(error)


def test_what_a_process_of_one_rank_can_not_do_is_told_to_all_and_they_go_on(ranks, local):
    ranks(2, _deaths, local)
