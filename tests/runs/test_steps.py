from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.errors import ConfigError
from cloudckpt.runs.steps import Retention, StepNames

PATTERNS = [
    "step-{step}",
    "{step}",
    "{step:08d}",
    "ckpt_{step:04}.d",
    "a{{b}}-{step}",
    "1-{step}-2",
    "v9{step}9",
    "10{step}0",
]


@pytest.mark.parametrize("pattern", PATTERNS)
@given(step=st.integers(0, 10**18 - 1))
def test_a_step_is_found_by_the_name_that_it_gives(pattern: str, step: int) -> None:
    names = StepNames(pattern)
    assert names.step(names.name(step)) == step


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("step-{step}", "step-007"),
        ("step-{step}", "step-"),
        ("step-{step}", "step-7b"),
        ("step-{step}", "xstep-7"),
        ("step-{step}", "step--7"),
        ("step-{step}", "step-7\n"),
        ("step-{step}", "step-\u0667"),
        ("step-{step}", "step-" + "9" * 19),
        ("{step:08d}", "7"),
        ("{step:08d}", "000000007"),
        ("step.{step}", "stepx7"),
    ],
    ids=repr,
)
def test_what_a_step_would_be_called_otherwise_is_another_folder(pattern: str, name: str) -> None:
    assert StepNames(pattern).step(name) is None


@pytest.mark.parametrize(
    "pattern",
    ["", "step", "step-{}", "{0}", "{step}/{step}", "{step}{step}", "a/{step}", "{step", "{other}",
     "{step!r:>5}{x}", "{step:s}", "{step:>8}", "{step:x}", "{step:,}"],
)  # fmt: skip
def test_a_pattern_that_names_no_folder_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match="step_name"):
        StepNames(pattern)


@pytest.mark.parametrize("step", [-1, 1.0, True, "7", None, 10**18])
def test_what_is_no_step_has_no_name(step: object) -> None:
    with pytest.raises(ConfigError, match="give a whole number"):
        StepNames().name(step)  # type: ignore[arg-type]


BEST = Retention(best_to_keep=2, best_metric="loss", best_mode="min")
HIGHEST = Retention(best_to_keep=2, best_metric="loss", best_mode="max")
BOTH = Retention(max_to_keep=2, best_to_keep=2, best_metric="loss", best_mode="min")
LOWEST = Retention(max_to_keep=2, best_metric="loss", best_mode="min")


UNNEEDED = [
    (Retention(), range(9), {}, []),
    (Retention(max_to_keep=2, keep_period=10), [5, 10, 15, 20, 25, 30, 35], {}, [5, 15, 25]),
    (BEST, [1, 2, 3, 4], {1: 0.5, 2: 0.1, 3: 0.2, 4: 0.9}, [1]),  # the newest has the worst score
    (HIGHEST, [1, 2, 3, 4, 5], {1: 0.5, 2: 0.1, 3: 0.2, 4: 0.9}, [2, 3]),
    (BEST, [1, 2, 3, 4, 5], {1: 1.0, 3: 2.0, 4: math.inf}, [4]),  # without a score all are kept
    (HIGHEST, [1, 3, 7, 9], {1: 0.5, 3: 0.5, 7: 0.5}, [1]),  # of equal scores the newest is best
    (BOTH, [1, 2, 3, 4, 5], {1: 0.5, 2: 0.1, 3: 0.2, 4: 0.9, 5: 0.8}, [1]),
    (LOWEST, [1, 2, 3, 4], {1: 0.5, 2: 0.1, 3: 0.2, 4: 0.9}, [1]),  # and the newest
]


@pytest.mark.parametrize(("rules", "committed", "scores", "unneeded"), UNNEEDED)
def test_what_no_rule_keeps_is_unneeded(rules, committed, scores, unneeded) -> None:
    assert rules.unneeded(committed, scores) == unneeded
