"""What a checkpoint of the training holds."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from cloudckpt.demo.model import GPT

__all__ = ["TrainingState"]


class TrainingState(Stateful):
    """All that a checkpoint holds.

    Attributes:
        step: The last step that was trained; it is the position in the data, too.
        held_out_loss: The loss after it, which tells after loading whether all is as it was.
    """

    def __init__(self, model: GPT, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.step = 0
        self.held_out_loss = 0.0

    def state_dict(self) -> dict[str, Any]:
        """The sharded tensors of model and optimizer under names that no resharding changes."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "step": self.step,
            "held_out_loss": self.held_out_loss,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what was loaded."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.step = state_dict["step"]
        self.held_out_loss = state_dict["held_out_loss"]
