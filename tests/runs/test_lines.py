"""Jobs, claims, zombies, returns, removals and damage as drawn: as many as seconds allow."""

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from lines import Lines

DRAWN = settings(max_examples=12, stateful_step_count=25, deadline=None, derandomize=True)


def test_a_run_is_what_its_model_says() -> None:
    run_state_machine_as_test(Lines, settings=DRAWN)
