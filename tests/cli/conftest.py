from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import cloudckpt
from cloudckpt.cli import main


class Ended(NamedTuple):
    """How a command has ended."""

    code: object
    out: str
    err: str

    @property
    def rows(self) -> list[list[str]]:
        return [line.split("\t") for line in self.out.splitlines()]

    @property
    def json(self) -> Any:
        def no_number(text: str) -> None:
            raise AssertionError(f"{text} is no JSON")

        return json.loads(self.out, parse_constant=no_number)

    def shown(self, folder: Path) -> str:
        """The output, with names for what differs between runs of a test."""
        text = self.out.replace(folder.as_uri(), "URI").replace(str(folder), "PATH")
        text = re.sub(r"\b\d+(\.\d+)? (bytes|kB)", "SIZE", text).replace("\t", " | ")
        return re.sub(r"\b\d+ (s|min)\b", "AGE", text)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys) -> Callable[..., Ended]:
    """Runs the command in this process."""

    def run(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["cloudckpt", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(ended.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def run(tmp_path) -> Path:
    """A run of five steps, of which the second is incomplete, and a stranger's folder."""
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
