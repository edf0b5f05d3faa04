"""Training jobs that tests start as processes of their own, signal and kill."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from cloudckpt import CheckpointManager
from cloudckpt.checkpointer import CheckpointerConfig
from cloudckpt.runs import Preemption

__all__ = ["KINDS", "expected_steps", "train", "train_until_told", "trained"]

_MOST = 200  # seconds after which a job is killed that nobody has told anything


def train_until_told(folder: str, kind: str, number: int, **group: Any) -> None:
    """Trains one rank of a job until it is told by a signal that it is about to be ended.

    Args:
        folder: ``run`` in it is the run; ``rank-0`` and so on appear when the ranks train, and
            ``rank-0-saved`` in the end, with the step at which it stopped.
        kind: ``PROCESS`` or ``THREAD``: what saves.
        number: The signal.
        group: How to meet the other rank, if not as torchrun says.
    """
    dist.init_process_group("gloo", **group)
    mark = Path(folder) / f"rank-{dist.get_rank()}"
    with CheckpointManager(
        f"{folder}/run",
        save_interval_steps=10**9,
        preemption=Preemption(signals=(number,)),
        checkpointer=CheckpointerConfig(kind=AsyncCheckpointerType[kind]),
    ) as manager:
        state = {"w": torch.zeros(1000), "step": 0}
        for step in itertools.count((manager.restore(state) or 0) + 1):
            state["w"] += 1
            state["step"] = step
            dist.barrier()  # as the gradients of a step keep ranks together
            manager.save(step, state)
            if manager.reached_preemption(step):
                (mark.parent / f"{mark.name}-saved").write_text(str(step))
                break
            if not mark.exists():
                mark.write_text(str(os.getpid()))
    dist.destroy_process_group()


KINDS = ("SYNC", "THREAD", "PROCESS")
"""What saves: the trainer itself, a thread of it, or a process beside it."""

_SIZE = 50_000  # elements of each tensor, over both ranks
_KEPT = {"save_interval_steps": 2, "max_to_keep": 2, "keep_period": 6}


def trained(last: int) -> dict[str, torch.Tensor]:
    """What the tensors are after some steps that nothing has come between."""
    weight, momentum = torch.arange(_SIZE, dtype=torch.float32), torch.zeros(_SIZE)
    for step in range(1, last + 1):
        _advance(weight, momentum, step)
    return {"weight": weight, "momentum": momentum}


def expected_steps(last: int) -> list[int]:
    """The checkpoints that are there after some steps."""
    saved = range(2, last + 1, 2)
    return [step for step in saved if step % 6 == 0 or step in saved[-2:]]


def _advance(weight: torch.Tensor, momentum: torch.Tensor, step: int) -> None:
    """A step; each bit depends on all steps before, and is the same on any number of ranks."""
    momentum.mul_(0.9).add_(weight).add_(step)
    weight.mul_(0.99).sub_(momentum.mul(0.01))


def train(
    folder: str, kind: str, last: int, fatal: int | None = None, delay: float = 0.0, **group: Any
) -> dict[str, torch.Tensor]:
    """Trains one of two ranks from its newest checkpoint to a last step, and returns its tensors.

    Args:
        folder: ``run`` in it is the run.
        kind: One of ``KINDS``.
        last: The last step.
        fatal: The step behind which this rank kills itself, but not before its first save.
        delay: Seconds from that step to the kill, in which it trains on.
        group: How to meet the other rank.
    """
    dist.init_process_group("gloo", **group)
    killer: threading.Timer | None = None
    has_met = False
    mesh, half = init_device_mesh("cpu", (2,)), _SIZE // 2
    mine = slice(dist.get_rank() * half, (dist.get_rank() + 1) * half)
    weight = torch.arange(_SIZE, dtype=torch.float32)[mine].clone()
    momentum = torch.zeros(half)
    state = {
        name: DTensor.from_local(local, mesh, [Shard(0)])
        for name, local in (("weight", weight), ("momentum", momentum))
    }
    how = (
        CheckpointerConfig()
        if kind == "SYNC"
        else CheckpointerConfig(kind=AsyncCheckpointerType[kind])
    )
    with CheckpointManager(
        f"{folder}/run",
        **_KEPT,
        asynchronous=kind != "SYNC",
        preemption=Preemption(signals=()),
        checkpointer=how,
    ) as manager:
        for step in range((manager.restore(state) or 0) + 1, last + 1):
            _advance(weight, momentum, step)
            dist.barrier()
            if manager.save(step, state, metrics={"loss": 1 / step}) and not has_met:
                manager.wait_until_finished()  # saving processes wait for others that are late
                has_met = True
            if has_met and killer is None and fatal is not None and step >= fatal:
                killer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
                killer.start()
    if killer is not None:
        killer.join()
    return {"weight": weight, "momentum": momentum}


if __name__ == "__main__":
    signal.alarm(_MOST)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    train_until_told(sys.argv[1], sys.argv[2], signal.Signals[sys.argv[3]])
