from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import cloudckpt
from cloudckpt.cli import main


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """Runs the command in this process; returns its exit code."""

    def run(*arguments: str) -> object:
        monkeypatch.setattr(sys, "argv", ["cloudckpt", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0

    return run


@pytest.fixture
def run(tmp_path) -> Path:
    """A run of five steps, of which the second is torn, with a stranger's folder beside them."""
    folder = tmp_path / "run"
    with cloudckpt.CheckpointManager(
        folder, asynchronous=False, preemption=cloudckpt.runs.Preemption(signals=())
    ) as manager:
        for step in range(1, 6):
            state = {"w": torch.full((500, 3), float(step)), "step": step}
            manager.save(step, state, metrics={"loss": abs(step - 3.0)})
    (folder / "step-2" / ".metadata").unlink()
    (folder / "logs").mkdir()
    (folder / "logs" / "events").write_text("mine")
    return folder
