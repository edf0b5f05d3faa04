"""What one rank does: resume, train, save in the background.

An ordinary FSDP2 script, in the environment that ``torchrun`` would give it.
"""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import cloudckpt
from children import end_with_parent
from cloudckpt.dcp.planners import CloudSavePlanner
from cloudckpt.events import Event, subscribe
from messages import (
    Committed,
    Failed,
    Job,
    Measured,
    Resumed,
    Staged,
    Stepped,
    Uploaded,
    tell,
)
from model import CONTEXT, GPT, StdlibText

__all__ = ["train"]

_GLOBAL_BATCH = 8  # sequences of a step, over all ranks
_SEED = 1
_PATIENCE = timedelta(seconds=120)  # with which ranks wait for each other


class TrainingState(Stateful):
    """All that a checkpoint holds.

    Attributes:
        step: The last step that was trained; it is the position in the data, too.
        held_out_loss: The loss after it, which tells after loading whether all is as it was.
    """

    def __init__(self, model: GPT, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.step = 0
        self.held_out_loss = 0.0

    def state_dict(self) -> dict[str, Any]:
        """The sharded tensors of model and optimizer under names that no resharding changes."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        counters = {"step": self.step, "held_out_loss": self.held_out_loss}
        return {"model": model, "optimizer": optimizer, **counters}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what was loaded."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.step = state_dict["step"]
        self.held_out_loss = state_dict["held_out_loss"]


def train(job: Job) -> None:
    """Runs this rank's part of a job, from the first step or from a checkpoint."""
    dist.init_process_group("gloo", timeout=_PATIENCE)
    ranks = dist.get_world_size()
    text = StdlibText(length=CONTEXT, batch=_GLOBAL_BATCH, rank=dist.get_rank(), ranks=ranks)

    torch.manual_seed(_SEED)
    model = GPT()
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    state = TrainingState(model, optimizer)

    saves = Saves()
    subscribe(saves.note)
    stalls = job.stall_at is not None  # amid its upload, which a process begins behind the planner
    how = cloudckpt.checkpointer.CheckpointerConfig(
        kind=AsyncCheckpointerType.THREAD if stalls else AsyncCheckpointerType.PROCESS,
        planner=(lambda: StallingPlanner(job.stall_at)) if stalls else CloudSavePlanner,
    )
    with cloudckpt.CheckpointManager(
        job.run, save_interval_steps=job.save_every, checkpointer=how
    ) as manager:
        if manager.restore({"app": state}) is not None:  # whatever number of ranks has saved it
            tell_once(Resumed(state.step, state.held_out_loss, again=evaluate(state, text)))
        for step in range(state.step + 1, job.last_step + 1):
            began = time.perf_counter()
            loss = train_step(state, text, step)
            seconds = time.perf_counter() - began
            tell_once(Stepped(step, loss, seconds, beside_save=saves.begun != saves.committed))
            is_last = step == job.last_step
            if not (is_last or manager.should_save(step)):
                continue
            state.held_out_loss = evaluate(state, text)
            if is_last and job.measure:
                manager.wait_until_finished()
                save_and_measure(state, manager.uri(step))
                continue
            began, saves.begun = time.perf_counter(), step
            manager.save(
                step, {"app": state}, metrics={"held_out_loss": state.held_out_loss}, force=is_last
            )
            tell(Staged(step, stall=time.perf_counter() - began))
    dist.destroy_process_group()


class Saves:
    """Tells the driver what becomes of saves.

    Attributes:
        begun: The step that was last given to be saved.
        committed: The step that was last committed; known on the first rank.
    """

    def __init__(self) -> None:
        self.begun = self.committed = 0

    def note(self, event: Event) -> None:
        """Hears what cloudckpt is doing."""
        if event.failed or event.phase not in ("upload", "commit"):
            return
        step = int(event.uri.rpartition("-")[2])
        if event.phase == "upload":
            tell(Uploaded(step, event.nbytes, event.seconds))
        else:
            self.committed = step
            tell(Committed(step))


def save_and_measure(state: TrainingState, uri: str) -> None:
    """Saves while nothing else runs in this process, and tells what CPU time that took."""
    writer = cloudckpt.CloudStorageWriter(uri)
    began = time.process_time()
    cloudckpt.save({"app": state}, storage_writer=writer)
    cpu = time.process_time() - began
    assert writer.transferred is not None  # set by every save
    tell(Measured(cpu, writer.transferred.nbytes))


def train_step(state: TrainingState, text: StdlibText, step: int) -> float:
    """Trains one step; returns its loss over all ranks."""
    loss: torch.Tensor = state.model(*text.training_batch(step))
    loss.backward()  # type: ignore[no-untyped-call]
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.step = step
    return mean_over_ranks(loss)


@torch.no_grad()
def evaluate(state: TrainingState, text: StdlibText) -> float:
    """The loss on held-out text over all ranks."""
    return mean_over_ranks(state.model(*text.held_out_batch()))


def mean_over_ranks(loss: torch.Tensor) -> float:
    """The mean of a scalar over all ranks, each of which has an equal share of the batch."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def tell_once(event: Resumed | Stepped) -> None:
    """Tells what all ranks know, by one of them."""
    if dist.get_rank() == 0:
        tell(event)


class StallingPlanner(CloudSavePlanner):
    """On the second rank, hands over three quarters of the items of one step, and then no more.

    So a save is cut in its middle on any machine and at any speed: it stays open, with data in the
    store, until the driver has seen that and kills the rank.
    """

    def __init__(self, step: int | None) -> None:
        super().__init__()
        self._step = step
        self._left: int | None = None

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        stalls = self.state_dict["app.step"] == self._step and dist.get_rank() == 1
        self._left = len(plan.items) * 3 // 4 if stalls else None
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if self._left == 0:
            threading.Event().wait()
        if self._left is not None:
            self._left -= 1
        data: torch.Tensor | io.BytesIO = super().resolve_data(write_item)
        return data


def main() -> None:
    """Runs the job given as an argument and reports how it failed, if it did."""
    end_with_parent()
    torch.set_num_threads(1)  # ranks share few cores; more threads would wait for each other
    try:
        train(Job(**json.loads(sys.argv[1])))
    except Exception as exc:
        tell(Failed(f"{type(exc).__name__}: {exc}"[:500]))  # few enough to be written at once
        raise


if __name__ == "__main__":
    main()
