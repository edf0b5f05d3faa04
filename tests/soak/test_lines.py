"""Jobs, claims, zombies, returns, removals and damage in one run, with a fresh seed each round."""

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


def test_a_run_is_what_its_model_says(rng, rounds) -> None:
    for _ in rounds():

        class Drawn(Lines):
            pass

        run_state_machine_as_test(seed(rng.getrandbits(32))(Drawn), settings=DRAWN)
