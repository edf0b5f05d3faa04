"""torch's default planners, without collector pauses and with errors that have names."""

from __future__ import annotations

import difflib

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

from cloudckpt.errors import MissingKeyError, ShapeMismatchError
from cloudckpt.gc_pause import paused_gc

__all__ = ["CloudLoadPlanner", "CloudSavePlanner"]


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
            raise MissingKeyError(
                f"{len(missing)} keys are not in the checkpoint, the first: {missing[:5]}{hint}. "
                "Remove them from the state dict, or pass "
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
