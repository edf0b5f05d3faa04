"""Which memory is taken by targets that are filled at the same time."""

from __future__ import annotations

from bisect import bisect_right

import torch

__all__ = ["Claims"]


class Claims:
    """Contiguous tensors that do not overlap.

    Others are never taken for overlapping: columns of a matrix lie in between each other.
    """

    def __init__(self) -> None:
        self._starts: dict[torch.device, list[int]] = {}
        self._ends: dict[torch.device, list[int]] = {}

    def overlap(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor shares memory with one that was added."""
        if not _counts(tensor):
            return False
        starts, ends = self._of(tensor)
        start = tensor.data_ptr()
        place = bisect_right(starts, start)
        return (place > 0 and ends[place - 1] > start) or (
            place < len(starts) and starts[place] < start + tensor.nbytes
        )

    def add(self, tensor: torch.Tensor) -> None:
        """Adds a tensor, which overlaps none that was added before."""
        if not _counts(tensor):
            return
        starts, ends = self._of(tensor)
        start = tensor.data_ptr()
        place = bisect_right(starts, start)
        starts.insert(place, start)
        ends.insert(place, start + tensor.nbytes)

    def _of(self, tensor: torch.Tensor) -> tuple[list[int], list[int]]:
        device = tensor.device
        return self._starts.setdefault(device, []), self._ends.setdefault(device, [])


def _counts(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and tensor.is_contiguous()
