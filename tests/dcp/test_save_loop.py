"""How often ranks plan, and how often they call each other: all of a large job waits each time.

The second save of a structure plans nothing; a change of the structure is planned anew.
"""

import contextlib
import functools
import pickle
import re
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

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
from .values import assert_same, blank_like

FEW = 600
"""Bytes that a rank may send in all when nothing is planned."""
COLLECTIVES = [
    name
    for name in dist.distributed_c10d.__all__
    if re.match(r"all_|broadcast|gather|scatter|reduce(?!_op)|(monitored_)?barrier", name)
]
MEETING = ["all_gather_object"]
PLAN = ["gather_object", "scatter_object_list"]
COMMIT = ["gather_object", "broadcast_object_list"]
BASE = COMMIT
"""An incremental save agrees on its base, which is another round of the same calls."""


@pytest.fixture(autouse=True)
def forgetful():
    save_plan._plans.clear()
    yield
    save_plan._plans.clear()


@dataclass
class Watched:
    """How often this rank plans, what it calls, and how many bytes it sends to be gathered."""

    plans: int = 0
    calls: list[str] = field(default_factory=list)
    sent: int = 0


@contextlib.contextmanager
def watched():
    """Calls within the block; not those that one of them is made of."""
    seen, depth, plan = Watched(), 0, DefaultSavePlanner.create_local_plan

    def noting(name, original):
        @functools.wraps(original)
        def call(*args, **kwargs):
            nonlocal depth
            if not depth:
                seen.calls.append(name)
                if name == "gather_object":
                    seen.sent += len(pickle.dumps(args[0] if args else kwargs["obj"]))
            depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                depth -= 1

        return call

    def planned(self):
        seen.plans += 1
        return plan(self)

    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            patch.setattr(dist, name, noting(name, getattr(dist, name)))
        patch.setattr(DefaultSavePlanner, "create_local_plan", planned)
        yield seen


def _state(step: int) -> dict:
    mesh, whole = init_device_mesh("cpu", (dist.get_world_size(),)), torch.arange(24.0).view(8, 3)
    layers = {
        f"layer.{n}.weight": distribute_tensor(whole + step * n, mesh, [Shard(0)])
        for n in range(200)
    }
    replicated = distribute_tensor(torch.full((3,), float(step)), mesh, [Replicate()])
    plain, own = torch.full((5,), float(step)), f"of {dist.get_rank()}"
    return {**layers, "r": replicated, "plain": plain, own: plain, "step": step, "text": "x" * step}


def _check(place: Place, state: dict, **options) -> None:
    place.load(loaded := blank_like(state), **options)
    assert_same(loaded, state)


def _saves(place: Place, steps=(1, 2, 3), change=dict, planner=None) -> list[Watched]:
    found = []
    for step in steps:
        state = change(_state(step))
        with watched() as seen:
            place.save(state, planner=planner)
        found.append(seen)
        _check(place, state)
    return found


def test_the_second_save_plans_nothing_and_gathers_few_bytes_in_fewer_calls(local, ranks):
    for first, *others in ranks(3, _saves, local):
        assert (first.plans, first.calls) == (1, [*MEETING, *PLAN, *COMMIT])
        for other in others:
            assert (other.plans, other.calls) == (0, [*MEETING, *COMMIT])
            assert other.sent <= FEW


def test_an_incremental_save_agrees_on_its_base_by_two_calls_more(local, ranks):
    place = local.having(incremental=True).at("run/step")
    for first, second, _ in ranks(2, _saves, place):
        assert first.calls == [*MEETING, *PLAN, *BASE, *COMMIT]
        assert second.calls == [*MEETING, *BASE, *COMMIT]


def _with_more_on_one(state: dict) -> dict:
    is_changed = dist.get_rank() == 1 and state["step"] == 3
    return {**state, "more": torch.ones(7)} if is_changed else state


def test_all_plan_anew_if_one_rank_has_another_structure(local, ranks):
    for found in ranks(2, _saves, local, (1, 3, 2, 4), _with_more_on_one):
        assert [seen.plans for seen in found] == [1, 1, 1, 0]


class OwnSavePlanner(DefaultSavePlanner):
    """A planner of a user's own."""


def _own_planner_on_one(place: Place) -> list[Watched]:
    _saves(place, (1,))
    return _saves(place, (2, 3), planner=OwnSavePlanner() if dist.get_rank() == 1 else None)


def test_a_planner_of_a_users_own_plans_each_save_on_all_ranks(local, ranks):
    for found in ranks(2, _own_planner_on_one, local):
        assert [seen.plans for seen in found] == [1, 1]
        assert [seen.calls for seen in found] == [[*MEETING, *PLAN, *COMMIT]] * 2


def _in_the_background(place: Place) -> list[list[str]]:
    config = CheckpointerConfig(config=place.config, kind=AsyncCheckpointerType.THREAD)
    found = []
    with AsyncCheckpointer(config) as checkpointer:
        one_by_one = functools.partial(cloudckpt.async_save, config=place.config)
        for save in (
            lambda state: checkpointer.save(place.uri, state)[1],
            lambda state: one_by_one(state, checkpoint_id=place.uri),
        ):
            save({"all": torch.ones(9)}).result()
            with watched() as seen:
                save({"all": torch.ones(9)}).result()
            found.append(seen.calls)
    close_async_savers()
    return found


def test_a_save_in_the_background_has_a_meeting_more(ranks, local):
    later = [*MEETING, *COMMIT]
    expected = [[*MEETING, *later], [*MEETING, *MEETING, *later]]
    assert ranks(2, _in_the_background, local) == [expected] * 2


class OwnLoadPlanner(DefaultLoadPlanner):
    """A planner of a user's own, with a global plan of its own."""

    seen = None

    def create_global_plan(self, global_plan):
        self.seen = len(global_plan)
        return super().create_global_plan(global_plan)


def _loads(place: Place) -> list[list[str]]:
    place.save(state := _state(1))
    found, own = [], OwnLoadPlanner()
    for planner in (None, DefaultLoadPlanner(), own):
        with watched() as seen:
            _check(place, state, planner=planner)
        found.append(seen.calls)
    assert own.seen == (2 if dist.get_rank() == 0 else None)
    return found


def test_the_plans_of_a_load_go_to_the_first_rank_only_if_its_planner_wants_them(ranks, local):
    for ours, torchs, own in ranks(2, _loads, local):
        assert ours == torchs == ["broadcast_object_list", *3 * MEETING]
        assert own == ["broadcast_object_list", *PLAN, *3 * MEETING]


def _outside_of_a_group(place: Place) -> int:
    group, refused = dist.new_group([0, 1]), 0
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
            refused += 1
        dist.barrier()
    close_async_savers()
    return refused


def test_a_rank_that_is_not_in_the_group_is_refused(local, ranks):
    assert ranks(3, _outside_of_a_group, local) == [0, 0, 5]


def _of_another_version(place: Place) -> None:
    make = meeting.RankStatus.__new__
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(make, "__defaults__", (*make.__defaults__[:-1], "9.9"))
        with pytest.raises(ConfigError, match=r"9\.9"):
            place.save({"t": torch.ones(2)})


def test_ranks_of_different_versions_are_refused(local, ranks):
    ranks(2, _of_another_version, local)
    assert local.names() == []


class Planless(CommitHook):
    """Once it has committed, planning is an error in the process that did so."""

    def after_commit(self, uri, metadata):
        def refuse(self):
            raise ArithmeticError("planned again")

        CloudSavePlanner.create_local_plan = refuse


def _in_a_process(place: Place) -> None:
    config = CheckpointerConfig(
        config=place.config, kind=AsyncCheckpointerType.PROCESS, commit_hook=Planless()
    )
    with pytest.MonkeyPatch.context() as patch, AsyncCheckpointer(config) as checkpointer:
        patch.setattr(CloudSavePlanner, "create_local_plan", CloudSavePlanner.create_local_plan)
        for step in (1, 2, 3):
            state = {"t": torch.full((9,), float(step)), "step": step}
            checkpointer.save(place.uri, state)[1].result()
    _check(place, state)


def test_a_process_that_saves_plans_once(local, ranks):
    ranks(2, _in_a_process, local)


def test_memory_that_was_freed_is_refused_by_a_save_by_the_same_plan(local):
    state = {"kept": torch.ones(5), "freed": torch.ones(6)}
    local.save(state, no_dist=True)
    state["freed"].untyped_storage().resize_(0)
    with pytest.raises(cloudckpt.errors.UnsupportedTensorError) as caught:
        local.save(state, no_dist=True)
    assert caught.value.item == "freed"
