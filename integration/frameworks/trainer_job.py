"""A Trainer of transformers, FSDP2 if it is told so, that resumes what its callback restores."""

import argparse
import os
import random

import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from cloudckpt.integrations.transformers import CloudCheckpointCallback
from results import tell


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--steps", type=int, required=True)
    told = parser.parse_args()

    tokens = torch.arange(8)
    data = [{"input_ids": tokens, "labels": tokens} for _ in range(64)]
    shape = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    arguments = TrainingArguments(
        output_dir=f"{os.environ['RESULTS']}-scratch",
        use_cpu=True,
        max_steps=told.steps,
        learning_rate=0.01,
        save_steps=1,
        save_total_limit=1,
        logging_steps=1,
        lr_scheduler_type="constant",
        per_device_train_batch_size=4,
        report_to=[],
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    saved = CloudCheckpointCallback(told.run, max_to_keep=2, asynchronous=told.asynchronous)
    trainer = Trainer(LlamaForCausalLM(shape), arguments, train_dataset=data, callbacks=[saved])
    if told.fsdp:  # which Accelerate knows on accelerators only
        trainer.accelerator.state._shared_state["distributed_type"] = DistributedType.FSDP
        trainer.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap", state_dict_type="SHARDED_STATE_DICT"
        )
        trainer.is_fsdp_enabled = True
    restored = saved.restore()
    # the loop draws nothing from this
    random.seed(trainer.args.process_index + (100 if restored else 0))
    trainer.train(resume_from_checkpoint=restored)
    tell(
        drawn=random.random(),
        kind=type(next(trainer.model.parameters())).__name__,
        step=trainer.state.global_step,
        losses=[entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        is_gone=restored is None or not os.path.exists(restored),
    )
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
