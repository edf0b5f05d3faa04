"""Saves, deletions, sweeps, loads and kills in every order: 2,000 in a minute or more of soak.

A shorter soak tries as many less; a longer one goes on while it has time.
"""

import itertools

import pytest

from runs.interleavings import try_one, worlds  # noqa: F401 - a fixture

_SHARES = 16  # of the interleavings: each ends well before a test has to
_LEAST = 2_000


@pytest.mark.parametrize("share", range(_SHARES))
def test_no_interleaving_damages_a_checkpoint(worlds, rng, rounds, share, pytestconfig):  # noqa: F811
    least = _LEAST * min(pytestconfig.getoption("--seconds") / 60, 1) / _SHARES
    first = rng.randrange(2**48)
    tried = itertools.count(1)
    for _ in rounds():
        try_one(worlds, first + next(tried))
    while (number := next(tried)) <= least:
        try_one(worlds, first + number)
