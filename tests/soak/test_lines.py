"""Jobs, claims, zombies, returns, removals and damage in one run, with a fresh seed each round."""

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from runs.lines import Lines

DRAWN = settings(
    max_examples=20,
    stateful_step_count=30,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("where", ["a disk", "S3"])
def test_a_run_is_what_its_model_says(where, rng, rounds, bucket, s3_config) -> None:
    for _ in rounds():

        class Drawn(Lines):
            place = None if where == "a disk" else f"s3://{bucket}"
            config = s3_config

        run_state_machine_as_test(seed(rng.getrandbits(32))(Drawn), settings=DRAWN)
