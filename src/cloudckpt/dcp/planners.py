"""What is saved and loaded: torch's default planners, sooner and with errors that have names."""

from __future__ import annotations

import difflib
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import (
    DynamicMetaLoadPlanner as TorchDynamicMetaLoadPlanner,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

from cloudckpt.dcp.torch_private import create_chunk_list, set_element
from cloudckpt.errors import MissingKeyError, ShapeMismatchError
from cloudckpt.gc_pause import paused_gc

__all__ = [
    "CloudLoadPlanner",
    "CloudSavePlanner",
    "DynamicMetaLoadPlanner",
    "EverythingPlanner",
    "PartialPlanner",
]


class CloudSavePlanner(DefaultSavePlanner):
    """Plans as torch does; a plan of many items takes about half of the time."""

    def create_local_plan(self) -> SavePlan:
        with paused_gc():
            return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        with paused_gc():
            return super().create_global_plan(all_plans)


class CloudLoadPlanner(DefaultLoadPlanner):
    """Plans as torch does, and says which keys are missing or misshapen.

    Args:
        uri: The checkpoint, for messages.
    """

    def __init__(self, uri: str) -> None:
        super().__init__()
        self._uri = uri

    def create_local_plan(self) -> LoadPlan:
        """As torch's.

        Raises:
            MissingKeyError: If the state dict has keys that the checkpoint has not.
            ShapeMismatchError: If a tensor has another shape than the one in the checkpoint.
        """
        try:
            with paused_gc():
                return super().create_local_plan()
        except (RuntimeError, ValueError) as exc:
            self._explain(exc)
            raise

    def _explain(self, exc: Exception) -> None:
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        missing = [fqn for fqn in self.state_dict if fqn not in stored]
        if missing:
            near = difflib.get_close_matches(missing[0], stored, n=3)
            hint = f"; near {missing[0]!r} it has {near}" if near else ""
            count = "1 key is" if len(missing) == 1 else f"{len(missing)} keys are"
            raise MissingKeyError(
                f"{count} not in the checkpoint, the first: {missing[:5]}{hint}. "
                "Remove what is missing from the state dict, or pass "
                "planner=DefaultLoadPlanner(allow_partial_load=True)",
                uri=self._uri,
                item=missing[0],
            ) from exc
        for fqn, value in self.state_dict.items():
            entry = stored[fqn]
            if isinstance(entry, TensorStorageMetadata) and hasattr(value, "size"):
                wanted = tuple(value.size())
                if wanted != tuple(entry.size):
                    raise ShapeMismatchError(
                        f"{fqn} has shape {tuple(entry.size)} in the checkpoint and {wanted} in "
                        "the state dict",
                        uri=self._uri,
                        item=fqn,
                    ) from exc


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

    def __init__(self, uri: str, device: str | torch.device | None = None) -> None:
        super().__init__(uri)
        self._device = device if device is not None else "cpu"  # whatever torch's default is
        self.content: dict[str, Any] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        assert metadata is not None
        self.content = {}  # another try of a load may find another checkpoint
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


class DynamicMetaLoadPlanner(TorchDynamicMetaLoadPlanner):
    """torch's planner for sources without metadata, which also takes values that are no tensors.

    What is to be loaded, and how it is sharded, is taken from the state dict alone.
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        DefaultLoadPlanner.set_up_planner(self, state_dict, metadata, is_coordinator)
        entries: dict[str, Any] = {}
        for fqn, value in self.state_dict.items():
            if isinstance(value, torch.Tensor):
                properties = TensorProperties(dtype=value.dtype)
                entries[fqn] = TensorStorageMetadata(
                    properties, value.size(), create_chunk_list(value)
                )
            else:
                entries[fqn] = BytesStorageMetadata()
        self.metadata = Metadata(state_dict_metadata=entries)
