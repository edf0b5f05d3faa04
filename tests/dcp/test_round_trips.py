"""Sharded tensors of torch, and models by FSDP2, load on another number of ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from .places import Place
from .values import assert_same, numbered

# ---- ShardedTensor


def _sharded(blank: bool):
    """A 13x6 tensor, of which each rank has several shards of two rows."""
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = numbered(13, 6)

    def shard(first: int, rows: int) -> LocalShard:
        part = whole[first : first + rows].clone()
        if blank:
            part.fill_(113)
        metadata = ShardMetadata([first, 0], [rows, 6], f"rank:{rank}/cpu")
        return LocalShard(part, metadata)

    shards = [shard(row, min(2, 13 - row)) for row in range(2 * rank, 13, 2 * world)]
    return {"t": sharded_tensor.init_from_local_shards(shards, 13, 6)}


def _save_sharded(place: Place) -> None:
    place.save(_sharded(blank=False))


def _load_sharded(place: Place) -> None:
    state = _sharded(blank=True)
    place.load(state)
    expected = _sharded(blank=False)["t"].local_shards()
    for mine, theirs in zip(state["t"].local_shards(), expected, strict=True):
        assert_same(mine.tensor, theirs.tensor)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2)])
def test_a_sharded_tensor_loads_on_another_number_of_ranks(before, after, local, ranks):
    ranks(before, _save_sharded, local)
    ranks(after, _load_sharded, local)


# ---- Stateful objects


class Itself(dict):
    """A dict that is its own state; loaded, it asks all ranks, and adds to the dict around it."""

    def state_dict(self):
        return self

    def load_state_dict(self, state):
        names: list = [None] * dist.get_world_size()
        dist.all_gather_object(names, state["name"])
        self.around["late"] = names


def _load_in_another_order(place: Place) -> None:
    names = ["a", "b"] if dist.get_rank() else ["b", "a"]
    place.save({name: Itself(name=name) for name in names})
    Itself.around = state = {name: Itself(name="") for name in names}
    place.load(state)
    assert state["late"] == ["b", "b"]


def test_all_ranks_fill_what_is_stateful_in_one_order(local, ranks):
    ranks(2, _load_in_another_order, local)


# ---- FSDP2, with an optimizer


def _model(layout: str, width: int):
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, width), torch.nn.ReLU(), torch.nn.Linear(width, 4, bias=False)
    )
    if layout != "plain":
        shape, names = {
            "FSDP": ((dist.get_world_size(),), ("rows",)),
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
    place.save({"model": weights, "optimizer": moments, "step": 3})
    return _whole(model, optimizer)


def _load_trained(layout: str, width: int, place: Place) -> dict:
    model, optimizer = _model(layout, width)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(113)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 0}
    place.load(state)
    assert state["step"] == 3
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return _whole(model, optimizer)


_UNEVEN, _EVEN = 11, 12  # rows of the larger layer; tensor parallelism wants them even


@pytest.mark.parametrize(
    ("before", "after", "width"),
    [
        (("FSDP", 2), ("plain", 1), _UNEVEN),
        (("FSDP and TP", 4), ("FSDP", 3), _EVEN),
        (("FSDP", 2), ("FSDP and TP", 4), _EVEN),
    ],
    ids=lambda side: side if isinstance(side, int) else f"{side[0]} on {side[1]}",
)
def test_a_model_and_its_adam_resume_resharded(before, after, width, local, ranks):
    saved = ranks(before[1], _save_trained, before[0], width, local)[0]
    loaded = ranks(after[1], _load_trained, after[0], width, local)[0]
    assert len(saved["optimizer"]["state"]) == 3
    assert_same(loaded, saved)
