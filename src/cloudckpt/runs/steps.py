"""The names of a run's checkpoints, and which of them are kept."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Real
from string import Formatter
from typing import Literal

from cloudckpt.config import whole_number
from cloudckpt.errors import ConfigError

__all__ = ["DEFAULT_PATTERN", "HIGHEST_STEP", "Retention", "StepNames", "check_step"]

logger = logging.getLogger("cloudckpt")

DEFAULT_PATTERN = "step-{step}"
"""The same names as torchtitan's."""

HIGHEST_STEP = 10**18 - 1
"""Steps are whole numbers of up to eighteen digits."""


def check_step(step: int) -> int:
    """The step as a Python int; it may be a number of numpy or torch.

    Raises:
        ConfigError: If it is not a whole number from 0 on.
    """
    found = whole_number(step)
    if found is None or not 0 <= found <= HIGHEST_STEP:
        raise ConfigError(f"step={step!r} is not valid: give a whole number from 0 to 10**18 - 1")
    return found


class StepNames:
    """The folder names of a run's steps, and the steps that folder names stand for.

    A name stands for a step only if formatting the step gives exactly this name: beside ``step-7``,
    ``step-007`` is another program's folder.
    """

    def __init__(self, pattern: str = DEFAULT_PATTERN) -> None:
        """
        Args:
            pattern: The name with ``{step}`` in it, or ``{step:08d}`` for leading zeros.

        Raises:
            ConfigError: If it is not such a pattern.
        """
        self.pattern = pattern
        example = "write a name with {step} in it once, such as 'step-{step}' or '{step:08d}'"
        try:
            fields = [field for _, field, _, _ in Formatter().parse(pattern) if field is not None]
            made = pattern.format(step=1)
        except (ValueError, KeyError, IndexError, AttributeError, TypeError) as exc:
            raise ConfigError(f"step_name={pattern!r} is not a valid pattern: {example}") from exc
        if fields != ["step"] or "/" in made or "\\" in made:
            raise ConfigError(
                f"step_name={pattern!r} does not give the name of a folder: {example}"
            )
        before, after = (re.escape(text) for text in self._around())
        self._pattern = re.compile(f"{before}([0-9]+){after}")
        if any(self.step(self._with(step)) != step for step in (0, 7, HIGHEST_STEP)):
            raise ConfigError(f"step_name={pattern!r} does not give plain digits: {example}")

    def _with(self, step: int) -> str:
        return self.pattern.format(step=step)

    def _around(self) -> tuple[str, str]:
        """The text before and after the number."""
        pieces = list(Formatter().parse(self.pattern))
        index = next(i for i, (_, field, _, _) in enumerate(pieces) if field is not None)
        before = "".join(text for text, _, _, _ in pieces[: index + 1])
        return before, "".join(text for text, _, _, _ in pieces[index + 1 :])

    def name(self, step: int) -> str:
        """The name of a step's folder.

        Raises:
            ConfigError: If the step is not a whole number from 0 on.
        """
        return self._with(check_step(step))

    def step(self, name: str) -> int | None:
        """The step whose folder has this name; None if it is another folder."""
        match = self._pattern.fullmatch(name)
        if match is None or len(match[1]) > 18:
            return None
        step = int(match[1])
        return step if self._with(step) == name else None


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which steps of a run are kept: those that any of the rules keeps.

    The newest is always kept. ``keep_period`` alone keeps all, as no rule at all does.

    Attributes:
        max_to_keep: How many of the newest; with ``best_metric`` and without ``best_to_keep``, of
            the best.
        best_to_keep: How many of the best, and all that have no score.
        keep_younger_than: Those committed within so many seconds.
        keep_period: Those that this divides.
        best_metric: The metric that is the score.
        best_mode: Whether its lowest or its highest values are the best.
    """

    max_to_keep: int | None = None
    best_to_keep: int | None = None
    keep_younger_than: float | None = None
    keep_period: int | None = None
    best_metric: str | None = None
    best_mode: Literal["min", "max"] | None = None

    def __post_init__(self) -> None:
        for name in ("max_to_keep", "best_to_keep", "keep_period"):
            if (value := getattr(self, name)) is None:
                continue
            found = whole_number(value)
            if found is None or found < 1:
                raise ConfigError(
                    f"{name}={value!r}: give a whole number of at least 1, or None; no option "
                    "deletes all checkpoints of a run"
                )
            object.__setattr__(self, name, found)
        age: object = self.keep_younger_than
        if age is not None and not (isinstance(age, Real) and 0 < float(age) < math.inf):
            raise ConfigError(f"keep_younger_than={age!r}: give a number of seconds above 0")
        metric: object = self.best_metric
        if not isinstance(metric, (str, type(None))):
            raise ConfigError(f"best_metric={metric!r}: give the name of a metric, such as 'loss'")
        if (metric is None) != (self.best_mode is None) or self.best_mode not in _MODES:
            raise ConfigError(
                f"best_metric={metric!r}, best_mode={self.best_mode!r}: give both, the mode as "
                "'min' if the lowest values of the metric are the best, or as 'max'"
            )
        if self.best_to_keep is not None and metric is None:
            raise ConfigError("best_to_keep= also needs best_metric= and best_mode=")

    @property
    def keeps_all(self) -> bool:
        """Whether no rule lets a step go."""
        rules = (self.max_to_keep, self.best_to_keep, self.keep_younger_than)
        return all(one is None for one in rules)

    def unneeded(
        self, committed: Collection[int], scores: Mapping[int, float] | None = None
    ) -> list[int]:
        """The steps that may be deleted, oldest first, unless they are too young.

        Args:
            committed: The steps whose checkpoints are committed.
            scores: The scores of those that have one; NaN is none.
        """
        if self.keeps_all or not committed:
            return []
        newest_first = sorted(committed, reverse=True)
        newest, best = self.max_to_keep or 1, self.best_to_keep
        if best is None and self.best_metric is not None:
            newest, best = 1, self.max_to_keep
        kept = {*newest_first[:newest]}
        if best is not None:
            usable = _usable(scores or {})
            kept.update(step for step in committed if step not in usable)
            ranked = [step for step in newest_first if step in usable]
            ranked.sort(key=lambda step: self._badness(usable[step]))
            kept.update(ranked[:best])
        if self.keep_period is not None:
            kept.update(step for step in committed if step % self.keep_period == 0)
        return sorted(set(committed) - kept)

    def best(self, scores: Mapping[int, float]) -> int | None:
        """The step with the best score, the newest of equal ones; None if no step has a score."""
        usable = _usable(scores)
        return min(usable, key=lambda step: (self._badness(usable[step]), -step), default=None)

    def warn_of_metric(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs it if a step is saved without the metric, or without a number there."""
        metric = self.best_metric
        if metric is not None and math.isnan(metrics.get(metric, math.nan)):
            logger.warning(
                "step %d: its metric %s is %s, so it is never the best step",
                step,
                metric,
                "not a number (NaN)"
                if metric in metrics
                else f"missing (its metrics: {', '.join(metrics) or 'none'})",
            )

    def _badness(self, score: float) -> float:
        return -score if self.best_mode == "max" else score


_MODES = ("min", "max", None)


def _usable(scores: Mapping[int, float]) -> dict[int, float]:
    return {step: score for step, score in scores.items() if not math.isnan(score)}
