"""A run, from its first step to its last."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from cloudckpt import CheckpointerConfig, Config
from cloudckpt.errors import (
    CheckpointConflictError,
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ClosedError,
    ConfigError,
)
from cloudckpt.runs.manager import CheckpointManager
from cloudckpt.runs.preemption import Preemption


def managed(run, **options) -> CheckpointManager:
    """A manager that saves in a thread, and heeds no signal of the test."""
    config = options.pop("config", Config())
    kind = AsyncCheckpointerType.THREAD
    options.setdefault("preemption", Preemption(signals=()))
    return CheckpointManager(
        str(run), checkpointer=CheckpointerConfig(config=config, kind=kind), **options
    )


def state(step: float = 0.0) -> dict:
    return {"model": {"w": torch.full((300,), float(step))}, "step": int(step)}


def value(found: dict) -> float:
    assert found["model"]["w"].unique().numel() == 1
    return found["model"]["w"][0].item()


@pytest.fixture
def run(tmp_path) -> Path:
    return tmp_path / "run"


def fill(run, *steps: int, **options) -> None:
    with managed(run, **options) as manager:
        for step in steps:
            manager.save(step, state(step), metrics={"loss": 1 / (1 + step)})


def test_a_new_run_has_nothing_to_restore(run) -> None:
    found = state(9)
    with managed(run) as manager:
        assert manager.restore(found) is None
        assert manager.latest_step() is None
        assert manager.all_steps() == []
    assert value(found) == 9


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_newest_step_is_restored(run, asynchronous) -> None:
    with managed(run, asynchronous=asynchronous) as manager:
        for step in (8, 9, 10):
            assert manager.save(step, state(step))
    found = state()
    with managed(run) as manager:
        assert manager.restore(found) == 10
        assert manager.latest_step() == 10
        assert manager.all_steps() == [8, 9, 10]
        assert not manager.should_save(10)
        assert manager.should_save(11)
    assert value(found) == 10
    assert found["step"] == 10


def test_an_older_step_is_restored_if_it_is_asked_for(run) -> None:
    fill(run, 1, 2)
    found = state()
    with managed(run) as manager:
        assert manager.restore(found, step=1) == 1
        assert value(found) == 1
        with pytest.raises(CheckpointNotFoundError):
            manager.restore(found, step=3)


def test_only_steps_whose_turn_it_is_are_saved(run) -> None:
    with managed(run, save_interval_steps=3) as manager:
        saved = [step for step in range(1, 8) if manager.save(step, state(step))]
        assert saved == [3, 6]
        assert manager.save(8, state(8), force=True)
        assert not manager.save(6, state(6))
        manager.wait_until_finished()
        assert manager.all_steps() == [3, 6, 8]


def test_old_steps_are_deleted_behind_the_commit(run) -> None:
    with managed(run, max_to_keep=2, keep_period=4) as manager:
        for step in range(1, 11):
            manager.save(step, state(step))
        manager.wait_until_finished()
        assert manager.all_steps() == [4, 8, 9, 10]
    assert sorted(path.name for path in run.iterdir() if any(path.glob("*"))) == [
        "step-10", "step-4", "step-8", "step-9",
    ]  # fmt: skip


def test_the_best_steps_are_kept_also_those_of_an_earlier_job(run) -> None:
    losses = {1: 0.5, 2: 0.1, 3: 0.3}
    with managed(run) as manager:
        for step, loss in losses.items():
            manager.save(step, state(step), metrics={"loss": loss})
    with managed(run, max_to_keep=2, best_metric="loss") as manager:
        manager.restore(state())
        manager.save(4, state(4), metrics={"loss": 0.4})
        manager.wait_until_finished()
        assert manager.all_steps() == [2, 3, 4]
        assert manager.best_step() == 2
        assert manager.metrics(3) == {"loss": 0.3}
        manager.save(5, state(5))
        manager.wait_until_finished()
        assert manager.all_steps() == [2, 3, 5]


def test_folders_of_others_stay(run) -> None:
    fill(run, 1)
    for name in ("tensorboard", "step-x", "step-007"):
        (run / name).mkdir()
        (run / name / "file").write_text("mine")
    with managed(run, max_to_keep=1) as manager:
        assert manager.restore(state()) == 1
        manager.save(2, state(2))
        manager.wait_until_finished()
        assert manager.all_steps() == [2]
    assert all((run / name / "file").exists() for name in ("tensorboard", "step-x", "step-007"))


def damage(run: Path, step: int) -> None:
    [data, *_] = sorted((run / f"step-{step}").glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)


def test_a_damaged_checkpoint_is_passed_over_loudly(run, caplog) -> None:
    fill(run, 1, 2, 3)
    damage(run, 3)
    found = state()
    with managed(run) as manager, caplog.at_level(logging.ERROR, "cloudckpt"):
        assert manager.restore(found) == 2
        assert manager.should_save(3)
    assert value(found) == 2
    assert "step 3 can't be restored" in caplog.text


def test_torn_checkpoints_are_none(run) -> None:
    fill(run, 1, 2)
    (run / "step-2" / ".metadata").unlink()
    with managed(run) as manager:
        assert manager.restore(state()) == 1


def test_a_run_of_which_all_is_damaged_is_not_taken_for_a_new_one(run) -> None:
    fill(run, 1, 2)
    damage(run, 1)
    damage(run, 2)
    with managed(run) as manager, pytest.raises(CheckpointCorruptError, match="step-2"):
        manager.restore(state())


def test_a_step_that_was_passed_over_is_saved_anew_and_does_not_count_until_then(run) -> None:
    fill(run, 1, 2, 30)
    damage(run, 30)
    with managed(run, max_to_keep=1) as manager:
        assert manager.restore(state()) == 2
        manager.save(3, state(3))
        manager.wait_until_finished()
        assert manager.all_steps() == [3, 30]
        manager.save(30, state(30))
        manager.wait_until_finished()
        assert manager.all_steps() == [30]
    found = state()
    with managed(run) as manager:
        assert manager.restore(found) == 30


def test_a_step_that_exists_is_replaced_or_refused(run) -> None:
    fill(run, 1)
    with managed(run) as manager:
        manager.save(1, state(7))
    found = state()
    with managed(run, config=Config(overwrite=False)) as manager:
        manager.restore(found)
        assert value(found) == 7
        manager.save(1, state(8), force=True)
        with pytest.raises(CheckpointExistsError):
            manager.wait_until_finished()


def test_a_job_that_another_one_has_taken_over_from_can_not_commit(run) -> None:
    first, second = managed(run), managed(run)
    first.save(1, state(1))
    first.wait_until_finished()
    second.restore(state())
    second.save(2, state(2))
    second.wait_until_finished()
    first.save(3, state(3))
    with pytest.raises(CheckpointConflictError, match=f"process {os.getpid()} on host"):
        first.wait_until_finished()
    second.save(4, state(4))
    second.wait_until_finished()
    assert second.all_steps() == [1, 2, 4]
    second.close()
    first.close()


def test_a_failure_in_the_background_is_raised_once(run) -> None:
    with managed(run) as manager:
        manager.save(1, state(1))
        manager.wait_until_finished()
        (run / ".cloudckpt-job.json").unlink()
        manager.save(2, state(2))
        with pytest.raises(CheckpointConflictError, match="deleted"):
            manager.wait_until_finished()
        manager.wait_until_finished()


def test_a_step_is_deleted(run) -> None:
    fill(run, 1, 2)
    with managed(run) as manager:
        manager.delete(1)
        assert manager.all_steps() == [2]
        with pytest.raises(CheckpointNotFoundError):
            manager.delete(1)


def test_what_can_not_be_deleted_does_not_fail_the_training(run, caplog, monkeypatch) -> None:
    fill(run, 1, 2)

    def deny(*_args, **_options):
        raise PermissionError("no")

    monkeypatch.setattr(Path, "unlink", deny)
    with managed(run, max_to_keep=1) as manager, caplog.at_level(logging.ERROR, "cloudckpt"):
        manager.restore(state())
        manager.save(3, state(3))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2, 3]
        assert "step 1 is not to be kept" in caplog.text
        monkeypatch.undo()
        manager.save(4, state(4))
        manager.wait_until_finished()
        assert manager.all_steps() == [4]


def test_a_job_that_is_about_to_end_saves_its_last_step(run) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with managed(run, save_interval_steps=100, preemption=Preemption()) as manager:
        assert not manager.save(7, state(7))
        assert not manager.reached_preemption(7)
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.save(8, state(8))
        assert manager.reached_preemption(8)
        assert (run / "step-8" / ".metadata").exists()
        assert not manager.save(8, state(8))
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    "options",
    [
        {"save_interval_steps": 0},
        {"max_to_keep": 0},
        {"keep_period": -1},
        {"best_mode": "lowest"},
        {"step_name": "step"},
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(run, options) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        managed(run, **options)


def test_the_best_step_needs_a_metric(run) -> None:
    with managed(run) as manager, pytest.raises(ConfigError, match="best_metric"):
        manager.best_step()


@pytest.mark.parametrize("metrics", [{"loss": "low"}, {1: 2.0}])
def test_what_is_no_metric_is_refused(run, metrics) -> None:
    with managed(run) as manager, pytest.raises(ConfigError, match="is no number"):
        manager.save(1, state(1), metrics=metrics)


def test_a_closed_manager_says_so(run) -> None:
    manager = managed(run)
    manager.close()
    manager.close()
    with pytest.raises(ClosedError):
        manager.save(1, state(1))
    with pytest.raises(ClosedError):
        manager.restore(state())


def _run_of_ranks(run: str, is_told: bool) -> tuple:
    rank = dist.get_rank()
    step_due = [False]
    preemption = Preemption(signals=(), is_due=lambda: step_due[0] and rank == 1)
    with managed(run, save_interval_steps=2, max_to_keep=2, preemption=preemption) as manager:
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


def test_ranks_save_prune_and_stop_alike(ranks, run) -> None:
    assert (
        ranks(2, _run_of_ranks, str(run), True)
        == [(None, [2, 4, 6, 8, 10, 12, 14], [12, 14], {"loss": 14.0})] * 2
    )
    assert (
        ranks(2, _run_of_ranks, str(run), False) == [(14, [16, 18], [16, 18], {"loss": 18.0})] * 2
    )


def _bad_on_one(run: str) -> None:
    options = {"max_to_keep": 0} if dist.get_rank() == 1 else {}
    managed(run, **options)


def test_what_is_wrong_on_one_rank_is_told_to_all(ranks, run) -> None:
    errors = ranks.errors(2, _bad_on_one, str(run))
    assert [type(error) for error in errors] == [ConfigError] * 2


def _restore(run: str) -> int | None:
    with managed(run) as manager:
        return manager.restore(state())


def test_all_ranks_fall_back_to_the_same_step(ranks, run) -> None:
    fill(run, 1, 2, 3)
    damage(run, 3)
    assert ranks(2, _restore, str(run)) == [2, 2]
