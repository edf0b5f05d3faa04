"""The second save of a structure plans nothing; a change of the structure is planned anew."""

import contextlib
import functools
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import cloudckpt
from cloudckpt.checkpointer import (
    AsyncCheckpointer,
    CheckpointerConfig,
    CommitHook,
    close_async_savers,
)
from cloudckpt.dcp import meeting, save_plan
from cloudckpt.dcp.save_plan import CloudSavePlanner
from cloudckpt.errors import ConfigError

from .places import Place
from .values import assert_same

FEW = 600
"""Bytes that a rank may send in all when nothing is planned."""


@pytest.fixture(autouse=True)
def forgetful():
    save_plan.forget()
    yield
    save_plan.forget()


@contextlib.contextmanager
def watched():
    """What is gathered of this rank, in bytes, and how often it plans."""
    sent, plans = [], []
    gather, plan = _DistWrapper.gather_object, DefaultSavePlanner.create_local_plan

    def gathered(self, value):
        sent.append(len(pickle.dumps(value)))
        return gather(self, value)

    def planned(self):
        plans.append(None)
        return plan(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_DistWrapper, "gather_object", gathered)
        patch.setattr(DefaultSavePlanner, "create_local_plan", planned)
        yield sent, plans


def _state(step: int, tensors: int = 200) -> dict:
    mesh, whole = init_device_mesh("cpu", (dist.get_world_size(),)), torch.arange(24.0).view(8, 3)
    state = {
        f"layer.{n}.weight": distribute_tensor(whole + step * n, mesh, [Shard(0)])
        for n in range(tensors)
    }
    replicated = distribute_tensor(torch.full((3,), float(step)), mesh, [Replicate()])
    plain = torch.full((5,), float(step))
    return {**state, "r": replicated, "plain": plain, "step": step, "text": "x" * step}


def _loaded(place: Place, like: dict) -> dict:
    def blank(value):
        return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None

    state = {name: blank(value) for name, value in like.items()}
    place.load(state)
    return state


def _local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _same(one: dict, other: dict) -> bool:
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert_same(_local(value), _local(other[name]))
        else:
            assert value == other[name]
    return True


def _saves(place: Place, steps) -> list[tuple[int, int]]:
    """Of each save how often this rank has planned, and the most bytes that it has sent at once."""
    found = []
    for step in steps:
        state = step if isinstance(step, dict) else _state(step)
        with watched() as (sent, plans):
            place.save(state)
        found.append((len(plans), sum(sent)))
        assert _same(state, _loaded(place, state))
    return found


def test_the_second_save_plans_nothing_and_gathers_few_bytes(local, ranks):
    for first, *others in ranks(3, _saves, local, (1, 2, 3)):
        assert first[0] == 1
        assert [plans for plans, _ in others] == [0, 0]
        assert max(sent for _, sent in others) <= FEW


def _changed_on_one(place: Place):
    state = _state(3)
    if dist.get_rank() == 1:
        state["more"] = torch.ones(7)
    return _saves(place, (1, state, 2, 3))


def test_all_plan_anew_if_one_rank_has_another_structure(local, ranks):
    for found in ranks(2, _changed_on_one, local):
        assert [plans for plans, _ in found] == [1, 1, 1, 0]


def _own_planner_on_one(place: Place):
    class Own(DefaultSavePlanner):
        pass

    _saves(place, (1,))
    state = _state(2)
    planner = Own() if dist.get_rank() == 1 else None
    with watched() as (_, plans):
        place.save(state, planner=planner)
    assert _same(state, _loaded(place, state))
    return len(plans)


def test_a_planner_of_a_users_own_plans_each_save_on_all_ranks(local, ranks):
    assert ranks(2, _own_planner_on_one, local) == [1, 1]


def _outside_of_a_group(place: Place):
    group, told = dist.new_group([0, 1]), []
    state, where = {"a": torch.ones(3)}, {"checkpoint_id": place.uri, "config": place.config}
    for call in (
        functools.partial(cloudckpt.save, state, **where),
        functools.partial(cloudckpt.load, state, **where),
        functools.partial(cloudckpt.async_save, state, **where),
        functools.partial(cloudckpt.verify, place.uri, config=place.config),
        functools.partial(cloudckpt.copy, place.uri, f"{place.uri}-2", config=place.config),
    ):
        try:
            call(process_group=group)
        except ConfigError:
            told.append(True)
        dist.barrier()
    close_async_savers()
    return told


def test_a_rank_that_is_not_in_the_group_is_told_so(local, ranks):
    assert ranks(3, _outside_of_a_group, local) == [[], [], [True] * 5]


def _of_another_version(place: Place):
    make = meeting.RankStatus.__new__
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(make, "__defaults__", (*make.__defaults__[:-1], "9.9"))
        with pytest.raises(ConfigError, match=r"9\.9"):
            place.save({"t": torch.ones(2)})


def test_ranks_of_different_versions_are_told_so(local, ranks):
    ranks(2, _of_another_version, local)
    assert local.names() == []


class Planless(CommitHook):
    """Once it has committed, planning is an error in the process that did so."""

    def after_commit(self, uri, metadata):
        def refuse(self):
            raise ArithmeticError("planned again")

        CloudSavePlanner.create_local_plan = refuse


def _in_a_process(place: Place):
    config = CheckpointerConfig(
        config=place.config, kind=AsyncCheckpointerType.PROCESS, commit_hook=Planless()
    )
    plan = CloudSavePlanner.create_local_plan
    try:
        with AsyncCheckpointer(config) as checkpointer:
            for step in (1, 2, 3):
                checkpointer.save(place.uri, {"t": torch.full((9,), float(step)), "step": step})
                checkpointer.wait()
    finally:
        CloudSavePlanner.create_local_plan = plan
    state = {"t": torch.zeros(9), "step": 0}
    place.load(state)
    return state["step"], state["t"].tolist() == [3.0] * 9


def test_a_process_that_saves_plans_once(local, ranks):
    assert ranks(2, _in_a_process, local) == [(3, True)] * 2


def test_memory_that_was_freed_is_told_by_a_save_by_the_same_plan(local):
    state = {"kept": torch.ones(5), "freed": torch.ones(6)}
    local.save(state, no_dist=True)
    state["freed"].untyped_storage().resize_(0)
    with pytest.raises(cloudckpt.errors.UnsupportedTensorError, match="freed"):
        local.save(state, no_dist=True)
