"""Fabric trains, saves, and loads again what an earlier job has saved."""

import argparse
import os

import lightning.fabric as lightning
import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import cloudckpt
from cloudckpt.integrations import fabric as ours
from lightning_job import Loader
from results import tell


def sharded(model: torch.nn.Module, mesh: torch.distributed.DeviceMesh) -> torch.nn.Module:
    return fully_shard(model, mesh=mesh["data_parallel"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=["model_parallel", "ddp"], default="model_parallel")
    parser.add_argument("--load")
    parser.add_argument("--save")
    told = parser.parse_args()

    world = int(os.environ["WORLD_SIZE"])
    if told.strategy == "model_parallel":
        strategy = ours.CloudModelParallelStrategy(sharded, world, 1)
    else:
        strategy = ours.CloudDDPStrategy()
    fabric = lightning.Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    model = fabric.setup_module(torch.nn.Linear(8, 4))
    optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters(), 1e-2))
    own = cloudckpt.per_rank(None if told.load else {"drawn": torch.tensor(fabric.global_rank)})
    loader = Loader(TensorDataset(torch.ones(4)))
    state = {"model": model, "optimizer": optimizer, "step": 0, "own": own, "loader": loader}
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
    tell(
        losses=losses,
        step=state["step"],
        rest=rest,
        own=None if own.value is None else int(own.value["drawn"]),
        position=loader.told,
    )


if __name__ == "__main__":
    main()
