"""A small GPT learns the source of Python's standard library, sharded by FSDP2, and resumes.

Any launcher runs it::

    torchrun --nproc-per-node 2 examples/demo/train.py s3://bucket/run

Start it again on any number of ranks, and it goes on where it was. The demo beside it
(``make demo``) starts it, kills it, and reads what it prints: one JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
import threading
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import cloudckpt

CONTEXT, WIDTH, LAYERS, HEADS = 96, 320, 8, 5  # 10 million parameters
BATCH = 8  # sequences of a step, over all ranks
HELD_OUT = 100_000  # bytes at the end of the text that are for evaluation only


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm and around a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.projection = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``(batch, time, width)`` to the same shape."""
        batch, time, _ = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, time, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and name != "tokens.weight":
                nn.init.normal_(parameter, std=0.02)

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        """The mean loss, in nats per byte."""
        inputs, targets = sequences[:, :-1], sequences[:, 1:]
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def text() -> torch.Tensor:
    """The standard library's source, the same in every process."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)


def batch(text: torch.Tensor, seed: int) -> torch.Tensor:
    """This rank's share of a batch that only depends on its seed, so that ranks may change."""
    chance = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=chance)
    mine = starts[dist.get_rank() :: dist.get_world_size()]
    return torch.stack([text[at : at + CONTEXT + 1] for at in mine.tolist()]).long()


class Training:
    """All that a checkpoint holds, under names that no resharding changes."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.step, self.held_out_loss = 0, 0.0

    def state_dict(self) -> dict[str, Any]:
        """The sharded tensors, and the loss that tells after loading whether all is as it was."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        counters = {"step": self.step, "held_out_loss": self.held_out_loss}
        return {"model": model, "optimizer": optimizer, **counters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what was loaded."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step, self.held_out_loss = state["step"], state["held_out_loss"]


class StallingPlanner(DefaultSavePlanner):
    """On rank 1, hands over three quarters of the items of a save, and then no more.

    So a save is cut in its middle on any machine: it stays open, with data in the store, until the
    demo has seen that and kills the rank.
    """

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step, self._left = step, -1

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Counts the items."""
        plan = super().finish_plan(new_plan)
        stalls = self.state_dict["app.step"] == self._step and dist.get_rank() == 1
        self._left = len(plan.items) * 3 // 4 if stalls else -1
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | BytesIO:
        """Hands over an item, or stops for good."""
        if self._left == 0:
            threading.Event().wait()
        self._left -= 1
        return super().resolve_data(write_item)


def train(run: str, steps: int, save_every: int, stall_at: int | None) -> None:
    """Trains from the newest checkpoint on."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.manual_seed(1)
    model, data = GPT(), text()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    training = Training(model, torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95)))

    @torch.no_grad()
    def held_out_loss() -> float:
        return mean(model(batch(data[-HELD_OUT:], seed=0)))

    how = None
    if stall_at is not None:  # amid what a thread sends; a process begins after the planner
        how = cloudckpt.checkpointer.CheckpointerConfig(
            kind=AsyncCheckpointerType.THREAD, planner=lambda: StallingPlanner(stall_at)
        )
    with cloudckpt.CheckpointManager(
        run, save_interval_steps=save_every, checkpointer=how
    ) as manager:
        newest = manager.restore({"app": training})  # whatever number of ranks has saved it
        if newest is not None:
            tell("resumed", newest, recorded=training.held_out_loss, again=held_out_loss())
        for step in range((newest or 0) + 1, steps + 1):
            loss = model(batch(data[:-HELD_OUT], seed=step))
            loss.backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            tell("stepped", step, loss=mean(loss))
            if manager.should_save(step):
                training.step, training.held_out_loss = step, held_out_loss()
                manager.save(step, {"app": training})
                tell("staged", step)
    dist.destroy_process_group()


def mean(loss: torch.Tensor) -> float:
    """Over all ranks, each of which has an equal share of the batch."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def tell(event: str, step: int = 0, **values: object) -> None:
    """Prints what happened, in one write."""
    line = json.dumps({"event": event, "rank": int(os.environ["RANK"]), "step": step, **values})
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def end_with_parent() -> None:
    """Ends when whoever holds the other end of standard input has gone, even by ``kill -9``."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--save-every", type=int, default=8)
    parser.add_argument("--stall-at", type=int)
    parser.add_argument("--with-parent", action="store_true", help="end when standard input does")
    given = vars(parser.parse_args())
    if given.pop("with_parent"):
        end_with_parent()
    torch.set_num_threads(1)  # ranks share few cores; more threads would wait for each other
    try:
        train(**given)
    except Exception as error:
        tell("failed", error=f"{type(error).__name__}: {error}"[:500])
        raise
