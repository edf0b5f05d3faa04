"""Cases as chance draws them, the same at each run; ``make evolve`` draws others."""

import pytest

from .drawing import cases
from .machine import QUICK, check_drawn


@pytest.mark.parametrize("number", [1, 2])  # 54 saves
def test_whatever_is_saved_is_what_all_readers_find(number, ranks, places):
    check_drawn(cases(), ranks, places, number=number, examples=5, phases=QUICK)
