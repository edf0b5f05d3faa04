"""Jobs of two ranks, of which one or both are killed at any moment, and that go on each time."""

import pytest

from runs.kills import KINDS, trained_through_kills


@pytest.mark.parametrize("kind", KINDS)
def test_jobs_that_are_killed_end_as_if_nothing_had_come_between(
    tmp_path, rng, rounds, kind
) -> None:
    for number in rounds():
        folder = tmp_path / str(number)
        folder.mkdir()
        trained_through_kills(folder, kind, rng, last=21, kills=2)
