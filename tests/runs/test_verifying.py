"""What is in a checkpoint is told from its metadata, and all of it is verified by reading it."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import cloudckpt
from cloudckpt import Config
from cloudckpt.checkpoint import shard
from cloudckpt.checkpoint.envelope import Envelope, envelope
from cloudckpt.checkpoint.notes import Notes
from cloudckpt.errors import CheckpointCorruptError
from cloudckpt.runs.contents import StoredItem, inspect
from cloudckpt.runs.verifying import Verified, verify
from runs.managed import flip

STATE = {
    "model": {
        "weight": torch.arange(600_000.0).reshape(600, 1000),
        "bias": torch.ones(7, dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 5),
    },
    "step": 7,
}


NOTES = Notes(step=7, metrics={"loss": 0.5})


@pytest.fixture
def saved(tmp_path) -> Path:
    writer = cloudckpt.CloudStorageWriter(tmp_path / "step-7", notes=NOTES)
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
    assert found.notes == NOTES
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
    done, total = max(seen)
    assert done == total > found.nbytes  # envelopes are read, too


def test_of_a_checkpoint_of_torch_all_bytes_are_seen_to_be_there(of_torch) -> None:
    found = verify(of_torch)
    assert not found.has_checksums
    assert found.items == 5
    [data] = of_torch.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-1000])
    with pytest.raises(CheckpointCorruptError, match="shorter"):
        verify(of_torch)


def test_all_damages_are_told_and_not_only_the_first(tmp_path) -> None:
    state = {name: torch.arange(600_000.0) for name in "abcd"}
    cloudckpt.save(state, checkpoint_id=tmp_path)
    [data] = tmp_path.glob("__0_0.*.distcp")
    size = data.stat().st_size
    flip(data, *(int(size * at) for at in (0.1, 0.11, 0.6)))
    with pytest.raises(CheckpointCorruptError, match="the first of 3 damaged blocks") as caught:
        verify(tmp_path)
    damages = caught.value.damages
    assert [damage.item for damage in damages] == ["a", "a", "c"]
    assert {damage.object for damage in damages} == {data.as_uri()}
    for damage, at in zip(damages, (0.1, 0.11, 0.6), strict=True):
        assert damage.start is not None
        assert damage.start <= int(size * at) < damage.stop
    assert pickle.loads(pickle.dumps(caught.value)).damages == damages


@pytest.mark.parametrize("number", [0, 1])
def test_no_byte_of_an_object_changes_unseen(saved, number) -> None:
    """Of envelopes neither: loads do not look at them, but stock torch can't do without."""
    [data] = saved.glob(f"__0_{number}.*.distcp")
    content = data.read_bytes()
    starts = {0, 64, 700, len(content) - 1, len(content) - 60}
    archives = [at for at in range(0, len(content), 64) if content[at : at + 4] == b"PK\3\4"]
    for at in sorted(starts | {place for start in archives for place in (start, start - 1)} - {-1}):
        flip(data, at)
        with pytest.raises(CheckpointCorruptError) as caught:
            verify(saved)
        assert any(one.start <= at < one.stop for one in caught.value.damages), at
        assert all(one.item.count("the bytes") <= 1 for one in caught.value.damages)
        data.write_bytes(content)
    verify(saved)


def test_envelopes_of_another_version_are_no_damage(tmp_path, monkeypatch) -> None:
    def other(dtype, shape):
        """As another version may write it: with the CRC32 of the elements."""
        made = envelope(dtype, shape)
        return Envelope(made.head, made.tail[:4] + b"7" + made.tail[5:])  # amid the CRC32

    monkeypatch.setattr(shard, "envelope", other)
    cloudckpt.save(STATE, checkpoint_id=tmp_path)
    assert verify(tmp_path).items == 5
    [data] = tmp_path.glob("__0_0.*.distcp")
    flip(data, 100_000)
    with pytest.raises(CheckpointCorruptError) as caught:
        verify(tmp_path)
    assert [damage.item for damage in caught.value.damages] == ["model.weight"]


def test_damage_of_what_is_shared_is_damage_to_what_shares_it(tmp_path) -> None:
    state, config = {name: torch.ones(50) * ord(name) for name in "abc"}, Config(incremental=True)
    for step in (1, 2):
        cloudckpt.save(state, checkpoint_id=tmp_path / f"step-{step}", config=config)
        state["b"] = state["b"] + 0.5
    verify(tmp_path / "step-2")
    [data] = (tmp_path / "step-1").glob("*.distcp")
    content = data.read_bytes()
    for name in "abc":
        data.write_bytes(content)
        flip(data, content.index(bytes((torch.ones(50) * ord(name)).numpy())))
        if name == "b":  # it does not refer to what is there
            verify(tmp_path / "step-2")
            continue
        with pytest.raises(CheckpointCorruptError) as caught:
            verify(tmp_path / "step-2")
        assert {one.item for one in caught.value.damages} == {name}


def _verify(uri: str) -> tuple[int, Verified]:
    done = [0]
    found = verify(
        uri, process_group=dist.group.WORLD, progress=lambda moved, total: done.append(moved)
    )
    return max(done), found


def _save_parts(uri: str) -> None:
    cloudckpt.save({f"of-{dist.get_rank()}": torch.arange(1_000_000.0)}, checkpoint_id=uri)


def test_ranks_divide_the_objects_and_all_are_told_what_each_finds_damaged(ranks, tmp_path) -> None:
    ranks(2, _save_parts, str(tmp_path))
    (one, found), (other, again) = ranks(2, _verify, str(tmp_path))
    assert found == again == Verified(items=2, nbytes=8_000_000, has_checksums=True)
    assert 8_000_000 <= one + other < 8_100_000
    assert min(one, other) >= 4_000_000
    for data in tmp_path.glob("*.distcp"):
        flip(data, 500_000)
        flip(data, 2_000_000)
    errors = ranks.errors(2, _verify, str(tmp_path))
    assert [type(error) for error in errors] == [CheckpointCorruptError] * 2
    assert len(errors[0].damages) == 4
    assert errors[0].damages == errors[1].damages


@pytest.mark.parametrize("how", ["an index", "an object that is gone", "torch's metadata"])
def test_one_damage_hides_no_other(saved, monkeypatch, how) -> None:
    monkeypatch.setattr("cloudckpt.checkpoint.committed._TAIL", 1500)  # which is 4 MiB
    [large] = saved.glob("__0_0.*.distcp")
    [small] = saved.glob("__0_1.*.distcp")
    damaged = saved / ".metadata" if how == "torch's metadata" else small
    small.unlink() if "gone" in how else flip(damaged, -1 if damaged == small else 10)
    flip(large, 100_000)
    with pytest.raises(CheckpointCorruptError) as caught:
        verify(saved)
    found = {(one.object, one.item == "model.weight") for one in caught.value.damages}
    assert found == {(damaged.as_uri(), False), (large.as_uri(), True)}
