"""What becomes of checkpoints between saves: they are copied, deleted, swept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import cloudckpt
from dcp.places import Place

__all__ = ["Aftermath"]

Held = Mapping[Place, list[Any]]
"""By place, what is there."""


class Aftermath:
    """What happens after a save.

    Attributes:
        root: Where the next process group saves, if elsewhere.
        is_littered: Whether objects may lie at the places of `of` that no checkpoint names.
    """

    def __init__(self, root: Place, place: Place, step: int, held: Held) -> None:
        """
        Args:
            root: Beneath which all is saved.
            place: What was saved last.
            step: As which save.
            held: What there is.
        """
        self.root = ""
        self.is_littered = False
        self._root, self._place, self._step = root, place, step
        self._held = {one: each for one, each in held.items() if _is_beneath(root, one)}

    def of(self, then: str, *, is_shared: bool) -> tuple[Held, Callable[[], object]]:
        """What is there after it, and what makes it so.

        Args:
            then: Of `THEN`.
            is_shared: Whether the checkpoint may name objects of others beside it.
        """
        held, place, config = self._held, self._place, self._place.config
        if then == "deleted" and not _is_step(place):
            return {place: [None]}, lambda: cloudckpt.delete(place.uri, config=config)
        if then == "swept":
            return {}, self._sweep
        if then == "copied" or (then == "copied by other tools" and not is_shared):
            by_others = then != "copied"
            self.is_littered = by_others  # what is kept for others is copied, too
            target = self._root.at(f"{'raw' if by_others else 'copy'}-{self._step}")
            if by_others:
                return {target: held[place]}, lambda: place.copy_to(target)
            return {target: held[place]}, lambda: cloudckpt.copy(
                place.uri, target.uri, config=config
            )
        if then in ("run copied", "run copied by others"):
            goal = dataclasses.replace(self._root, uri=f"{self._root.uri}-{self._step}")
            self.root, by_others = goal.uri, then != "run copied"
            there = {self._moved(one, goal): each for one, each in held.items()}
            if by_others:
                return there, lambda: self._root.copy_to(goal)
            return there, lambda: self._runs_copied(goal)
        return {}, lambda: None

    def _moved(self, one: Place, goal: Place) -> Place:
        return dataclasses.replace(one, uri=goal.uri + one.uri.removeprefix(self._root.uri))

    @property
    def _runs(self) -> set[str]:
        return {_run_of(one) for one, each in self._held.items() if each != [None]}

    def _sweep(self) -> None:
        for run in self._runs:
            cloudckpt.sweep(run, older_than=0.0, config=self._root.config)

    def _runs_copied(self, goal: Place) -> None:
        for run in self._runs:
            there = goal.uri + run.removeprefix(self._root.uri)
            cloudckpt.copy(run, there, config=goal.config)


def _is_beneath(root: Place, one: Place) -> bool:
    return one.uri.startswith(f"{root.uri}/")


def _run_of(place: Place) -> str:
    return place.uri.rpartition("/")[0]


def _is_step(place: Place) -> bool:
    """Whether a manager looks after it."""
    return place.uri.rpartition("/")[2].startswith("step-")
