"""Saves, deletions, sweeps, loads and kills in every order: as many as a minute allows."""

import pytest
from interleavings import try_one, worlds  # noqa: F401 - a fixture

from cloudckpt.checkpoint import baseline
from cloudckpt.runs import adopting

INTERLEAVINGS = 300  # make soak tries two thousand, and goes on as long as it is told


def test_no_interleaving_damages_a_checkpoint_or_leaves_anything_in_the_end(worlds):  # noqa: F811
    for seed in range(INTERLEAVINGS):
        try_one(worlds, seed)


def test_without_the_limit_of_a_save_a_checkpoint_is_damaged(worlds, monkeypatch):  # noqa: F811
    """The scheduler finds what the limit rules out: a sweep behind the back of a slow save."""
    monkeypatch.setattr(baseline, "LONGEST_SAVE", 1e9)

    def run_many() -> None:
        for seed in range(5000):
            worlds(seed, kinds=("save", "sweep", "prune")).run()

    with pytest.raises(AssertionError, match="is gone"):
        run_many()


def test_without_a_limit_of_age_what_is_adopted_may_be_swept(worlds, monkeypatch):  # noqa: F811
    """The scheduler finds what that limit rules out: a sweep behind the back of an adoption."""
    monkeypatch.setattr(adopting, "LONGEST_SAVE", 1e9)

    def run_many() -> None:
        for seed in range(5000):
            worlds(seed, kinds=("adopt", "sweep")).run()

    with pytest.raises(AssertionError, match="is gone"):
        run_many()
