"""A run from its first step to its last, on two ranks: saved, pruned, taken over, restored."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import cloudckpt
from cloudckpt import CheckpointManager
from cloudckpt.checkpointer import CheckpointerConfig
from cloudckpt.runs import Preemption
from clouds import Place


def _managed(place: Place, *, told: bool = False) -> CheckpointManager:
    return CheckpointManager(
        place.uri,
        save_interval_steps=2,
        max_to_keep=2,
        keep_period=6,
        preemption=Preemption(signals=(), is_due=lambda: told),
        checkpointer=CheckpointerConfig(config=place.config, kind=AsyncCheckpointerType.THREAD),
    )


def _state(step: int) -> dict:
    return {f"w{dist.get_rank()}": torch.full((3000,), float(step)), "step": step}


def _trained(place: Place) -> tuple[int | None, list[int], dict[str, float]]:
    """Trains until the job is told to end, one step later."""
    with _managed(place) as manager:
        began = manager.restore(_state(0))
        for step in range((began or 0) + 1, (began or 0) + 12):
            manager.save(step, _state(step), metrics={"loss": 1 / step})
    with _managed(place, told=True) as manager:
        newest = manager.restore(_state(0))
        assert newest is not None
        for step in range(newest + 1, newest + 3):
            manager.save(step, _state(step), metrics={"loss": 1 / step})
        manager.wait_until_finished()
        return began, manager.all_steps(), manager.metrics(step)


def _restored(place: Place) -> tuple[int | None, list[float], int]:
    found = _state(0)
    with _managed(place) as manager:
        step = manager.restore(found, verify=True)
    return step, found[f"w{dist.get_rank()}"].unique().tolist(), found["step"]


def test_a_run_is_saved_pruned_and_restored(ranks, cloud, place) -> None:
    assert ranks(2, _trained, place) == [(None, [6, 10, 12], {"loss": 1 / 12})] * 2
    assert ranks(2, _restored, place) == [(12, [12.0], 12)] * 2
    left = cloudckpt.runs.find_leftovers(place.uri, older_than=0, config=place.config)
    assert (left.objects, left.uploads) == ((), ())
    folders = {name.partition("/")[0] for name in cloud.names(place)}
    assert folders == {".cloudckpt-job.json", "step-6", "step-10", "step-12"}
