"""Jobs, claims, zombies, returns, removals and damage as drawn: as many as seconds allow."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from lines import Lines

DRAWN = settings(  # make soak draws anew, for as long as it is told
    max_examples=4,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("where", ["a disk", "S3"])
def test_a_run_is_what_its_model_says(where, bucket, s3_config) -> None:
    class Drawn(Lines):
        place = None if where == "a disk" else f"s3://{bucket}"
        config = s3_config

    run_state_machine_as_test(Drawn, settings=DRAWN)
