from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch.distributed as dist

from cloudckpt.errors import ConfigError
from cloudckpt.runs.preemption import Agreement, Preemption


@pytest.fixture
def heard():
    """What a handler of the program's own has heard."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_is_noticed_and_told_to_the_handler_that_was_there(heard) -> None:
    preemption = Preemption(signals=[signal.SIGUSR1])
    preemption.watch()
    assert not preemption.noticed
    os.kill(os.getpid(), signal.SIGUSR1)
    assert preemption.noticed
    assert heard == [signal.SIGUSR1]
    preemption.ignore()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == [signal.SIGUSR1] * 2


def test_a_handler_that_was_set_later_stays(heard) -> None:
    preemption = Preemption(signals=[signal.SIGUSR1])
    preemption.watch()

    def later(number, frame) -> None:
        pass

    signal.signal(signal.SIGUSR1, later)
    preemption.ignore()
    assert signal.getsignal(signal.SIGUSR1) is later


def test_a_function_and_a_point_in_time_say_so_too() -> None:
    said = [False]
    asked = Preemption(signals=(), is_due=lambda: said[0])
    assert not asked.noticed
    said[0] = True
    assert asked.noticed
    said[0] = False
    assert asked.noticed
    assert Preemption(signals=(), deadline=time.time() - 1).noticed
    assert not Preemption(signals=(), deadline=time.time() + 1000).noticed


def test_signals_need_the_main_thread() -> None:
    errors: list[BaseException] = []

    def watch() -> None:
        try:
            Preemption().watch()
        except ConfigError as error:
            errors.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])
    Preemption(signals=()).watch()


def _heard_at() -> list[int]:
    agreement, rank = Agreement(dist.group.WORLD), dist.get_rank()
    return [step for step in range(8) if agreement.step(rank == 2 and step >= 3)]


def test_all_ranks_hear_at_the_same_step_what_one_has_noticed(ranks) -> None:
    assert ranks(3, _heard_at) == [[4, 5, 6, 7]] * 3


def test_a_rank_alone_hears_at_once() -> None:
    agreement = Agreement(None)
    assert [agreement.step(noticed) for noticed in (False, True)] == [False, True]
