"""A Trainer of Lightning that saves to a run, from the checkpoint that it is told to resume."""

import argparse
import os

import lightning
import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import cloudckpt
from cloudckpt.integrations import lightning as ours
from results import tell


class Model(lightning.LightningModule):
    def __init__(self, sharded: bool) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.sharded = sharded
        self.net: torch.nn.Module | None = None
        self.losses: list[float] = []
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

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--strategy", choices=["model_parallel", "ddp"], default="model_parallel")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--resume")
    parser.add_argument("--callback", action="store_true")
    told = parser.parse_args()

    world = int(os.environ["WORLD_SIZE"])
    sharded = told.strategy == "model_parallel"
    strategy = ours.CloudModelParallelStrategy(world, 1) if sharded else "ddp"
    saving = ours.CloudModelCheckpoint(
        told.run, every_n_train_steps=1, save_top_k=2, monitor="loss", save_last=True
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        plugins=None if sharded else [ours.CloudCheckpointIO()],
        callbacks=[saving] if told.callback else None,
        enable_checkpointing=told.callback,
        max_steps=told.steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    same = torch.ones(64, 8) * torch.arange(8)
    model = Model(sharded)
    resume = cloudckpt.latest(told.run) if told.resume == "latest" else told.resume
    trainer.fit(model, DataLoader(TensorDataset(same), batch_size=4), ckpt_path=resume)
    if not told.callback:
        trainer.save_checkpoint(f"{told.run}/step-{trainer.global_step}")
    tell(
        step=trainer.global_step,
        losses=model.losses,
        best=saving.best_model_path,
        last=saving.last_model_path,
    )


if __name__ == "__main__":
    main()
