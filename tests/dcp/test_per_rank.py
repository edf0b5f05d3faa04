"""Values of each rank, and objects with a state of their own, wherever they stand in a state."""

import copy
import signal
from collections import Counter, OrderedDict, defaultdict
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import cloudckpt
from cloudckpt.errors import ConfigError, MissingKeyError, UnsupportedValueError
from support.logs import warnings_of_ours

from .places import Place
from .values import assert_same


def _save_own(place: Place) -> None:
    place.save({"pos": cloudckpt.per_rank(dist.get_rank())})


def _load_own(place: Place) -> tuple:
    own = cloudckpt.per_rank(-1)
    with warnings_of_ours() as told:
        place.load({"pos": own})
    return own.value, own.all, len(told)


@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "told"), [(2, 3, [0, 0, 1]), (3, 2, [1, 0])], ids=["more", "fewer"]
)
def test_another_number_of_ranks_has_the_values_of_all(saved_by, loaded_by, told, ranks, local):
    """It is said where a value has no rank, and where a rank has no value."""
    ranks(saved_by, _save_own, local)
    found = ranks(loaded_by, _load_own, local)
    of_all = {rank: rank for rank in range(saved_by)}
    assert found == [(of_all.get(rank, -1), of_all, told[rank]) for rank in range(loaded_by)]


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
    assert_same(room.value, saved)


@pytest.mark.parametrize(
    "saved",
    [
        {("a", 1): 5, b"k": 6, signal.SIGTERM: 7, 0: 8},
        *(defaultdict(int, a=1), Counter("aab"), OrderedDict(b=1, a=2)),
    ],
    ids=str,
)
def test_keys_and_classes_of_containers_without_tensors_are_kept(tmp_path, saved):
    cloudckpt.save({"x": cloudckpt.per_rank(saved)}, checkpoint_id=tmp_path)
    own = cloudckpt.per_rank(copy.copy(saved))
    for key in saved:
        own.value[key] = 0
    cloudckpt.load({"x": own}, checkpoint_id=tmp_path)
    assert own.value == saved
    assert [type(own.value), *map(type, own.value)] == [type(saved), *map(type, saved)]


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
