"""What the trainers of all ranks agree on before a save: to skip it, or not to begin it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from cloudckpt.errors import AsyncSaveError, ProcessGroupError

__all__ = ["Consent"]


class Consent:
    """Asks all ranks of a group; each question is a collective call.

    Attributes:
        group: The ranks; None for this process alone.
        is_broken: Whether a question may still be under way on some rank.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.is_broken = False

    def any(self, holds: bool) -> bool:
        """Whether something holds on some rank.

        Raises:
            ProcessGroupError: If the ranks lost each other.
        """
        if self.group is None:
            return holds
        seen = torch.tensor([int(holds)], device="cpu")
        with self._asking():
            dist.all_reduce(seen, dist.ReduceOp.MAX, group=self.group)
        return bool(seen.item())

    def raise_alike(self, failure: BaseException | None) -> None:
        """Raises a failure; on the other ranks, an error that tells of it.

        Raises:
            AsyncSaveError: If another rank has a failure.
            ProcessGroupError: If the ranks lost each other.
        """
        try:
            reasons = self._reasons(failure)
        except ProcessGroupError:
            if failure is None:
                raise
            reasons = {}
        if failure is not None:
            raise failure
        if reasons:
            rank, reason = next(iter(reasons.items()))
            raise AsyncSaveError(f"rank {rank} did not begin this save", cause=reason)

    def _reasons(self, failure: BaseException | None) -> dict[int, str]:
        """The text of each rank's failure, by rank."""
        if not self.any(failure is not None):
            return {}
        texts = [None if failure is None else f"{type(failure).__name__}: {failure}"]
        if self.group is not None:
            own, texts = texts[0], texts * dist.get_world_size(self.group)
            with self._asking():
                dist.all_gather_object(texts, own, group=self.group)
        return {rank: text for rank, text in enumerate(texts) if text is not None}

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as exc:  # plain ones of gloo; of a group that is gone
            self.is_broken = True
            raise ProcessGroupError(
                "the ranks could not agree on a save: look which one ended first and why, and "
                "start them again",
                cause=exc,
            ) from exc
