"""Older torches say the same in other words, and what they keep of a failed save is dropped."""

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from cloudckpt.checkpoint import torch_private


def rows(*bounds):
    chunks = [ChunkStorageMetadata(torch.Size([a]), torch.Size([b - a])) for a, b in bounds]
    return TensorStorageMetadata(TensorProperties(), torch.Size([4]), chunks)


@pytest.mark.parametrize("says_what_is_wrong", [True, False])
def test_a_plan_with_a_hole_is_named_also_by_a_torch_that_only_says_that_it_is_wrong(
    monkeypatch, says_what_is_wrong
):
    usual = torch_private._validate_global_plan
    if not says_what_is_wrong:  # as torch 2.9
        monkeypatch.setattr(
            torch_private,
            "_validate_global_plan",
            lambda *given: (found := usual(*given)) is True or found == [],
        )
    plans = [SavePlan([])] * 2
    whole, hole = rows((0, 2), (2, 4)), rows((0, 2), (3, 4))
    assert torch_private.validate_global_plan(plans, Metadata({"whole": whole})) == []
    told = torch_private.validate_global_plan(plans, Metadata({"whole": whole, "hole": hole}))
    assert len(told) == 1
    assert told[0].startswith("key:hole ")


def test_what_a_planner_keeps_of_earlier_saves_is_dropped_for_it_alone(monkeypatch):
    kept = {name: {} for name in vars(SavePlanner) if name.startswith("_cached_")}
    assert len(kept) >= 4
    planner = DefaultSavePlanner(enable_plan_caching=True)
    for name, cache in kept.items():
        cache |= {planner._cached_plans_key: name, "Another": name}
        monkeypatch.setattr(SavePlanner, name, cache)
    torch_private.forget_plans(planner)
    assert all(cache == {"Another": name} for name, cache in kept.items())
