"""The frozen base of PEFT models, which may be left out of a checkpoint.

The code that makes such a model can load the base from where it came from. That is so unless the
base was initialized randomly or changed: so it is saved, unless the user says otherwise.

Nothing here imports PEFT: its models, and transformers models with adapters, are recognized by
their ``peft_config``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from cloudckpt.dcp.meeting import Meeting

__all__ = ["base_weights", "without_base"]

logger = logging.getLogger("cloudckpt")

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


def without_base(model: Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a model's state dict to save without the base; logs what is left out."""
    left_out = base_weights(model) & state.keys()
    nbytes = sum(state[name].numel() * state[name].element_size() for name in left_out)
    if Meeting.of(None, False).rank == 0:
        logger.info(
            "%d frozen weights of the base model (%d bytes) are left out of the checkpoint, as "
            "peft_base=False says: the model must have them before it is loaded",
            len(left_out),
            nbytes,
        )
    return {name: value for name, value in state.items() if name not in left_out}
