from __future__ import annotations

import datetime
import math
import os
import signal
import threading
import time

import pytest
import torch.distributed as dist

from cloudckpt.errors import ConfigError
from cloudckpt.runs import preemption
from cloudckpt.runs.preemption import Agreement, Preemption
from support.forks import child


@pytest.fixture
def heard():
    """What a handler of the program's own has heard."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("calls_ours", [False, True])
def test_what_is_watched_again_is_noticed_whatever_handler_was_set_meanwhile(
    heard, calls_ours
) -> None:
    again = Preemption(signals=[signal.SIGUSR1])
    again.watch()
    ours = signal.getsignal(signal.SIGUSR1)
    told: list[int] = []

    def later(number, frame) -> None:
        told.append(number)
        if calls_ours:
            ours(number, frame)

    signal.signal(signal.SIGUSR1, later)
    again.ignore()
    again.watch()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert again.noticed
    assert told == [signal.SIGUSR1]
    again.ignore()
    assert signal.getsignal(signal.SIGUSR1) is later
    os.kill(os.getpid(), signal.SIGUSR1)
    assert told == [signal.SIGUSR1] * 2


@pytest.mark.parametrize(
    "options",
    [
        {"signals": signal.SIGUSR1},
        {"signals": None},
        *({"signals": [signal.SIGUSR1, number]} for number in (signal.SIGKILL, 9999, "SIGTERM")),
        {"is_due": True},
        {"deadline": "12:00"},
        {"deadline": datetime.datetime(2030, 1, 1, tzinfo=datetime.timezone.utc)},
        {"deadline": math.nan},
    ],
    ids=str,
)
def test_what_tells_nothing_is_refused_by_name(options) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}=.*: give "):
        Preemption(**options)


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


def test_a_function_that_fails_is_logged_once_and_asked_again(caplog) -> None:
    answers = iter([OSError("no answer"), OSError("no answer"), False, True])

    def ask() -> bool:
        if isinstance(answer := next(answers), OSError):
            raise answer
        return answer

    preemption = Preemption(signals=(), is_due=ask)
    assert [preemption.noticed for _ in range(4)] == [False, False, False, True]
    assert caplog.text.count("OSError: no answer") == 1


def test_two_that_watch_one_signal_both_notice_and_leave_what_was_there(heard) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    first, second = (Preemption(signals=[signal.SIGUSR1]) for _ in range(2))
    first.watch()
    second.watch()
    second.watch()  # of another manager
    second.ignore()
    first.ignore()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert (first.noticed, second.noticed) == (False, True)
    assert heard == [signal.SIGUSR1]
    second.ignore()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == [signal.SIGUSR1] * 2
    signal.signal(signal.SIGUSR1, before)


def _chain(number: int) -> None:
    """Sets a handler that calls the one before it, as libraries do."""
    before = signal.getsignal(number)
    signal.signal(number, lambda *given: before(*given))


def _ended_by(number: int, is_chained: bool) -> None:
    """Watches twice and ends that in the wrong order, and then is to end by the signal."""
    first, second = (Preemption(signals=[number]) for _ in range(2))
    first.watch()
    if is_chained:
        _chain(number)
    second.watch()
    first.ignore()
    second.ignore()
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("is_chained", [False, True])
def test_a_signal_that_nobody_watches_any_more_ends_the_process(is_chained) -> None:
    with child(_ended_by, number=signal.SIGUSR1, is_chained=is_chained) as ended:
        assert ended.wait()[0] == -signal.SIGUSR1


def _survives_the_first(number: int, pause: float, how: str) -> None:
    preemption = Preemption(signals=[number])
    preemption.watch()
    if how == "chained":
        _chain(number)
        Preemption(signals=[number]).watch()
    os.kill(os.getpid(), number)
    assert preemption.noticed
    if how == "watched anew":
        preemption.ignore()
        preemption.watch()
    time.sleep(pause)
    os.kill(os.getpid(), number)
    os._exit(7)


@pytest.mark.parametrize(
    ("pause", "how", "ended"),
    [
        (0.0, "alone", 7),
        (0.5, "alone", -signal.SIGTERM),
        (0.5, "chained", -signal.SIGTERM),
        (0.5, "watched anew", 7),
    ],
)
def test_a_second_signal_that_is_not_the_first_from_another_sender_ends_the_process(
    pause, how, ended
) -> None:
    given = {"number": signal.SIGTERM, "pause": pause, "how": how}
    with child(_survives_the_first, **given) as found:
        assert found.wait()[0] == ended


def test_outside_of_the_main_thread_no_signal_is_handled(caplog) -> None:
    before = signal.getsignal(signal.SIGTERM)
    preemption = Preemption(is_due=lambda: True)
    thread = threading.Thread(target=preemption.watch)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
    assert preemption.noticed
    assert "main thread" in caplog.text


def _heard_at(long: float) -> tuple[list[int], list[int]]:
    """The steps at which this rank hears that the job ends, and that a save is due."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preemption, "_LONG", long)
        ending, due = Agreement(dist.group.WORLD), Agreement(dist.group.WORLD)
        heard = [step for step in range(8) if ending.step(rank == 2 and step >= 3)[0]]
        return heard, [
            step for step in range(8) if due.step(False, rank == 0 and step in (2, 5))[1]
        ]


@pytest.mark.parametrize("long", [1.0, 0.0])
def test_all_ranks_hear_at_the_same_step_what_one_has_noticed(ranks, long) -> None:
    """At the next step; at once if steps are long."""
    expected = ([4, 5, 6, 7], [3, 6]) if long else ([3, 4, 5, 6, 7], [2, 5])
    assert ranks(3, _heard_at, long) == [expected] * 3
