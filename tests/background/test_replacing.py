"""A save that is stuck does not hold up the next: the newest copy waits behind it, and no other."""

import concurrent.futures
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import cloudckpt
from cloudckpt import BackgroundOptions, CheckpointManager, RetryPolicy, waiting
from cloudckpt.background import saver as savers
from cloudckpt.background import stager as stagers
from cloudckpt.background.saver import AsyncSaver
from cloudckpt.checkpointer import CheckpointerConfig
from cloudckpt.errors import RanksFailedError, SaveInProgressError, StagingMemoryError
from cloudckpt.runs import Preemption
from cloudckpt.waiting import Waiting
from wire.faults import s3_error

from .saves import PATIENCE, Gate, begin, step_at
from .waiting import staged_copies

KINDS = list(AsyncCheckpointerType)


def saver(**options) -> AsyncSaver:
    options = {"when_busy": "replace", "patience": PATIENCE} | options
    return AsyncSaver(no_dist=True, options=BackgroundOptions(**options))


@pytest.fixture
def stuck(monkeypatch) -> threading.Event:
    """Whether the store seems to be stuck; not at first."""
    now = threading.Event()
    monkeypatch.setattr(savers, "is_stuck", now.is_set)
    return now


def test_the_newest_copy_takes_the_place_of_one_that_waits_behind_a_stuck_save(
    local, gate, stuck, caplog
) -> None:
    held = staged_copies()
    with saver() as one:
        futures = [begin(one, 1, local.at("1"), planner=gate)]
        gate.wait()
        stuck.set()
        futures += [begin(one, step, local.at(str(step))) for step in (2, 3, 4)]
        assert staged_copies() - held == 2
        assert [future.done() for future in futures] == [False, True, True, False]
        gate.open()
        results = [future.result(PATIENCE) for future in futures]
    assert [future.skipped for future in futures] == [False, True, True, False]
    assert [result is None for result in results] == [False, True, True, False]
    assert step_at(local.at("1")) == 1
    assert step_at(local.at("4")) == 4
    assert not [name for name in local.names() if name.startswith(("2/", "3/"))]
    assert caplog.text.count("a newer one takes its place") == 2


def test_a_save_that_gets_on_is_waited_for(local, gate, stuck) -> None:
    held = staged_copies()
    with saver() as one, ThreadPoolExecutor(1) as thread:
        first = begin(one, 1, local.at("1"), planner=gate)
        gate.wait()
        second = thread.submit(begin, one, 2, local.at("2"))
        with pytest.raises(TimeoutError):
            second.result(0.5)
        gate.open()
        assert first.result(PATIENCE) is not None
        second.result(PATIENCE).result(PATIENCE)
        assert staged_copies() - held == 1
    assert step_at(local.at("2")) == 2


def test_who_waits_goes_on_when_the_save_before_gets_stuck(local, gate, stuck) -> None:
    with saver() as one, ThreadPoolExecutor(1) as thread:
        begin(one, 1, local.at("1"), planner=gate)
        gate.wait()
        second = thread.submit(begin, one, 2, local.at("2"))
        with pytest.raises(TimeoutError):
            second.result(0.3)
        stuck.set()
        future = second.result(PATIENCE)
        assert not future.done()
        gate.open()
    assert step_at(local.at("2")) == 2


def test_it_is_waited_for_as_long_as_patience_says(local, gate, stuck) -> None:
    with saver(patience=0.3) as one:
        first = begin(one, 1, local.at("1"), planner=gate)
        gate.wait()
        with pytest.raises(SaveInProgressError, match=r"not finished within 0\.3 s"):
            begin(one, 2, local.at("2"))
        gate.open()
        first.result(PATIENCE)


def test_a_stuck_save_to_the_same_place_is_waited_for(local, gate, stuck) -> None:
    with saver(patience=0.3) as one:
        first = begin(one, 1, local, planner=gate)
        gate.wait()
        stuck.set()
        with pytest.raises(SaveInProgressError):
            begin(one, 2, local)
        gate.open()
        first.result(PATIENCE)
    assert step_at(local) == 1


def test_without_memory_for_a_second_copy_the_one_before_is_waited_for(
    local, gate, stuck, monkeypatch
) -> None:
    make, room = stagers.Arena, [1]

    def made(size, *, pin):
        if not room[0]:
            raise StagingMemoryError("not enough memory")
        room[0] -= 1
        return make(size, pin=pin)

    def closed(self) -> None:
        room[0] += 1
        close(self)

    close = make.close
    monkeypatch.setattr(make, "close", closed)
    monkeypatch.setattr(stagers, "Arena", made)
    with saver() as one, ThreadPoolExecutor(1) as thread:
        begin(one, 1, local.at("1"), planner=gate)
        gate.wait()
        stuck.set()
        second = thread.submit(begin, one, 2, local.at("2"))
        with pytest.raises(TimeoutError):
            second.result(0.3)
        gate.open()
        second.result(PATIENCE).result(PATIENCE)
    assert step_at(local.at("2")) == 2


def _on_ranks(place, folder):
    gate, rank = Gate(Path(folder), rank=1), dist.get_rank()
    if rank == 1:  # the others have sent all, and wait for this one
        savers.is_stuck = lambda: (Path(folder) / "reached").exists()
    try:
        options = BackgroundOptions(when_busy="replace")
        with AsyncSaver(options=options) as one:
            futures = [begin(one, 1, place.at("1"), planner=gate)]
            gate.wait()
            futures += [begin(one, step, place.at(str(step))) for step in (2, 3, 4)]
            dist.barrier()
            gate.open()
            return [future.result(PATIENCE) is None for future in futures]
    finally:
        savers.is_stuck = waiting.is_stuck


def test_all_ranks_replace_the_same_saves(local, tmp_path, ranks) -> None:
    assert ranks(3, _on_ranks, local, str(tmp_path)) == [[False, True, True, False]] * 3
    assert step_at(local.at("4"), ranks=3) == 4


def _interrupted_between_meetings(place, folder):
    gate, rank, here = Gate(Path(folder), rank=1), dist.get_rank(), threading.get_ident()
    wait = concurrent.futures.wait

    def interrupted(*arguments):
        if threading.get_ident() == here:
            raise KeyboardInterrupt
        return wait(*arguments)

    with AsyncSaver(options=BackgroundOptions(when_busy="replace")) as one:
        first = begin(one, 1, place.at("1"), planner=gate)
        gate.wait()
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(concurrent.futures, "wait", interrupted)
            with pytest.raises(BaseException) as told:  # noqa: PT011 - looked at below
                begin(one, 2, place.at("2"))
        gate.open()
        first.result(PATIENCE)
        begin(one, 3, place.at("3")).result(PATIENCE)
    return type(told.value), "KeyboardInterrupt" in repr(told.value)


def test_an_interrupt_of_a_rank_that_waits_for_a_stuck_save_is_told_to_all(
    local, tmp_path, ranks
) -> None:
    told = ranks(2, _interrupted_between_meetings, local, str(tmp_path))
    assert told == [(RanksFailedError, True), (KeyboardInterrupt, True)]
    assert step_at(local.at("1"), ranks=2) == 1
    assert step_at(local.at("3"), ranks=2) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_manager_trains_on_while_its_store_refuses(shaky, proxy, kind) -> None:
    patient = shaky.having(retry=RetryPolicy(base=0.01, cap=0.1)).config
    config = CheckpointerConfig(config=patient, kind=kind)
    with CheckpointManager(
        shaky.uri, checkpointer=config, preemption=Preemption(signals=())
    ) as manager:
        manager.save(1, {"w": torch.ones(50_000)})
        manager.wait_until_finished()
        proxy.inject(s3_error(503, "SlowDown"))
        for step in range(2, 7):
            assert manager.save(step, {"w": torch.full((50_000,), float(step))})
        assert manager.status().under_way == (2, 6)
        proxy.clear()
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2, 6]
        assert manager.status().newest_step == 6
        assert manager.status().failures_in_row == 0
    room = {"w": torch.zeros(50_000)}
    cloudckpt.load(room, checkpoint_id=f"{shaky.uri}/step-6", config=shaky.config)
    assert torch.equal(room["w"], torch.full((50_000,), 6.0))


def test_a_process_is_stuck_while_requests_fail_and_none_succeeds(monkeypatch) -> None:
    monkeypatch.setattr(waiting, "_lines", waiting._Lines())
    assert not waiting.is_stuck()
    with Waiting(300) as one:
        assert not waiting.is_stuck()
        one.failed("503", left=300, pause=1)
        assert waiting.is_stuck()
        with Waiting(300):
            pass
        assert not waiting.is_stuck()  # something gets on
        monkeypatch.setattr(waiting, "_NO_SUCCESS", 0.0)
        assert waiting.is_stuck()
    assert not waiting.is_stuck()
    with Waiting(300) as one:
        one.is_silent(1.0)
        assert not waiting.is_stuck()
        one.is_silent(waiting.FIRST_LINE)
        assert waiting.is_stuck()
