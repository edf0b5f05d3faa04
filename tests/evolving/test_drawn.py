"""Cases as chance draws them, the same at each run; ``make evolve`` draws others."""

import pytest

from .drawing import drawn
from .machine import found_in, shrunk
from .shrinking import smaller
from .states import made
from .values import Here

SEEDS = 12
LANES = 3


@pytest.mark.parametrize("lane", range(LANES))
def test_whatever_is_saved_is_what_all_readers_find(lane, ranks, places):
    for seed in range(lane, SEEDS, LANES):
        found = found_in(drawn(str(seed)), ranks, places)
        assert found is None, shrunk(found, ranks, places, seconds=60.0)


def test_a_case_is_that_of_its_seed():
    assert drawn("7") == drawn("7")
    assert drawn("7") != drawn("8")


def test_every_smaller_case_is_another_one_and_can_be_made():
    for seed in range(10):
        case = drawn(str(seed))
        for number, small in enumerate(smaller(case)):
            assert small != case
            if number % 40 == 0:
                for save in small.saves:
                    made(save.state, Here(0, None, 3))
