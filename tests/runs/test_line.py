"""Whose step is it: jobs that are replaced, that go back, and that begin anew in one run.

The model in ``lines`` draws such jobs; here are what they log, and the cases that it lacks.
"""

from __future__ import annotations

import itertools
import json
import threading
from contextlib import nullcontext
from functools import partial

import pytest

import cloudckpt
from cloudckpt import CheckpointManager, Config, errors
from cloudckpt.checkpoint.objects import CLAIM
from cloudckpt.integrations.saves import Saves
from cloudckpt.runs import claim, prune
from cloudckpt.runs.catalog import Run
from cloudckpt.runs.steps import Retention
from runs.managed import fill, managed, restored, save, state, value
from support.memory_store import MemoryStore


def states(run) -> dict[int | None, str]:
    found = cloudckpt.list_checkpoints(run)
    return {one.step: "abandoned" if one.is_abandoned else "line" for one in found}


@pytest.fixture
def two(run):
    """A job that has saved 1 to 6, and one that has restored step 3 and saved 4 and 5."""
    with managed(run) as old:
        save(old, 1, 2, 3)
        with managed(run) as new:
            assert new.restore(state()) == 3
            save(old, 4, 5, 6, of=1000)
            save(new, 4, 5)
            yield new


def test_newer_steps_of_a_replaced_job_are_named_when_they_are_not_restored(run, two, caplog):
    assert restored(run) == (5, 5)
    assert "these steps were not, because they are abandoned: step 6" in caplog.text
    assert cloudckpt.latest(run).endswith("step-5")
    assert states(run) == dict.fromkeys([1, 2, 3, 4, 5], "line") | {6: "abandoned"}
    caplog.clear()
    save(two, 7)
    assert restored(run) == (7, 7)
    assert "steps were not, because" not in caplog.text  # step 6 is older than that


def test_no_step_is_pruned_if_the_newest_on_the_line_is_damaged(run, two) -> None:
    """Whatever an abandoned step is that is newer."""
    store, key = Run(run).store, Run(run).uri(5).key(".metadata")
    store.put(key, [memoryview(b"?" + store.get(key)[0][1:])], checksum=0)
    for rules in ({"max_to_keep": 1}, {"abandoned": True}):
        with pytest.raises(errors.CheckpointCorruptError):
            prune(run, **rules)
    assert [*states(run)] == [1, 2, 3, 4, 5, 6]


def delete_all_but_one(run) -> None:
    """As the savers of frameworks do it."""
    Saves(Config()).prune_run(Run(run), Retention(max_to_keep=1))


def prune_all_but_one(run) -> None:
    with pytest.raises(errors.CheckpointConflictError, match="deleted: none; not deleted: 1, 2"):
        prune(run, max_to_keep=1)


@pytest.mark.parametrize("how", ["after a dry run", prune_all_but_one, delete_all_but_one])
def test_a_step_that_is_saved_anew_while_steps_are_pruned_stays(
    run, how, monkeypatch, caplog
) -> None:
    """By prune(), as no step may be needed less once another job has claimed the run."""
    fill(run, 1, 2, 3)
    history = Run.history

    def goes_back(*_) -> None:
        monkeypatch.undo()
        with managed(run) as other:
            other.restore(state(), step=1)
            save(other, 2, of=1000)

    def then_saved(asked: Run, *steps) -> object:
        found = history(asked, *steps)
        goes_back()
        return found

    if callable(how):
        monkeypatch.setattr(Run, "history", then_saved)
        how(run)
        assert cloudckpt.exists(f"{run}/step-1") == (how is prune_all_but_one)
        is_told = f"saved anew meanwhile, so it was not deleted | at {run}/step-2" in caplog.text
        assert is_told == (how is delete_all_but_one)
    else:
        shown = prune(run, max_to_keep=1, dry_run=True)
        goes_back()
        assert shown == [f"{run}/step-1", f"{run}/step-2"]
        assert prune(run, max_to_keep=1, only=shown) == shown[:1]
    assert restored(run) == (2, 1002)


def test_abandoned_steps_that_stay_are_logged_once(run, caplog) -> None:
    fill(run, 10, 20, 30, 40)
    with managed(run, max_to_keep=2) as manager:
        assert manager.restore(state(), step=20) == 20
        save(manager, 25, 35)
    assert [*states(run)] == [25, 30, 35, 40]
    assert caplog.text.count("are kept (") == caplog.text.count("are kept (30, 40)") == 1


def test_a_job_that_never_restores_begins_a_line_of_its_own_and_says_so(run, caplog) -> None:
    fill(run, 2, 4, 6)
    with managed(run, max_to_keep=1, keep_abandoned=False, asynchronous=True) as manager:
        save(manager, 1, 3)
        with pytest.raises(errors.CheckpointExistsError, match="force=True"):
            save(manager, 4)
        assert "this job did not call restore()" in caplog.text
        assert "overwrite is off" not in caplog.text
    assert states(run) == dict.fromkeys([2, 4, 6], "abandoned") | {3: "line"}


def test_a_job_that_goes_back_and_only_deletes_keeps_the_line(run, two) -> None:
    with managed(run) as manager:
        manager.restore(state(), step=4)
        manager.delete(3)
    assert restored(run) == (5, 5)


def test_a_job_may_begin_in_a_copy_that_is_copied_again(run, two) -> None:
    copy = f"{run}-copy"
    cloudckpt.copy(run, copy)
    with managed(copy) as manager:
        manager.restore(state())
        with managed(run) as another:
            another.restore(state())
            save(another, 7)
        cloudckpt.copy(run, copy)
        save(manager, 8, 9, of=1000)
    fill(run, 9)
    with pytest.raises(errors.CheckpointExistsError):
        cloudckpt.copy(run, copy)
    assert restored(copy) == (9, 1009)


def test_a_reader_writes_nothing(run) -> None:
    with managed(run) as manager, managed(run, read_only=True) as reader:
        save(manager, 1)
        assert reader.restore(state()) == 1
        for write in (lambda: reader.save(2, state()), lambda: reader.delete(1)):
            with pytest.raises(errors.ConfigError, match="read_only"):
                write()
        save(manager, 2)


@pytest.mark.parametrize("claim", [None, {"job": "old", "host": "h", "pid": 1}, "no claim"])
def test_without_a_claim_that_says_it_the_newest_step_decides(run, two, claim) -> None:
    store, key = Run(run).store, Run(run).root.key(CLAIM)
    if claim is None:
        store.delete(key)
    else:
        store.put(key, [memoryview(json.dumps(claim).encode())], checksum=0)
    assert restored(run) == (6, 1006)
    cloudckpt.delete(f"{run}/step-6")
    assert restored(run) == (5, 5)
    assert {*states(run).values()} == {"line"}
    with managed(run) as manager:
        assert manager.restore(state()) == 5
        save(manager, 7)  # whatever the claim says, it can be replaced


def test_jobs_that_have_left_no_step_are_forgotten_if_they_are_many(run, monkeypatch) -> None:
    monkeypatch.setattr(claim, "_MANY_JOBS", 3)
    with managed(run, max_to_keep=1) as manager:
        for step in range(1, 10):
            manager.restore(state())
            save(manager, step)
    assert restored(run) == (9, 9)
    assert len(cloudckpt.inspect(f"{run}/step-9").notes.continues) <= 4


def test_of_many_jobs_those_of_a_restored_abandoned_step_are_not_forgotten(run, monkeypatch):
    monkeypatch.setattr(claim, "_MANY_JOBS", 1)
    with managed(run) as manager:
        for step in (1, 2, 3):
            manager.restore(state())
            save(manager, step)
        manager.restore(state(), step=1)
        save(manager, 2)
    with managed(run) as manager:
        assert manager.restore(state(), step=3) == 3
        save(manager, 4)
        assert manager.all_steps() == [1, 3, 4]


def test_a_step_that_is_not_there_is_told_with_those_that_are(run, two) -> None:
    with pytest.raises(errors.CheckpointNotFoundError, match=r"steps: 1, 2, 3, 4, 5; .*steps: 6"):
        restored(run, step=77)


ASK = [managed, cloudckpt.latest, cloudckpt.list_checkpoints, partial(prune, max_to_keep=1)]


@pytest.mark.parametrize("ask", [*ASK, lambda run: next(cloudckpt.watch(run))])
def test_a_checkpoint_in_the_place_of_a_run_is_refused_with_the_run_named(run, ask) -> None:
    fill(run, 1)
    with pytest.raises(errors.ConfigError, match=f"such as {run}\\."):
        ask(f"{run}/step-1")


@pytest.mark.parametrize(
    ("owner", "verb"), [(Run, "owner"), (Run, "steps"), (MemoryStore, "get_range")]
)
def test_the_newest_step_is_found_while_another_job_saves_and_prunes(
    run, monkeypatch, owner, verb
) -> None:
    """One that takes the run over between two requests; at last when the step is being loaded."""
    fill(run, 2, 5)
    keeps = {"max_to_keep": 1, "keep_period": 2}
    with managed(run, **keeps) as job, managed(run, read_only=True) as reader:
        job.restore(state())
        request, found = getattr(owner, verb), state()

        def then_saved(asked, *args, **options):
            answer = request(asked, *args, **options)
            if owner is Run or args[0].endswith(".distcp"):
                monkeypatch.undo()
                save(job, 7)
                assert states(run).keys() == {2, 7}
            return answer

        monkeypatch.setattr(owner, verb, then_saved)
        assert reader.restore(found) == value(found) == 7


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


def test_a_first_save_goes_on_behind_its_call_if_nobody_answers_its_claim(
    run, answers, caplog
) -> None:
    with managed(run, asynchronous=True) as manager:
        assert manager.save(1, state())
        assert "training continues" in caplog.text
        assert cloudckpt.latest(run) is None
        answers.set()
        manager.wait_until_finished()
        save(manager, 2)
        assert manager.all_steps() == [1, 2]


def test_a_save_whose_claim_is_refused_late_commits_nothing(run, answers) -> None:
    with managed(run, asynchronous=True) as late, managed(run) as other:
        assert late.save(1, state())
        save(other, 2)
        answers.set()
        with pytest.raises(errors.CheckpointConflictError):
            late.wait_until_finished()
        assert other.all_steps() == [2]


@pytest.mark.parametrize("is_overtaken", [False, True])
def test_a_claim_whose_answer_is_lost_is_the_jobs_own(run, monkeypatch, is_overtaken) -> None:
    put_whole = claim.put_whole

    def put(*args, **options):
        monkeypatch.setattr(claim, "put_whole", put_whole)
        put_whole(*args, **options)
        raise errors.ConnectionLostError("the answer was lost")

    monkeypatch.setattr(claim, "put_whole", put)
    with managed(run) as manager:
        with pytest.raises(errors.ConnectionLostError):
            manager.save(1, state())
        if is_overtaken:
            fill(run, 2)
        with pytest.raises(errors.CheckpointConflictError) if is_overtaken else nullcontext():
            save(manager, 2)
        assert manager.all_steps() == [2]


def test_a_watch_leaves_out_abandoned_steps_and_yields_those_that_are_saved_anew(run) -> None:
    watch = cloudckpt.watch(run, interval=0.01)
    with managed(run) as old:
        save(old, 1, 2, 3)
        assert [next(watch).step for _ in range(3)] == [1, 2, 3]
        with managed(run) as new:
            new.restore(state(), step=1)
            save(old, 4)
            save(new, 2)
            assert next(watch).step == 2
            save(new, 5)
            assert next(watch).step == 5


def test_a_watch_from_a_step_beyond_the_line_waits_for_the_line(run, two: CheckpointManager):
    watch = cloudckpt.watch(run, interval=0.01, start=6)  # which is abandoned
    later = threading.Timer(0.5, save, (two, 7))
    later.start()
    assert next(watch).step == 7
    later.join()
