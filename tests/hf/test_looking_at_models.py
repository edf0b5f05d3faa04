"""Models in safetensors files are looked at as checkpoints are."""

import pytest
import torch

import cloudckpt
from cloudckpt.errors import CheckpointCorruptError


@pytest.fixture
def model(tmp_path):
    """The location of a model of two files, and its tensors."""
    tensors = {
        "a.weight": torch.arange(600.0).view(20, 30),
        "b.weight": torch.ones(50, dtype=torch.bfloat16),
        "steps": torch.tensor(7),
    }
    cloudckpt.hf.save(tensors, tmp_path / "model", max_shard_size=2000)
    return tmp_path / "model", tensors


def test_inspect_says_what_is_in_a_model(model):
    location, tensors = model
    found = cloudckpt.inspect(location)
    assert not found.has_checksums
    assert {(i.name, i.shape, i.dtype, i.nbytes, i.chunks) for i in found.items} == {
        (name, tuple(t.shape), str(t.dtype).removeprefix("torch."), t.nbytes, 1)
        for name, t in tensors.items()
    }


def test_verify_reads_all_of_a_model(model):
    location, tensors = model
    found = cloudckpt.verify(location)
    assert (found.items, found.has_checksums) == (3, False)
    assert found.nbytes == sum(t.nbytes for t in tensors.values())


def test_verify_tells_a_model_of_which_a_file_is_missing(model):
    location, _ = model
    next(location.glob("model-00002*")).unlink()
    with pytest.raises(CheckpointCorruptError, match="model-00002"):
        cloudckpt.verify(location)


def test_diff_compares_a_model_with_a_checkpoint(model, tmp_path):
    location, tensors = model
    cloudckpt.save({**tensors, "steps": torch.tensor(8)}, checkpoint_id=tmp_path / "checkpoint")
    found = cloudckpt.diff(location, tmp_path / "checkpoint")
    assert {item.name for item in found.items} == tensors.keys()
    assert {item.verdict for item in found.items} == {"unknown"}  # a model has no checksums
