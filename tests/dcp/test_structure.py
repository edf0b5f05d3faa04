"""What is loaded without a state dict equals what was saved, whichever way it was saved."""

import contextlib
import copy
from collections import OrderedDict, UserDict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

import cloudckpt
from cloudckpt.checkpointer import (
    CheckpointerConfig,
    make_async_checkpointer,
    make_sync_checkpointer,
)
from cloudckpt.errors import KeyCollisionError, MissingKeyError

from . import values
from .places import Place
from .values import numbered

PATIENCE = 150.0


def assert_same(found, expected):
    """Empty dicts are behind what is beside them: the order of keys does not count."""
    values.assert_same(in_order(found), in_order(expected))


def in_order(value):
    if type(value) in (dict, OrderedDict):
        pairs = sorted(value.items(), key=lambda pair: (str(pair[0]), str(type(pair[0]))))
        return type(value)((key, in_order(entry)) for key, entry in pairs)
    return type(value)(map(in_order, value)) if type(value) in (list, tuple) else value


def loaded(place: Place):
    with make_sync_checkpointer(CheckpointerConfig(config=place.config)) as checkpointer:
        return checkpointer.load(place.uri)


def by_async_checkpointer(content, place):
    with make_async_checkpointer(CheckpointerConfig(config=place.config)) as checkpointer:
        checkpointer.save(place.uri, content)[1].result(PATIENCE)


def by_save(content, place):
    place.save(content)


def _by_stock(place, content):
    dcp.save(content, storage_writer=place.writer())


class Renaming(DefaultSavePlanner):
    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        renamed = {f"new_{key}": value for key, value in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)


def test_a_planner_that_saves_something_else_gets_no_note_of_what_it_was_given(local):
    content = {"a": {1: numbered(2)}, "empty": {}}
    dcp.save(content, storage_writer=local.writer(), planner=Renaming())
    assert_same(loaded(local), {"new_a": {"1": numbered(2)}})


COLLISIONS = [
    ({"a": {1: numbered(1), "1": numbered(2)}}, r"\['a'\]\['1'\] and .*\['a'\]\[1\]"),
    ({"a.b": numbered(1), "a": {"b": numbered(2)}}, r"\['a'\]\['b'\] and .*\['a.b'\]"),
]


@pytest.mark.parametrize(("content", "named"), COLLISIONS)
def test_two_values_of_one_name_are_refused(local, content, named):
    by_save({"step": 1}, local)
    for save in (by_save, by_async_checkpointer):
        with pytest.raises(KeyCollisionError, match=named) as caught:
            save(content, local)
        assert isinstance(caught.value, ValueError)
        assert caught.value.uri == local.uri
    assert_same(loaded(local), {"step": 1})


def test_two_keys_of_one_string_are_refused_where_nothing_is_flattened(tmp_path):
    flat = DefaultSavePlanner(flatten_state_dict=False)
    with pytest.raises(KeyCollisionError):
        cloudckpt.save({1: {"a": 1}, "1": {"a": 2}}, checkpoint_id=tmp_path, planner=flat)


@pytest.mark.parametrize(
    "content", [{".": {}, "": {"": None}}, {".": [None, {}], "": {"": torch.ones(3)}}], ids=str
)
@pytest.mark.parametrize("save", [Place.save, _by_stock])
def test_places_of_one_flat_name_come_back(local, save, content):
    save(local, content)
    assert_same(loaded(local), content)
    local.load(target := copy.deepcopy(content))
    assert_same(target, content)


class Settings(dict):
    """Attributes are entries, as many projects have it."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Pair(NamedTuple):
    a: int
    b: int


def keeps():
    """Values of which a checkpoint has none."""
    return {
        "dtype": torch.bfloat16,
        "path": Path("/a"),
        "number": np.float32(3),
        "set": {1, 2},
        "pair": Pair(1, 2),
        "list": [Pair(3, 4), {"deep": frozenset((5,))}],
        "mapping": UserDict(a=complex(1, 2)),
        "tensor": numbered(2),
    }


@pytest.mark.parametrize("ends", ["partial", "missing"])
def test_values_that_nothing_is_loaded_into_stay_as_they_are(ends, tmp_path):
    cloudckpt.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    state = {"w": torch.zeros(2), "settings": Settings(keeps())}
    planner = DefaultLoadPlanner(allow_partial_load=ends == "partial")
    refused = pytest.raises(MissingKeyError) if ends == "missing" else contextlib.nullcontext()
    with refused:
        cloudckpt.load(state, checkpoint_id=tmp_path, planner=planner)
    assert type(state["settings"]) is Settings
    assert_same(dict(state["settings"]), keeps())


@pytest.mark.parametrize("is_partial", [False, True])
def test_containers_that_were_saved_whole_are_loaded_whole(is_partial, tmp_path):
    """As stock torch does it, from a save that flattened nothing."""

    def made(last):
        return {
            "w": torch.full((2,), float(last)),
            "settings": {"lr": last, "deep": {"c": last}},
            "empty": {"k": last} if last else {},
            "list": [{"a": last}, {"b": [last]}],
            "alone": last,
        }

    cloudckpt.save(
        made(5), checkpoint_id=tmp_path, planner=DefaultSavePlanner(flatten_state_dict=False)
    )
    for load in (cloudckpt.load, dcp.load):
        state = made(0)
        planner = DefaultLoadPlanner(allow_partial_load=is_partial)
        load(state, checkpoint_id=tmp_path, planner=planner)
        assert_same(state, made(5))
    state = made(0)
    state["settings"]["deep"]["model"] = torch.nn.Linear(1, 1)
    with pytest.raises(MissingKeyError) as caught:
        cloudckpt.load(state, checkpoint_id=tmp_path)
    assert caught.value.item == "settings.deep.model"


@pytest.mark.parametrize("value", [None, 3, "text", np.float32(1)])
def test_a_value_that_is_no_container_does_not_stand_for_the_keys_of_one(value, tmp_path):
    cloudckpt.save({"w": torch.ones(2), "average": value}, checkpoint_id=tmp_path)
    state = {"w": torch.zeros(2), "average": {"w": torch.zeros(2), "n": 7}}
    with pytest.raises(MissingKeyError, match=r"2 keys are .*'average\.w', 'average\.n'"):
        cloudckpt.load(state, checkpoint_id=tmp_path)
    state["w"].zero_()
    planner = DefaultLoadPlanner(allow_partial_load=True)
    cloudckpt.load(state, checkpoint_id=tmp_path, planner=planner)
    assert_same(state, {"w": torch.ones(2), "average": {"w": torch.zeros(2), "n": 7}})
