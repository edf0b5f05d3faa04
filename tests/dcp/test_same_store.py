"""Ranks that mean the same URI and reach different stores commit nothing, and load nothing."""

import dataclasses
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import cloudckpt
from cloudckpt import S3Options
from cloudckpt.errors import DifferentCheckpointsError
from support.emulators import moto_server

from .layouts import Layout, spread
from .places import Place
from .values import assert_same, numbered

MIB = 1024 * 1024


@pytest.fixture(scope="session")
def other_url(_own_surroundings):
    """A second S3 server."""
    with moto_server() as url:
        yield url


@pytest.fixture
def twin(s3, other_url) -> Place:
    """The same bucket and prefix in the second server."""
    twin = s3.having(s3=S3Options(endpoint_url=other_url, addressing_style="path"))
    bucket = twin.uri.removeprefix("s3://").partition("/")[0]
    if bucket not in {found["Name"] for found in twin.client().list_buckets()["Buckets"]}:
        twin.client().create_bucket(Bucket=bucket)
    return twin


def _state(first: int = 0) -> dict:
    """Rows for each rank: large ones, which are uploaded in parts, and small ones."""
    state = {"large": numbered(6 * MIB // 4, 4, first=first), "small": numbered(60, 10)}
    return spread(state, Layout((dist.get_world_size(),), (Shard(0),)))


def _save(places: list[Place], kind: str = "options") -> None:
    """Saves with each rank in its own place; the last one of the list is for all other ranks."""
    place = places[min(dist.get_rank(), len(places) - 1)]
    if kind == "environment":
        os.environ["AWS_ENDPOINT_URL_S3"] = place.config.s3.endpoint_url
        # a process keeps the store of the options that it knows
        options = dataclasses.replace(place.config.s3, endpoint_url=None)
        place = place.having(s3=options, read_timeout=61.0)
    try:
        if kind == "background":
            cloudckpt.async_save(_state(), checkpoint_id=place.uri, config=place.config).result(150)
        else:
            place.save(_state())
    finally:
        os.environ.pop("AWS_ENDPOINT_URL_S3", None)
        cloudckpt.checkpointer.close_async_savers()


@pytest.mark.parametrize(
    ("world", "kind"),
    [(2, "options"), (3, "options"), (2, "environment"), (2, "background")],
)
def test_ranks_that_write_to_different_stores_commit_nothing(s3, twin, ranks, world, kind):
    told = ranks.errors(world, _save, [s3, twin], kind)
    assert [type(error) for error in told] == [DifferentCheckpointsError] * world
    for error in told:
        assert error.uri == s3.uri
        assert any(f"__{rank}_" in str(error) for rank in range(1, world))
        assert "AWS_ENDPOINT_URL" in str(error)
    for place in (s3, twin):
        assert place.names() == []
        assert place.unfinished() == []


def test_different_ways_to_one_store_are_no_matter(s3, ranks):
    """A node may have a gateway of its own."""
    gateway = s3.config.s3.endpoint_url.replace("127.0.0.1", "localhost")
    other_way = s3.having(s3=S3Options(endpoint_url=gateway, addressing_style="path"))
    ranks(3, _save, [s3, other_way])
    ranks(2, _load, [s3, other_way])


def _save_on_own_disk(folder: str) -> None:
    """What /proc/self/cwd leads to is another folder on each rank, as a disk of its node is."""
    before = os.getcwd()
    own = os.path.join(folder, str(dist.get_rank()))
    os.mkdir(own)
    os.chdir(own)
    try:
        cloudckpt.save(_state(), checkpoint_id="file:///proc/self/cwd/run")
    finally:
        os.chdir(before)


def test_ranks_that_write_to_disks_of_their_own_commit_nothing(tmp_path, ranks):
    told = ranks.errors(2, _save_on_own_disk, str(tmp_path))
    assert [type(error) for error in told] == [DifferentCheckpointsError] * 2
    assert all("__1_" in str(error) for error in told)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def _load(places: list[Place]) -> None:
    place = places[min(dist.get_rank(), len(places) - 1)]
    state = {"small": torch.zeros(60, 10)}
    place.load(state)
    assert_same(state["small"], numbered(60, 10))


@pytest.mark.parametrize("holds", ["nothing", "another checkpoint"])
def test_a_load_of_which_one_rank_looks_into_another_store_is_told_to_all(s3, twin, ranks, holds):
    ranks(2, _save, [s3])
    if holds != "nothing":
        ranks(2, _save, [twin])
    told = ranks.errors(2, _load, [s3, twin])
    assert [type(error) for error in told] == [DifferentCheckpointsError] * 2
    assert all("endpoint_url" in str(error) for error in told)
