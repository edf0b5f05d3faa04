"""Saves that fail: which end the training, which are only told, and what a run knows of itself."""

import contextlib
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from cloudckpt import CheckpointManager, events
from cloudckpt.background import saver
from cloudckpt.checkpointer import CheckpointerConfig, CommitHook
from cloudckpt.errors import AccessDeniedError, CloudCheckpointError, ThrottledError
from cloudckpt.runs.preemption import Preemption
from cloudckpt.runs.saves import Saves
from runs.managed import managed, save, state


class Refusing(CommitHook):
    """Refuses the commits of some steps."""

    def __init__(self, *steps: int, error=ThrottledError) -> None:
        self.steps, self._error = steps, error

    def before_commit(self, uri, metadata) -> None:
        if int(uri.rpartition("-")[2]) in self.steps:
            raise self._error("come back later", uri=uri)


GOES_ON = {"on_failure": "log"}
MANY = {**GOES_ON, "max_failures": 3}
ENDS = {
    "raise": (Refusing(2, 3, 5), {}, ThrottledError, [1]),
    "log": (Refusing(2, 3, 5, 8), GOES_ON, None, [1, 4, 6, 7]),
    "too many": (Refusing(1, 2, 4, 5, 6), MANY, ThrottledError, [3]),
    "at the very end": (
        Refusing(7, 8),
        {**GOES_ON, "max_failures": 2},
        ThrottledError,
        [1, 2, 3, 4, 5, 6],
    ),
    "for good": (Refusing(2, error=AccessDeniedError), GOES_ON, AccessDeniedError, [1]),
    "all may fail": (
        Refusing(2, error=AccessDeniedError),
        {"on_failure": "log_all"},
        None,
        [1, 3, 4, 5, 6, 7, 8],
    ),
}


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("how", ENDS)
def test_which_failures_end_the_training(run, how, asynchronous, caplog) -> None:
    hook, options, error, committed = ENDS[how]
    ended = None
    with managed(run, hook=hook, asynchronous=asynchronous, **options) as manager:
        try:
            for step in range(1, 9):
                manager.save(step, state(step))
            manager.wait_until_finished()
        except CloudCheckpointError as raised:
            ended = type(raised)
        assert (ended, manager.all_steps()) == (error, committed)
    if how == "log":
        told = [one.getMessage() for one in caplog.records if "continues" in one.getMessage()]
        assert [int(text.split()[2]) for text in told] == [*hook.steps]
        assert "failed saves in a row: 2; training ends at 3" in told[1]
        assert "come back later" in told[1]


@pytest.mark.parametrize("on_failure", ["raise", "log"])
def test_a_step_whose_save_failed_can_be_saved_again_without_force(run, on_failure) -> None:
    hook = Refusing(2)
    with managed(run, hook=hook, on_failure=on_failure, asynchronous=True) as manager:
        save(manager, 1)
        with pytest.raises(ThrottledError) if on_failure == "raise" else contextlib.nullcontext():
            save(manager, 2)
        hook.steps = ()
        assert not manager.should_save(1)
        assert manager.should_save(2)
        save(manager, 2)
        assert manager.all_steps() == [1, 2]


def test_a_run_knows_its_status_and_failures_are_events(run) -> None:
    found = []
    unsubscribe = events.subscribe(
        lambda event: found.append(event) if event.phase == "failure" else None
    )
    try:
        with managed(run, hook=Refusing(1, 3, 4), asynchronous=True, **GOES_ON) as manager:
            assert manager.status().newest_step is None
            save(manager, 1, 2)
            status = manager.status()
            assert (status.newest_step, status.under_way, status.failures_in_row) == (2, (), 0)
            assert status.newest_age < 600
            save(manager, 3, 4)
            status = manager.status()
            assert (status.newest_step, status.failures_in_row) == (2, 2)
            assert isinstance(status.last_failure, ThrottledError)
            save(manager, 5)
            assert (manager.status().newest_step, manager.status().failures_in_row) == (5, 0)
    finally:
        unsubscribe()
    assert [(one.step, one.newest_step, one.detail) for one in found] == [
        (1, None, "ThrottledError"),
        (3, 2, "ThrottledError"),
        (4, 2, "ThrottledError"),
    ]
    assert found[0].newest_age is None
    assert 0 <= found[1].newest_age < 600
    assert found[1].uri.endswith("/step-3")
    with managed(run) as manager:
        assert manager.restore(state()) == 5
        assert (manager.status().newest_step, manager.status().newest_age) == (5, None)


def test_failures_are_counted_in_the_order_of_the_saves() -> None:
    saves, error = Saves("log", 3, str, 0), ThrottledError("later")
    first, second, third, *others = [saves.begin(step) for step in range(1, 7)]

    def tolerated(save) -> bool:
        return saves.tolerates(save, error)

    assert tolerated(second)  # told before that of the save before it
    assert tolerated(first)
    assert saves.status().failures_in_row == 2
    saves.end(third, "committed")
    assert saves.status().failures_in_row == 0
    assert [tolerated(other) for other in others] == [True, True, False]


class Holding(CommitHook):
    """Refuses each commit, when it is told to."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Semaphore(0), threading.Semaphore(0)

    def before_commit(self, uri, metadata) -> None:
        self.reached.release()
        assert self.go_on.acquire(timeout=60)
        raise ThrottledError("come back later", uri=uri)


def test_a_save_that_is_skipped_does_not_end_a_row_of_failures(run, monkeypatch) -> None:
    """Of a store that is gone for good nobody would ever hear, as most saves are skipped then."""
    monkeypatch.setattr(saver, "is_stuck", lambda: True)
    hook = Holding()
    manager = managed(run, hook=hook, asynchronous=True, on_failure="log", max_failures=2)
    for step in (1, 3):
        if step == 3:
            manager.wait_until_finished()
        assert manager.save(step, state(step))
        assert hook.reached.acquire(timeout=60)
        assert not manager.save(step + 1, state(step + 1))
        hook.go_on.release()
    with pytest.raises(ThrottledError):
        manager.wait_until_finished()
    assert manager.status().failures_in_row == 2
    manager.close()


def _on_ranks(run: str, kind: AsyncCheckpointerType, max_failures: int) -> tuple:
    made = CheckpointerConfig(kind=kind, commit_hook=Refusing(2, 3, 5))
    options = {**GOES_ON, "max_failures": max_failures, "preemption": Preemption(signals=())}
    done, ended = [], ""
    manager = CheckpointManager(run, checkpointer=made, **options)
    try:
        for step in range(1, 7):
            manager.save(step, {f"w{dist.get_rank()}": torch.full((9,), float(step))})
            done.append(step)
        manager.wait_until_finished()
    except ThrottledError as error:
        ended = str(error)
    status = manager.status()
    manager.close()
    return done, bool(ended), status.newest_step, status.failures_in_row


@pytest.mark.parametrize("kind", list(AsyncCheckpointerType))
def test_all_ranks_go_on_alike(tmp_path, ranks, kind) -> None:
    found = ranks(2, _on_ranks, str(tmp_path), kind, 3)
    assert found == [([1, 2, 3, 4, 5, 6], False, 6, 0)] * 2


def test_all_ranks_end_alike(tmp_path, ranks) -> None:
    found = ranks(3, _on_ranks, str(tmp_path), AsyncCheckpointerType.THREAD, 2)
    assert found[0][1:] == (True, 1, 2)
    assert found == [found[0]] * 3
