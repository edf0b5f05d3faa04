"""A run, from its first step to its last; whose steps it has is in ``test_line`` and ``lines``."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import cloudckpt
from cloudckpt import CheckpointManager, Config, errors
from cloudckpt.checkpoint.notes import Notes
from cloudckpt.checkpoint.objects import CLAIM
from cloudckpt.checkpointer import CheckpointerConfig, CommitHook
from cloudckpt.integrations.saves import Saves
from cloudckpt.runs import catalog, deleting, prune, pruning
from cloudckpt.runs.catalog import Run
from cloudckpt.runs.preemption import Preemption
from cloudckpt.runs.steps import Retention
from dcp.children import ChildDiedError, in_a_child
from runs.managed import damage, fill, managed, save, state, value

BY_LOSS = {"best_metric": "loss", "best_mode": "min"}


@pytest.fixture
def folder(tmp_path) -> Path:
    """The location of a new run on a disk."""
    return tmp_path / "run"


class Held(CommitHook):
    """Stops each commit until it is let go; each wait has an end."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def before_commit(self, uri, metadata) -> None:
        self.reached.set()
        assert self.opened.wait(60)


class Acting(CommitHook):
    """Does something in the middle of the commit of a step."""

    def __init__(self, step: int, act) -> None:
        self._end, self._act, self.calls = f"/step-{step}", act, []

    def check_claim(self) -> None:
        self.calls.append("check")

    def before_commit(self, uri, metadata) -> None:
        self.calls.append("before")
        if uri.endswith(self._end):
            self._act()

    def after_commit(self, uri, metadata) -> None:
        self.calls.append("after")


def fails() -> None:
    raise ArithmeticError("the dog ate it")


# saving


def test_only_steps_whose_turn_it_is_are_saved(run) -> None:
    with managed(run, save_interval_steps=3) as manager:
        saved = [step for step in range(1, 8) if manager.save(step, state(step))]
        assert saved == [3, 6]
        assert manager.save(8, state(8), force=True)
        assert not manager.save(6, state(6))
        assert manager.all_steps() == [3, 6, 8]


def test_a_save_is_due_when_its_seconds_have_passed(run) -> None:
    with managed(run, save_interval_seconds=0.5) as manager:
        saved = []
        for step in range(12):
            time.sleep(0.1)
            assert manager.should_save(step) == manager.save(step, state(step))
            saved.append(manager.status().newest_step)
        assert saved[0] is None
        assert 1 <= len({*saved} - {None}) <= 3


@pytest.mark.parametrize("restores", [True, False])
def test_a_step_that_exists_is_refused_if_the_options_say_so(run, restores) -> None:
    fill(run, 1)
    with managed(run, Config(overwrite=False), asynchronous=True) as manager:
        assert not restores or manager.restore(state()) == 1
        manager.save(1, state(8), force=True)
        with pytest.raises(errors.CheckpointExistsError, match="overwrite=True"):
            manager.wait_until_finished()


@pytest.mark.parametrize("is_restored", [True, False])
def test_a_loop_that_counts_steps_anew_is_told_once_that_nothing_is_saved(
    run, caplog, is_restored
) -> None:
    with managed(run) as manager:
        save(manager, 3)
        if is_restored:
            manager.restore(state())
        assert [manager.save(step, state(step)) for step in range(5)] == [False] * 4 + [True]
    assert caplog.text.count("at the step after the one that restore() returns") == 1


def test_a_failure_in_the_background_is_raised_once(run) -> None:
    with managed(run, asynchronous=True) as manager:
        save(manager, 1)
        Run(run).store.delete(Run(run).root.key(CLAIM))
        manager.save(2, state(2))
        with pytest.raises(errors.CheckpointConflictError, match="deleted"):
            manager.wait_until_finished()
        manager.wait_until_finished()


def test_a_failure_that_nobody_was_told_is_raised_by_close_and_all_is_given_back(run) -> None:
    before, threads = signal.getsignal(signal.SIGTERM), threading.active_count()
    hook = Acting(1, fails)
    manager = managed(run, hook=hook, asynchronous=True, preemption=Preemption())
    manager.save(1, state(1))
    with pytest.raises(errors.CloudCheckpointError, match="the dog ate it"):
        manager.close()
    manager.close()
    assert signal.getsignal(signal.SIGTERM) is before
    assert threading.active_count() == threads


NUMBERS = [np.uint16, lambda step: torch.tensor(step, dtype=torch.int32)]


@pytest.mark.parametrize("number", NUMBERS)
def test_steps_and_options_may_be_numbers_of_numpy_and_torch(run, number) -> None:
    options = {"save_interval_steps": number(2), "max_to_keep": number(2), "keep_period": number(6)}
    with managed(run, **options) as manager:
        for step in range(1, 11):
            assert manager.should_save(number(step)) == (step % 2 == 0)
            assert not manager.reached_preemption(number(step))
            manager.save(number(step), state(step), metrics={"loss": 1.0}, notes={"n": step})
        manager.wait_until_finished()
        assert manager.all_steps() == [6, 8, 10]
        assert manager.uri(number(8)) == manager.uri(8)
        assert (manager.metrics(number(8)), manager.notes(number(8))) == ({"loss": 1.0}, {"n": 8})
        found = state()
        step = manager.restore(found, number(8))
        assert (type(step), step, value(found)) == (int, 8, 8.0)
        manager.delete(number(8))
        assert manager.all_steps() == [6, 10]


# claims


@pytest.mark.parametrize("conditions", ["auto", "off"])
def test_a_claim_in_the_middle_of_a_commit_is_noticed(run, conditions) -> None:
    hook = Acting(3, lambda: fill(run, 2))
    with managed(run, Config(conditional_writes=conditions), hook) as manager:
        manager.save(1, state(1))
        assert hook.calls == ["before", "check", "after"]
        with pytest.raises(errors.CheckpointConflictError):
            manager.save(3, state(3))
    assert not cloudckpt.exists(f"{run}/step-3")


def test_a_claim_in_the_middle_of_a_deletion_is_noticed(run, monkeypatch, caplog) -> None:
    fetched = deleting.fetch

    def then_claimed(store, key):
        if not cloudckpt.exists(f"{run}/step-2"):
            with managed(run) as other:
                save(other, 1, 2, force=True)
        return fetched(store, key)

    with managed(run, max_to_keep=1) as manager:
        manager.save(1, state(7))
        monkeypatch.setattr(deleting, "fetch", then_claimed)
        with pytest.raises(errors.CheckpointConflictError):
            manager.delete(1)
        for _ in range(2):  # as after two saves that had begun before
            manager._pruner.after(None, keep_abandoned=True)
        manager.wait_until_finished()
    assert caplog.text.count("no longer deleted") == 1
    assert cloudckpt.exists(f"{run}/step-1")


def test_a_job_whose_claim_could_not_be_written_deletes_old_steps(run, monkeypatch) -> None:
    """As under a retention policy, by which the claim of the first job stays."""
    fill(run, 1, 2)

    def deny(*_args, **_options):
        raise errors.AccessDeniedError("it is retained")

    monkeypatch.setattr("cloudckpt.runs.claim.put_whole", deny)
    with managed(run, max_to_keep=1) as manager:
        save(manager, 3)
        assert manager.all_steps() == [3]


# what is kept


@pytest.mark.parametrize(("held", "left"), [(".metadata", [1, 3]), (".distcp", [3])])
@pytest.mark.parametrize("by", ["a manager", "a framework's saves"])
def test_a_step_that_can_not_be_deleted_fails_no_training_and_keeps_no_other(
    folder, caplog, monkeypatch, held, left, by
) -> None:
    fill(folder, 1, 2)
    unlink = Path.unlink

    def deny(path: Path, *args, **options) -> None:
        if path.parent.name == "step-1" and path.name.endswith(held):
            raise PermissionError("no")
        unlink(path, *args, **options)

    monkeypatch.setattr(Path, "unlink", deny)
    is_manager = by == "a manager"
    with managed(folder, max_to_keep=1 if is_manager else None) as manager:
        manager.restore(state())
        save(manager, 3)
        if not is_manager:
            Saves(Config()).prune_run(Run(folder), Retention(max_to_keep=1))
        assert manager.all_steps() == left
        told = "1, 2; not deleted: none" if left == [3] else "2; not deleted: 1"
        assert f"steps that were deleted: {told}" in caplog.text
        monkeypatch.undo()
        if is_manager:
            save(manager, 4)
            assert manager.all_steps() == [4]


@pytest.mark.parametrize("error", [errors.ThrottledError, errors.CheckpointConflictError])
def test_no_further_step_is_tried_if_it_would_fail_as_well(run, monkeypatch, error) -> None:
    fill(run, 1, 2, 3)
    tried = []

    def refuse(uri, *_) -> None:
        tried.append(uri.folder)
        raise error("not now")

    monkeypatch.setattr("cloudckpt.runs.pruning.delete_at", refuse)
    with pytest.raises(error, match="deleted: none; not deleted: 1, 2"):
        prune(run, max_to_keep=1)
    assert tried == ["step-1"]


def test_a_step_that_can_not_be_compared_stays_and_keeps_no_other(run, caplog, monkeypatch) -> None:
    read = catalog.read_notes

    def deny(store, uri, retrier) -> Notes:
        if str(uri).endswith("step-1"):
            raise errors.AccessDeniedError("not now")
        return read(store, uri, retrier)

    fill(run, 1, 2, 3)  # the last is the best
    with managed(run, best_to_keep=1, **BY_LOSS) as manager:
        manager.restore(state())
        with monkeypatch.context() as patch:
            patch.setattr(catalog, "read_notes", deny)
            for step in (4, 5):
                save(manager, step)
                assert manager.all_steps() == [step]
            with pytest.raises(errors.AccessDeniedError):
                manager.best_step()
        assert caplog.text.count("the notes of step-1 can't be read") == 1
        save(manager, 6)
        assert manager.all_steps() == [6]


def test_the_best_step_is_found_while_others_are_deleted(run, monkeypatch) -> None:
    fill(run, 1, 2, 3)
    with managed(run, best_to_keep=1, **BY_LOSS) as manager:
        manager.restore(state())
        listing, listed = Run.steps, list[int]()

        def then_deleted(found: Run) -> list[int]:
            steps = listing(found)
            if not listed:
                listed.extend(steps)
                save(manager, 4)
            return steps

        monkeypatch.setattr(Run, "steps", then_deleted)
        assert manager.best_step() == 4
        assert listed == [1, 2, 3]


def test_what_any_rule_keeps_stays(folder, monkeypatch) -> None:
    losses = {1: 0.1, 2: 0.5, 3: 0.3, 4: 0.9, 5: 0.9, 6: 0.9}
    rules = {"max_to_keep": 2, "best_to_keep": 1, "best_metric": "loss", "best_mode": "max"}
    with managed(folder, **rules, keep_period=3) as manager:
        for step, loss in losses.items():
            manager.save(step, state(step), metrics={"loss": loss})
        manager.wait_until_finished()
        assert manager.all_steps() == [3, 5, 6]
    assert prune(folder, max_to_keep=1, keep_younger_than=3600) == []
    assert prune(folder, max_to_keep=2, dry_run=True) == [manager.uri(3)]
    tomorrow = time.time() + 86_400
    with monkeypatch.context() as patch:  # the clock of this machine, not that of the disk
        patch.setattr(time, "time", lambda: tomorrow)
        assert prune(folder, keep_younger_than=3600) == []
    os.utime(folder / "step-3" / ".metadata", (time.time() - 7200,) * 2)
    assert prune(folder, keep_younger_than=3600) == [manager.uri(3)]
    assert not cloudckpt.exists(manager.uri(3))
    assert cloudckpt.exists(manager.uri(5))


def test_a_step_without_the_metric_is_kept_told_and_never_the_best(run, caplog) -> None:
    nan = [math.nan, np.float32("nan"), torch.tensor(math.nan)]
    found = [{"loss": 0.5, "x": nan[0]}, {"loss": 0.6}, *({"loss": one} for one in nan), None]
    with managed(run, best_to_keep=1, **BY_LOSS) as manager:
        assert manager.restore(state()) is manager.latest_step() is None
        for step, metrics in enumerate(found):
            manager.save(step, state(step), metrics=metrics)
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 2, 3, 4, 5]
        assert caplog.text.count("its metric loss is not a number (NaN)") == 3
        assert manager.best_step() == 0
        assert manager.metrics(5) == {}
        manager.delete(0)
        assert manager.best_step() is None


def test_a_step_that_is_being_saved_is_deleted_when_it_is_committed(run) -> None:
    held = Held()
    with managed(run, hook=held, asynchronous=True) as manager:
        manager.save(1, state(1))
        assert held.reached.wait(60)
        deleting = threading.Thread(target=manager.delete, args=(1,))
        deleting.start()
        held.opened.set()
        deleting.join(60)
        assert manager.all_steps() == []


def test_a_step_that_is_being_replaced_is_not_deleted_beside(run) -> None:
    fill(run, 1, 2)
    held, options = Held(), {"max_to_keep": 1, "asynchronous": True}
    with managed(run, hook=held, **options) as manager, ThreadPoolExecutor(1) as thread:
        manager.restore(state())
        manager.save(3, state(3))  # behind which step 1 is not to be kept
        assert held.reached.wait(60)
        replacing = thread.submit(manager.save, 1, state(7), force=True)
        held.opened.set()
        assert replacing.result(60)
        manager.wait_until_finished()
        assert manager.all_steps() == [3]


class Watched(dict):
    """A state that does something while it is loaded."""

    def __init__(self, content: dict, then) -> None:
        super().__init__(content)
        self._then = then

    def items(self):
        self._then()
        return super().items()


def test_a_step_that_is_being_restored_is_not_deleted_beside(run) -> None:
    fill(run, 1, 2)
    with managed(run, max_to_keep=1) as manager:

        def pruned() -> list[int]:
            manager._pruner.after(None, keep_abandoned=True)
            manager.wait_until_finished()
            return manager.all_steps()

        seen = list[list[int]]()
        assert manager.restore(Watched(state(), lambda: seen.append(pruned())), step=1) == 1
        assert seen[0] == [1, 2]
        assert pruned() == [2]


def test_a_step_is_restored_while_an_older_one_is_deleted(run, monkeypatch) -> None:
    fill(run, 1, 2, 3)
    delete_at, has_begun, may_end = pruning.delete_at, threading.Event(), threading.Event()

    def slow(*args) -> None:
        has_begun.set()
        may_end.wait(10)
        delete_at(*args)

    monkeypatch.setattr(pruning, "delete_at", slow)
    with managed(run, max_to_keep=1) as manager:
        manager._pruner.after(None, keep_abandoned=True)
        assert has_begun.wait(10)
        assert manager.restore(state(), step=2) == 2
        may_end.set()
        manager.wait_until_finished()
        assert manager.all_steps() == [3]


# jobs that are about to end


def test_only_a_job_that_saves_heeds_a_signal(run) -> None:
    fill(run, 1)
    before = signal.getsignal(signal.SIGTERM)
    with managed(run, preemption=None) as manager:
        manager.restore(state())
        assert signal.getsignal(signal.SIGTERM) is before
        manager.save(2, state(2))
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_only_the_first_step_after_the_signal_is_saved_out_of_turn(run) -> None:
    preemption = Preemption(signals=(), is_due=lambda: True)
    with managed(run, save_interval_steps=3, preemption=preemption) as manager:
        saved = [step for step in range(1, 7) if manager.should_save(step)
                 and manager.save(step, state(step))]  # fmt: skip
        assert saved == [1, 3, 6]
        assert manager.reached_preemption(6)


def test_what_failed_before_does_not_keep_the_last_step_from_being_saved(run, caplog) -> None:
    due = [False]
    preemption = Preemption(signals=(), is_due=lambda: due[0])
    options = {"hook": Acting(1, fails), "asynchronous": True}
    with managed(run, **options, preemption=preemption) as manager:
        manager.save(1, state(1))
        due[0] = True
        with caplog.at_level(logging.ERROR, "cloudckpt"):
            assert manager.save(2, state(2))
        assert manager.all_steps() == [2]
        assert "the dog ate it" in caplog.text


def test_a_forked_process_is_refused_and_ends_by_its_signal(run) -> None:
    def fork() -> None:
        with pytest.raises(errors.ClosedError):
            manager.save(2, state(2))
        manager.close()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)  # the signal ends it

    with managed(run, preemption=Preemption()) as manager:
        manager.save(1, state(1))
        with pytest.raises(ChildDiedError, match=f"exit code -{signal.SIGTERM.value}"):
            in_a_child("fork", fork)
        assert not manager.reached_preemption(2)
        assert manager.all_steps() == [1]


# restoring


def test_a_job_begins_from_a_part_of_another_run_or_checkpoint(run, caplog) -> None:
    base = f"{run}-base"
    fill(base, 3, 8)
    for source, options in ((base, {}), (f"{base}/step-8", {}), (base, {"step": 3})):
        found = {"model": {"w": torch.zeros(300)}, "step": -1}
        with managed(run) as manager:
            assert manager.restore(found) is None
            step = manager.restore(found, source=source, keys="model.*", **options)
            assert (value(found), found["step"], step) == (step, -1, options.get("step", 8))
            assert manager.should_save(1)
            with pytest.raises(errors.ConfigError, match="match nothing"):
                manager.restore(found, source=source, keys=["modle.*"])
            with pytest.raises(errors.CheckpointNotFoundError):
                manager.restore(found, source=f"{run}-nothing")
            with pytest.raises(errors.CheckpointNotFoundError, match="steps: 3, 8"):
                manager.restore(found, source=base, step=4)
    fill(run, 5)
    with managed(run) as manager:
        found = {"model": {"w": torch.zeros(300)}, "step": -1}
        assert manager.restore(found, keys="step") == 5
        assert (value(found), found["step"]) == (0, 5)
    cloudckpt.copy(base, run)
    assert "has saved into the target" in caplog.text


def test_a_step_is_restored_that_is_being_saved(run) -> None:
    held = Held()
    with managed(run, hook=held, asynchronous=True) as manager:
        manager.save(1, state(1))
        assert held.reached.wait(60)
        opening = threading.Timer(0.5, held.opened.set)
        opening.start()
        assert manager.restore(state()) == 1
        save(manager, 2)
        assert manager.all_steps() == [1, 2]


def test_a_state_is_as_it_was_if_nothing_that_is_verified_is_whole(folder) -> None:
    fill(folder, 1, 2)
    for step in (1, 2):
        damage(folder / f"step-{step}")
    found = state(9)
    with managed(folder) as manager, pytest.raises(errors.CheckpointCorruptError, match="step-2"):
        manager.restore(found, verify=True)
    assert value(found) == 9


def test_no_save_refers_to_an_abandoned_step(run, monkeypatch) -> None:
    with managed(run, incremental=True) as old:
        save(old, 1)
        with managed(run, incremental=True) as new:
            assert new.restore(state()) == 1
            old.save(7, state(7))
            new.save(2, state(7))
            monkeypatch.setattr("cloudckpt.dcp.incremental._bases", {})  # it has forgotten its own
            new.save(3, state(7))
            assert [*cloudckpt.inspect(new.uri(3)).shared] == [new.uri(2)]


@pytest.mark.parametrize("how", ["changed", "gone"])
def test_no_save_refers_to_what_a_restore_found_damaged(folder, how) -> None:
    """The bytes of the next saves are those that the damaged step had."""
    fill(folder, 1, 2, incremental=True)
    if how == "changed":
        damage(folder / "step-2")
    else:
        min((folder / "step-2").glob("*.distcp")).unlink()
    with managed(folder, incremental=True) as manager:
        assert manager.restore(state()) == 1
        for step in (2, 3):
            manager.save(step, state(2))
            found = state()
            cloudckpt.load(found, checkpoint_id=manager.uri(step))
            assert value(found) == 2


# ranks


def _run_of_ranks(run: str, is_told: bool) -> tuple:
    rank = dist.get_rank()
    step_due = [False]
    preemption = Preemption(signals=(), is_due=lambda: step_due[0] and rank == 1)
    options = {"save_interval_steps": 2, "max_to_keep": 2, "asynchronous": True}
    with managed(run, **options, preemption=preemption) as manager:
        began = manager.restore(state())
        saved = []
        for step in range((began or 0) + 1, 20):
            step_due[0] = is_told and step >= 13
            if manager.save(step, state(step), metrics={"loss": step}):
                saved.append(step)
            if manager.reached_preemption(step):
                break
        manager.wait_until_finished()
        return began, saved, manager.all_steps(), manager.metrics(saved[-1])


def test_ranks_save_prune_and_stop_alike(ranks, folder) -> None:
    first = None, [2, 4, 6, 8, 10, 12, 14], [12, 14], {"loss": 14.0}
    assert ranks(2, _run_of_ranks, str(folder), True) == [first] * 2
    second = 14, [16, 18], [16, 18], {"loss": 18.0}
    assert ranks(2, _run_of_ranks, str(folder), False) == [second] * 2


def _open_differently(run: str) -> None:
    rank = dist.get_rank()
    with pytest.raises(errors.DifferentCheckpointsError):
        managed(f"{run}-{rank}")
    with pytest.raises(errors.ConfigError, match=r"overwrite=False, but .*overwrite=True: "):
        managed(run, cloudckpt.Config(overwrite=rank == 1))
    for name in ("save_interval_steps", "max_to_keep", "keep_period", "keep_abandoned"):
        with pytest.raises(errors.ConfigError, match=rf"options {name}=1, but .* {name}=2: "):
            managed(run, **{name: 1 + rank})
    managed(run, preemption=Preemption(deadline=1e10 + rank)).close()


def test_ranks_that_mean_different_runs_or_options_are_told_at_once(ranks, folder) -> None:
    assert ranks(2, _open_differently, str(folder)) == [None, None]


class _Refuses:
    """Its load_state_dict fails on the second rank."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.calls = error, 0

    def state_dict(self) -> dict:
        return {"a": torch.zeros(1)}

    def load_state_dict(self, state: dict) -> None:
        self.calls += 1
        if dist.get_rank() == 1:
            raise self.error


def _restore_refused(run: str) -> list[tuple]:
    told = []
    with managed(run) as manager:
        for step in (1, 2):
            manager.save(step, {"own": _Refuses()})
        for error in (ValueError("mine"), errors.CheckpointCorruptError("another one is damaged")):
            own = _Refuses(error)
            with pytest.raises(errors.CheckpointError) as caught:
                manager.restore({"own": own})
            told.append((type(caught.value), getattr(caught.value, "failures", None), own.calls))
    return told


def test_a_value_that_refuses_its_state_on_one_rank_fails_the_restore_on_all(ranks, folder) -> None:
    """No older step is tried: the checkpoint is not damaged."""
    refused = errors.RanksFailedError, {1: "ValueError: mine (in load_state_dict of own)"}, 1
    assert (
        ranks(2, _restore_refused, str(folder))
        == [[refused, (errors.CheckpointError, None, 1)]] * 2
    )


def _save_sharded(run: str) -> None:
    rank = dist.get_rank()
    with managed(run) as manager:
        for step in (1, 2):
            manager.save(step, {f"w{rank}": torch.full((300,), float(step))})
        with pytest.raises(errors.ConfigError, match="match nothing"):  # on the second rank alone
            manager.restore({f"w{rank}": torch.zeros(300)}, keys="w0")


def _restore_sharded(run: str, is_alike: bool, verify: bool) -> tuple[int | None, list[float]]:
    """What a job restores whose ranks ask for their own tensor, or all for the first rank's."""
    name = "w0" if is_alike else f"w{dist.get_rank()}"
    found = {name: torch.zeros(300)}
    with managed(run) as manager:
        step = manager.restore(found, verify=verify)
    return step, found[name].unique().tolist()


def test_all_ranks_fall_back_alike_whatever_each_of_them_finds_and_asks_for(ranks, folder) -> None:
    ranks(2, _save_sharded, str(folder))
    _, unasked = sorted((folder / "step-2").glob("*.distcp"))
    unasked.unlink()
    assert ranks(2, _restore_sharded, str(folder), True, False) == [(2, [2.0])] * 2
    assert ranks(2, _restore_sharded, str(folder), True, True) == [(1, [1.0])] * 2
    damage(folder / "step-2")
    assert ranks(2, _restore_sharded, str(folder), False, False) == [(1, [1.0])] * 2


# calls that make no sense

MISUSED = {
    "save_interval_steps": [{"save_interval_steps": 0}],
    "max_to_keep": [{"max_to_keep": 0}],
    "best_metric": [{"best_metric": "loss"}, {"best_metric": ["loss"], "best_mode": "min"}],
    "best_mode": [{"best_mode": "min"}, {"best_metric": "loss", "best_mode": "lowest"}],
    "keep_younger_than": [{"keep_younger_than": 0}],
    "save_interval_seconds": [
        {"save_interval_seconds": 0},
        {"save_interval_seconds": 10**400},
        {"save_interval_seconds": 60, "save_interval_steps": 2},
    ],
    "step_name": [{"step_name": "step"}],
    "preemption": [{"preemption": signal.SIGTERM}],
    "best_to_keep": [{"best_to_keep": 2}],
    "on_failure": [{"on_failure": "ignore"}],
    "max_failures": [{"max_failures": 0}, {"max_failures": 1.5}],
}


@pytest.mark.parametrize("name", MISUSED)
def test_options_that_make_no_sense_are_refused(run, name) -> None:
    for options in MISUSED[name]:
        with pytest.raises(errors.ConfigError, match=name):
            managed(run, **options)


def test_what_no_call_can_take_is_refused(run) -> None:
    with managed(run, save_interval_steps=10) as manager:
        for given in ({"metrics": {"loss": "low"}}, {"metrics": {1: 2.0}}):
            with pytest.raises(errors.ConfigError, match="is not a number"):
                manager.save(10, state(1), **given)
        for given in ({"metrics": [1.0]}, {"notes": "text"}):
            with pytest.raises(errors.ConfigError, match="give a dict"):
                manager.save(20, state(1), **given)
        for step in (1.5, "2", None, True, -1):
            with pytest.raises(errors.ConfigError, match="whole number"):
                manager.save(step, state(1))
        with pytest.raises(errors.ConfigError, match="best_metric"):
            manager.best_step()
    manager.close()
    for call in (lambda: manager.save(1, state(1)), lambda: manager.restore(state())):
        with pytest.raises(errors.ClosedError):
            call()
    with pytest.raises(errors.ConfigError, match="CheckpointerConfig"):
        CheckpointManager(run, config=Config(), checkpointer=CheckpointerConfig())
