"""Jobs, claims, zombies, returns, removals and damage as drawn: as many as seconds allow."""

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


def test_a_run_is_what_its_model_says() -> None:
    run_state_machine_as_test(Lines, settings=DRAWN)
