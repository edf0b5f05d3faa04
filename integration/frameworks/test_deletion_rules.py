"""What frameworks delete in a run: nothing of another one, and nothing that others refer to.

A table of frameworks. Each trains in one folder, goes on in another one, keeps one checkpoint, and
saves incrementally: what is kept refers to what was deleted.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import lightning.pytorch
import pytest
import torch
from accelerate import Accelerator
from lightning.pytorch.demos.boring_classes import BoringModel

import cloudckpt
from cloudckpt.integrations.accelerate import load_state, save_state
from cloudckpt.integrations.lightning import CloudCheckpointIO, CloudModelCheckpoint
from cloudckpt.integrations.transformers import CloudCheckpointCallback
from test_trainer import _trainer

INCREMENTAL = cloudckpt.Config(incremental=True)


@dataclasses.dataclass(frozen=True)
class Where:
    """Where runs are, and where what stays local goes."""

    root: str
    scratch: Path


Train = Callable[[Where, str, int, str | None], str]
"""Trains in a folder, up to a step, from a checkpoint if one is given, with a save at each step;
returns the last one. One is kept."""


def with_lightning(where: Where, folder: str, steps: int, resume: str | None) -> str:
    saving = CloudModelCheckpoint(
        f"{where.root}/{folder}", every_n_train_steps=1, save_top_k=1, save_last=False
    )
    trainer = _lightning(saving, steps)
    trainer.fit(BoringModel(), ckpt_path=resume)
    assert trainer.global_step == steps
    return str(saving.best_model_path)


def _lightning(saving: CloudModelCheckpoint, steps: int) -> lightning.pytorch.Trainer:
    return lightning.pytorch.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        callbacks=[saving],
        plugins=[CloudCheckpointIO()],
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def with_accelerate(where: Where, folder: str, steps: int, resume: str | None) -> str:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))
    if resume is not None:
        load_state(accelerator, resume)
    for step in (steps - 1, steps):
        save_state(accelerator, f"{where.root}/{folder}/step-{step}", max_to_keep=1)
    return f"{where.root}/{folder}/step-{steps}"


def with_trainer(where: Where, folder: str, steps: int, resume: str | None) -> str:
    saved = CloudCheckpointCallback(f"{where.root}/{folder}", max_to_keep=1)
    trainer = _trainer(where.scratch / folder, saved, steps)
    restored = None
    if resume is not None:
        run, _, step = resume.rpartition("/step-")
        is_own = run == f"{where.root}/{folder}"
        restored = (saved if is_own else CloudCheckpointCallback(run)).restore(int(step))
    trainer.train(resume_from_checkpoint=restored)
    return f"{where.root}/{folder}/step-{steps}"


ROTATIONS: dict[str, Train] = {
    "lightning": with_lightning,
    "accelerate": with_accelerate,
    "trainer": with_trainer,
}


@pytest.fixture
def where(
    environment: dict[str, str], run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Where]:
    here = tmp_path / "cwd"
    here.mkdir()
    monkeypatch.chdir(here)
    cloudckpt.install(config=INCREMENTAL)
    yield Where(run, tmp_path / "scratch")
    cloudckpt.uninstall()
    assert not [*here.iterdir()]


def _there(root: str) -> set[str]:
    """All checkpoints of both runs, each of which is whole."""
    folders = [f"{root}/first", f"{root}/second"]
    found = [one for folder in folders for one in cloudckpt.list_checkpoints(folder)]
    committed = {one.uri for one in found if one.is_committed}
    for uri in committed:
        cloudckpt.verify(uri)
    return committed


@pytest.mark.parametrize("framework", ROTATIONS)
def test_a_run_deletes_nothing_of_another_one_and_not_what_it_has_resumed(
    where: Where, framework: str
) -> None:
    train = ROTATIONS[framework]
    first = train(where, "first", 2, None)
    assert _there(where.root) == {first}
    second = train(where, "second", 4, first)
    assert _there(where.root) == {first, second}

    third = train(where, "second", 6, second)
    assert _there(where.root) == {first, second, third}
    assert any(cloudckpt.inspect(uri).shared for uri in (first, second, third))


def test_accelerate_and_lightning_go_on_with_the_training_that_went_back(where: Where) -> None:
    run = f"{where.root}/first"
    accelerator = Accelerator(cpu=True)
    for step in (1, 2, 3, 4):
        save_state(accelerator, f"{run}/step-{step}")
    again = Accelerator(cpu=True)
    load_state(again, f"{run}/step-2")
    save_state(again, f"{run}/step-3", max_to_keep=1)
    assert cloudckpt.latest(run) == f"{run}/step-3"
    assert _there(where.root) == {f"{run}/step-{step}" for step in (2, 3, 4)}

    for folder, steps, resume in (("second", 4, None), ("second", 3, 2)):
        saving = CloudModelCheckpoint(
            f"{where.root}/{folder}", every_n_train_steps=1, save_top_k=-1
        )
        ckpt = None if resume is None else f"{where.root}/{folder}/step-{resume}"
        _lightning(saving, steps).fit(BoringModel(), ckpt_path=ckpt)
    assert cloudckpt.latest(f"{where.root}/second") == f"{where.root}/second/step-3"


def test_steps_behind_which_the_trainer_went_back_stay_and_do_not_count(where: Where) -> None:
    run = f"{where.root}/first"
    _trainer(where.scratch / "before", CloudCheckpointCallback(run), 4).train()
    saved = CloudCheckpointCallback(run, max_to_keep=1)
    trainer = _trainer(where.scratch / "after", saved, 3)
    trainer.train(resume_from_checkpoint=saved.restore(2))
    kept = _there(where.root)
    assert kept == {f"{run}/step-{step}" for step in (2, 3, 4)}  # resumed, saved, given up
    again = CloudCheckpointCallback(run).restore()
    assert again is not None
    assert again.endswith("checkpoint-3")


def test_a_training_that_goes_on_from_the_local_disk_is_the_same_one(where: Where) -> None:
    run = f"{where.root}/first"
    _trainer(where.scratch, CloudCheckpointCallback(run, max_to_keep=2), 2).train()
    goes_on = _trainer(where.scratch, CloudCheckpointCallback(run, max_to_keep=2), 4)
    goes_on.train(resume_from_checkpoint=True)
    assert _there(where.root) == {f"{run}/step-{step}" for step in (2, 3, 4)}


def test_a_job_that_another_one_has_replaced_neither_saves_nor_deletes(where: Where) -> None:
    run = f"{where.root}/first"
    first, second = Accelerator(cpu=True), Accelerator(cpu=True)
    save_state(first, f"{run}/step-1", max_to_keep=1)
    load_state(second, f"{run}/step-1")
    save_state(second, f"{run}/step-2")
    with pytest.raises(cloudckpt.errors.CheckpointConflictError):
        save_state(first, f"{run}/step-3", max_to_keep=1)
    assert _there(where.root) == {f"{run}/step-{step}" for step in (1, 2)}
    assert cloudckpt.latest(run) == f"{run}/step-2"
