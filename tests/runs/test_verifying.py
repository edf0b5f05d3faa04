"""All of a checkpoint is read; all damage is told; ranks divide the work."""

from __future__ import annotations

import dataclasses
import io
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
from cloudckpt.errors import (
    CheckpointCorruptError,
)
from cloudckpt.runs.contents import inspect
from cloudckpt.runs.verifying import Verified, verify

STATE = {
    "model": {
        "weight": torch.arange(600_000.0).reshape(600, 1000),
        "bias": torch.ones(7, dtype=torch.bfloat16),
        "empty": torch.empty(0, 5),
    },
    "step": 7,
}


@pytest.fixture
def saved(tmp_path) -> Path:
    cloudckpt.save(STATE, checkpoint_id=tmp_path / "step-7")
    return tmp_path / "step-7"


@pytest.fixture
def of_torch(tmp_path) -> Path:
    dcp.save(STATE, checkpoint_id=str(tmp_path / "torch"))
    return tmp_path / "torch"


def test_all_of_a_whole_checkpoint_is_verified(saved) -> None:
    seen: list[tuple[int, int]] = []
    found = verify(saved, progress=lambda done, total: seen.append((done, total)))
    assert found == Verified(items=4, nbytes=inspect(saved).nbytes, has_checksums=True)
    done, total = max(seen)
    assert done == total > found.nbytes  # envelopes are read, too


def test_of_a_checkpoint_of_torch_all_bytes_are_seen_to_be_there(of_torch) -> None:
    found = verify(of_torch)
    assert not found.has_checksums
    assert found.items == 4
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
    with pytest.raises(CheckpointCorruptError, match="and of 2 more") as caught:
        verify(tmp_path)
    damages = caught.value.damages
    assert [damage.item for damage in damages] == ["a", "a", "c"]
    assert {damage.object for damage in damages} == {data.as_uri()}
    for damage, at in zip(damages, (0.1, 0.11, 0.6), strict=True):
        assert damage.start is not None
        assert damage.start <= int(len(content) * at) < damage.stop
    assert pickle.loads(pickle.dumps(caught.value)).damages == damages


def flip(path: Path, *places: int) -> None:
    content = bytearray(path.read_bytes())
    for at in places:
        content[at] ^= 0x10
    path.write_bytes(content)


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


class Empty(dcp.DefaultSavePlanner):
    """Writes values that take no byte at all, and lists all names in the reverse order."""

    def transform_object(self, write_item, object):
        if write_item.index.fqn.startswith("empty"):
            return io.BytesIO()
        return super().transform_object(write_item, object)

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        entries = reversed(metadata.state_dict_metadata.items())
        return plans, dataclasses.replace(metadata, state_dict_metadata=dict(entries))


@pytest.mark.parametrize("names", [("empty", "a"), ("a", "empty"), ("empty", "a", "empty2", "b")])
def test_beside_items_without_bytes_no_byte_changes_unseen(tmp_path, names) -> None:
    state = {name: 0 if name.startswith("empty") else torch.ones(3) for name in names}
    cloudckpt.save(state, checkpoint_id=tmp_path, planner=Empty())
    assert verify(tmp_path).items == len(names)
    [data] = tmp_path.glob("*.distcp")
    content = data.read_bytes()
    for at in range(0, len(content), 30):
        flip(data, at)
        with pytest.raises(CheckpointCorruptError):
            verify(tmp_path)
        data.write_bytes(content)


def test_a_file_of_torch_without_bytes_is_missed(tmp_path) -> None:
    writer = dcp.FileSystemWriter(tmp_path, single_file_per_rank=False)
    dcp.save({"empty": 0, "a": torch.ones(3)}, storage_writer=writer, planner=Empty())
    assert verify(tmp_path).items == 2
    [empty] = [path for path in tmp_path.glob("*.distcp") if not path.stat().st_size]
    empty.unlink()
    with pytest.raises(CheckpointCorruptError, match="gone") as caught:
        verify(tmp_path)
    assert [damage.item for damage in caught.value.damages] == ["empty"]


def test_envelopes_of_another_version_are_no_damage(tmp_path, monkeypatch) -> None:
    def other(dtype, shape):
        """As another version may write it: with the CRC32 of the elements."""
        made = envelope(dtype, shape)
        return Envelope(made.head, made.tail[:4] + b"7" + made.tail[5:])  # amid the CRC32

    monkeypatch.setattr(shard, "envelope", other)
    cloudckpt.save(STATE, checkpoint_id=tmp_path)
    assert verify(tmp_path).items == 4
    [data] = tmp_path.glob("__0_0.*.distcp")
    flip(data, 100_000)
    with pytest.raises(CheckpointCorruptError) as caught:
        verify(tmp_path)
    assert [damage.item for damage in caught.value.damages] == ["model.weight"]


def test_a_damaged_index_hides_no_other_damage(saved) -> None:
    [large] = saved.glob("__0_0.*.distcp")
    [small] = saved.glob("__0_1.*.distcp")
    flip(small, -1)
    flip(large, 100_000)
    with pytest.raises(CheckpointCorruptError) as caught:
        verify(saved)
    found = {(damage.object, damage.item) for damage in caught.value.damages}
    assert found == {
        (small.as_uri(), f"the index of {small.name}"),
        (large.as_uri(), "model.weight"),
    }


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


def test_an_object_that_is_gone_hides_no_other_damage(saved) -> None:
    [large] = saved.glob("__0_0.*.distcp")
    [small] = saved.glob("__0_1.*.distcp")
    small.unlink()
    flip(large, 100_000)
    with pytest.raises(CheckpointCorruptError, match="gone") as caught:
        verify(saved)
    assert [damage.object for damage in caught.value.damages] == [small.as_uri(), large.as_uri()]


def test_damage_of_the_part_for_other_readers_hides_no_other_damage(saved, monkeypatch) -> None:
    monkeypatch.setattr("cloudckpt.checkpoint.committed._TAIL", 1500)  # which is 4 MiB
    [large] = saved.glob("__0_0.*.distcp")
    flip(saved / ".metadata", 10)
    flip(large, 100_000)
    with pytest.raises(CheckpointCorruptError, match="other readers") as caught:
        verify(saved)
    assert [damage.item for damage in caught.value.damages] == ["", "model.weight"]


@pytest.mark.parametrize("at", [100, -300, -60])  # torch's part, the columns, the trailer
def test_damaged_metadata_are_among_the_damages(saved, at) -> None:
    flip(saved / ".metadata", at)
    with pytest.raises(CheckpointCorruptError) as caught:
        verify(saved)
    assert [damage.object for damage in caught.value.damages] == [(saved / ".metadata").as_uri()]


def _verify(uri: str) -> tuple[int, Verified]:
    done = [0]
    found = verify(
        uri, process_group=dist.group.WORLD, progress=lambda moved, total: done.append(moved)
    )
    return max(done), found


def _save_parts(uri: str) -> None:
    cloudckpt.save({f"of-{dist.get_rank()}": torch.arange(1_000_000.0)}, checkpoint_id=uri)


def test_ranks_divide_the_objects(ranks, tmp_path) -> None:
    ranks(2, _save_parts, str(tmp_path))
    (one, found), (other, again) = ranks(2, _verify, str(tmp_path))
    assert found == again == Verified(items=2, nbytes=8_000_000, has_checksums=True)
    assert 8_000_000 <= one + other < 8_100_000
    assert min(one, other) >= 4_000_000


def test_what_each_rank_finds_damaged_is_told_to_all(ranks, tmp_path) -> None:
    ranks(2, _save_parts, str(tmp_path))
    for data in tmp_path.glob("*.distcp"):
        for at in (500_000, 2_000_000):
            flip(data, at)
    errors = ranks.errors(2, _verify, str(tmp_path))
    assert [type(error) for error in errors] == [CheckpointCorruptError] * 2
    assert len(errors[0].damages) == 4
    assert errors[0].damages == errors[1].damages
