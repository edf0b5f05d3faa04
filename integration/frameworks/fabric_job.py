"""Fabric trains, saves, and loads again what an earlier job has saved."""

import argparse
import importlib
import os
import sys
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

import cloudckpt
from results import tell

if "--strategy=alone" in sys.argv:  # the package lightning_fabric, where the other is not
    sys.modules["lightning"] = None  # type: ignore[assignment]
    lightning: Any = importlib.import_module("lightning_fabric")
    ours: Any = None
else:
    lightning = importlib.import_module("lightning.fabric")
    ours = importlib.import_module("cloudckpt.integrations.fabric")


def sharded(model: torch.nn.Module, mesh: torch.distributed.DeviceMesh) -> torch.nn.Module:
    return fully_shard(model, mesh=mesh["data_parallel"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--strategy", choices=["model_parallel", "ddp", "plain", "alone"], default="model_parallel"
    )
    parser.add_argument("--load")
    parser.add_argument("--save")
    told = parser.parse_args()

    world = int(os.environ["WORLD_SIZE"])
    if told.strategy == "model_parallel":
        chosen = {"strategy": ours.CloudModelParallelStrategy(sharded, world, 1)}
    elif told.strategy in ("plain", "alone"):
        cloudckpt.install()
        chosen = {"strategy": lightning.strategies.ModelParallelStrategy(sharded, world, 1)}
    else:
        chosen = {"strategy": "ddp", "plugins": [ours.CloudCheckpointIO()]}
    fabric = lightning.Fabric(accelerator="cpu", devices=world, **chosen)
    fabric.launch()
    torch.manual_seed(0)
    model = fabric.setup_module(torch.nn.Linear(8, 4))
    optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters(), 1e-2))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    try:
        rest = fabric.load(told.load, state) if told.load else {}
    except cloudckpt.errors.CloudCheckpointError as error:
        tell(failure=type(error).__name__, message=str(error))
        return
    losses = []
    for _ in range(2):
        loss = (model(torch.ones(2, 8)) - 3).pow(2).mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        state["step"] += 1
    if told.save:
        fabric.save(told.save, {**state, "name": "of this run"})
    tell(losses=losses, step=state["step"], rest=rest)


if __name__ == "__main__":
    main()
