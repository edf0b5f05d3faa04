"""Saves, deletions, sweeps, loads and kills in every order: as many as a minute allows."""

import pytest
from interleavings import try_one, worlds  # noqa: F401 - a fixture

from cloudckpt.checkpoint import baseline
from cloudckpt.runs import adopting

INTERLEAVINGS = 300  # make soak tries two thousand, and goes on as long as it is told


def test_no_interleaving_damages_a_checkpoint_or_leaves_anything_in_the_end(worlds):  # noqa: F811
    for seed in range(INTERLEAVINGS):
        try_one(worlds, seed)
    for seed in range(INTERLEAVINGS // 6):
        try_one(worlds, seed, kinds=("manager",))


@pytest.mark.parametrize(
    ("module", "kinds"), [(baseline, ("save", "sweep", "prune")), (adopting, ("adopt", "sweep"))]
)
def test_without_its_limit_of_age_a_sweep_damages_a_checkpoint(worlds, monkeypatch, module, kinds):  # noqa: F811
    """The scheduler finds what the limits rule out: a sweep behind a slow save, or an adoption."""
    monkeypatch.setattr(module, "LONGEST_SAVE", 1e9)

    def run_many() -> None:
        for seed in range(5000):
            worlds(seed, kinds=kinds).run()

    with pytest.raises(AssertionError, match="is gone"):
        run_many()
