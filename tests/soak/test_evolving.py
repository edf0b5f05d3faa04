"""States that change from save to save, as chance draws them, on one to four ranks."""

import pytest

from evolving.drawing import drawn
from evolving.machine import found_in, shrunk

WORLDS = (1, 1, 2, 2, 2, 3, 3, 4)


@pytest.mark.parametrize(("store", "lane"), [("local", 0), ("local", 1), ("local", 2), ("s3", 0)])
def test_whatever_is_saved_is_what_all_readers_find(store, lane, ranks, places, rng, rounds):
    saves = 0
    for _ in rounds():
        seed = f"{rng.getrandbits(48):x}"
        case = drawn(seed, stores=(store,), worlds=WORLDS)
        saves += len(case.saves)
        found = found_in(case, ranks, places)
        if found is not None:
            small = shrunk(found, ranks, places)
            pytest.fail(f"the case of {seed!r} shows{small}\nand before it was made small\n{found}")
    print(f"{saves} saves")
