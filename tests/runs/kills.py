"""Jobs of two ranks that are killed again and again, and go on from their newest checkpoint."""

from __future__ import annotations

import os
import random
import signal
import uuid
from pathlib import Path
from typing import Any

import torch

import cloudckpt
from background.waiting import eventually, processes_of
from runs.jobs import expected_steps, train, trained
from support.forks import together

__all__ = ["trained_through_kills"]


def trained_through_kills(
    folder: Path, kind: str, rng: random.Random, *, last: int, kills: int
) -> None:
    """Trains to a last step through some kills, and sees that nobody could tell.

    The tensors are those of a training that nothing came between, to the bit; the checkpoints that
    are kept are whole, and no others are there; and what the kills have left is swept away.
    """
    for _ in range(kills):
        if (first := _newest(folder / "run") + 1) >= last:
            break
        fatal = rng.randrange(first, last)
        codes = [code for code, _ in _attempt(folder, kind, last, fatal, rng)]
        if codes == [0, 0]:  # it adopted the last step that there is to save, and saved nothing
            assert _newest(folder / "run") >= expected_steps(last)[-1]
        else:
            assert -signal.SIGKILL in codes
    last += 2  # the last job commits a step, behind which it deletes what others were to delete
    ended = _attempt(folder, kind, last, None, rng)
    assert [code for code, _ in ended] == [0, 0]
    for name, whole in trained(last).items():
        assert torch.equal(torch.cat([tensors[name] for _, tensors in ended]), whole)
    run = str(folder / "run")
    checkpoints = cloudckpt.list_checkpoints(run)
    assert [one.step for one in checkpoints if one.is_committed] == expected_steps(last)
    cloudckpt.sweep(run, older_than=0)
    left = cloudckpt.runs.find_leftovers(run, older_than=0)
    assert (left.objects, left.uploads) == ((), ())
    for step in expected_steps(last):
        assert cloudckpt.verify(f"{run}/step-{step}").items == 4


def _newest(run: Path) -> int:
    newest = cloudckpt.latest(str(run))
    return 0 if newest is None else int(newest.rpartition("-")[2])


def _attempt(
    folder: Path, kind: str, last: int, fatal: int | None, rng: random.Random
) -> list[tuple[int, Any]]:
    """How both ranks of a job have ended, of which one kills itself or both do."""
    family, victims = uuid.uuid4().hex, rng.choice([(0,), (1,), (0, 1)])
    of_both = {"folder": str(folder), "family": family, "kind": kind, "last": last}
    each = [
        {
            "rank": rank,
            "fatal": fatal if rank in victims else None,
            "delay": rng.random() * 0.05,
            **of_both,
        }
        for rank in range(2)
    ]
    ended = together(_rank, each)
    assert eventually(lambda: not processes_of(family))  # a saving process may have been at it
    return ended


def _rank(folder: str, family: str, rank: int, **job: Any) -> dict[str, torch.Tensor]:
    os.environ.update(FAMILY=family, GLOO_SOCKET_IFNAME="lo")
    group = {"init_method": f"file://{folder}/{family}", "rank": rank, "world_size": 2}
    return train(folder, **job, **group)
