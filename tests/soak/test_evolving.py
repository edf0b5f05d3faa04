"""States that change from save to save, as chance draws them, on one to four ranks."""

import pytest

from evolving.drawing import cases
from evolving.machine import check_drawn

WORLDS = (1, 1, 2, 2, 2, 3, 3, 4)


@pytest.mark.parametrize(("store", "lane"), [("local", 0), ("local", 1), ("local", 2), ("s3", 0)])
def test_whatever_is_saved_is_what_all_readers_find(store, lane, ranks, places, rng, rounds):
    drawn, saves = cases(stores=(store,), worlds=WORLDS), 0
    for _ in rounds():
        saves += check_drawn(drawn, ranks, places, number=rng.getrandbits(48), examples=5)
    print(f"{saves} saves")
