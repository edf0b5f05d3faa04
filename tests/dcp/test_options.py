"""The options of torch's save and load: groups, planners, plan caching, reuse, overwriting."""

import io
import os
import pickle
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItemType

import cloudckpt
from cloudckpt.errors import CheckpointError, ConfigError, IncompleteSaveError, InvalidURIError

from .layouts import LAYOUTS, spread
from .places import Place
from .values import assert_same, blank_like, numbered

# ---- who takes part


def _in_a_group(members: list[int], place: Place) -> None:
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return
    number = dist.get_rank(group)
    state = {"all": numbered(40), f"rank {number}": numbered(5, first=number)}
    place.save(state, process_group=group)
    loaded = blank_like(state)
    place.load(loaded, process_group=group)
    assert_same(loaded, state)


@pytest.mark.parametrize("members", [[1, 2], [2]], ids=str)
def test_a_group_of_some_ranks_saves_and_loads(members, local, ranks):
    ranks(3, _in_a_group, members, local)
    shards = {name.split(".")[0].split("_")[2] for name in local.data()}
    assert shards <= {str(number) for number in range(len(members))}


# ---- planners


class HalfPrecision(DefaultSavePlanner):
    """torch's own example of a planner that changes what is stored."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item):
        found = super().resolve_data(write_item)
        return found if write_item.type == WriteItemType.BYTE_IO else found.to(torch.float16)


class Noting(DefaultLoadPlanner):
    """Keeps a note of what it is told, and hands out copies that only ``commit_tensor`` takes."""

    def __init__(self):
        super().__init__()
        self.committed = []
        self.bytes = []

    def resolve_tensor(self, read_item):
        return torch.zeros_like(super().resolve_tensor(read_item))

    def commit_tensor(self, read_item, tensor):
        super().resolve_tensor(read_item).copy_(tensor)
        self.committed.append(read_item.dest_index.fqn)

    def load_bytes(self, read_item, value):
        assert isinstance(value, io.BytesIO)
        assert value.tell() == 0
        self.bytes.append(read_item.dest_index.fqn)
        super().load_bytes(read_item, value)


def _save_halved(place: Place) -> None:
    for name in ("2 rows", "2 columns"):
        place.at(name).save(spread({"t": numbered(40, 50)}, LAYOUTS[name]), planner=HalfPrecision())


def test_a_planner_may_change_the_dtype_of_what_it_saves(local, ranks):
    ranks(2, _save_halved, local)
    for name in ("2 rows", "2 columns"):
        for dtype in (torch.float32, torch.float16):
            local.at(name).load(loaded := {"t": torch.zeros(40, 50, dtype=dtype)})
            assert_same(loaded["t"], numbered(40, 50, dtype=dtype))
        stored = local.at(name).reader().read_metadata().state_dict_metadata["t"]
        assert stored.properties.dtype == torch.float16


def test_a_load_planner_is_told_of_every_item_and_may_place_it_itself(local):
    state = {"a": numbered(400, 500), "b": numbered(3).t(), "c": {"d": 5}, "e": torch.empty(0)}
    local.save(state)
    planner, loaded = Noting(), blank_like(state)
    local.load(loaded, planner=planner)
    assert_same(loaded, state)
    assert sorted(planner.committed) == ["a", "b"]
    assert planner.bytes == ["c.d"]


# ---- a writer, a reader, used many times


CALLS = [cloudckpt.save, cloudckpt.load, cloudckpt.async_save]


@pytest.mark.parametrize("call", CALLS)
def test_where_to_is_said_once_and_by_what_knows_stores(call, local):
    is_load = call is cloudckpt.load
    name, own = ("reader", local.reader()) if is_load else ("writer", local.writer())
    stock = (FileSystemReader if is_load else FileSystemWriter)(local.path)
    with pytest.raises(InvalidURIError):
        call({"t": torch.zeros(1)})
    with pytest.raises(ConfigError):  # whose options are given beside it
        call({}, **{f"storage_{name}": own}, config=local.config)
    with pytest.raises(ConfigError, match=rf"{type(stock).__name__}.* torch\.distributed"):
        call({"t": numbered(5)}, **{f"storage_{name}": stock})
    assert local.names() == []


class Telling(cloudckpt.CloudStorageWriter):
    """A writer of a user's own, which adds something to steps and results of ours."""

    told: ClassVar[list[str]] = []

    def write_data(self, plan, planner):
        self.told.append(f"{len(plan.items)} items")
        future = torch.futures.Future()
        results = super().write_data(plan, planner).value()
        future.set_result(
            [replace(one, storage_data={"ours": one.storage_data}) for one in results]
        )
        return future

    def finish(self, metadata, results):
        ours = [[replace(r, storage_data=r.storage_data["ours"]) for r in of] for of in results]
        super().finish(metadata, ours)
        self.told.append("committed")


class Counting(cloudckpt.CloudStorageReader):
    """A reader of a user's own."""

    items = 0

    def read_data(self, plan, planner):
        self.items += len(plan.items)
        return super().read_data(plan, planner)


def test_a_writer_and_a_reader_that_are_derived_from_ours_are_asked_for_each_step(local):
    Telling.told.clear()
    writer = Telling(local.uri, config=local.config)
    for first in (1, 2):
        state = {"t": numbered(5, first=first), 7: {"empty": {}}}
        cloudckpt.save(state, storage_writer=writer)
    assert Telling.told == ["1 items", "committed"] * 2
    for without_a_save in (writer, local.writer()):  # finished already, never begun
        with pytest.raises(IncompleteSaveError):
            without_a_save.finish(dcp.metadata.Metadata({}), [])
    reader, loaded = Counting(local.uri, config=local.config), {"t": torch.zeros(5)}
    cloudckpt.load(loaded, storage_reader=reader)
    assert reader.items == 1
    assert_same(loaded["t"], numbered(5, first=2))
    assert 7 in cloudckpt.checkpointer.make_sync_checkpointer(
        cloudckpt.checkpointer.CheckpointerConfig()
    ).load(local.uri)


@pytest.mark.parametrize("call", [cloudckpt.save, cloudckpt.async_save, dcp.save])
def test_that_each_rank_commits_by_itself_is_refused_with_what_to_do(call, local):
    place = {"storage_writer": local.writer()}
    with pytest.raises(ConfigError, match=r"use_collectives=False is not supported.*no_dist=True"):
        call({"t": numbered(5)}, use_collectives=False, **place)
    assert local.names() == []


def test_what_torch_has_saved_without_collectives_is_refused_and_not_taken_for_nothing(local):
    dcp.save({"t": numbered(5)}, checkpoint_id=local.path, use_collectives=False, no_dist=True)
    for load in (cloudckpt.load, dcp.load):
        with pytest.raises((CheckpointError, CheckpointException)) as caught:
            load({"t": torch.zeros(5)}, storage_reader=local.reader())
        assert "use_collectives=False" in str(caught.value)
        assert not isinstance(caught.value, FileNotFoundError)


# ---- overwriting


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({"no": "metadata"})])
def test_a_checkpoint_that_cannot_be_read_is_replaced(content, local, caplog):
    local.save({"t": numbered(3)})
    with open(os.path.join(local.path, ".metadata"), "wb") as file:
        file.write(content)
    local.save({"t": numbered(3, first=5)})
    loaded = {"t": torch.zeros(3)}
    local.load(loaded)
    assert_same(loaded["t"], numbered(3, first=5))
    assert "cloudckpt sweep" in caplog.text


def test_a_checkpoint_beneath_another_is_left_alone(s3):
    for there, first in ((s3.at("inner"), 0), (s3, 5), (s3, 9)):
        there.save({"t": numbered(3, first=first)})
    s3.at("inner").load(loaded := {"t": torch.zeros(3)})
    assert_same(loaded["t"], numbered(3))
