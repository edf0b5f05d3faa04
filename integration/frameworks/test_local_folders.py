"""Where a script names a URI, and a framework takes a path: it means the store, or is an error.

Never is there a local folder `s3:` afterwards; `nothing_local` of conftest.py looks for it behind
each test, and here it is looked for anything at all.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.fabric
import lightning.pytorch
import pytest
import ray.train
import torch
from accelerate import Accelerator
from accelerate.tracking import TensorBoardTracker
from accelerate.utils import ProfileKwargs, ProjectConfiguration
from lightning.pytorch.demos.boring_classes import BoringModel
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
from transformers import TrainingArguments

import cloudckpt
from cloudckpt.integrations.torch_checkpointing import CloudStorageConfig
from peft_job import lora


@pytest.fixture
def empty(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The working folder, behind ``install``."""
    here = tmp_path / "cwd"
    here.mkdir()
    monkeypatch.chdir(here)
    cloudckpt.install()
    yield here
    cloudckpt.uninstall()


def _trainer(**options: Any) -> Any:
    trainer = lightning.pytorch.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": 1,
            "limit_val_batches": 0,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        }
    )
    trainer.fit(BoringModel())
    return trainer


def _fabric() -> Any:
    fabric = lightning.fabric.Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    return fabric


def _accelerator(**options: Any) -> Accelerator:
    accelerator = Accelerator(cpu=True, **options)
    accelerator.prepare(torch.nn.Linear(2, 2))
    return accelerator


def _project(root: Any) -> Any:
    return _accelerator(
        project_config=ProjectConfiguration(root, automatic_checkpoint_naming=True)
    ).save_state()


def _lightning_callback(root: Any) -> None:
    saving = lightning.pytorch.callbacks.ModelCheckpoint(root, every_n_train_steps=1)
    _trainer(callbacks=[saving], enable_checkpointing=True)


Act = Callable[[Any], object]
SAVES: dict[str, Act] = {
    "Lightning: save_checkpoint": lambda root: _trainer().save_checkpoint(root),
    "Lightning: ModelCheckpoint": _lightning_callback,
    "Lightning: default_root_dir": lambda root: _trainer(
        default_root_dir=root, enable_checkpointing=True
    ),
    "Fabric: save": lambda root: _fabric().save(root, {"model": torch.nn.Linear(1, 1)}),
    "Accelerate: save_state": lambda root: _accelerator().save_state(root),
    "Accelerate: project": _project,
    "torch_checkpointing: ours": lambda root: (
        CloudStorageConfig().create_storage().write(Path(root) / "x", b"saved")
    ),
}
"""What means the store, if it is given a URI."""

LOCAL: dict[str, Act] = {
    "Lightning: CSVLogger": lambda root: lightning.pytorch.loggers.CSVLogger(root),
    "Lightning: profiler": lambda root: lightning.pytorch.profilers.SimpleProfiler(root),
    "Fabric: CSVLogger": lambda root: lightning.fabric.loggers.CSVLogger(root),
    "Accelerate: save": lambda root: Accelerator(cpu=True).save({"a": 1}, root),
    "Accelerate: save_model": lambda root: _accelerator().save_model(torch.nn.Linear(2, 2), root),
    "Accelerate: profile": lambda root: ProfileKwargs(output_trace_dir=root),
    "Accelerate: TensorBoard": lambda root: TensorBoardTracker("run", root),
    "PEFT: save_pretrained": lambda root: lora(16).save_pretrained(root),
    "PEFT: a configuration": lambda root: lora(16).peft_config["default"].save_pretrained(root),
    "Ray: to_directory": lambda root: ray.train.Checkpoint("/").to_directory(root),
    "torch_checkpointing: its own": lambda root: (
        LocalFileSystemStorageConfig().create_storage().mkdir(root)
    ),
    "Trainer: output_dir": lambda root: TrainingArguments(root, use_cpu=True),
}
"""What is local, whatever it is given."""


@pytest.mark.parametrize("act", SAVES)
def test_what_is_saved_to_a_uri_is_in_the_store_only(empty: Path, run: str, act: str) -> None:
    SAVES[act](run)
    assert _found(run)
    assert not [*empty.iterdir()]


@pytest.mark.parametrize("act", LOCAL)
def test_what_is_local_refuses_uris_and_says_what_to_write(empty: Path, run: str, act: str) -> None:
    with pytest.raises(cloudckpt.errors.CloudCheckpointError, match=run):
        LOCAL[act](run)
    assert not [*empty.iterdir()]
    assert not _found(run)


FOLDED = {
    **{name: act for name, act in (SAVES | LOCAL).items() if not name.endswith("ours")},
    "Lightning: TensorBoardLogger": lambda root: lightning.pytorch.loggers.TensorBoardLogger(root),
}


@pytest.mark.parametrize("act", FOLDED)
def test_a_uri_that_pathlib_has_folded_is_refused(empty: Path, act: str) -> None:
    with pytest.raises(cloudckpt.errors.InvalidURIError, match="lost a slash"):
        FOLDED[act](Path("s3://bucket/run"))
    assert not [*empty.iterdir()]


@functools.cache
def _files() -> Any:
    from cloudckpt.integrations.fsspec import file_system

    return file_system("s3")


def _found(run: str) -> list[str]:
    return list(_files().find(run))
