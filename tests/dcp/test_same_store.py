"""Ranks that mean the same URI and reach different stores commit nothing, and load nothing."""

import contextlib
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import cloudckpt
from cloudckpt import S3Options
from cloudckpt.errors import DifferentCheckpointsError

from .layouts import Layout, spread
from .places import Place
from .values import assert_same, numbered

URI = "file:///proc/self/cwd/run"
"""Another folder on each rank, as a disk of its node is."""


@contextlib.contextmanager
def _on(folder: Path, disks: str):
    before = os.getcwd()
    own = folder / disks[dist.get_rank()]
    own.mkdir(exist_ok=True)
    os.chdir(own)
    try:
        yield
    finally:
        cloudckpt.checkpointer.close_async_savers()
        os.chdir(before)


def _state() -> dict:
    return spread({"t": numbered(60, 10)}, Layout((dist.get_world_size(),), (Shard(0),)))


def _save(folder: Path, disks: str, in_background: bool = False) -> None:
    with _on(folder, disks):
        if in_background:
            cloudckpt.async_save(_state(), checkpoint_id=URI).result(150)
        else:
            cloudckpt.save(_state(), checkpoint_id=URI)


def _load(folder: Path, disks: str) -> None:
    with _on(folder, disks):
        cloudckpt.load({"t": torch.zeros(60, 10)}, checkpoint_id=URI)


@pytest.mark.parametrize(
    ("disks", "in_background"), [("ab", False), ("abb", False), ("ab", True)], ids=str
)
def test_ranks_that_write_to_different_stores_commit_nothing(tmp_path, ranks, disks, in_background):
    for error in ranks.errors(len(disks), _save, tmp_path, disks, in_background):
        assert type(error) is DifferentCheckpointsError
        assert error.uri == URI
        assert any(f"__{rank}_" in str(error) for rank in range(1, len(disks)))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("holds", ["nothing", "another checkpoint"])
def test_a_load_of_which_one_rank_looks_into_another_store_fails_on_all(tmp_path, ranks, holds):
    ranks(2, _save, tmp_path, "aa")
    if holds != "nothing":
        ranks(2, _save, tmp_path, "bb")
    errors = ranks.errors(2, _load, tmp_path, "ab")
    assert [type(error) for error in errors] == [DifferentCheckpointsError] * 2


def _on_ways_of_their_own(places: list[Place]) -> None:
    place = places[dist.get_rank()]
    place.save(_state())
    place.load(state := {"t": torch.zeros(60, 10)})
    assert_same(state["t"], numbered(60, 10))


def test_different_ways_to_one_store_are_no_matter(s3, ranks):
    """A node may have a gateway of its own."""
    gateway = s3.config.s3.endpoint_url.replace("127.0.0.1", "localhost")
    other_way = s3.having(s3=S3Options(endpoint_url=gateway, addressing_style="path"))
    ranks(2, _on_ways_of_their_own, [s3, other_way])
