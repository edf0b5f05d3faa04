"""What a save took on each rank stands in the notes of its checkpoint."""

from __future__ import annotations

import json
import time

import pytest
import torch

import cloudckpt
from cloudckpt.checkpoint.notes import Notes, with_timing
from cloudckpt.checkpoint.timing import RankTiming, SaveTiming
from cloudckpt.checkpoint.trailer import MOST_NOTES
from cloudckpt.errors import CheckpointCorruptError

NOTES = Notes(step=7, metrics={"loss": 0.5})


def timing(world: int) -> SaveTiming:
    """Every seventh rank is slower than the others."""
    ranks = [
        RankTiming(
            rank=rank,
            began=1.7e9 + rank / 1000,
            sending=1.7e9 + 1,
            sent=1.7e9 + 20 + 10 * (rank % 7 == 0),
            nbytes=10**10 + rank,
        )
        for rank in range(world)
    ]
    return SaveTiming.of(ranks, 1.7e9 + 31)


@pytest.mark.parametrize("noted", [b"", NOTES.to_json()], ids=["alone", "beside notes"])
def test_what_a_save_took_comes_back_in_milliseconds(noted) -> None:
    found = Notes.from_json(with_timing(noted, timing(8)), "memory://x")
    assert found == (NOTES if noted else Notes())
    assert found.save == timing(8)


def test_the_slowest_ranks_are_kept_if_there_are_more_than_there_is_room_for() -> None:
    data = with_timing(NOTES.to_json(), timing(10_000))
    assert MOST_NOTES - 60 < len(data) <= MOST_NOTES
    found = Notes.from_json(data, "memory://x").save
    assert found is not None
    assert found.world == 10_000
    kept = [one.rank for one in found.ranks]
    assert kept == sorted(kept)
    assert {rank for rank in range(10_000) if rank % 7 == 0} <= set(kept)


def test_notes_that_leave_no_room_stay_as_they_are() -> None:
    full = Notes(user={"text": "x" * (MOST_NOTES - 60)}).to_json()
    assert with_timing(full, timing(1)) in (full, with_timing(full, timing(0)))
    assert len(with_timing(full, timing(1))) <= MOST_NOTES


@pytest.mark.parametrize(
    "save",
    [
        7,
        {"began": 1},
        {"began": "x", "commit": 1, "world": 1, "ranks": []},
        {"began": 1, "commit": 1, "world": 1, "ranks": [[0, 1, 2]]},
        {"began": 1, "commit": 1, "world": 1, "ranks": [[0.5, 1, 2, 3, 4]]},
        {"began": float("nan"), "commit": 1, "world": 1, "ranks": []},
    ],
    ids=["number", "incomplete", "text", "short", "fraction", "nan"],
)
def test_what_makes_no_sense_is_named(save) -> None:
    with pytest.raises(CheckpointCorruptError, match="make no sense"):
        Notes.from_json(json.dumps({"save": save}).encode(), "memory://x")


def save_in_turn(where: str) -> None:
    rank = torch.distributed.get_rank()
    cloudckpt.save({f"w{rank}": torch.ones(1000)}, checkpoint_id=where)


def test_each_rank_of_a_save_is_told(tmp_path, ranks) -> None:
    before = time.time()
    ranks(2, save_in_turn, str(tmp_path / "step-1"))
    found = cloudckpt.inspect(tmp_path / "step-1").notes.save
    assert found is not None
    assert [one.rank for one in found.ranks] == [0, 1]
    for one in found.ranks:
        assert before - 0.01 < one.began <= one.sending <= one.sent <= found.committing + 0.01
        assert one.nbytes > 4000
