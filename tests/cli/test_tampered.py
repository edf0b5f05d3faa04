"""What each command and function says of a damaged step, and that good steps stay."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import cloudckpt
from cloudckpt import Config
from cloudckpt.errors import CheckpointCorruptError
from runs.managed import flip, managed


def data(step: Path) -> Path:
    return next(step.glob("*.distcp"))


def of_tensor(step: Path) -> None:
    flip(data(step), 2000)


class Tampered(NamedTuple):
    """A kind of damage to a step.

    Attributes:
        tamper: Makes it.
        damages: What verify names: items, or the index or metadata that they are known by.
        codes: The exit codes of inspect, verify, cp, convert, and of diff with the whole step.
        restored: The step of five that a job restores.
        prunes: Whether older steps are deleted although this one is the newest.
    """

    tamper: Callable[[Path], object]
    damages: list[str] | None
    codes: tuple[int, ...]
    restored: int = 4
    prunes: bool = True


GONE, CUT = (3,) * 5, (4,) * 5
TAMPERED = {
    "nothing": Tampered(lambda step: None, None, (0,) * 5, 5),
    "a byte of a tensor": Tampered(of_tensor, ["w"], (0, 4, 4, 4, 0)),
    "a byte around a tensor": Tampered(
        lambda step: flip(data(step), 64), ["a part of"], (0, 4, 4, 0, 0), 5
    ),
    "the index": Tampered(lambda step: flip(data(step), -1), ["the index of"], (0, 4, 4, 4, 4)),
    "data that is gone": Tampered(
        lambda step: data(step).unlink(), ["the index of"], (0, 4, 4, 4, 4)
    ),
    "the part for other readers": Tampered(
        lambda step: flip(step / ".metadata", 10), [""], CUT, prunes=False
    ),
    "the columns": Tampered(lambda step: flip(step / ".metadata", -300), [""], CUT, prunes=False),
    "the trailer": Tampered(lambda step: flip(step / ".metadata", -60), [""], CUT, prunes=False),
    "metadata that are cut": Tampered(
        lambda step: (step / ".metadata").write_bytes(b"cut"), [""], CUT, prunes=False
    ),
    "metadata that are empty": Tampered(
        lambda step: (step / ".metadata").write_bytes(b""), [""], CUT, prunes=False
    ),
    "metadata of something else": Tampered(
        lambda step: (step / ".metadata").write_bytes(b"\x80\x02}q\x00." + b"no metadata" * 40),
        [""],
        CUT,
        prunes=False,
    ),
    "no metadata": Tampered(lambda step: (step / ".metadata").unlink(), None, GONE),
    "no folder": Tampered(shutil.rmtree, None, GONE),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_each_command_says_what_is_damaged_and_good_steps_stay(cli, run, tmp_path, name):
    kind, step = TAMPERED[name], run / "step-5"
    shutil.copytree(step, tmp_path / "whole")
    kind.tamper(step)
    commands = (
        ("inspect", step),
        ("verify", step),
        ("cp", step, tmp_path / "copy"),
        ("convert", step, tmp_path / "model.pt"),
        ("diff", step, tmp_path / "whole"),
    )
    ended = [cli(*command) for command in commands]
    assert tuple(one.code for one in ended) == kind.codes
    assert (tmp_path / "copy").exists() == (kind.codes[2] == 0)
    assert all(bool(one.err) == (one.code != 0) for one in ended)
    if kind.damages is not None:
        with pytest.raises(CheckpointCorruptError) as caught:
            cloudckpt.verify(step, config=Config(verify=False))
        found = [one.item for one in caught.value.damages]
        pairs = zip(found, kind.damages, strict=True)
        assert all(item.startswith(expected) for item, expected in pairs), found
    state = {"w": torch.zeros(500, 3), "step": 0}
    with managed(run) as manager:
        assert manager.restore(state) == state["step"] == kind.restored
    pruned = cli("prune", run, "--max-to-keep", "1", "--yes")
    assert pruned.code == (0 if kind.prunes else 4), pruned.err
    assert (run / "step-4" / ".metadata").exists() == (not kind.prunes or kind.codes == GONE)
