"""A small GPT learns the source of Python's standard library, sharded by FSDP2, and resumes.

torchrun starts it, on any number of ranks; started again, it goes on where it was::

    torchrun --nproc-per-node 2 examples/demo/train.py s3://bucket/run

The demo beside it (``make demo``) has ranks kill themselves, and reads ``DEMO_EVENTS``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sysconfig
import threading
import time
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard

import cloudckpt
from cloudckpt.checkpointer import CheckpointerConfig

CONTEXT, WIDTH, LAYERS, HEADS = 96, 320, 8, 5  # 10 million parameters
BATCH = 8  # sequences of a step, over all ranks
HELD_OUT = 100_000  # bytes at the end of the text that are for evaluation only


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        """The mean loss, in nats per byte."""
        x = self.tokens(sequences[:, :-1]) + self.positions(torch.arange(CONTEXT))
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        x = self.head(self.blocks(x, mask, is_causal=True))
        return nn.functional.cross_entropy(x.flatten(0, 1), sequences[:, 1:].flatten())


def batch(text: torch.Tensor, seed: int) -> torch.Tensor:
    """This rank's share of a batch that only depends on its seed, so that ranks may change."""
    chance = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=chance)
    mine = starts[dist.get_rank() :: dist.get_world_size()]
    return torch.stack([text[at : at + CONTEXT + 1] for at in mine.tolist()]).long()


def mean(loss: torch.Tensor) -> float:
    """Over all ranks, each of which has an equal share of the batch."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


class Training:
    """All that a checkpoint holds, under names that no resharding changes."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
        self.counters = {"step": 0, "held_out_loss": 0.0}

    def state_dict(self) -> dict[str, Any]:
        """The sharded tensors, and the loss by which a load is checked."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "counters": self.counters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what was loaded."""
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)
        self.counters = state["counters"]


class TornPlanner(DefaultSavePlanner):
    """Kills rank 1 amid its items, when data and an unfinished upload are in the store.

    So a save is cut in its middle on any machine, however fast.
    """

    def __init__(self, run: str, step: int) -> None:
        super().__init__()
        self._place, self._step, self._left = f"{run}/step-{step}", step, -1

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Counts the items."""
        is_torn = self.state_dict["app.counters.step"] == self._step and dist.get_rank() == 1
        self._left = len(new_plan.items) * 3 // 4 if is_torn else -1
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | BytesIO:
        """Hands over an item, or ends the process."""
        deadline = time.monotonic() + 30
        while self._left == 0:
            left = cloudckpt.runs.find_leftovers(self._place, older_than=0)
            is_torn = left.nbytes >= 1 << 20 and bool(left.uploads)
            if is_torn or time.monotonic() > deadline:
                tell("torn", self._step, holds=is_torn, nbytes=left.nbytes)
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.05)
        self._left -= 1
        return super().resolve_data(write_item)


def tell(event: str, step: int, **values: object) -> None:
    """Adds a line of JSON to the file that all ranks have in common, in one write."""
    line = json.dumps({"event": event, "rank": dist.get_rank(), "step": step, **values})
    with open(os.environ.get("DEMO_EVENTS", os.devnull), "ab", buffering=0) as file:
        file.write(f"{line}\n".encode())


def train(run: str, steps: int, save_every: int, tear_at: int, die_after: int) -> None:
    """Trains from the newest checkpoint on."""
    torch.manual_seed(1)
    model = GPT()
    for block in model.blocks.layers:
        fully_shard(block)
    fully_shard(model)
    training = Training(model)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)

    @torch.no_grad()
    def held_out_loss() -> float:
        return mean(model(batch(text[-HELD_OUT:], seed=0)))

    how = None
    if tear_at:  # amid what a thread sends; a process begins after the planner
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's: a rank is to notice by itself
        how = CheckpointerConfig(
            kind=AsyncCheckpointerType.THREAD, planner=lambda: TornPlanner(run, tear_at)
        )
    sending = threading.Event()  # the saving process has the step that is not to be lost

    def listen(event: cloudckpt.events.Event) -> None:
        if event.uri.endswith(f"/step-{die_after}") and event.phase in ("progress", "upload"):
            sending.set()

    cloudckpt.events.subscribe(listen)
    with cloudckpt.CheckpointManager(
        run, save_interval_steps=save_every, checkpointer=how
    ) as manager:
        newest = manager.restore({"app": training})  # whatever number of ranks has saved it
        if newest is not None:
            recorded = training.counters["held_out_loss"]
            tell("resumed", newest, recorded=recorded, again=held_out_loss())
        for step in range((newest or 0) + 1, steps + 1):
            loss = model(batch(text[:-HELD_OUT], seed=step))
            loss.backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            tell("stepped", step, loss=mean(loss))
            if manager.should_save(step):
                training.counters = {"step": step, "held_out_loss": held_out_loss()}
                manager.save(step, {"app": training})
                if step == die_after:
                    assert sending.wait(60)
                    tell("staged", step)
                    dist.barrier()
                    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Tells why, if this rank fails."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--save-every", type=int, default=8)
    parser.add_argument("--tear-at", type=int, default=0, help="kill rank 1 amid this save")
    parser.add_argument("--die-after", type=int, default=0, help="kill all ranks amid this save")
    given = parser.parse_args()
    torch.set_num_threads(1)  # ranks share few cores; more threads would wait for each other
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    try:
        train(**vars(given))
    except Exception as error:
        tell("failed", 0, error=f"{type(error).__name__}: {error}"[:500])
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
