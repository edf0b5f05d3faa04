"""What of a PEFT model is saved: its adapters and what else is trained, and not its frozen base.

The code that makes the model loads the base from where it was trained, and in each save of it
nothing would be new. ``Config(peft_base=True)`` saves it all the same, for one that is made by
chance, or was changed. A checkpoint that has it is loaded with it, whatever the options are.

Nothing here imports PEFT: its models, and those of transformers that have adapters, say so by
``peft_config``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from cloudckpt.config import Config

__all__ = ["base_weights", "without_base"]

_WRAPPERS = {"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"}
"""What torch puts into the names of parameters, and not into those of a state dict."""


def base_weights(model: Module) -> frozenset[str]:
    """The frozen parameters of a PEFT model, or of those in a model, that are of no adapter.

    Those of an adapter have its name in theirs: one that is frozen, as that of a reference model,
    comes from no base.

    Returns:
        Their names in the state dict of the model; none if there is no PEFT model in it.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    found: set[str] = set()
    for prefix, module in model.named_modules():
        config = getattr(module, "peft_config", None)
        if not isinstance(config, Mapping) or not config:
            continue
        for name, parameter in module.named_parameters(prefix, remove_duplicate=False):
            parts = [part for part in name.split(".") if part not in _WRAPPERS]
            if not parameter.requires_grad and not config.keys() & {*parts}:
                found.add(".".join(parts))
    return frozenset(found)


def without_base(model: Module, state: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """What is to be saved of the state dict of a model."""
    left_out: Collection[str] = () if config.peft_base else base_weights(model)
    return {name: value for name, value in state.items() if name not in left_out}
