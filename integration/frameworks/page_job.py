"""Runs the code of docs/frameworks.md for one framework, on some ranks."""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist

import cloudckpt
from page import code
from results import tell


def with_lightning(run: str, world: int) -> int:
    import lightning
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_job import Model

    rows = torch.ones(64, 8) * torch.arange(8)
    for steps in (2, 4):  # the second one goes on
        trainer = f"lightning.Trainer(accelerator='cpu', devices={world}, max_steps={steps},"
        own = {
            "s3://bucket/run": run,
            "every_n_train_steps=1000": "every_n_train_steps=1",
            "lightning.Trainer(": f"{trainer} use_distributed_sampler=False, logger=False,",
            "data_parallel_size=8": f"{world}, 1",
            "trainer.fit(model": "trainer.fit(model, data",
        }
        data = DataLoader(TensorDataset(rows), batch_size=4)
        names = {"lightning": lightning, "model": Model(sharded=True), "data": data}
        exec(code("Lightning", own), names)
        assert len(names["model"].losses) == 2
    return int(names["trainer"].global_step)


def with_fabric(run: str, world: int) -> int:
    import lightning

    from fabric_job import sharded

    begin = """
fabric.launch()
model = fabric.setup_module(torch.nn.Linear(8, 4))
optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters()))
"""
    own = {
        "s3://bucket/run": run,
        "(parallelize)": f"(sharded, {world}, 1), accelerator='cpu', devices={world}",
        "\n...\n": begin,
    }
    names = {"lightning": lightning, "torch": torch, "sharded": sharded, "step": 10}
    exec(code("Fabric", own), names)
    return int(names["state"]["step"])


def with_accelerate(run: str, world: int) -> int:
    prepare = """
model = accelerator.prepare(torch.nn.Linear(8, 4))
"""
    own = {
        "s3://bucket/run": run,
        "fsdp_plugin=plugin": "cpu=True",  # Accelerate has FSDP on accelerators only
        "\n...\n": prepare,
    }
    for step in (10, 20):  # the second one goes on
        names: dict[str, Any] = {"torch": torch, "step": step}
        exec(code("Hugging Face Accelerate", own), names)
    assert names["newest"] == f"{run}/step-10"
    return 20


def with_trainer(run: str, world: int) -> int:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    tokens = torch.arange(8)
    data = [{"input_ids": tokens, "labels": tokens} for _ in range(64)]
    for steps in (2, 4):
        own = {
            "s3://bucket/run": run,
            "/scratch/run": f"{os.environ['RESULTS']}-scratch{steps}",
            "save_steps=1000": f"save_steps=1, max_steps={steps}, use_cpu=True, report_to=[]",
        }
        names = {"model": LlamaForCausalLM(shape), "data": data}
        exec(code("Hugging Face Trainer", own), names)
    return int(names["trainer"].state.global_step)


PROGRAMS = {
    "lightning": with_lightning,
    "fabric": with_fabric,
    "accelerate": with_accelerate,
    "trainer": with_trainer,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=[*PROGRAMS])
    parser.add_argument("run")
    told = parser.parse_args()
    step = PROGRAMS[told.framework](told.run, int(os.environ["WORLD_SIZE"]))
    tell(step=step, latest=cloudckpt.latest(told.run))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
