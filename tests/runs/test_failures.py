"""Saves that fail: which end the training, which are only told, and what a run knows of itself."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from cloudckpt import CheckpointManager, events
from cloudckpt.background import saver
from cloudckpt.checkpointer import CheckpointerConfig, CommitHook
from cloudckpt.errors import AccessDeniedError, CloudCheckpointError, ConfigError, ThrottledError
from cloudckpt.runs.preemption import Preemption
from cloudckpt.runs.saves import Saves

FAILING = {2, 3, 5}


class Refusing(CommitHook):
    """Refuses the commits of some steps."""

    def __init__(self, steps, error=ThrottledError) -> None:
        self._steps, self._error = steps, error

    def before_commit(self, uri, metadata) -> None:
        if int(uri.rpartition("-")[2]) in self._steps:
            raise self._error("come back later", uri=uri)

    def refuse(self, *steps: int) -> None:
        self._steps = steps


def managed(run, hook, **options) -> CheckpointManager:
    made = CheckpointerConfig(kind=AsyncCheckpointerType.THREAD, commit_hook=hook)
    return CheckpointManager(
        str(run), checkpointer=made, preemption=Preemption(signals=()), **options
    )


def state(step: int) -> dict:
    return {"w": torch.full((300,), float(step))}


def trained(run, hook, steps, **options) -> tuple[list[int], str | None, list[int]]:
    """Steps of which the training heard nothing bad, what ended it, and what is committed."""
    done, ended = [], None
    with managed(run, hook, **options) as manager:
        try:
            for step in steps:
                manager.save(step, state(step))
                done.append(step)
            manager.wait_until_finished()
        except CloudCheckpointError as error:
            ended = type(error).__name__
        return done, ended, manager.all_steps()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_training_goes_on_beside_failures_that_may_pass(tmp_path, asynchronous, caplog) -> None:
    found = trained(
        tmp_path, Refusing(FAILING), range(1, 7), on_failure="log", asynchronous=asynchronous
    )
    assert found == ([1, 2, 3, 4, 5, 6], None, [1, 4, 6])
    told = [one.getMessage() for one in caplog.records if "was not saved" in one.getMessage()]
    assert [text.split(" was")[0] for text in told] == ["step 2", "step 3", "step 5"]
    assert "failure 2 in a row; training ends after 3" in told[1]
    assert "come back later" in told[1]


def _save_again(run: str, on_failure: str) -> tuple[bool, list[int]]:
    """Whether a step whose save failed is saved when it is asked for once more, without force."""
    hook = Refusing({2})
    with managed(run, hook, on_failure=on_failure) as manager:
        manager.save(1, state(1))
        manager.save(2, state(2))
        if on_failure == "raise":
            with pytest.raises(ThrottledError):
                manager.wait_until_finished()
        else:
            manager.wait_until_finished()
        hook.refuse()
        assert not manager.should_save(1)
        is_saved = manager.should_save(2) and manager.save(2, state(2))
        manager.wait_until_finished()
        return is_saved, manager.all_steps()


@pytest.mark.parametrize("on_failure", ["raise", "log"])
def test_a_step_whose_save_failed_can_be_saved_again(tmp_path, ranks, on_failure) -> None:
    assert ranks(2, _save_again, str(tmp_path), on_failure) == [(True, [1, 2])] * 2


def test_a_failure_is_an_event(tmp_path) -> None:
    found = []
    unsubscribe = events.subscribe(
        lambda event: found.append(event) if event.phase == "failure" else None
    )
    try:
        trained(tmp_path, Refusing({1, 3}), range(1, 5), on_failure="log")
    finally:
        unsubscribe()
    assert [(one.step, one.newest_step, one.detail) for one in found] == [
        (1, None, "ThrottledError"),
        (3, 2, "ThrottledError"),
    ]
    assert found[0].newest_age is None
    assert 0 <= found[1].newest_age < 600
    assert found[1].uri.endswith("/step-3")


def test_a_run_knows_its_status(tmp_path) -> None:
    hook = Refusing({2, 3})
    with managed(tmp_path, hook, on_failure="log") as manager:
        assert manager.status().newest_step is None
        manager.save(1, state(1))
        manager.wait_until_finished()
        status = manager.status()
        assert (status.newest_step, status.under_way, status.failures_in_row) == (1, (), 0)
        assert status.newest_age < 600
        for step in (2, 3):
            manager.save(step, state(step))
        manager.wait_until_finished()
        status = manager.status()
        assert (status.newest_step, status.failures_in_row) == (1, 2)
        assert isinstance(status.last_failure, ThrottledError)
        manager.save(4, state(4))
        manager.wait_until_finished()
        assert (manager.status().newest_step, manager.status().failures_in_row) == (4, 0)
    with managed(tmp_path, hook) as manager:
        assert manager.restore(state(0)) == 4
        assert (manager.status().newest_step, manager.status().newest_age) == (4, None)


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
    assert tolerated(others[0])
    assert saves.status().failures_in_row == 1
    assert tolerated(others[1])
    assert not tolerated(others[2])


class Holding(CommitHook):
    """Refuses each commit, when it is told to."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Semaphore(0), threading.Semaphore(0)

    def before_commit(self, uri, metadata) -> None:
        self.reached.release()
        assert self.go_on.acquire(timeout=60)
        raise ThrottledError("come back later", uri=uri)


def test_a_save_that_is_skipped_does_not_end_a_row_of_failures(tmp_path, monkeypatch) -> None:
    """Of a store that is gone for good nobody would ever hear, as most saves are skipped then."""
    monkeypatch.setattr(saver, "is_stuck", lambda: True)
    hook = Holding()
    manager = managed(tmp_path, hook, on_failure="log", max_failures=2)
    assert manager.save(1, state(1))
    assert hook.reached.acquire(timeout=60)
    assert not manager.save(2, state(2))
    hook.go_on.release()
    manager.wait_until_finished()
    assert manager.save(3, state(3))
    assert hook.reached.acquire(timeout=60)
    assert not manager.save(4, state(4))
    hook.go_on.release()
    with pytest.raises(ThrottledError):
        manager.wait_until_finished()
    assert manager.status().failures_in_row == 2
    manager.close()


def _on_ranks(run: str, kind: AsyncCheckpointerType, max_failures: int) -> tuple:
    hook = Refusing(FAILING)
    made = CheckpointerConfig(kind=kind, commit_hook=hook)
    done, ended = [], None
    manager = CheckpointManager(
        run,
        checkpointer=made,
        preemption=Preemption(signals=()),
        on_failure="log",
        max_failures=max_failures,
    )
    try:
        for step in range(1, 7):
            manager.save(step, {f"w{dist.get_rank()}": torch.full((9,), float(step))})
            done.append(step)
        manager.wait_until_finished()
    except ThrottledError as error:
        ended = str(error)
    status = manager.status()
    manager.close()
    return done, ended is not None, status.newest_step, status.failures_in_row


@pytest.mark.parametrize("kind", list(AsyncCheckpointerType))
def test_all_ranks_go_on_alike(tmp_path, ranks, kind) -> None:
    found = ranks(2, _on_ranks, str(tmp_path), kind, 3)
    assert found == [([1, 2, 3, 4, 5, 6], False, 6, 0)] * 2


def test_all_ranks_end_alike(tmp_path, ranks) -> None:
    found = ranks(3, _on_ranks, str(tmp_path), AsyncCheckpointerType.THREAD, 2)
    assert found[0][1:] == (True, 1, 2)
    assert found == [found[0]] * 3


WRONG = AccessDeniedError
ENDS = {
    "raise": (FAILING, ThrottledError, {}, [1]),
    "too many": ({1, 2, 4, 5, 6}, ThrottledError, {"on_failure": "log", "max_failures": 3}, [3]),
    "for good": ({2}, WRONG, {"on_failure": "log"}, [1]),
    "all may fail": ({2}, WRONG, {"on_failure": "log_all"}, [1, 3, 4, 5, 6, 7, 8]),
}


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("how", ENDS)
def test_which_failures_end_the_training(tmp_path, how, asynchronous) -> None:
    steps, error, options, committed = ENDS[how]
    hook = Refusing(steps, error)
    _, ended, found = trained(tmp_path, hook, range(1, 9), asynchronous=asynchronous, **options)
    assert found == committed
    assert ended == (None if how == "all may fail" else error.__name__)


def test_failures_at_the_very_end_count_and_options_are_checked(tmp_path) -> None:
    manager = managed(tmp_path, Refusing({1, 2}), on_failure="log", max_failures=2)
    for step in (1, 2):
        manager.save(step, state(step))
    with pytest.raises(ThrottledError):
        manager.close()
    for options in ({"on_failure": "ignore"}, {"max_failures": 0}, {"max_failures": 1.5}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            managed(tmp_path, None, **options)
