"""What ranks have under one name is compared, as of several copies one is saved."""

import random
import re
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import cloudckpt
from cloudckpt.checkpointer import close_async_savers
from cloudckpt.dcp import copies, save_plan
from cloudckpt.errors import KeyCollisionError
from support.logs import warnings_of_ours

from .places import Place

KINDS = ["save", *AsyncCheckpointerType, "own planner", "torch", "torch, plans cached"]


class _OwnPlanner(SavePlanner):
    """A planner of a user's own, which has another do the work."""

    def __init__(self, **options: bool) -> None:
        self._other, self.asked = DefaultSavePlanner(**options), Counter()

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        self._other.set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self):
        return self._other.create_local_plan()

    def create_global_plan(self, plans):
        return self._other.create_global_plan(plans)

    def finish_plan(self, plan):
        return self._other.finish_plan(plan)

    def resolve_data(self, item):
        self.asked[item.index.fqn] += 1
        return self._other.resolve_data(item)


class _Caching(DefaultSavePlanner):
    """Has cached plans of its own: torch keeps them by the name of the class."""


def _save(kind, state: dict, place: Place) -> None:
    options = {"checkpoint_id": place.uri, "config": place.config}
    if kind == "save":
        cloudckpt.save(state, **options)
    elif kind == "own planner":
        cloudckpt.save(state, planner=_OwnPlanner(), **options)
    elif kind == "torch":
        dcp.save(state, storage_writer=place.writer())
    elif kind == "torch, plans cached":
        dcp.save(state, storage_writer=place.writer(), planner=_Caching(enable_plan_caching=True))
    else:
        cloudckpt.async_save(state, async_checkpointer_type=kind, **options).result()


def _dtensor(local: torch.Tensor, placements: list) -> DTensor:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    return DTensor.from_local(local, mesh, placements, run_check=False)


def _state(step: int, unlike: set[str]) -> dict:
    """The same on all ranks, but for these names."""

    def of(name: str) -> int:
        return step + 100 * (dist.get_rank() if name in unlike else 0)

    # replicas are ranks 0 and 2, and 1 and 3
    half = dist.get_rank() % 2
    return {
        "loader": {"pos": of("loader.pos"), "seen": [1, 2]},
        "text": f"epoch {of('text')}",
        "small": torch.full((3,), float(of("small"))),
        "large": torch.randn(
            300, 300, generator=torch.Generator().manual_seed(of("large")), dtype=torch.float64
        ),
        "own": {f"rank{dist.get_rank()}": torch.randn(3)},
        "replicated": _dtensor(torch.full((4,), of("replicated")), [Replicate(), Replicate()]),
        "hybrid": _dtensor(torch.full((2,), half + 2.0 * of("hybrid")), [Replicate(), Shard(0)]),
        "sharded": _dtensor(torch.full((2,), float(dist.get_rank())), [Shard(0), Shard(0)]),
    }


NAMES = ["loader.pos", "text", "small", "large", "replicated", "hybrid"]


def _named(text: str) -> set[str]:
    return {name for name in [*NAMES, "own", "sharded", "seen"] if f"{name}: rank" in text}


def _told_of(place: Place, kind, drawn: list[set[str]]) -> list[set[str]]:
    save_plan._plans.clear()
    copies._logged.clear()
    found = []
    try:
        for step, unlike in enumerate(drawn):
            with warnings_of_ours() as texts:
                _save(kind, _state(step, unlike), place)
            assert len(texts) <= 1
            cloudckpt.load(loaded := {"text": ""}, checkpoint_id=place.uri, config=place.config)
            for kept in re.findall(r"text: ranks? (\d)", "".join(texts)):  # the first is saved
                assert loaded["text"] == f"epoch {step + 100 * int(kept)}"
            found.append(_named("".join(texts)))
    finally:
        close_async_savers()
    return found


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_differs_between_ranks_is_named_once(kind, ranks, local):
    """By a new plan, by a known one, and not again."""
    drawn = [set(), {"small"}, {"small"}, {"small", "hybrid", "text"}, set(), set(NAMES)]
    drawn += [set()] * 2
    told = [set(), {"small"}, set(), {"hybrid", "text"}, set()]
    told += [{"loader.pos", "large", "replicated"}, set(), set()]
    first, *others = ranks(4, _told_of, local, kind, drawn)
    assert first == told
    assert others == [[set()] * len(drawn)] * 3  # the coordinator tells it


def test_what_is_trusted_is_not_compared(ranks, local):
    place = local.having(replicas="trust")
    assert ranks(4, _told_of, place, "save", [set(NAMES)] * 2)[0] == [set()] * 2


def _made_in_other_ways(place: Place) -> list[str]:
    """States of equal values, whose order, identity and strides differ by rank and chance."""
    draw = random.Random(dist.get_rank())
    texts: list[str] = []
    for step in range(25):
        words = [f"w{n}" for n in range(20)]
        draw.shuffle(words)
        one = [1.0, "a"]
        tensor = torch.arange(12.0).reshape(3, 4) + step
        state = {
            "set": {*words},
            "dict": {"flat": dict.fromkeys(sorted(words), step)},
            "list": [one, one if draw.random() < 0.5 else list(one)],
            "t": tensor if draw.random() < 0.5 else tensor.t().contiguous().t(),
            "text": "".join(["ab", "c"]) if draw.random() < 0.5 else "abc",
            "state": random.Random(step).getstate(),
        }
        with warnings_of_ours() as found:
            place.save(state)
        texts += found
    return texts


def test_equal_values_are_never_called_different(ranks, local):
    assert ranks(3, _made_in_other_ways, local) == [[]] * 3


def _plain_on_one(place: Place) -> list[str]:
    """A tensor on one rank, and one that is replicated on the others."""
    copies._logged.clear()
    rank, whole = dist.get_rank(), torch.ones(4)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    other = DTensor.from_local(whole + rank, mesh, [Replicate()], run_check=False)
    with warnings_of_ours() as found:
        place.save({"w": whole if rank == 0 else other})
    return found


def test_a_plain_tensor_is_compared_with_a_replica_of_a_dtensor(ranks, local):
    first, second = ranks(2, _plain_on_one, local)
    assert "w: rank 0" in first[0]
    assert second == []


def _one_byte_differs(place: Place) -> None:
    large = torch.zeros(1 << 20, dtype=torch.uint8)
    large[54_321] = dist.get_rank()
    place.save({"large": large})


def test_a_byte_of_a_large_tensor_is_found_where_a_difference_is_an_error(ranks, local):
    errors = ranks.errors(2, _one_byte_differs, local.having(replicas="refuse"))
    assert [type(error) for error in errors] == [KeyCollisionError] * 2


def _own_planner_asked(place: Place) -> Counter:
    planner, rank = _OwnPlanner(flatten_state_dict=False), dist.get_rank()
    # torch's flattening, which this planner does without, would give two values one name
    state = {"all": torch.ones(3), f"of {rank}": torch.ones(3), "n.m": 1, "n": {"m": 1}}
    place.save(state, planner=planner)
    return planner.asked


def test_a_planner_is_asked_for_each_item_once_on_each_rank(ranks, local):
    for rank, asked in enumerate(ranks(2, _own_planner_asked, local)):
        assert asked == {"all": 1, f"of {rank}": 1, "n.m": 1, "n": 1}


def _models_apart(place: Place, differs: bool, kind: str) -> None:
    """Stages of a pipeline, or replicas of a model, each on a mesh of its own."""
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    stage = dist.get_rank() // 2
    local = torch.full((2,), dist.get_rank() % 2 + 10.0 * stage * differs)
    tensor = DTensor.from_local(local, meshes[stage], [Shard(0)], run_check=False)
    _save(kind, {"w": tensor}, place)


@pytest.mark.parametrize("kind", ["save", "own planner"])
def test_different_tensors_on_meshes_without_a_common_rank_are_an_error(kind, ranks, local):
    assert ranks.errors(4, _models_apart, local, False, kind) == [None] * 4
    errors = ranks.errors(4, _models_apart, local.at("other"), True, kind)
    assert [(type(error), error.item) for error in errors] == [(KeyCollisionError, "w")] * 4
