"""Small runs of managers, for tests of one thing each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from cloudckpt import CheckpointManager, Config
from cloudckpt.checkpointer import CheckpointerConfig, CommitHook
from cloudckpt.runs import Preemption

__all__ = ["damage", "fill", "flip", "managed", "restored", "save", "state", "value"]


def managed(
    run: object, config: Config | None = None, hook: CommitHook | None = None, **options: Any
) -> CheckpointManager:
    """A manager that saves at once, or in a thread, and heeds no signal of the test."""
    made = CheckpointerConfig(
        config=config if config is not None else Config(),
        kind=AsyncCheckpointerType.THREAD,
        commit_hook=hook,
    )
    options = {"asynchronous": False, "preemption": Preemption(signals=())} | options
    return CheckpointManager(str(run), checkpointer=made, **options)


def state(of: float = 0.0) -> dict[str, Any]:
    return {"model": {"w": torch.full((300,), float(of))}, "step": int(of)}


def value(found: dict[str, Any]) -> float:
    """What the state was made of."""
    [one] = found["model"]["w"].unique().tolist()
    return one


def save(manager: CheckpointManager, *steps: int, of: float = 0, **options: Any) -> None:
    """Saves steps; ``of`` says in each value whose they are."""
    for step in steps:
        manager.save(step, state(of + step), metrics={"loss": 1 / (1 + step)}, **options)
    manager.wait_until_finished()


def fill(run: object, *steps: int, **options: Any) -> None:
    """A job saves steps, and ends."""
    with managed(run, **options) as manager:
        save(manager, *steps)


def restored(
    run: object, config: Config | None = None, *, step: int | None = None, **options: Any
) -> tuple[int | None, float]:
    """The step that the next job restores, and its value."""
    found = state(-1)
    with managed(run, config, **options) as manager:
        step = manager.restore(found, step=step)
    assert value(found) == found["step"]
    return step, value(found)


def flip(path: Path, *places: int) -> None:
    """Changes bytes of a file."""
    content = bytearray(path.read_bytes())
    for at in places:
        content[at] ^= 0x10
    path.write_bytes(content)


def damage(step: Path) -> None:
    """Changes the half of a data object that lies in its middle: loads ignore envelopes."""
    data = min(step.glob("*.distcp"))
    size = data.stat().st_size
    flip(data, *range(size // 4, 3 * size // 4))
