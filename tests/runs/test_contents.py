"""What is in a checkpoint is told without reading tensors, and verified without keeping them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import cloudckpt
from cloudckpt import Config
from cloudckpt.checkpoint.notes import Notes
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ObjectNotFoundError,
)
from cloudckpt.runs.contents import StoredItem, inspect
from cloudckpt.runs.verifying import Verified, verify

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


def test_all_of_a_whole_checkpoint_is_verified(saved) -> None:
    seen: list[tuple[int, int]] = []
    found = verify(saved, progress=lambda done, total: seen.append((done, total)))
    assert found == Verified(items=5, nbytes=inspect(saved).nbytes, has_checksums=True)
    assert max(seen) == (found.nbytes, found.nbytes)


def test_of_a_checkpoint_of_torch_all_bytes_are_seen_to_be_there(of_torch) -> None:
    found = verify(of_torch)
    assert not found.has_checksums
    assert found.items == 5
    [data] = of_torch.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-1000])
    with pytest.raises(CheckpointCorruptError, match="shorter"):
        verify(of_torch)


@pytest.mark.parametrize("at", [0.1, 0.5, 0.9])
def test_a_changed_byte_of_a_tensor_is_found_and_named(saved, at) -> None:
    [data] = saved.glob("__0_0.*.distcp")
    content = bytearray(data.read_bytes())
    content[int(len(content) * at)] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointCorruptError, match="do not match") as caught:
        verify(saved)
    assert caught.value.item == "model.weight"
    with pytest.raises(CheckpointCorruptError):
        verify(saved, config=Config(verify=False))


def test_all_damages_are_told_and_not_only_the_first(tmp_path) -> None:
    state = {name: torch.arange(600_000.0) for name in "abcd"}
    cloudckpt.save(state, checkpoint_id=tmp_path)
    [data] = tmp_path.glob("__0_0.*.distcp")
    content = bytearray(data.read_bytes())
    for at in (0.1, 0.11, 0.6):
        content[int(len(content) * at)] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointCorruptError, match="2 other blocks") as caught:
        verify(tmp_path)
    damages = caught.value.damages
    assert [damage.item for damage in damages] == ["a", "a", "c"]
    assert {damage.object for damage in damages} == {data.as_uri()}
    for damage, at in zip(damages, (0.1, 0.11, 0.6), strict=True):
        assert damage.start is not None
        assert damage.start <= int(len(content) * at) < damage.stop
    assert pickle.loads(pickle.dumps(caught.value)).damages == damages


def test_an_object_that_is_gone_is_found(saved) -> None:
    [data] = saved.glob("__0_0.*.distcp")
    data.unlink()
    with pytest.raises(CheckpointCorruptError, match="gone") as caught:
        verify(saved)
    assert isinstance(caught.value.__cause__, ObjectNotFoundError)


def test_without_a_checkpoint_there_is_nothing_to_tell(tmp_path) -> None:
    for ask in (inspect, verify):
        with pytest.raises(CheckpointNotFoundError):
            ask(tmp_path / "step-7")


def _save_alone(uri: str) -> None:
    rank = dist.get_rank()
    state = {"shared": torch.ones(4), f"of-{rank}": torch.full((3,), float(rank)), "value": rank}
    cloudckpt.save(state, checkpoint_id=uri, use_collectives=False)


def test_what_ranks_have_saved_each_by_itself_is_told_together(ranks, tmp_path) -> None:
    uri = tmp_path / "alone"
    ranks(2, _save_alone, str(uri))
    found = inspect(uri)
    assert [(item.name, item.chunks) for item in found.items] == [
        ("of-0", 1),
        ("of-1", 1),
        ("shared", 2),
        ("value", 2),
    ]
    assert verify(uri).items == 6
