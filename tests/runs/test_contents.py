"""What is in a checkpoint is told without reading tensors, and verified without keeping them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import cloudckpt
from cloudckpt.checkpoint.notes import Notes
from cloudckpt.runs.contents import StoredItem, inspect

STATE = {
    "model": {
        "weight": torch.arange(600_000.0).reshape(600, 1000),
        "bias": torch.ones(7, dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 5),
    },
    "step": 7,
}


@pytest.fixture
def saved(tmp_path) -> Path:
    writer = cloudckpt.CloudStorageWriter(
        tmp_path / "step-7", notes=Notes(step=7, metrics={"loss": 0.5})
    )
    cloudckpt.save(STATE, storage_writer=writer)
    return tmp_path / "step-7"


@pytest.fixture
def of_torch(tmp_path) -> Path:
    dcp.save(STATE, checkpoint_id=str(tmp_path / "torch"))
    return tmp_path / "torch"


def test_names_shapes_types_sizes_and_notes_are_told(saved) -> None:
    found = inspect(saved)
    assert found.uri == saved.as_uri()
    assert found.items[:-1] == (
        StoredItem(name="model.bias", shape=(7,), dtype="bfloat16", nbytes=14, chunks=1),
        StoredItem(name="model.empty", shape=(0, 5), dtype="float32", nbytes=0, chunks=1),
        StoredItem(name="model.scalar", shape=(), dtype="int64", nbytes=8, chunks=1),
        StoredItem(
            name="model.weight", shape=(600, 1000), dtype="float32", nbytes=2_400_000, chunks=1
        ),
    )
    step = found.items[-1]
    assert (step.name, step.shape, step.dtype, step.chunks) == ("step", None, None, 1)
    assert 0 < step.nbytes < 2000
    assert found.nbytes == sum(item.nbytes for item in found.items)
    assert found.notes == Notes(step=7, metrics={"loss": 0.5})
    assert found.has_checksums


def test_checkpoints_of_torch_are_told_as_well(saved, of_torch) -> None:
    found, ours = inspect(of_torch), inspect(saved)
    assert [item for item in found.items if item.shape is not None] == [
        item for item in ours.items if item.shape is not None
    ]
    assert not found.has_checksums
    assert found.notes == Notes()
