"""What people do first, and what they are told to write instead."""

from collections import UserDict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

import cloudckpt
from cloudckpt import Config
from cloudckpt.checkpointer import CheckpointerConfig, make_sync_checkpointer
from cloudckpt.dcp.save_plan import CloudSavePlanner
from cloudckpt.errors import (
    ConfigError,
    ThrottledError,
    UnsupportedTensorError,
    UnsupportedValueError,
)
from cloudckpt.files import save_file
from cloudckpt.stores import registry
from support.faulty_store import FaultyStore
from support.memory_store import MemoryStore

from .places import Place

WITH_OPTIONS = {
    "save": lambda place, **given: cloudckpt.save({}, checkpoint_id=place, **given),
    "async_save": lambda place, **given: cloudckpt.async_save({}, checkpoint_id=place, **given),
    "reader": cloudckpt.CloudStorageReader,
    "manager": cloudckpt.CheckpointManager,
    "checkpointer": lambda _, **given: make_sync_checkpointer(CheckpointerConfig(**given)),
    "install": lambda _, **given: cloudckpt.install(**given),
    "verify": cloudckpt.verify,
    "hf.save": lambda place, **given: cloudckpt.hf.save({}, place, **given),
    "save_file": lambda place, **given: save_file(str(place), b"", **given),
}


@pytest.mark.parametrize("config", [{}, {"connections": 4}])
@pytest.mark.parametrize("act", WITH_OPTIONS.values(), ids=WITH_OPTIONS.keys())
def test_a_dict_in_place_of_options_is_named(tmp_path, act, config):
    with pytest.raises(ConfigError, match=r"config is a dict: give a cloudckpt.Config"):
        act(tmp_path / "step-1", config=config)
    assert not list(tmp_path.iterdir())


def _around_itself(kind):
    """A container that is within itself, with a tensor beside, or one of 300 levels."""
    made = [torch.ones(2)]
    if kind == "deep":
        for _ in range(300):
            made = [made]
    elif kind is list:
        made.append({"inner": (made,)})
    else:
        made = kind(weight=torch.ones(2))
        made["inner"] = [made]
    return made


class _Endless(UserDict):
    """A mapping that makes a new one of itself whenever it is asked."""

    def __getitem__(self, key):
        return _Endless(inner=0)


ROADS = {
    "save": lambda state, place: cloudckpt.save(state, checkpoint_id=place),
    "async_save": lambda state, place: cloudckpt.async_save(state, checkpoint_id=place).result(99),
    "load": lambda state, place: cloudckpt.load(state, checkpoint_id=place),
    "hf.save": cloudckpt.hf.save,
    "torch's save": lambda state, place: dcp.save(
        state, storage_writer=cloudckpt.CloudStorageWriter(place), planner=CloudSavePlanner()
    ),
}


@pytest.mark.parametrize("kind", [dict, UserDict, list, _Endless, "deep"])
@pytest.mark.parametrize("road", ROADS.values(), ids=ROADS.keys())
def test_a_container_within_itself_or_nested_without_end_is_named(tmp_path, road, kind):
    with pytest.raises(
        (UnsupportedValueError, CheckpointException),
        match=r"state_dict\['model'\].* contains itself",
    ):
        road({"weight": torch.ones(2), "model": _around_itself(kind)}, tmp_path / "step-1")


@pytest.mark.parametrize("act", [cloudckpt.save, cloudckpt.load])
def test_a_class_in_place_of_a_model_is_named(tmp_path, act):
    with pytest.raises(TypeError) as caught:
        act({"nets": [{"a": torch.nn.Linear}]}, checkpoint_id=tmp_path)
    assert caught.value.__notes__ == ["in state_dict of nets.0.a"]


@pytest.mark.parametrize("act", [cloudckpt.save, cloudckpt.load])
def test_a_model_in_place_of_a_state_dict_is_named(tmp_path, act):
    with pytest.raises(ConfigError, match=r"not a Linear: pass \{'model': \.\.\.\} with"):
        act(torch.nn.Linear(2, 2), checkpoint_id=tmp_path)


def test_a_model_on_meta_is_told_how_to_get_memory_before_it_loads(tmp_path):
    cloudckpt.save({"model": torch.nn.Linear(2, 2)}, checkpoint_id=tmp_path)
    model = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(UnsupportedTensorError, match=r"model.weight is a meta .*to_empty\(device"):
        cloudckpt.load({"model": model}, checkpoint_id=tmp_path)
    model.to_empty(device="cpu")
    cloudckpt.load({"model": model}, checkpoint_id=tmp_path)


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [(torch.float32, torch.int64), (torch.complex64, torch.float32), (torch.int32, torch.bool)],
)
@pytest.mark.parametrize("planner", [None, DefaultLoadPlanner(flatten_state_dict=False)])
def test_a_type_that_cannot_hold_what_was_saved_is_refused(tmp_path, saved, wanted, planner):
    cloudckpt.save({"w": torch.ones(3, dtype=saved)}, checkpoint_id=tmp_path)
    target = torch.zeros(3, dtype=wanted)
    with pytest.raises(UnsupportedTensorError, match=f"w is {saved} in .* but {wanted} in"):
        cloudckpt.load({"w": target}, checkpoint_id=tmp_path, planner=planner)
    assert not target.any()


def _with_a_partial_placement(act, folder):
    mesh = init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    act({"a": {"grad": partial}}, checkpoint_id=folder)


@pytest.mark.parametrize("act", [cloudckpt.save, cloudckpt.load])
def test_a_tensor_with_a_partial_placement_is_named(ranks, tmp_path, act):
    if act is cloudckpt.load:
        cloudckpt.save({"a": {"grad": torch.ones(3)}}, checkpoint_id=tmp_path)
    for error in ranks.errors(2, _with_a_partial_placement, act, tmp_path):
        assert type(error) is UnsupportedTensorError
        assert error.item == "a.grad"
        assert "redistribute it" in str(error)


_STATE = {"w": torch.ones(2)}
_INTO = {
    "save": lambda place: place.save(_STATE),
    "torch": lambda place: dcp.save(_STATE, storage_writer=place.writer()),
    "async": lambda place: cloudckpt.async_save(_STATE, checkpoint_id=place.uri).result(60),
    "hf": lambda place: cloudckpt.hf.save(_STATE, place.uri, config=place.config),
    "export": lambda place: cloudckpt.hf.export_checkpoint(
        next(Path(place.path).glob("*-1*")), place.uri, config=place.config
    ),
}


def _save_into_run(place: Place, road: str) -> None:
    with pytest.raises((ConfigError, CheckpointException), match="folder of a run"):
        _INTO[road](place)


@pytest.mark.parametrize("of", ["manager", "stock torch"])
@pytest.mark.parametrize("road", _INTO)
def test_the_folder_of_a_run_becomes_no_checkpoint(ranks, local, road, of):
    if of == "manager":
        with cloudckpt.CheckpointManager(local.uri, step_name="at-{step}") as manager:
            manager.save(1, _STATE)
    else:
        dcp.save(_STATE, checkpoint_id=f"{local.path}/step-10", no_dist=True)
    before = local.names()
    ranks(2, _save_into_run, local, road)
    assert local.names() == before


def test_no_save_waits_for_the_look_for_a_run(monkeypatch):
    store = FaultyStore(MemoryStore("looks"))
    store.fail("list", ThrottledError)
    monkeypatch.setitem(registry._OPENERS, "memory", lambda: lambda uri, config: store)
    patient = cloudckpt.RetryPolicy(base=0.01, cap=0.01, deadline=3600)
    cloudckpt.save(_STATE, checkpoint_id="memory://looks/x", config=Config(retry=patient))
    assert store.failed["list"] == 3
