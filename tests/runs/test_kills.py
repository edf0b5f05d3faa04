"""Training goes on behind kills as if there had been none; ``make soak`` has more of them."""

import random

import pytest

from runs.kills import trained_through_kills


@pytest.mark.parametrize(("kind", "kills"), [("THREAD", 2), ("PROCESS", 1)])
def test_a_job_that_is_killed_ends_as_one_that_is_not(tmp_path, kind, kills) -> None:
    trained_through_kills(tmp_path, kind, random.Random(kind), last=9, kills=kills)
