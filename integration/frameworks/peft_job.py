"""A model with LoRA that a framework trains, with a save at each step; tells the bytes of each.

Two checkpoints are kept; a run that resumes does so behind its third step.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import cloudckpt
from cloudckpt import events
from results import tell

TOKENS = torch.arange(8)
ROWS = [{"input_ids": TOKENS, "labels": TOKENS} for _ in range(64)]


def lora(hidden: int, base: int = 0) -> Any:
    """A small Llama with adapters, of which one is frozen, and comes from no base."""
    torch.manual_seed(base)
    shape = LlamaConfig(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=1,
        tie_word_embeddings=False,
    )
    adapter = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = get_peft_model(LlamaForCausalLM(shape), adapter)
    model.add_adapter("reference", adapter)
    return model


def with_lightning(told: argparse.Namespace) -> list[float]:
    import lightning.pytorch as lightning
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader

    from cloudckpt.integrations import lightning as ours

    class Model(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = lora(told.hidden, told.base), []

        def configure_model(self) -> None:
            if told.framework == "lightning-sharded":
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            loss = self.net(**batch).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            trained = (one for one in self.parameters() if one.requires_grad)
            return torch.optim.AdamW(trained, 0.01)

    world = int(os.environ["WORLD_SIZE"])
    sharding = ours.CloudModelParallelStrategy(world, 1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=sharding if told.framework == "lightning-sharded" else ours.CloudDDPStrategy(),
        callbacks=[
            ours.CloudModelCheckpoint(
                told.run, every_n_train_steps=1, monitor="step", mode="max", save_top_k=2
            )
        ],
        max_steps=told.steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    model = Model()
    trainer.fit(model, DataLoader(ROWS, batch_size=4), ckpt_path=told.resume)
    return list(model.losses)


def with_accelerate(told: argparse.Namespace) -> list[float]:
    from accelerate import Accelerator

    from cloudckpt.integrations.accelerate import load_state, save_state

    accelerator = Accelerator(cpu=True)
    model = lora(told.hidden, told.base)
    trained = (one for one in model.parameters() if one.requires_grad)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, 0.01))
    if told.resume:
        load_state(accelerator, told.resume)
    losses = []
    for step in range(3 if told.resume else 0, told.steps):
        loss = model(input_ids=TOKENS[None], labels=TOKENS[None]).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        uri = f"{told.run}/step-{step + 1}"
        save_state(accelerator, uri, max_to_keep=2)
    return losses


def with_trainer(told: argparse.Namespace) -> list[float]:
    from transformers import Trainer, TrainingArguments

    from cloudckpt.integrations.transformers import CloudCheckpointCallback

    arguments = TrainingArguments(
        output_dir=f"{os.environ['RESULTS']}-scratch",
        use_cpu=True,
        max_steps=told.steps,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        save_steps=1,
        save_total_limit=1,
        logging_steps=1,
        per_device_train_batch_size=4,
        report_to=[],
        disable_tqdm=True,
    )
    saved = CloudCheckpointCallback(told.run, max_to_keep=2)
    model = lora(told.hidden, told.base)
    trainer = Trainer(model, arguments, train_dataset=ROWS, callbacks=[saved])
    restored = None
    if told.resume:
        earlier, _, step = told.resume.rpartition("/step-")
        restored = CloudCheckpointCallback(earlier).restore(int(step))
    trainer.train(resume_from_checkpoint=restored)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    parser = argparse.ArgumentParser()
    frameworks = ["lightning", "lightning-sharded", "accelerate", "trainer"]
    parser.add_argument("framework", choices=frameworks)
    parser.add_argument("run")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--base", type=int, default=0, help="which base; a run has one")
    parser.add_argument("--resume")
    parser.add_argument("--incremental", action="store_true")
    told = parser.parse_args()
    sent: dict[str, int] = {}

    def listen(event: events.Event) -> None:
        if event.phase == "upload":
            sent[event.uri] = sent.get(event.uri, 0) + (event.nbytes or 0)

    events.subscribe(listen, progress=False)
    cloudckpt.install(config=cloudckpt.Config(incremental=told.incremental))
    train = {"accelerate": with_accelerate, "trainer": with_trainer}
    losses = train.get(told.framework, with_lightning)(told)
    tell(losses=losses, sent=sent)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
