"""A Trainer of Lightning that saves to a run, from the checkpoint that it is told to resume."""

import argparse
import os
import random
from collections.abc import Callable
from typing import Any

import lightning.pytorch as lightning
import torch
from torch.distributed.fsdp import fully_shard, fully_sharded_data_parallel
from torch.distributed.fsdp._init_utils import _init_device_handle
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, TensorDataset

import cloudckpt
from cloudckpt.integrations import lightning as ours
from results import die_in_save, tell


class Model(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, sharded: bool) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.sharded = sharded
        self.net: torch.nn.Module | None = None
        self.losses: list[float] = []
        self.restored: list[str] = []
        if not sharded:
            self._make()

    def _make(self) -> None:
        torch.manual_seed(0)
        layers = torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)
        self.net = torch.nn.Sequential(*layers)

    def configure_model(self) -> None:
        if self.net is None:
            self._make()
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).pow(2).mean()
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """As averages of weights do, which begin with those of the checkpoint."""
        self.restored = sorted(checkpoint["state_dict"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-2)


class Loader(DataLoader):  # type: ignore[type-arg]
    """One that says where it is, and what it was told: another thing on each rank."""

    told: object = None

    def state_dict(self) -> dict[str, object]:
        return {"of rank": int(os.environ["RANK"]), "told": self.told}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.told = state["of rank"]


def fsdp1(world: int) -> Any:
    """FSDP1, which is told that there is a device: the host."""

    def on_host(state: Any, module: torch.nn.Module, ignored: Any, device: object) -> Any:
        return _init_device_handle(state, module, ignored, torch.device("cpu"))

    fully_sharded_data_parallel._init_device_handle = on_host
    return ours.CloudFSDPStrategy(auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}))


STRATEGIES: dict[str, Callable[[int], Any]] = {
    "model_parallel": lambda world: ours.CloudModelParallelStrategy(world, 1),
    "fsdp": fsdp1,
    "ddp": lambda _: ours.CloudDDPStrategy(),
    "async": lambda world: ours.CloudModelParallelStrategy(world, 1, asynchronous=True),
    "async-ddp": lambda _: ours.CloudDDPStrategy(asynchronous=True),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--strategy", choices=[*STRATEGIES], default="model_parallel")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--resume")
    parser.add_argument("--callback", action="store_true")
    parser.add_argument("--killed-in")
    told = parser.parse_args()
    if told.killed_in and os.environ["RANK"] == "1":
        die_in_save(told.killed_in)

    world = int(os.environ["WORLD_SIZE"])
    strategy = STRATEGIES[told.strategy](world)
    saving = ours.CloudModelCheckpoint(
        told.run, every_n_train_steps=1, save_top_k=2, monitor="loss", save_last=True
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        callbacks=[saving] if told.callback else None,
        enable_checkpointing=told.callback,
        max_steps=told.steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    random.seed(int(os.environ["RANK"]))
    same = torch.ones(64, 8) * torch.arange(8)
    model = Model(told.strategy in ("model_parallel", "async"))
    data = Loader(TensorDataset(same), batch_size=4)
    failure = message = ""
    resume = cloudckpt.latest(told.run) if told.resume == "latest" else told.resume
    try:
        trainer.fit(model, data, ckpt_path=resume)
        if not told.callback:
            trainer.save_checkpoint(f"{told.run}/step-{trainer.global_step}")
    except (
        cloudckpt.errors.CloudCheckpointError,
        RuntimeError,
    ) as error:  # of collectives of a step
        failure, message = type(error).__name__, str(error)
    tell(
        failure=failure,
        message=message,
        step=trainer.global_step,
        losses=model.losses,
        restored=model.restored,
        best=saving.best_model_path,
        last=saving.last_model_path,
        drawn=random.random(),
        position=data.told,
    )


if __name__ == "__main__":
    main()
