"""Ranks that save together: they begin, skip and fail alike."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import cloudckpt
from cloudckpt import BackgroundOptions
from cloudckpt.background import async_save, groups
from cloudckpt.background.saver import AsyncSaver
from cloudckpt.errors import (
    CheckpointError,
    ProcessGroupError,
    SaveInProgressError,
)
from dcp.places import Place

from .saves import PATIENCE, Gate, SlowEnd, begin, of_rank, step_at

SOON = 45.0  # seconds: on a busy machine, new processes take some


def saver(**options) -> AsyncSaver:
    return AsyncSaver(options=BackgroundOptions(**options))


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
        with pytest.raises(SaveInProgressError):
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


# ---- one rank can't take part


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
        assert isinstance(error, CheckpointError)
        assert (pending.staged.exception(SOON) is None) == (dist.get_rank() == 0)
        return str(error)


def test_a_stager_that_fails_on_one_rank_fails_the_save_everywhere(ranks, local):
    for message in ranks(2, _bad_stager, local):
        assert "no disk" in message
    assert local.names() == []


# ---- beside other collectives


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
        except ProcessGroupError as raised:
            error = raised
    dist.barrier()
    return type(error).__name__


@pytest.mark.parametrize("kind", ["meeting", "save"])
def test_a_rank_that_loses_another_keeps_nobody_waiting(ranks, local, kind):
    assert ranks(4, _one_loses_another, local, kind) == ["ProcessGroupError"] * 4
    assert step_at(local, ranks=4) == 1


def _one_is_gone_behind_the_meeting(place: Place) -> str:
    config = place.config
    with mock.patch.object(groups, "_CONNECT", 0.5):
        if dist.get_rank() == 0:
            with (
                mock.patch.object(async_save, "_saver_for", side_effect=KeyboardInterrupt),
                pytest.raises(KeyboardInterrupt),
            ):
                cloudckpt.async_save(of_rank(1), checkpoint_id=place.uri, config=config)
            told = ""
        else:
            with pytest.raises(ProcessGroupError) as caught:
                cloudckpt.async_save(of_rank(1), checkpoint_id=place.uri, config=config)
            told = str(caught.value)
    dist.barrier()
    return told


def test_a_rank_that_ends_behind_the_first_meeting_is_not_waited_for_long(ranks, local):
    """They find each other by a store then, which does not know who has died."""
    _, told = ranks(2, _one_is_gone_behind_the_meeting, local)
    assert "did not all make a group for their saves within 0.7 s" in told
