"""A save that is stuck does not hold up training: the next ones are skipped until it has ended."""

import concurrent.futures
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import cloudckpt
from cloudckpt import BackgroundOptions, CheckpointManager, RetryPolicy, waiting
from cloudckpt.background import saver as savers
from cloudckpt.background.saver import AsyncSaver
from cloudckpt.checkpointer import CheckpointerConfig
from cloudckpt.errors import RanksFailedError
from cloudckpt.runs import Preemption
from cloudckpt.waiting import Waiting
from support.wire.faults import s3_error

from .saves import PATIENCE, PROCESS, THREAD, Gate, begin, step_at


def saver(**options) -> AsyncSaver:
    options = {"when_busy": "auto", "patience": PATIENCE} | options
    return AsyncSaver(no_dist=True, options=BackgroundOptions(**options))


@pytest.fixture
def stuck(monkeypatch) -> threading.Event:
    """Whether the store seems to be stuck; not at first."""
    now = threading.Event()
    monkeypatch.setattr(savers, "is_stuck", now.is_set)
    return now


def test_saves_behind_a_stuck_one_are_skipped_and_the_one_behind_its_end_is_saved(
    local, gate, stuck, caplog
) -> None:
    with saver() as one, ThreadPoolExecutor(1) as thread:
        first = begin(one, 1, local.at("1"), planner=gate)
        gate.wait()
        waits = thread.submit(begin, one, 2, local.at("2"))
        assert not concurrent.futures.wait([waits], 0.3).done
        stuck.set()
        skipped = [waits.result(PATIENCE), begin(one, 3, local.at("3"))]
        assert [(future.skipped, future.result(0)) for future in skipped] == [(True, None)] * 2
        gate.open()
        assert first.result(PATIENCE) is not None
        assert begin(one, 4, local.at("4")).result(PATIENCE) is not None
    assert [step_at(local.at(step)) for step in ("1", "4")] == [1, 4]
    assert local.at("2").names() == local.at("3").names() == []
    assert caplog.text.count(f"{local.at('2').uri} was skipped") == 1


def _on_ranks(place, folder):
    gate, rank = Gate(Path(folder), rank=1), dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:  # the others have sent all, and wait for this one
            patch.setattr(savers, "is_stuck", (Path(folder) / "reached").exists)
        with AsyncSaver(options=BackgroundOptions(when_busy="auto")) as one:
            futures = [begin(one, 1, place.at("1"), planner=gate)]
            gate.wait()
            futures += [begin(one, step, place.at(str(step))) for step in (2, 3, 4)]
            dist.barrier()
            gate.open()
            futures[0].result(PATIENCE)
            futures.append(begin(one, 5, place.at("5")))
            return [future.result(PATIENCE) is None for future in futures]


def test_all_ranks_skip_the_same_saves(local, tmp_path, ranks) -> None:
    told = ranks(3, _on_ranks, local, str(tmp_path))
    assert told == [[False, True, True, True, False]] * 3
    assert step_at(local.at("5"), ranks=3) == 5


def _interrupted_between_meetings(place, folder):
    gate, rank, here = Gate(Path(folder), rank=1), dist.get_rank(), threading.get_ident()
    wait = concurrent.futures.wait

    def interrupted(*arguments):
        if threading.get_ident() == here:
            raise KeyboardInterrupt
        return wait(*arguments)

    with AsyncSaver(options=BackgroundOptions(when_busy="auto")) as one:
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


def test_an_interrupt_of_a_rank_that_waits_for_a_save_is_told_to_all(
    local, tmp_path, ranks
) -> None:
    told = ranks(2, _interrupted_between_meetings, local, str(tmp_path))
    assert told == [(RanksFailedError, True), (KeyboardInterrupt, True)]
    assert step_at(local.at("1"), ranks=2) == 1
    assert step_at(local.at("3"), ranks=2) == 3


@pytest.mark.parametrize("kind", [THREAD, PROCESS])
def test_a_manager_trains_on_while_its_store_refuses(shaky, proxy, kind) -> None:
    patient = shaky.having(retry=RetryPolicy(base=0.01, cap=0.1)).config
    config = CheckpointerConfig(config=patient, kind=kind)
    with CheckpointManager(
        shaky.uri, checkpointer=config, preemption=Preemption(signals=())
    ) as manager:
        manager.save(1, {"w": torch.ones(50_000)})
        manager.wait_until_finished()
        proxy.inject(s3_error(503, "SlowDown"))
        saved = [manager.save(n, {"w": torch.full((50_000,), float(n))}) for n in range(2, 7)]
        assert saved == [True, False, False, False, False]
        assert manager.status().under_way == (2,)
        proxy.clear()
        manager.wait_until_finished()
        assert manager.save(7, {"w": torch.full((50_000,), 7.0)})
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2, 7]
        assert manager.status().failures_in_row == 0
    for step in (2, 7):
        room = {"w": torch.zeros(50_000)}
        cloudckpt.load(room, checkpoint_id=f"{shaky.uri}/step-{step}", config=shaky.config)
        assert torch.equal(room["w"], torch.full((50_000,), float(step)))


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
