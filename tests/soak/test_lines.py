"""Jobs, claims, zombies, returns, removals and damage in one run, with a fresh seed each round."""

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from runs.lines import Lines

RUNS = {"a disk": 20, "S3": 2}  # of a round: an emulator answers some hundred requests a second


@pytest.mark.parametrize("where", ["a disk", "S3"])
def test_a_run_is_what_its_model_says(where, rng, rounds, bucket, s3_config) -> None:
    for _ in rounds():

        class Drawn(Lines):
            place = None if where == "a disk" else f"s3://{bucket}"
            config = s3_config

        drawn = settings(
            max_examples=RUNS[where],
            stateful_step_count=30,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        run_state_machine_as_test(seed(rng.getrandbits(32))(Drawn), settings=drawn)
