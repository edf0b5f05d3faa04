"""What a load did, and what it left as it was, is said name by name."""

import io
import logging
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import cloudckpt
from cloudckpt.checkpointer import make_sync_checkpointer
from cloudckpt.errors import ConfigError, KeyCollisionError, MissingKeyError, ShapeMismatchError

from .places import Place


def _saved(path, state):
    cloudckpt.save(state, checkpoint_id=path, no_dist=True)
    return str(path)


def _load(road: str, uri: str, state: dict, *, strict: bool = False):
    """What the load returned, or what was kept of it."""
    if road == "load":
        return cloudckpt.load(state, checkpoint_id=uri, no_dist=True, strict=strict)
    if road == "hf":
        return cloudckpt.hf.load(state, uri, no_dist=True, strict=strict)
    if road == "checkpointer":
        with make_sync_checkpointer() as checkpointer:
            checkpointer.load(uri, state, strict=strict, leave_misfits=not strict)
            return checkpointer.load_report
    with cloudckpt.CheckpointManager(uri.removesuffix("/step-7"), read_only=True) as manager:
        assert manager.restore(state, strict=strict) == 7
        return manager.load_report


ROADS = ["load", "hf", "checkpointer", "manager"]


@pytest.mark.parametrize("road", ROADS)
def test_a_load_that_is_not_strict_loads_what_fits_and_names_the_rest(tmp_path, road, caplog):
    caplog.set_level(logging.INFO, "cloudckpt")
    saved = {"a": torch.ones(2), "vocab": torch.ones(3), "half": torch.ones(2), "n": 1, "old": 2}
    uri = _saved(tmp_path / "step-7", {**saved, "kind": torch.ones(1), "many": {"x": 1}})
    state = {"a": torch.zeros(2), "vocab": torch.zeros(4), "half": torch.zeros(2).bfloat16()}
    state |= {"new": torch.full((2,), 5.0), "n": 0, "kind": torch.zeros(1, dtype=torch.int64)}
    report = _load(road, uri, state | {"many": {}})
    assert torch.equal(state["a"], torch.ones(2))
    assert torch.equal(state["vocab"], torch.zeros(4))
    assert {*report.loaded} == {"a", "half", "n"}
    assert report.missing == ("new",)
    assert {*report.unexpected} == {"old", "many.x"}
    assert {*report.converted} == {"half"}
    assert {*report.left_alone} == {"vocab", "kind", "many"}
    assert len(str(report).splitlines()) <= 10
    tables = [r for r in caplog.records if "loaded from" in r.message]
    assert [r.levelno for r in tables] == [logging.WARNING]


def test_a_planner_says_itself_what_it_needs(tmp_path):
    uri = _saved(tmp_path, {"a": 1})
    with pytest.raises(ConfigError, match="planner"):
        cloudckpt.load({"a": 0}, checkpoint_id=uri, planner=dcp.DefaultLoadPlanner(), strict=False)


@pytest.mark.parametrize("load", [cloudckpt.load, dcp.load])
def test_what_a_planner_does_not_read_is_named(tmp_path, load):
    state = {"read": 1, "value": 1, "tensor": torch.ones(1), "none": torch.ones(0)}
    reader = cloudckpt.CloudStorageReader(_saved(tmp_path, state | {"more": 2}))
    planner = dcp.DefaultLoadPlanner()
    planner.finish_plan = lambda plan: dcp.LoadPlan(plan.items[:1])
    load(state, storage_reader=reader, planner=planner, no_dist=True)
    assert {*reader.report.left_alone} == {"value", "tensor"}
    assert reader.report.unexpected == ("more",)


def _optimizer(model) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    made = torch.optim.Adam(trained)
    model(torch.ones(2)).sum().backward()
    made.step()
    return made


def test_state_that_no_parameter_of_the_optimizer_takes_is_named(tmp_path, caplog):
    both = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = _optimizer(both)
    uri = _saved(tmp_path, {"optimizer": optimizer.state_dict()})
    both[0].requires_grad_(False)
    state = {"optimizer": _optimizer(both).state_dict()}
    report = cloudckpt.load(state, checkpoint_id=uri, strict=False)
    states = {name.split(".")[2] for name in report.optimizer}
    assert states == {"2", "3"}
    assert "frozen" in caplog.text
    assert report.unexpected == ()


def test_an_optimizer_of_other_groups_is_named(tmp_path):
    both = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    uri = _saved(tmp_path, {"app": {"optimizer": _optimizer(both)}})
    both[0].requires_grad_(False)
    with pytest.raises(ShapeMismatchError, match="get_optimizer_state_dict") as caught:
        cloudckpt.load({"app": {"optimizer": _optimizer(both)}}, checkpoint_id=uri)
    assert caught.value.item == "app.optimizer"


def test_state_that_was_saved_by_names_is_not_called_new_where_numbers_are_asked_for(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    optimizer = _optimizer(model)
    uri = _saved(tmp_path, {"optimizer": get_optimizer_state_dict(model, optimizer)})
    with pytest.raises(MissingKeyError, match="their numbers"):
        cloudckpt.load({"optimizer": optimizer}, checkpoint_id=uri)


@pytest.mark.parametrize("kind", [torch.int8, torch.bool])
def test_state_of_an_optimizer_that_torch_converts_is_named(tmp_path, kind):
    model = torch.nn.Linear(2, 2)
    optimizer = _optimizer(model)
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].to(kind)
    uri = _saved(tmp_path, {"optimizer": optimizer.state_dict(), "n": torch.ones(1, dtype=kind)})
    state = {"optimizer": optimizer.state_dict(), "n": torch.zeros(1, dtype=kind)}
    report = cloudckpt.load(state, checkpoint_id=uri)
    assert {*report.doubtful} == {f"optimizer.state.{number}.exp_avg" for number in (0, 1)}
    assert str(kind) in str(report)


@pytest.mark.parametrize("place", range(3))
def test_a_group_without_parameters_is_named_where_torch_loses_its_options(tmp_path, place):
    def state(model):
        groups = [[*layer.parameters()] for layer in model]
        groups.insert(place, [])
        optimizer = torch.optim.Adam([{"params": params, "lr": 0.5} for params in groups])
        return {"optimizer": get_optimizer_state_dict(model, optimizer)}, optimizer

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    uri = _saved(tmp_path, state(model)[0])
    wanted, optimizer = state(model)
    report = cloudckpt.load(wanted, checkpoint_id=uri)
    set_optimizer_state_dict(model, optimizer, wanted["optimizer"])
    lost = [number for number, one in enumerate(optimizer.param_groups) if "lr" not in one]
    assert {*report.doubtful} == {f"optimizer.param_groups.{number}.params" for number in lost}
    assert lost == [] if place == 2 else [place]


SAVED = [({"a": 1, "b": 2}, "2 entries"), ([torch.ones(1), 2], "2 entries")]


@pytest.mark.parametrize("given", [{"x": {}}, {"x": []}, {"x": None}], ids=str)
@pytest.mark.parametrize(("saved", "what"), [*SAVED, (torch.ones(1), "a tensor")], ids=str)
def test_what_is_empty_here_and_filled_there_is_named(tmp_path, given, saved, what, caplog):
    uri = _saved(tmp_path, {"x": saved})
    try:
        report = cloudckpt.load(given, checkpoint_id=uri)
    except (MissingKeyError, ShapeMismatchError) as error:
        said = str(error)
    else:
        said = caplog.text + report.left_alone["x"]
    assert "x" in said
    assert what in said


@pytest.mark.parametrize(
    "given",
    [io.BytesIO(), SimpleNamespace(), torch.Generator(), 5],
    ids=lambda given: type(given).__name__,
)
def test_what_can_not_take_a_tensor_is_named(tmp_path, given):
    uri = _saved(tmp_path, {"x": torch.ones(2)})
    with pytest.raises(ShapeMismatchError) as caught:
        cloudckpt.load({"x": given}, checkpoint_id=uri)
    assert caught.value.item == "x"
    state = {"x": given}
    assert {*cloudckpt.load(state, checkpoint_id=uri, strict=False).left_alone} == {"x"}
    assert state["x"] is given


@pytest.mark.parametrize("road", ROADS)
def test_tied_weights_of_which_one_was_saved_are_loaded(tmp_path, road):
    embedding, head = torch.nn.Embedding(4, 2), torch.nn.Linear(2, 4, bias=False)
    head.weight = embedding.weight
    state = {"embedding": embedding.weight.detach(), "head": head.weight.detach()}
    uri = _saved(tmp_path / "step-7", {"embedding": torch.ones(4, 2)})
    report = _load(road, uri, state, strict=True)
    assert torch.equal(head.weight, torch.ones(4, 2))
    assert report.missing == ()
    assert {*report.converted} == {"head"}
    with pytest.raises(MissingKeyError):
        _load(road, uri, state | {"head": torch.zeros(4, 2)}, strict=True)


def test_what_is_left_alone_says_which_loaded_tensor_shares_its_memory(tmp_path):
    uri = _saved(tmp_path, {"w": torch.ones(4), "head": torch.ones(6)})
    room = torch.zeros(5)
    state = {"w": room[:4], "head": room[1:], "other": torch.zeros(2)}
    report = cloudckpt.load(state, checkpoint_id=uri, strict=False)
    assert (report.missing, report.unexpected, report.loaded) == (("other",), (), ("w",))
    assert "changed with w" in report.left_alone["head"]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("road", ROADS)
def test_tensors_of_one_memory_refuse_different_values_and_name_both(tmp_path, road, strict):
    zeros = torch.zeros(2, 3)
    uri = _saved(tmp_path / "step-7", {"embedding": torch.ones(2, 3), "head": zeros, "on": zeros})
    room = torch.zeros(3, 3)
    parts = sorted([torch.zeros(2, 3) for _ in range(4)], key=torch.Tensor.data_ptr)
    chain = [TwoTensor(parts[a], parts[b]) for a, b in [(0, 3), (0, 1), (1, 2)]]
    for tensors in [(room[:2], room[:2]), (room[:2], room[1:]), chain[:1] * 2, chain]:
        state = dict(zip(["embedding", "head", "on"], tensors, strict=False))
        with pytest.raises(KeyCollisionError, match=r"embedding.* head|head.* embedding"):
            _load(road, uri, state, strict=strict)


@pytest.mark.parametrize("how", ["ours", "unverified", "torch's", "pickled", "converted", "other"])
def test_tensors_of_one_memory_take_equal_values(local, how):
    weight = torch.rand(300, 300)
    saved = {"embedding": weight, "head": weight.double() if how == "other" else weight}
    saved |= {"left": weight[:, :9], "right": weight[:, 9:]}
    extensions = {"torch's": [], "pickled": [ZStandard()]}.get(how)
    theirs = dcp.FileSystemWriter(local.path, _extensions=extensions)
    dcp.save(saved, storage_writer=local.writer() if extensions is None else theirs, no_dist=True)
    room = torch.zeros(2, 300, 300, dtype=torch.bfloat16 if how == "converted" else torch.float32)
    columns = {"left": room[1][:, :9], "right": room[1][:, 9:]}  # which lie between each other
    reader = local.having(verify=how != "unverified").reader()
    cloudckpt.load({"embedding": room[0], "head": room[0]} | columns, storage_reader=reader)
    assert torch.equal(room, weight.to(room.dtype).expand(2, -1, -1))
    if how in ("ours", "unverified", "converted"):
        assert reader.transferred.nbytes < 3 * weight.nbytes  # the second is known


def _tied_on_ranks(place: Place) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = torch.arange(16.0).view(4, 4)
    sharded = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
    place.save({"embedding": sharded, "head": sharded, "near": weight + torch.eye(4)[3]})
    for placement in (Shard(0), Shard(1)):
        room = distribute_tensor(torch.zeros(4, 4), mesh, [placement])
        place.load({"embedding": room, "head": room})
        assert torch.equal(room.full_tensor(), weight)
        with pytest.raises(KeyCollisionError):  # only the part of the last rank differs
            place.load({"embedding": room, "near": room})


def test_shards_of_one_memory_take_equal_values_and_every_rank_refuses_others(ranks, local):
    ranks(2, _tied_on_ranks, local)


def test_bytes_of_an_extra_state_take_the_saved_length(tmp_path):
    saved = torch.arange(7, dtype=torch.uint8)
    uri = _saved(tmp_path, {"model": {"layer._extra_state": saved}})
    for strict in (True, False):
        state = {"model": {"layer._extra_state": torch.zeros(3, dtype=torch.uint8)}}
        cloudckpt.load(state, checkpoint_id=uri, strict=strict)
        assert torch.equal(state["model"]["layer._extra_state"], saved)


def _resharded(place: Place) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"s": distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]), "w": torch.ones(2)}
    place.save(state)
    state["s"] = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(1)])
    report = place.load(state)
    assert torch.equal(state["s"].to_local(), torch.ones(4, 2))
    return dict(report.converted)


def test_a_tensor_that_is_sharded_in_another_way_is_named(ranks, local):
    assert [{*converted} for converted in ranks(2, _resharded, local)] == [{"s"}] * 2


def test_a_checkpointer_refuses_another_shape_unless_told_to_leave_it_as_torch_does(tmp_path):
    uri = _saved(tmp_path / "step-7", {"head": torch.ones(3)})
    state = {"head": torch.zeros(4), "new": torch.zeros(1)}
    with make_sync_checkpointer() as checkpointer:
        with pytest.raises(ShapeMismatchError) as caught:
            checkpointer.load(uri, state)
        assert caught.value.item == "head"
        checkpointer.load(uri, {"new": state["new"]})
        assert checkpointer.load_report.missing == ("new",)
