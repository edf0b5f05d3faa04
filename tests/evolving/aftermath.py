"""What becomes of checkpoints between saves: they are copied, deleted, swept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import cloudckpt
from dcp.places import Place

__all__ = ["After", "aftermath"]

Held = Mapping[Place, list[Any]]
"""By place, what is there."""


class After(NamedTuple):
    """What happens after a save.

    Attributes:
        changed: What is there then, of what has changed.
        act: Makes it so.
        root: Where the next process group saves, if elsewhere.
        is_littered: Whether objects may lie at the places that have changed that no checkpoint
            names.
    """

    changed: Held
    act: Callable[[], object]
    root: str = ""
    is_littered: bool = False


def aftermath(
    then: str, root: Place, place: Place, step: int, held: Held, *, is_shared: bool
) -> After:
    """What happens after a save.

    Args:
        then: Of `THEN`.
        root: Beneath which all is saved.
        place: What was saved last.
        step: As which save.
        held: What there is.
        is_shared: Whether the checkpoint may name objects of others beside it.
    """
    config = root.config
    held = {one: each for one, each in held.items() if one.uri.startswith(f"{root.uri}/")}
    runs = {one.uri.rpartition("/")[0] for one, each in held.items() if each != [None]}
    copy, raw = root.at(f"copy-{step}"), root.at(f"raw-{step}")
    goal = dataclasses.replace(root, uri=f"{root.uri}-{step}")
    is_of_a_manager = place.uri.rpartition("/")[2].startswith("step-")

    def moved(uri: str) -> str:
        return goal.uri + uri.removeprefix(root.uri)

    def of_runs(act: Callable[[str], object]) -> Callable[[], object]:
        return lambda: [act(run) for run in runs]

    there = {dataclasses.replace(one, uri=moved(one.uri)): each for one, each in held.items()}
    if then == "deleted" and not is_of_a_manager:
        return After({place: [None]}, lambda: cloudckpt.delete(place.uri, config=config))
    if then == "swept":
        return After({}, of_runs(lambda run: cloudckpt.sweep(run, older_than=0.0, config=config)))
    if then == "copied":
        return After(
            {copy: held[place]}, lambda: cloudckpt.copy(place.uri, copy.uri, config=config)
        )
    if then == "copied by other tools" and not is_shared:  # what is kept for others is copied, too
        return After({raw: held[place]}, lambda: place.copy_to(raw), is_littered=True)
    if then == "run copied":
        act = of_runs(lambda run: cloudckpt.copy(run, moved(run), config=config))
        return After(there, act, goal.uri)
    if then == "run copied by others":
        return After(there, lambda: root.copy_to(goal), goal.uri)
    return After({}, lambda: None)
