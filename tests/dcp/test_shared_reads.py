"""Ranks that want the same bytes read them from the store once.

What becomes of a rank that fails or dies meanwhile: see tests/transfer/test_sharing.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import cloudckpt

from .values import assert_same


def whole() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "weight": torch.rand(1024, 3000, generator=draw),
        "bias": torch.rand(700_001, generator=draw),
        "half": torch.rand(300, 1000, generator=draw).to(torch.bfloat16),
    }


def empty(state):
    return {name: torch.zeros_like(value) for name, value in state.items()}


def all_load_the_same(place):
    """The bytes that this rank has read from the store."""
    state, target, reader = whole(), empty(whole()), place.reader()
    place.save(state)
    cloudckpt.load(target, storage_reader=reader)
    assert_same(target, state)
    return reader.transferred.nbytes


@pytest.mark.parametrize("shared_reads", ["auto", "host"])
def test_replicated_tensors_leave_the_store_once(ranks, s3, shared_reads):
    unique = sum(value.nbytes for value in whole().values())
    read = ranks(3, all_load_the_same, s3.having(shared_reads=shared_reads))
    assert unique <= sum(read) <= 1.05 * unique
    assert max(read) <= 0.6 * unique


def mixed_options(place):
    with pytest.raises(cloudckpt.errors.ConfigError, match="shared_reads"):
        place.having(shared_reads=["auto", "off"][dist.get_rank()]).load({})


def test_ranks_must_agree_on_it(ranks, local):
    ranks(2, mixed_options, local)


class OwnPlanner(DefaultLoadPlanner):
    """A planner of a user's own."""


def mixed_planners(place, where):
    place.save({"a": torch.ones(3)})
    planner = OwnPlanner() if dist.get_rank() == where else None
    target = {"a": torch.zeros(3)}
    place.load(target, planner=planner)
    return bool(target["a"].all())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_planner_of_ones_own_may_be_on_one_rank_only(ranks, local, rank):
    assert ranks(2, mixed_planners, local, rank) == [True, True]
