"""A loop with Accelerate, FSDP2 if it is told so, from the checkpoint that it is told to resume."""

import argparse
import os
import random

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader, TensorDataset

import cloudckpt
from cloudckpt.integrations.accelerate import load_state, save_state
from results import die_in_save, tell


class Counter:
    def __init__(self) -> None:
        self.count, self.rank = 0, int(os.environ["RANK"])

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count, "rank": self.rank}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count, self.rank = state["count"], state["rank"]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.second = torch.nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save", action="append", default=[])
    parser.add_argument("--load")
    parser.add_argument("--run")
    parser.add_argument("--killed-in")
    told = parser.parse_args()
    if told.killed_in and os.environ["RANK"] == "1":
        die_in_save(told.killed_in)

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="no_wrap", state_dict_type="SHARDED_STATE_DICT"
    )
    accelerator = Accelerator(cpu=True)
    if told.fsdp:  # which Accelerate knows on accelerators only
        accelerator.state._shared_state["distributed_type"] = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    torch.manual_seed(0)
    random.seed(accelerator.process_index)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    data = DataLoader(TensorDataset(torch.ones(64, 8) * torch.arange(8)), batch_size=4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    losses = []
    if told.load:
        load_state(accelerator, told.load)
    for _, (batch,) in zip(range(told.steps), data, strict=False):
        with accelerator.accumulate(model):
            loss = (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean()
            losses.append(loss.item())
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        counter.count += 1
        if told.run:
            save_state(accelerator, f"{told.run}/step-{counter.count}", max_to_keep=2)
    failures = []
    for uri in told.save:
        try:
            save_state(accelerator, uri)
        except cloudckpt.errors.CloudCheckpointError as error:
            failures.append(type(error).__name__)
    tell(
        failures=failures,
        kind=type(next(model.parameters())).__name__,
        losses=losses,
        count=counter.count,
        rank=counter.rank,
        rate=scheduler.get_last_lr()[0],
        drawn=random.random(),
        step=accelerator.step,
    )
    if not told.killed_in:
        accelerator.end_training()


if __name__ == "__main__":
    main()
