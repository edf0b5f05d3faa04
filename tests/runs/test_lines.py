"""Jobs, claims, zombies, returns, removals and damage as drawn: as many as seconds allow."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from runs.lines import Lines
from support import memory_store  # noqa: F401 - makes memory:// known

DRAWN = settings(  # make soak draws anew, on a disk and on S3, for as long as it is told
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def test_a_run_is_what_its_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lines, "place", "memory://lines")
    run_state_machine_as_test(Lines, settings=DRAWN)
