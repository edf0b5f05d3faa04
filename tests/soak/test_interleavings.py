"""Saves, deletions, sweeps, loads and kills in every order: twenty thousand, and more in time."""

import itertools

import pytest

from runs.interleavings import try_one, worlds  # noqa: F401 - a fixture

_SHARES = 16  # of the interleavings: each ends well before a test has to
_LEAST = 20_000 // _SHARES


@pytest.mark.parametrize("share", range(_SHARES))
def test_no_interleaving_damages_a_checkpoint(worlds, rng, rounds, share):  # noqa: F811
    first = rng.randrange(2**48)
    tried = itertools.count(1)
    for _ in rounds():
        try_one(worlds, first + next(tried))
    while (number := next(tried)) <= _LEAST:
        try_one(worlds, first + number)
