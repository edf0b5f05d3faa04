"""How tensors travel to all ranks: cut into batches that fit into memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from cloudckpt.checkpoint.shard import travels_as_bytes
from cloudckpt.dcp.load_plan import check_types
from cloudckpt.errors import ShapeMismatchError, UnsupportedTensorError
from cloudckpt.transfer.boxes import Box, aligned, row_major_slices
from cloudckpt.transfer.landing import copy_into
from cloudckpt.transfer.memory import narrow, settled, why_not_filled

__all__ = ["Batch", "FileTensor", "Slice", "Targets", "batches"]


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the file: its name, element type and shape."""

    fqn: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Slice:
    """Consecutive elements of a tensor in row-major order.

    Attributes:
        tensor: The tensor.
        box: Which elements.
        first: Their first byte in the tensor.
        at: Their first byte in the batch.
    """

    tensor: FileTensor
    box: Box
    first: int
    at: int

    @property
    def nbytes(self) -> int:
        return math.prod(length for _, length in self.box) * self.tensor.dtype.itemsize

    def bytes_in(self, room: torch.Tensor) -> torch.Tensor:
        return room[self.at : self.at + self.nbytes]

    def view(self, room: torch.Tensor) -> torch.Tensor:
        flat = self.bytes_in(room).view(self.tensor.dtype)
        return flat.view([length for _, length in self.box])


@dataclass
class Batch:
    """Slices sent together."""

    slices: list[Slice] = field(default_factory=list)
    size: int = 0


def batches(tensors: Iterable[FileTensor], limit: int) -> Iterator[Batch]:
    """Batches of at most ``limit`` bytes; the same on every rank."""
    batch = Batch()
    for tensor in tensors:
        for rows in row_major_slices(tensor.shape, tensor.dtype.itemsize, limit):
            part = Slice(tensor, rows.box, rows.start, aligned(batch.size))
            if batch.slices and part.at + part.nbytes > limit:
                yield batch
                batch, part = Batch(), Slice(tensor, rows.box, rows.start, 0)
            batch.slices.append(part)
            batch.size = part.at + part.nbytes
    if batch.slices:
        yield batch


@dataclass(frozen=True)
class _Target:
    """A tensor that takes a region, beginning at ``offsets``, of a tensor in the file."""

    item: ReadItem
    tensor: torch.Tensor
    offsets: tuple[int, ...]


class Targets:
    """The tensors of this rank that are loaded into.

    Args:
        plan: What this rank loads.
        planner: Its planner.
        tensors: The tensors of the file that are loaded by any rank.
        uri: The file, for messages.
        logs: Whether this rank logs which tensors are converted.

    Raises:
        ShapeMismatchError: If a tensor has another shape in the file than in the state dict.
        UnsupportedTensorError: If a tensor can't be loaded into, or can't hold what the file has.
    """

    def __init__(
        self,
        plan: LoadPlan,
        planner: LoadPlanner,
        tensors: Sequence[FileTensor],
        uri: str,
        *,
        logs: bool,
    ) -> None:
        self._planner = planner
        self._by_fqn: dict[str, list[_Target]] = {}
        shapes = {tensor.fqn: tensor.shape for tensor in tensors}
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                continue
            fqn, start = item.storage_index.fqn, item.storage_index.offset
            begin = start if start is not None else (0,) * len(item.storage_offsets)
            # the planner's chunks are those of the state dict: the file has all of each tensor
            offsets = tuple(a + b for a, b in zip(begin, item.storage_offsets, strict=True))
            target = _Target(item, settled(planner.resolve_tensor(item)).detach(), offsets)
            self._check(fqn, shapes[fqn], target, uri)
            self._by_fqn.setdefault(fqn, []).append(target)
        found = {fqn: targets[0].tensor for fqn, targets in self._by_fqn.items()}
        check_types(found, {one.fqn: one.dtype for one in tensors}.get, uri, logs=logs)

    def _check(self, fqn: str, stored: tuple[int, ...], target: _Target, uri: str) -> None:
        entries = getattr(getattr(self._planner, "metadata", None), "state_dict_metadata", {})
        wanted = tuple(getattr(entries.get(fqn), "size", stored))
        fits = len(stored) == target.tensor.dim() and all(
            offset + length <= size
            for offset, length, size in zip(
                target.offsets, target.tensor.shape, stored, strict=True
            )
        )
        if wanted != stored or not fits:
            raise ShapeMismatchError(
                f"{fqn} has shape {stored} in the file and {wanted} in the state dict",
                uri=uri,
                item=fqn,
            )
        why = "" if travels_as_bytes(target.tensor) else why_not_filled(target.tensor)
        if why:
            raise UnsupportedTensorError(f"{fqn} can't be loaded into: {why}", uri=uri, item=fqn)

    def deliver(self, batch: Batch, room: torch.Tensor) -> None:
        """Copies what this rank wants of a batch."""
        for part in batch.slices:
            for target in self._by_fqn.get(part.tensor.fqn, ()):
                _copy_common(part, room, target)

    def commit(self) -> None:
        """Commits all tensors to the planner once they have arrived."""
        for targets in self._by_fqn.values():
            for target in targets:
                self._planner.commit_tensor(target.item, target.tensor)


def _copy_common(part: Slice, room: torch.Tensor, target: _Target) -> None:
    """Copies what a slice and a target have in common."""
    here, there = [], []
    for (start, length), offset, size in zip(
        part.box, target.offsets, target.tensor.shape, strict=True
    ):
        first, stop = max(start, offset), min(start + length, offset + size)
        if first >= stop:
            return
        here.append((first - start, stop - first))
        there.append((first - offset, stop - first))
    source = narrow(part.view(room), tuple(here))
    copy_into(narrow(target.tensor, tuple(there)), source)
