"""Training jobs that tests start as processes of their own, signal and kill."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from cloudckpt import CheckpointManager
from cloudckpt.checkpointer import CheckpointerConfig
from cloudckpt.runs import Preemption

__all__ = ["train_until_told"]

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


if __name__ == "__main__":
    signal.alarm(_MOST)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    train_until_told(sys.argv[1], sys.argv[2], signal.Signals[sys.argv[3]])
