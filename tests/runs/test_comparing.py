"""Two checkpoints are compared by their metadata and checksums."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import cloudckpt
from cloudckpt.checksum import CRC64NVME
from cloudckpt.runs.comparing import diff
from cloudckpt.stores.local import LocalStore

WEIGHT = torch.arange(600_000.0).reshape(600, 1000)


def state() -> dict[str, object]:
    return {
        "weight": WEIGHT.clone(),
        "bias": torch.ones(7, dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 5),
        "step": 7,
    }


def _save_shards(where: str, content: dict[str, object], dimension: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(content["weight"], mesh, [Shard(dimension)])
    cloudckpt.save(content | {"weight": weight}, checkpoint_id=where)


@pytest.fixture
def save(tmp_path, ranks):
    """Saves a state, and returns where; its weight in shards of so many ranks."""

    def saved(content: dict[str, object], name: str, world: int = 1, dimension: int = 0) -> str:
        where = (tmp_path / name).as_uri()
        if world > 1:
            ranks(world, _save_shards, where, content, dimension)
        else:
            cloudckpt.save(content, checkpoint_id=where)
        return where

    return saved


def verdicts(found) -> dict[str, str]:
    return {item.name: item.verdict for item in found.items if item.verdict != "same"}


@pytest.fixture
def nothing_is_read(monkeypatch):
    def refuse(*args: object) -> None:
        raise AssertionError("data was read")

    monkeypatch.setattr("cloudckpt.dcp.loading.download", refuse)


def test_a_state_that_was_saved_twice_is_the_same(save, nothing_is_read) -> None:
    found = diff(save(state(), "a"), save(state(), "b"))
    assert found.are_same is True
    assert [item.name for item in found.items] == ["bias", "empty", "scalar", "step", "weight"]


def test_what_changed_is_told_by_checksums_and_how_much_of_it(save, nothing_is_read) -> None:
    changed = state() | {"step": 8, "scalar": torch.tensor(4)}
    changed["weight"][300, 7] += 1
    found = diff(save(state(), "a"), save(changed, "b"))
    assert verdicts(found) == {"scalar": "changed", "step": "changed", "weight": "changed"}
    assert found.are_same is False
    assert {item.name: item.differing for item in found.items}["weight"] == 2_400_000


def test_names_shapes_types_and_kinds_are_compared(save) -> None:
    other = state() | {
        "bias": torch.ones(7),
        "scalar": 3,
        "weight": WEIGHT.reshape(1000, 600),
        "more": torch.ones(2),
    }
    del other["step"]
    found = diff(save(state(), "a"), save(other, "b"))
    assert verdicts(found) == {
        "bias": "reshaped",
        "more": "added",
        "scalar": "reshaped",
        "step": "removed",
        "weight": "reshaped",
    }
    assert diff(found.first, found.second, pattern="e*").are_same is True


def test_tensors_in_other_rows_are_compared_by_joined_checksums(save, nothing_is_read) -> None:
    changed = state()
    changed["weight"][-1, -1] += 1
    whole, three = save(state(), "whole"), save(state(), "three", 3)
    assert diff(whole, three).are_same is True
    assert diff(three, save(state(), "four", 4)).are_same is True
    assert verdicts(diff(three, save(changed, "changed", 2))) == {"weight": "changed"}


@pytest.mark.parametrize("other", ["columns", "torch", "another checksum"])
def test_what_checksums_can_not_compare_is_unknown(save, tmp_path, monkeypatch, other) -> None:
    nested = {"weight": WEIGHT, "of": {0: torch.ones(2), "b": {}}}
    first, second = save(nested, "first"), str(tmp_path / "torch")
    if other == "columns":
        second = save(nested, "second", 4, 1)
    elif other == "torch":
        dcp.save(nested, checkpoint_id=second)
    else:
        others = dataclasses.replace(LocalStore.capabilities, checksum=CRC64NVME)
        monkeypatch.setattr(LocalStore, "capabilities", others)
        second = save(nested, "second")
    found = diff(first, second)
    assert verdicts(found)["weight"] == "unknown"
    assert set(verdicts(found).values()) == {"unknown"}
    assert found.are_same is None
