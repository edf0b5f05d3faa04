"""How often the ranks of a job call each other: a save or a load of a large job waits each time."""

import functools
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import cloudckpt
from cloudckpt.checkpointer import AsyncCheckpointer, CheckpointerConfig, close_async_savers

COLLECTIVES = [
    name
    for name in dist.distributed_c10d.__all__
    if re.match(r"all_|broadcast|gather|scatter|reduce(?!_op)|(monitored_)?barrier", name)
]


class Calls(list):
    """The collective calls within a ``with`` block; not those that one of them is made of."""

    def __enter__(self):
        self._patch = pytest.MonkeyPatch()
        self._depth = 0
        for name in COLLECTIVES:
            self._patch.setattr(dist, name, self._noting(name, getattr(dist, name)))
        return self

    def __exit__(self, *_):
        self._patch.undo()

    def _noting(self, name, original):
        @functools.wraps(original)
        def call(*args, **kwargs):
            if not self._depth:
                self.append(name)
            self._depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1

        return call


def content(rank):
    return {"all": torch.ones(700_001), f"of {rank}": torch.full((9,), float(rank)), "step": 7}


class OwnLoadPlanner(DefaultLoadPlanner):
    """A planner of a user's own, with a global plan of its own."""

    def create_global_plan(self, global_plan):
        self.seen = len(global_plan)
        return super().create_global_plan(global_plan)


class OwnSavePlanner(DefaultSavePlanner):
    """A planner of a user's own."""


def calls_of_a_load(place, planner):
    rank = dist.get_rank()
    place.save(content(rank))
    target = {name: value * 0 for name, value in content(rank).items()}
    with Calls() as calls:
        place.load(target, planner=planner)
    assert all(torch.equal(target[k], v) for k, v in content(rank).items() if k != "step")
    if isinstance(planner, OwnLoadPlanner):
        assert getattr(planner, "seen", None) == (2 if rank == 0 else None)
    return calls


@pytest.mark.parametrize("planner", [None, DefaultLoadPlanner()], ids=["ours", "torch's"])
def test_the_ranks_of_a_load_meet_three_times(ranks, local, planner):
    for calls in ranks(2, calls_of_a_load, local, planner):
        assert calls == ["broadcast_object_list", "all_gather_object", "all_gather_object"]


def test_the_plans_of_all_ranks_go_to_the_first_rank_only_if_its_planner_wants_them(ranks, local):
    for calls in ranks(2, calls_of_a_load, local, OwnLoadPlanner()):
        assert calls == [
            "broadcast_object_list",
            *["gather_object", "scatter_object_list"],
            *["all_gather_object", "all_gather_object"],
        ]


def calls_of_saves(place, planner):
    found = []
    for _ in range(2):
        with Calls() as calls:
            place.save(content(dist.get_rank()), planner=planner)
        found.append(list(calls))
    return found


PLANNED = [
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "gather_object",
    "broadcast_object_list",
]


def test_the_ranks_of_a_save_meet_five_times_and_three_times_once_they_have_a_plan(ranks, local):
    for first, second in ranks(2, calls_of_saves, local.having(overwrite=True), None):
        assert first == PLANNED
        assert second == ["all_gather_object", "gather_object", "broadcast_object_list"]


def test_a_save_that_is_planned_each_time_takes_no_more(ranks, local):
    for first, second in ranks(2, calls_of_saves, local.having(overwrite=True), OwnSavePlanner()):
        assert first == second == PLANNED


def test_an_incremental_save_agrees_on_its_base_by_two_calls_more(ranks, local):
    place = local.having(overwrite=True, incremental=True)
    for first, second in ranks(2, calls_of_saves, place.at("run").at("step"), None):
        assert first == [*PLANNED[:3], "gather_object", "broadcast_object_list", *PLANNED[3:]]
        assert second == ["all_gather_object", *["gather_object", "broadcast_object_list"] * 2]


def calls_of_a_save_in_the_background(place):
    state = {"all": torch.ones(9)}
    config = CheckpointerConfig(config=place.config, kind=AsyncCheckpointerType.THREAD)
    with AsyncCheckpointer(config) as checkpointer:
        checkpointer.save(place.uri, state)[1].result()
        with Calls() as calls:
            checkpointer.save(place.uri, state)[1].result()
    where = {"checkpoint_id": place.uri, "config": place.config}
    cloudckpt.async_save(state, **where).result()
    with Calls() as others:
        cloudckpt.async_save(state, **where).result()
    close_async_savers()
    return list(calls), list(others)


def test_a_save_in_the_background_has_a_meeting_more(ranks, local):
    later = ["all_gather_object", "gather_object", "broadcast_object_list"]
    for found in ranks(2, calls_of_a_save_in_the_background, local):
        assert found == (
            ["all_gather_object", *later],
            ["all_gather_object", "all_gather_object", *later],
        )
