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


@pytest.mark.parametrize("is_old", [False, True])
def test_a_hole_is_seen_also_if_torch_only_says_whether_there_is_one(monkeypatch, is_old):
    usual = torch_private._validate_global_plan
    if is_old:  # as torch 2.9
        verdict = lambda *given: usual(*given) in (True, [])  # noqa: E731
        monkeypatch.setattr(torch_private, "_validate_global_plan", verdict)
    for second, is_filled in ((2, 4), True), ((3, 4), False):
        metadata = Metadata({"t": rows((0, 2), second)})
        assert torch_private.is_filled([SavePlan([])] * 2, metadata) is is_filled


def test_what_a_planner_keeps_of_earlier_saves_is_dropped_for_it_alone(monkeypatch):
    kept = {name: {} for name in vars(SavePlanner) if name.startswith("_cached_")}
    assert len(kept) >= 4
    planner = DefaultSavePlanner(enable_plan_caching=True)
    for name, cache in kept.items():
        cache |= {planner._cached_plans_key: name, "Another": name}
        monkeypatch.setattr(SavePlanner, name, cache)
    torch_private.forget_plans(planner)
    assert all(cache == {"Another": name} for name, cache in kept.items())
