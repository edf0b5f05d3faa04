"""What is saved in one layout loads, element by element, in any other."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import cloudckpt

from .layouts import LAYOUTS, check_local_parts, full_state, spread
from .places import Place, on_disk
from .values import assert_same, numbered


def save(state, place: Place, door: str = "cloudckpt") -> None:
    if door == "torch":
        dcp.save(state, storage_writer=place.writer())
    else:
        cloudckpt.save(state, checkpoint_id=place.uri, config=place.config)


def load(state, place: Place, door: str = "cloudckpt") -> None:
    if door == "torch":
        dcp.load(state, storage_reader=place.reader())
    else:
        cloudckpt.load(state, checkpoint_id=place.uri, config=place.config)


def _save_layouts(names: list[str], place: Place, door: str) -> None:
    for name in names:
        save(spread(full_state(), LAYOUTS[name]), place.at(name.replace(" ", "-")), door)


def _load_layouts(saved: list[str], name: str, place: Place, door: str) -> None:
    for other in saved:
        layout = LAYOUTS[name]
        state = spread(full_state(), layout, blank=True)
        load(state, place.at(other.replace(" ", "-")), door)
        try:
            check_local_parts(state, layout)
        except AssertionError as error:
            raise AssertionError(f"saved as {other}, loaded as {name}: {error}") from error


def _save_all(names, place: Place, door: str, ranks) -> Place:
    for world in (1, 2, 3, 4):
        those = [name for name in names if LAYOUTS[name].world == world]
        ranks(world, _save_layouts, those, place, door)
    return place


@pytest.fixture(scope="module")
def saved_in_all_layouts(places, ranks) -> Place:
    """By the stock front door, in a folder."""
    return _save_all(LAYOUTS, places("local"), "torch", ranks)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_folder_saved_in_any_layout_loads_as(name, saved_in_all_layouts, ranks):
    world = LAYOUTS[name].world
    ranks(world, _load_layouts, list(LAYOUTS), name, saved_in_all_layouts, "torch")


# ---- plain tensors and values on several ranks


# ---- ShardedTensor

_CUTS = {1: [(0, 13)], 2: [(0, 5), (5, 8)], 4: [(0, 1), (1, 7), (8, 3), (11, 2)]}


def _sharded(blank: bool):
    """A 13x6 tensor in row blocks of different heights, and one with two shards a rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = numbered(13, 6)

    def shard(first: int, rows: int) -> LocalShard:
        part = whole[first : first + rows].clone()
        if blank:
            part.fill_(113)
        metadata = ShardMetadata([first, 0], [rows, 6], f"rank:{rank}/cpu")
        return LocalShard(part, metadata)

    one = [shard(*_CUTS[world][rank])]
    several = [shard(row, 1) for row in range(rank, 13, world)]
    return {
        "one shard a rank": sharded_tensor.init_from_local_shards(one, 13, 6),
        "every row a shard": sharded_tensor.init_from_local_shards(several, 13, 6),
    }


def _save_sharded(place: Place) -> None:
    save(_sharded(blank=False), place)


def _load_sharded(place: Place) -> None:
    state = _sharded(blank=True)
    load(state, place)
    for name, expected in _sharded(blank=False).items():
        pairs = zip(state[name].local_shards(), expected.local_shards(), strict=True)
        for mine, theirs in pairs:
            assert_same(mine.tensor, theirs.tensor, name)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 1), (4, 4)])
@on_disk
def test_a_sharded_tensor_loads_on_another_number_of_ranks(before, after, place, ranks):
    ranks(before, _save_sharded, place)
    ranks(after, _load_sharded, place)


# ---- FSDP2, with an optimizer


def _model(layout: str, width: int):
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, width), torch.nn.ReLU(), torch.nn.Linear(width, 4, bias=False)
    )
    if layout != "plain":
        shape, names = {
            "FSDP": ((dist.get_world_size(),), ("rows",)),
            "HSDP": ((2, dist.get_world_size() // 2), ("replicas", "rows")),
            "FSDP and TP": ((2, 2), ("rows", "tensor")),
        }[layout]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        if layout == "FSDP and TP":
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(model, mesh["tensor"], plan)
            mesh = mesh["rows"]
        for part in model:
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def _train(model, optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(numbered(4, 6, first=step) / 30).square().mean().backward()
        optimizer.step()


def _whole(model, optimizer) -> dict:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optimizer": moments} if dist.get_rank() == 0 else {}


def _save_trained(layout: str, width: int, place: Place) -> dict:
    model, optimizer = _model(layout, width)
    _train(model, optimizer, 3)
    weights, moments = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": moments, "step": 3}, place)
    return _whole(model, optimizer)


def _load_trained(layout: str, width: int, place: Place) -> dict:
    model, optimizer = _model(layout, width)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(113)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 0}
    load(state, place)
    assert state["step"] == 3
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return _whole(model, optimizer)


_UNEVEN, _EVEN = 11, 12  # rows of the larger layer; tensor parallelism wants them even


@pytest.mark.parametrize(
    ("before", "after", "width"),
    [
        (("FSDP", 2), ("FSDP", 4), _UNEVEN),
        (("FSDP", 4), ("plain", 1), _UNEVEN),
        (("HSDP", 4), ("FSDP", 2), _UNEVEN),
        (("plain", 1), ("HSDP", 4), _UNEVEN),
        (("FSDP and TP", 4), ("FSDP", 3), _EVEN),
        (("FSDP", 2), ("FSDP and TP", 4), _EVEN),
    ],
    ids=lambda side: side if isinstance(side, int) else f"{side[0]} on {side[1]}",
)
@on_disk
def test_a_model_and_its_adam_resume_resharded(before, after, width, place, ranks):
    saved = ranks(before[1], _save_trained, before[0], width, place)[0]
    loaded = ranks(after[1], _load_trained, after[0], width, place)[0]
    assert len(saved["optimizer"]["state"]) == 3
    assert_same(loaded, saved)
