"""Whose step is it: jobs that are replaced, that go back, and that begin anew in one run."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import cloudckpt
from cloudckpt import CheckpointManager, Config
from cloudckpt.checkpointer import CheckpointerConfig
from cloudckpt.errors import (
    CheckpointConflictError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    ConnectionLostError,
)
from cloudckpt.integrations.saves import Saves
from cloudckpt.runs import Preemption, claim, prune
from cloudckpt.runs.catalog import Run
from cloudckpt.runs.steps import Retention


def job(run, **options) -> CheckpointManager:
    options = {"asynchronous": False, "preemption": Preemption(signals=())} | options
    return CheckpointManager(run, **options)


def state(value: float) -> dict:
    return {"w": torch.full((400,), float(value))}


def save(manager: CheckpointManager, *steps: int, of: float = 0, **options) -> None:
    """Saves steps; each value says which job it is of."""
    for step in steps:
        manager.save(step, state(of + step), metrics={"loss": 1 / (1 + step)}, **options)
    manager.wait_until_finished()


def restored(run, **options) -> tuple[int | None, float]:
    """What the next job restores."""
    found = state(-1)
    with job(run) as manager:
        step = manager.restore(found, **options)
    return step, found["w"][0].item()


def states(run) -> dict[int | None, str]:
    found = cloudckpt.list_checkpoints(run)
    return {one.step: "abandoned" if one.is_abandoned else "line" for one in found}


@pytest.fixture
def run(tmp_path) -> str:
    return str(tmp_path / "run")


@pytest.fixture
def two(run):
    """A job that has saved 1 to 6, and one that has restored step 3 and saved 4 and 5."""
    with job(run) as old, job(run) as seen:
        save(old, 1, 2, 3)
        del seen
        with job(run) as new:
            assert new.restore(state(0)) == 3
            save(old, 4, 5, 6, of=1000)
            save(new, 4, 5)
            yield old, new


def test_what_a_replaced_job_has_saved_is_neither_restored_nor_counted(run, two, caplog) -> None:
    old, new = two
    with pytest.raises(CheckpointConflictError):
        old.save(7, state(1007))
    assert restored(run) == (5, 5)
    assert "newer steps were not, because they are abandoned: step 6" in caplog.text
    assert new.all_steps() == [1, 2, 3, 4, 5]
    assert cloudckpt.latest(run).endswith("step-5")
    assert states(run) == dict.fromkeys([1, 2, 3, 4, 5], "line") | {6: "abandoned"}
    options = {"best_to_keep": 1, "best_metric": "loss", "best_mode": "min", "dry_run": True}
    assert [uri[-1] for uri in prune(run, **options)] == ["1", "2", "3", "4"]
    assert [uri[-1] for uri in prune(run, **options, abandoned=True)] == [*"12346"]
    caplog.clear()
    save(new, 7)
    assert restored(run) == (7, 7)
    assert (
        "newer steps were not" not in caplog.text
    )  # step 6 is older than the one that was restored


def delete_all_but_one(run) -> None:
    """As the savers of frameworks do it."""
    Saves(Config()).keep_newest(Run(run), Retention(max_to_keep=1))


def prune_all_but_one(run) -> None:
    assert prune(run, max_to_keep=1) == [f"file://{run}/step-1"]


@pytest.mark.parametrize("how", ["after a dry run", prune_all_but_one, delete_all_but_one])
def test_a_step_that_is_saved_anew_while_steps_are_pruned_stays(run, how, monkeypatch) -> None:
    with job(run) as manager:
        save(manager, 1, 2, 3)
    history = Run.history

    def goes_back(*_) -> None:
        monkeypatch.undo()
        with job(run) as other:
            other.restore(state(0), step=1)
            save(other, 2, of=1000)

    def then_saved(asked: Run, *steps) -> object:
        found = history(asked, *steps)
        goes_back()
        return found

    if callable(how):
        monkeypatch.setattr(Run, "history", then_saved)
        how(run)
        assert not cloudckpt.exists(f"{run}/step-1")
    else:
        shown = prune(run, max_to_keep=1, dry_run=True)
        goes_back()
        assert [uri[-1] for uri in shown] == ["1", "2"]
        assert prune(run, max_to_keep=1, only=shown) == shown[:1]
    assert restored(run) == (2, 1002)


@pytest.mark.parametrize("keep_abandoned", [True, False])
def test_who_goes_back_counts_the_steps_that_it_continues(run, keep_abandoned, caplog) -> None:
    with job(run) as manager:
        save(manager, 10, 20, 30, 40)
    with job(run, max_to_keep=2, keep_abandoned=keep_abandoned) as manager:
        assert manager.restore(state(0), step=20) == 20
        save(manager, 25, 35, of=1000)
        assert manager.all_steps() == [25, 35]
    assert [*states(run)] == ([25, 30, 35, 40] if keep_abandoned else [25, 35])
    assert ("steps of another training are kept (30, 40)" in caplog.text) == keep_abandoned
    assert caplog.text.count("are kept (") == keep_abandoned
    cloudckpt.delete(f"{run}/step-35")
    assert restored(run) == (25, 1025)


def test_a_job_that_never_restores_begins_a_line_of_its_own_and_says_so(run, caplog) -> None:
    with job(run) as manager:
        save(manager, 2, 4, 6)
    with job(run, max_to_keep=1, keep_abandoned=False) as manager:
        save(manager, 1, 3, of=1000)
        assert "has steps up to 6, and restore() was not called" in caplog.text
        with pytest.raises(CheckpointExistsError, match="force=True"):
            manager.save(4, state(1004))
        assert restored(run) == (3, 1003)
        save(manager, 6, of=1000, force=True)
    assert restored(run) == (6, 1006)
    assert states(run) == {2: "abandoned", 4: "abandoned", 6: "line"}


def test_an_old_job_that_has_not_saved_cannot_take_the_run_from_its_replacement(run) -> None:
    with job(run) as old, job(run) as new:
        save(new, 1)
        for write in (lambda: old.save(2, state(1002)), lambda: old.delete(1)):
            with pytest.raises(CheckpointConflictError):
                write()
        save(new, 2)
    assert restored(run) == (2, 2)


def test_who_only_restores_or_reads_disturbs_nobody(run) -> None:
    with job(run) as manager:
        save(manager, 1)
        assert restored(run) == (1, 1)
        with job(run, read_only=True) as reader:
            assert reader.restore(state(0)) == 1
            for write in (lambda: reader.save(2, state(2)), lambda: reader.delete(1)):
                with pytest.raises(ConfigError, match="read_only"):
                    write()
        save(manager, 2)


def test_a_job_that_is_killed_before_its_first_commit_leaves_what_it_continues(run) -> None:
    with job(run) as manager:
        save(manager, 1, 2, 3)
    with job(run) as manager:
        manager.restore(state(0), step=2)
        manager._line.before_commit = lambda *_: 1 / 0
        with pytest.raises(cloudckpt.errors.CloudCheckpointError):
            manager.save(3, state(3))
    assert restored(run) == (2, 2)


@pytest.mark.parametrize("claim", [None, {"job": "old", "host": "h", "pid": 1}, "no claim"])
def test_without_a_claim_that_says_it_the_newest_step_decides(run, two, claim) -> None:
    path = Path(run, ".cloudckpt-job.json")
    path.unlink() if claim is None else path.write_text(json.dumps(claim))
    assert restored(run) == (6, 1006)
    cloudckpt.delete(f"{run}/step-6")
    assert restored(run) == (5, 5)
    assert set(states(run).values()) == {"line"}


def test_a_step_that_is_copied_into_a_run_is_not_restored_without_a_word(run, two) -> None:
    cloudckpt.copy(f"{run}/step-6", f"{run}-other/step-60")
    with job(f"{run}-other") as other:
        assert other.restore(state(0)) == 60  # it was all that was there
        save(other, 61)
    cloudckpt.copy(f"{run}-other/step-61", f"{run}/step-61")
    assert restored(run) == (5, 5)
    assert states(run)[61] == "abandoned"
    assert restored(run, step=61) == (61, 61)


def test_many_jobs_that_have_left_no_step_are_forgotten(run, monkeypatch) -> None:
    monkeypatch.setattr(claim, "_MANY_JOBS", 3)
    with job(run, max_to_keep=1) as manager:
        for step in range(1, 10):
            manager.restore(state(0))
            save(manager, step)
    assert restored(run) == (9, 9)
    assert len(cloudckpt.inspect(f"{run}/step-9").notes.continues) <= 4


def test_of_many_jobs_that_of_an_abandoned_step_that_is_restored_is_not_forgotten(
    run, monkeypatch
) -> None:
    monkeypatch.setattr(claim, "_MANY_JOBS", 1)
    with job(run) as manager:
        for step in (1, 2, 3):
            manager.restore(state(0))
            save(manager, step)
        manager.restore(state(0), step=1)
        save(manager, 2, of=1000)
    with job(run) as manager:
        assert manager.restore(state(0), step=3) == 3
        save(manager, 4)
        assert manager.all_steps() == [1, 3, 4]


def test_a_run_with_steps_is_never_taken_for_a_new_one(run, caplog) -> None:
    with job(run) as manager:
        save(manager, 1, 2)
    with job(run) as manager:  # it forgets to restore, and is killed before its first commit
        manager._line.before_commit = lambda *_: 1 / 0
        with pytest.raises(cloudckpt.errors.CloudCheckpointError):
            manager.save(3, state(3))
    assert restored(run) == (2, 2)
    assert "abandoned" not in caplog.text
    assert cloudckpt.latest(run).endswith("step-2")
    assert states(run) == {1: "line", 2: "line"}


def test_a_step_that_is_not_there_is_told_with_those_that_are(run, two) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"steps are 1, 2, 3, 4, 5.* ones 6"):
        restored(run, step=77)


@pytest.mark.parametrize("ask", [cloudckpt.inspect, cloudckpt.verify])
def test_a_run_in_the_place_of_a_checkpoint_is_refused_with_its_newest_step(run, two, ask) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"a run, .*step-5 is the newest"):
        ask(run)


@pytest.mark.parametrize("ask", [job, cloudckpt.latest, cloudckpt.list_checkpoints])
def test_a_checkpoint_in_the_place_of_a_run_is_refused_with_the_run_named(run, ask) -> None:
    with job(run) as manager:
        save(manager, 1)
    with pytest.raises(ConfigError, match=f"{run}\\?"):
        ask(f"{run}/step-1")


@pytest.fixture
def answers(monkeypatch):
    """What ends the silence of a store that is asked for the first claim."""
    monkeypatch.setattr(claim, "_PATIENCE", 0.2)
    answers, put_whole, asked = threading.Event(), claim.put_whole, itertools.count()

    def put(*args, **options):
        assert next(asked) or answers.wait(30)
        return put_whole(*args, **options)

    monkeypatch.setattr(claim, "put_whole", put)
    yield answers
    answers.set()


def in_thread(run) -> CheckpointManager:
    kind = CheckpointerConfig(kind=AsyncCheckpointerType.THREAD)
    return job(run, asynchronous=True, checkpointer=kind)


def test_a_first_save_goes_on_behind_its_call_if_nobody_answers_its_claim(
    run, answers, caplog
) -> None:
    with in_thread(run) as manager:
        assert manager.save(1, state(1))
        assert "training continues" in caplog.text
        assert cloudckpt.latest(run) is None
        answers.set()
        manager.wait_until_finished()
        save(manager, 2)
        assert manager.all_steps() == [1, 2]


def test_a_save_whose_claim_is_refused_late_commits_nothing(run, answers) -> None:
    with in_thread(run) as late, job(run) as other:
        assert late.save(1, state(1))
        save(other, 2)
        answers.set()
        with pytest.raises(CheckpointConflictError):
            late.wait_until_finished()
        assert other.all_steps() == [2]


def test_a_claim_whose_answer_is_lost_is_the_jobs_own(run, monkeypatch) -> None:
    put_whole = claim.put_whole

    def put(*args, **options):
        monkeypatch.setattr(claim, "put_whole", put_whole)
        put_whole(*args, **options)
        raise ConnectionLostError("the answer was lost")

    monkeypatch.setattr(claim, "put_whole", put)
    with job(run) as manager:
        with pytest.raises(ConnectionLostError):
            manager.save(1, state(1))
        save(manager, 2)
        assert manager.all_steps() == [2]


def test_a_watch_leaves_out_abandoned_steps_and_yields_those_that_are_saved_anew(run) -> None:
    watch = cloudckpt.watch(run, interval=0.01)
    with job(run) as old:
        save(old, 1, 2, 3)
        assert [next(watch).step for _ in range(3)] == [1, 2, 3]
        with job(run) as new:
            new.restore(state(0), step=1)
            save(old, 4)
            save(new, 2, of=10)
            assert [next(watch).step for _ in range(1)] == [2]
            save(new, 5, of=10)
            assert next(watch).step == 5


def test_a_watch_from_a_step_beyond_the_line_waits_for_the_line(run, two) -> None:
    _, new = two
    watch = cloudckpt.watch(run, interval=0.01, start=6)  # which is abandoned
    later = threading.Timer(0.5, save, (new, 7))
    later.start()
    assert next(watch).step == 7
    later.join()
