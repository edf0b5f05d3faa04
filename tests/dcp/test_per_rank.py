"""Values of each rank, and objects with a state of their own, wherever they stand in a state."""

import copy
import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import cloudckpt
from cloudckpt.errors import ConfigError, MissingKeyError, UnsupportedValueError
from support.logs import warnings_of_ours

from .places import Place


class Box:
    """An object with a state of its own; a load replaces it."""

    def __init__(self, state: dict) -> None:
        self.state = state

    def state_dict(self) -> dict:
        return self.state

    def load_state_dict(self, state: dict) -> None:
        self.state = state


def _value(draw: random.Random, rank: int):
    """A value of a rank; ``rank`` -1 makes another one of the same form."""
    kind = draw.randrange(6)
    return [
        rank,
        f"worker{rank}",
        torch.full((2,), float(rank)),
        {"pos": rank, 3: [torch.full((1,), rank), {}]},
        random.Random(rank).getstate(),
        [1, 2, rank],
    ][kind]


def _state(draw: random.Random, rank: int, depth: int = 0) -> dict:
    """Values of each rank among those of all, in dicts, lists and objects with a state."""
    made: dict = {}
    for number in range(draw.randrange(1, 4)):
        kind = draw.randrange(6 if depth < 3 else 3)
        value: object = cloudckpt.per_rank(_value(draw, rank))
        if kind == 0:
            value = draw.random()
        elif kind == 3:
            value = _state(draw, rank, depth + 1)
        elif kind == 4:
            value = [0, _state(draw, rank, depth + 1), cloudckpt.per_rank(_value(draw, rank))]
        elif kind == 5:
            value = Box(_state(draw, rank, depth + 1))
        made[number if number == 1 else f"n{number}"] = value
    return made


def _plain(value, of=lambda one: one.value):
    """What a state consists of, to be compared."""
    if isinstance(value, cloudckpt.PerRank):
        return _plain(of(value))
    if isinstance(value, Box):
        return _plain(value.state, of)
    if isinstance(value, dict):
        return {key: _plain(entry, of) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry, of) for entry in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _loaded(place: Place, saved_by: int, seed: int) -> list[str]:
    rank, target = dist.get_rank(), _state(random.Random(seed), -1)
    with warnings_of_ours() as told:
        cloudckpt.load(target, checkpoint_id=place.uri, config=place.config)
    own = _plain(_state(random.Random(seed), rank if rank < saved_by else -1))
    assert _plain(target) == own
    for old in range(saved_by):
        assert _plain(target, lambda one, old=old: one.all[old]) == _plain(
            _state(random.Random(seed), old)
        )
    return told


def _save_drawn(place: Place, seed: int) -> None:
    state = _state(random.Random(seed), dist.get_rank())
    cloudckpt.save(state, checkpoint_id=place.uri, config=place.config)


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 3), (3, 2)])
def test_another_number_of_ranks_has_the_values_of_all(saved_by, loaded_by, ranks, local):
    for seed in (3, 4):
        place = local.at(str(seed))
        ranks(saved_by, _save_drawn, place, seed)
        told = ranks(loaded_by, _loaded, place, saved_by, seed)
        assert any(told[2 if saved_by < loaded_by else 0])  # where a value has no rank, or reverse


def test_a_value_of_each_rank_is_not_loaded_for_one_of_all(tmp_path):
    cloudckpt.save({"pos": cloudckpt.per_rank(3)}, checkpoint_id=tmp_path)
    with pytest.raises(MissingKeyError, match="per_rank"):
        cloudckpt.load({"pos": 0}, checkpoint_id=tmp_path)
    cloudckpt.save({"pos": 3}, checkpoint_id=tmp_path)
    own = cloudckpt.per_rank(0)
    with pytest.raises(MissingKeyError, match="per_rank"):
        cloudckpt.load({"pos": own}, checkpoint_id=tmp_path)
    report = cloudckpt.load({"pos": own}, checkpoint_id=tmp_path, strict=False)
    assert (own.value, own.is_loaded, own.all) == (0, False, {})
    assert {*report.missing, *report.left_alone} == {"pos.rank_0"}


@pytest.mark.parametrize("saved", [5, torch.ones(2), {"t": torch.ones(2), "n": {}}, [1, (2,)], {}])
def test_a_per_rank_of_none_takes_whatever_was_saved(tmp_path, saved):
    cloudckpt.save({"a": [cloudckpt.per_rank(saved)]}, checkpoint_id=tmp_path)
    room = cloudckpt.per_rank(None)
    cloudckpt.load({"a": [room]}, checkpoint_id=tmp_path)
    assert _plain(room) == _plain(cloudckpt.per_rank(saved))


@pytest.mark.parametrize("value", [cloudckpt.per_rank(1), torch.nn.Linear(1, 1)], ids=str)
def test_what_a_tuple_would_lose_is_refused_by_name(tmp_path, value):
    with pytest.raises(UnsupportedValueError) as caught:
        cloudckpt.save({"a": {"b": (1, value)}}, checkpoint_id=tmp_path)
    assert caught.value.item == "a.b"


def test_what_does_not_know_values_of_each_rank_refuses_them(tmp_path):
    own = cloudckpt.per_rank(1)
    with pytest.raises(TypeError, match="per_rank"):
        copy.deepcopy(own)
    with pytest.raises(UnsupportedValueError):
        cloudckpt.save({"x": SimpleNamespace(a=own)}, checkpoint_id=tmp_path)
    flat = dcp.DefaultSavePlanner(flatten_state_dict=False)
    with pytest.raises(ConfigError, match="flatten_state_dict"):
        cloudckpt.save({"x": own}, checkpoint_id=tmp_path, planner=flat)


def test_a_module_is_asked_wherever_it_stands(tmp_path):
    saved, loaded = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    cloudckpt.save({"app": {"model": saved, "all": [{"ema": saved}]}}, checkpoint_id=tmp_path)
    state = {"app": {"model": loaded, "all": [{"ema": copy.deepcopy(loaded)}]}}
    cloudckpt.load(state, checkpoint_id=tmp_path)
    assert state["app"]["model"] is loaded
    for module in (loaded, state["app"]["all"][0]["ema"]):
        assert torch.equal(module.weight, saved.weight)
