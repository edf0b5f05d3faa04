"""Converts steps to folder names and back, and decides by retention rules which steps are kept."""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

from cloudckpt.config import whole_number
from cloudckpt.errors import ConfigError

__all__ = [
    "DEFAULT_PATTERN",
    "Retention",
    "StepNames",
    "check_count",
    "check_seconds",
    "check_step",
]

logger = logging.getLogger("cloudckpt")

DEFAULT_PATTERN = "step-{step}"
"""The default pattern of a step's folder name, the same as torchtitan's."""

HIGHEST_STEP = 10**18 - 1
"""The highest valid step: steps have at most eighteen digits."""

_EXAMPLE = 10**17  # a step that is found in a name even if other digits stand before or after it


def check_step(step: int, name: str = "step") -> int:
    """Converts a step to a Python int, also from an integer of numpy or torch.

    Args:
        step: The step.
        name: The name of the option that has the step, for the message.

    Raises:
        ConfigError: If ``step`` is not a whole number from 0 to :data:`HIGHEST_STEP`.
    """
    number = whole_number(step)
    if number is None or not 0 <= number <= HIGHEST_STEP:
        raise ConfigError(f"{name}={step!r} is not valid: give a whole number from 0 to 10**18 - 1")
    return number


def check_count(name: str, value: object) -> int:
    """Converts the value of the option ``name`` to a Python int.

    Raises:
        ConfigError: If it is not a whole number of at least 1.
    """
    number = whole_number(value)
    if number is None or number < 1:
        raise ConfigError(f"{name}={value!r}: give a whole number of at least 1")
    return number


def check_seconds(name: str, value: object, *, or_zero: bool = False) -> None:
    """Checks that the value of the option ``name`` is a finite number of seconds above 0.

    Raises:
        ConfigError: If it is not; with ``or_zero``, 0 is allowed.
    """
    seconds: Any = value if isinstance(value, Real) else -1
    if not (0 < seconds <= sys.float_info.max or (or_zero and seconds == 0)):
        raise ConfigError(
            f"{name}={value!r}: give a finite number of seconds, "
            f"{'0 or above' if or_zero else 'above 0'}"
        )


class StepNames:
    """Converts steps to folder names, and folder names to steps, by a pattern.

    A folder belongs to a step only if formatting the step gives exactly the folder's name: with the
    pattern ``step-{step}``, the folder ``step-007`` belongs to another program, not to step 7.
    """

    def __init__(self, pattern: str = DEFAULT_PATTERN) -> None:
        """
        Args:
            pattern: A folder name that contains ``{step}``, or ``{step:08d}`` for leading zeros.

        Raises:
            ConfigError: If ``pattern`` does not give the name of one folder that has the step once,
                in plain digits.
        """
        self.pattern = pattern
        example = "write a name with {step} in it once, such as 'step-{step}' or '{step:08d}'"
        try:
            made = self._with(_EXAMPLE)
        except (ValueError, KeyError, IndexError, AttributeError, TypeError) as exc:
            raise ConfigError(f"step_name={pattern!r} is not a valid pattern: {example}") from exc
        around = map(re.escape, made.partition(str(_EXAMPLE))[::2])
        self._pattern = re.compile("([0-9]+)".join(around))
        is_exact = all(self.step(self._with(step)) == step for step in (0, 7, HIGHEST_STEP))
        if not is_exact or "/" in made or "\\" in made:
            raise ConfigError(
                f"step_name={pattern!r} must give the name of one folder, without slash or "
                f"backslash, that has the step once and in plain digits: {example}"
            )

    def _with(self, step: int) -> str:
        """Returns the name of a step's folder, without checking the step."""
        return self.pattern.format(step=step)

    def name(self, step: int) -> str:
        """Returns the name of a step's folder.

        Raises:
            ConfigError: If ``step`` is not a valid step.
        """
        return self._with(check_step(step))

    def step(self, name: str) -> int | None:
        """Returns the step whose folder has this name; None if it is the name of no step."""
        match = self._pattern.fullmatch(name)
        if match is None or len(match[1]) > 18:
            return None
        step = int(match[1])
        return step if self._with(step) == name else None


@dataclass(frozen=True, kw_only=True)
class Retention:
    """The rules that decide which steps of a run are kept: a step stays if any rule keeps it.

    The newest step is always kept. If none of the first three rules is set, all steps are kept.

    Attributes:
        max_to_keep: How many of the newest steps are kept. With ``best_metric`` and without
            ``best_to_keep``, it is used as ``best_to_keep``.
        best_to_keep: How many of the best steps are kept; steps without a score are kept, too.
            Needs ``best_metric``.
        keep_younger_than: Steps committed within so many seconds are kept.
        keep_period: Steps that are multiples of this number are kept.
        best_metric: The name of the metric whose value is a step's score.
        best_mode: Whether the lowest (``"min"``) or the highest scores (``"max"``) are best; None
            without ``best_metric``.
    """

    max_to_keep: int | None = None
    best_to_keep: int | None = None
    keep_younger_than: float | None = None
    keep_period: int | None = None
    best_metric: str | None = None
    best_mode: Literal["min", "max"] | None = None

    def __post_init__(self) -> None:
        for name in ("max_to_keep", "best_to_keep", "keep_period"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, check_count(name, value))
        if self.keep_younger_than is not None:
            check_seconds("keep_younger_than", self.keep_younger_than)
        metric: object = self.best_metric
        if not isinstance(metric, (str, type(None))):
            raise ConfigError(f"best_metric={metric!r}: give the name of a metric, such as 'loss'")
        if (metric is None) != (self.best_mode is None) or self.best_mode not in _MODES:
            raise ConfigError(
                f"best_metric={metric!r}, best_mode={self.best_mode!r}: give both, with "
                "best_mode='min' if the lowest values are the best, or 'max' if the highest are"
            )
        if self.best_to_keep is not None and metric is None:
            raise ConfigError("best_to_keep= also needs best_metric= and best_mode=")

    @property
    def keeps_all(self) -> bool:
        """Whether all steps are kept, because no rule limits them."""
        rules = (self.max_to_keep, self.best_to_keep, self.keep_younger_than)
        return all(rule is None for rule in rules)

    def unneeded(self, committed: Collection[int], scores: Mapping[int, float]) -> list[int]:
        """Returns the steps that no rule keeps, oldest first, without regard to their ages.

        The caller has to leave out the steps that ``keep_younger_than`` keeps.

        Args:
            committed: The committed steps.
            scores: The scores of the steps that have one; empty without a ``best_metric``.
        """
        if self.keeps_all or not committed:
            return []
        newest_first = sorted(committed, reverse=True)
        newest, best = self.max_to_keep or 1, self.best_to_keep
        if best is None and self.best_metric is not None:
            newest, best = 1, self.max_to_keep
        kept = {*newest_first[:newest]}
        if best is not None:
            kept.update(step for step in committed if step not in scores)
            kept.update(
                self.ranked({step: scores[step] for step in committed if step in scores})[:best]
            )
        if self.keep_period is not None:
            kept.update(step for step in committed if step % self.keep_period == 0)
        return sorted(set(committed) - kept)

    def ranked(self, scores: Mapping[int, float]) -> list[int]:
        """Returns the steps by their scores, best first; of equal scores the newest comes first."""
        sign = -1 if self.best_mode == "max" else 1
        return sorted(scores, key=lambda step: (sign * scores[step], -step))

    def warn_of_metric(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs a warning if a step's metrics lack ``best_metric``, or its value is NaN."""
        metric = self.best_metric
        if metric is not None and math.isnan(metrics.get(metric, math.nan)):
            logger.warning(
                "step %d: its metric %s is %s, so this step never counts as the best",
                step,
                metric,
                "not a number (NaN)"
                if metric in metrics
                else f"missing (its metrics: {', '.join(metrics) or 'none'})",
            )


_MODES = ("min", "max", None)
