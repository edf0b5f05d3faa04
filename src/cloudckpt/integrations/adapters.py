"""Saves of PEFT models: the adapters and whatever else is trained, without the frozen base.

The code that makes the model loads the base from its original location, and the base is the same in
every save. ``Config(peft_base=True)`` saves it all the same, for a base that is randomly
initialized or was changed. A checkpoint that has the base is loaded with it, whatever the options.

Nothing here imports PEFT: its models, and transformers models with adapters, are recognized by
their ``peft_config``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from cloudckpt.config import Config

__all__ = ["base_weights", "without_base"]

_WRAPPERS = {"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"}
"""What torch adds to the names of parameters, but not to the keys of a state dict."""


def base_weights(model: Module) -> frozenset[str]:
    """The frozen parameters of the PEFT models in a model that belong to no adapter.

    An adapter's parameters contain its name: a frozen adapter, such as that of a reference model,
    does not come from the base.

    Returns:
        Their names in the state dict of the model; empty if it contains no PEFT model.
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
    """The part of a model's state dict to save."""
    left_out: Collection[str] = () if config.peft_base else base_weights(model)
    return {name: value for name, value in state.items() if name not in left_out}
