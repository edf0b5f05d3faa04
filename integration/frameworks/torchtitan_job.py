"""torchtitan's own main, with its arguments, on ranks that have a CPU only.

The import that docs/frameworks.md shows is all that it needs for checkpoints. It also asks for a
GPU in four places, and in one for a torch that is not released yet; these are led to what is here.
"""

import argparse
import collections
import dataclasses
import os
import signal
import sys
import types
from typing import Any

import torch
import torchtitan.tools.utils as utils
from torch.distributed.fsdp import FSDPModule

import page
from results import tell

exec(page.code("install()"))


class _Processor:
    """What torchtitan asks of ``torch.cuda``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name, lambda *_: None)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: object) -> str:
        return "cpu"

    def get_device_properties(self, device: object = None) -> types.SimpleNamespace:
        return types.SimpleNamespace(total_memory=2**34, name="cpu")

    def device_count(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def memory_stats(self, device: object) -> dict[str, int]:
        return collections.defaultdict(int)


utils.device_type, utils.device_module = "cpu", _Processor()

from torchtitan.components.metrics import MetricsProcessor  # noqa: E402 - which ask for the device
from torchtitan.hf_datasets.text_datasets import DATASETS  # noqa: E402
from torchtitan.models.common import attention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.train import main  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

losses: dict[int, float] = {}
_log, _step, _divide = (
    MetricsProcessor.log,
    Trainer.train_step,
    FSDPModule.set_gradient_divide_factor,
)


def _attend(q: Any, k: Any, v: Any, *, enable_gqa: bool, scale: float | None, **_: Any) -> Any:
    """Flex attention has no backward on a CPU."""
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa), None


def _divide_afterwards(module: FSDPModule, factor: float) -> None:
    module.set_force_sum_reduction_for_comms(True)  # gloo can't multiply
    _divide(module, factor)


def _noted(self: Any, step: int, loss: float, *args: Any, **kwargs: Any) -> None:
    losses[step] = loss
    _log(self, step, loss, *args, **kwargs)


def _killed_at(at: int) -> Any:
    def train_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.step == at:
            self.checkpointer.maybe_wait_for_saving()  # which save is the last is to be known
            os.kill(os.getpid(), signal.SIGKILL)
        return _step(self, *args, **kwargs)

    return train_step


def tiny() -> Any:
    """torchtitan looks for this by ``--module torchtitan_job --config tiny``."""
    config = llama3_debugmodel()
    assets = os.environ["ASSETS"]
    config.hf_assets_path = f"{assets}/tokenizer"
    DATASETS["c4_test"] = dataclasses.replace(DATASETS["c4_test"], path=f"{assets}/data")
    config.training.local_batch_size, config.training.seq_len = 1, 64
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "full_dtensor"
    config.validator.enable = False
    return config


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kill-at", type=int)
    told, rest = parser.parse_known_args()
    sys.argv[1:] = ["--module", "torchtitan_job", "--config", "tiny", *rest]
    attention.FlexAttention._compiled_flex_attn = staticmethod(_attend)
    attention._compiled_create_block_mask = attention.create_block_mask
    FSDPModule.set_gradient_divide_factor = _divide_afterwards
    MetricsProcessor.log = _noted
    if told.kill_at is not None:
        Trainer.train_step = _killed_at(told.kill_at)
    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = lambda *_, **__: None
    main()
    tell(losses=losses)
