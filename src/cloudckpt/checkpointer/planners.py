"""What a checkpointer loads: all that is there, or what is there of a state dict."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from cloudckpt.dcp.planners import CloudLoadPlanner
from cloudckpt.dcp.torch_private import set_element

__all__ = ["EverythingPlanner", "PartialPlanner"]


class PartialPlanner(CloudLoadPlanner):
    """Loads the keys that the checkpoint has; the others keep their values."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.allow_partial_load = True


class EverythingPlanner(CloudLoadPlanner):
    """Loads all that the checkpoint has, nested as it was saved.

    Args:
        uri: The checkpoint, for messages.
        device: Of the tensors; default: the host.

    Attributes:
        content: What was loaded.
    """

    def __init__(self, uri: str, device: str | torch.device | None) -> None:
        super().__init__(uri)
        self._device = device
        self.content: dict[str, Any] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        assert metadata is not None
        paths = metadata.planner_data or {}
        for fqn, entry in metadata.state_dict_metadata.items():
            made: Any = None
            if isinstance(entry, TensorStorageMetadata):
                made = torch.empty(entry.size, dtype=entry.properties.dtype, device=self._device)
            if fqn in paths:
                set_element(self.content, paths[fqn], made)
            else:
                self.content[fqn] = made
        # torch hands over a dict of its own, of which the caller would see nothing
        super().set_up_planner(self.content, metadata, is_coordinator)
