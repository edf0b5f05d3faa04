"""Checkpoints of several ranks: saved by some, loaded by more or fewer, in the background too."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import cloudckpt
from clouds import PART_SIZE
from dcp.layouts import LAYOUTS, check_local_parts, full_state, spread
from dcp.values import assert_same, numbered

WIDTH = 4096
PATIENCE = 200  # seconds


def _large() -> torch.Tensor:
    """As many rows as give each of two ranks several parts."""
    return numbered(2 * (2 * PART_SIZE + 1000) // (4 * WIDTH) + 1, WIDTH)


def _save(layout, place):
    state = spread({**full_state(), "in parts": _large()}, LAYOUTS[layout])
    own = {f"of rank {dist.get_rank()}": [dist.get_rank()], "step": 3}
    cloudckpt.save({**state, **own}, checkpoint_id=place.uri, config=place.config)


def _load(layout, place):
    state = spread(full_state(), LAYOUTS[layout], blank=True)
    large = spread({"in parts": _large()}, LAYOUTS[layout], blank=True)
    state_dict = {**state, **large, "step": None}
    cloudckpt.load(state_dict, checkpoint_id=place.uri, config=place.config)
    check_local_parts(state, LAYOUTS[layout])
    expected = spread({"in parts": _large()}, LAYOUTS[layout])["in parts"]
    assert_same(large["in parts"].to_local(), expected.to_local(), "in parts")
    assert state_dict["step"] == 3


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("one rank", "2 rows"),
        ("2 rows", "4 columns"),
        ("4 rows", "one rank"),
        ("2x2 blocks", "2 columns"),
    ],
)
def test_what_some_ranks_save_others_load(cloud, place, ranks, saved, loaded):
    ranks(LAYOUTS[saved].world, _save, saved, place)
    assert cloud.uploads(place) == []
    ranks(LAYOUTS[loaded].world, _load, loaded, place)


def _of_step(step):
    return spread({"t": torch.full((2, 2 * PART_SIZE), float(step))}, LAYOUTS["2 rows"])


def _save_in_background(place, kind):
    try:
        for step in (1, 2):
            state = _of_step(step)
            future = cloudckpt.async_save(
                state,
                checkpoint_id=place.uri,
                config=place.config,
                async_checkpointer_type=kind,
            )
            state["t"].to_local().fill_(-1)  # training goes on
            future.result(PATIENCE)
            blank = _of_step(0)
            cloudckpt.load(blank, checkpoint_id=place.uri, config=place.config)
            assert_same(blank["t"].to_local(), _of_step(step)["t"].to_local())
    finally:
        cloudckpt.checkpointer.close_async_savers()


@pytest.mark.parametrize(
    "kind", [AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS], ids=["thread", "process"]
)
def test_async_save_saves_what_was_there_when_it_was_called(cloud, place, ranks, kind):
    ranks(2, _save_in_background, place, kind)
    assert cloud.uploads(place) == []
    assert len([name for name in cloud.names(place) if name.startswith(".metadata")]) == 1
