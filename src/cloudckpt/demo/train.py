"""What one rank does: train, save in the background, resume.

An ordinary FSDP2 script, in the environment that ``torchrun`` would give it.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import cloudckpt
from cloudckpt import AsyncCheckpointer, SaveFuture, make_async_checkpointer
from cloudckpt.demo.children import end_with_parent
from cloudckpt.demo.crash import StallingPlanner
from cloudckpt.demo.events import Committed, Failed, Measured, Resumed, Staged, Stepped, tell
from cloudckpt.demo.job import Job, step_uri
from cloudckpt.demo.model import CONTEXT, GPT
from cloudckpt.demo.state import TrainingState
from cloudckpt.demo.text import StdlibText

__all__ = ["train"]

_GLOBAL_BATCH = 8  # sequences of a step, over all ranks
_SEED = 1
_PATIENCE = timedelta(seconds=120)  # with which ranks wait for each other


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

    if job.resume is not None:
        resume(state, job.resume, text)

    with make_async_checkpointer() as checkpointer:  # its process starts behind the first steps
        run(state, text, job, checkpointer)
    dist.destroy_process_group()


def run(state: TrainingState, text: StdlibText, job: Job, checkpointer: AsyncCheckpointer) -> None:
    """Trains to the last step and saves on the way."""
    saving: SaveFuture | None = None
    for step in range(state.step + 1, job.last_step + 1):
        began = time.perf_counter()
        loss = train_step(state, text, step)
        seconds = time.perf_counter() - began
        tell_once(Stepped(step, loss, seconds, saving is not None and not saving.done()))
        if step % job.save_every == 0 or step == job.last_step:
            state.held_out_loss = evaluate(state, text)
            if saving is not None:
                saving.result()  # raises if the last one has failed
            if job.measure and step == job.last_step:
                saving = None
                save_and_measure(state, job)
            else:
                saving = save(state, job, checkpointer)
    if saving is not None:
        saving.result()


def resume(state: TrainingState, checkpoint: str, text: StdlibText) -> None:
    """Loads a checkpoint, whatever number of ranks has saved it."""
    began = time.perf_counter()
    cloudckpt.load({"app": state}, checkpoint_id=checkpoint)
    seconds = time.perf_counter() - began
    again = evaluate(state, text)
    tell_once(Resumed(state.step, seconds, recorded=state.held_out_loss, again=again))


def save(state: TrainingState, job: Job, checkpointer: AsyncCheckpointer) -> SaveFuture:
    """Copies the state and returns; another process saves the copy while training goes on."""
    step = state.step
    stalls = step == job.stall_at and dist.get_rank() == 1
    began = time.perf_counter()
    _, written = checkpointer.save(
        {"app": state}, step_uri(job.run, step), planner=StallingPlanner() if stalls else None
    )
    tell(Staged(step, stall=time.perf_counter() - began))

    def committed(_: object) -> None:
        if written.transferred is not None:
            tell(Committed(step, written.transferred.bytes, written.transferred.seconds))

    written.add_done_callback(committed)
    return written


def save_and_measure(state: TrainingState, job: Job) -> None:
    """Saves while nothing else runs in this process, and tells what CPU time that took."""
    writer = cloudckpt.CloudStorageWriter(step_uri(job.run, state.step))
    began = time.process_time()
    cloudckpt.save({"app": state}, storage_writer=writer)
    cpu = time.process_time() - began
    assert writer.transferred is not None  # set by every save
    sent = writer.transferred
    tell(Measured(cpu, sent.bytes))
    tell(Committed(state.step, sent.bytes, sent.seconds))


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


def main() -> None:
    """Runs the job given as an argument and reports how it failed, if it did."""
    end_with_parent()
    torch.set_num_threads(1)  # ranks share few cores; more threads would wait for each other
    try:
        train(Job.from_json(sys.argv[1]))
    except Exception as exc:
        tell(Failed(f"{type(exc).__name__}: {exc}"[:500]))  # few enough to be written at once
        raise


if __name__ == "__main__":
    main()
