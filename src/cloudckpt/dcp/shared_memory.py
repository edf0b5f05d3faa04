"""Finds values that a load has overwritten, since their tensors share memory with others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from cloudckpt.checkpoint.shard import travels_as_bytes
from cloudckpt.checksum import CRC64NVME
from cloudckpt.config import MIB
from cloudckpt.errors import KeyCollisionError
from cloudckpt.transfer.boxes import row_major_slices
from cloudckpt.transfer.memory import bytes_of, narrow, sharing_memory, why_not_filled

__all__ = ["SharedMemory", "in_memory"]


class SharedMemory:
    """Detects whether entries of a load that share memory were saved with different values.

    Such entries must be filled one after another, and each be noted as soon as it is filled. After
    the last, the values in memory are compared with the noted ones.

    Args:
        entries: For each entry, the index of its tensor or chunk, and the tensors in memory that
            hold it.

    Attributes:
        rounds: For each entry that shares memory, by its number, the number of the round in which
            it is to be filled: entries of one round do not share memory with each other.
    """

    def __init__(self, entries: Sequence[tuple[MetadataIndex, Sequence[torch.Tensor]]]) -> None:
        self._entries = entries
        self.rounds = sharing_memory(entries)
        self._digests: dict[int, int] = {}

    def note(self, number: int) -> None:
        """Keeps a checksum of the values of an entry that has just been filled."""
        if number in self.rounds:
            self._digests[number] = self._digest(number)

    def check(self, uri: str | None) -> None:
        """Checks that all entries still have the values that were noted.

        Raises:
            KeyCollisionError: If an entry has other values.
        """
        for number, digest in reversed(self._digests.items()):
            if self._digest(number) != digest:
                mine, name = self._entries[number], self._entries[number][0].fqn
                others = [self._entries[at] for at in self.rounds if at != number]
                names = [other[0].fqn for other in others if sharing_memory([mine, other])]
                raise KeyCollisionError(
                    f"{name} and {names[0]} share memory in the state dict, which can't hold the "
                    "different values that were saved for them: give each a tensor of its own "
                    "before the load (untie them), or leave one of them out of the state dict",
                    uri=uri,
                    item=name,
                )

    def _digest(self, number: int) -> int:
        """Returns a checksum of an entry's values, read in pieces of up to 16 MiB."""
        digest = 0
        for tensor in self._entries[number][1]:
            for piece in row_major_slices(tensor.shape, tensor.itemsize, 16 * MIB):
                values = narrow(tensor, piece.box).cpu().resolve_conj().resolve_neg().contiguous()
                digest = CRC64NVME.of(bytes_of(values), digest)
        return digest


def in_memory(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the tensors that hold the elements of a tensor: itself, or those that it wraps.

    Tensors without elements, or without memory that can be filled, are left out.
    """
    if travels_as_bytes(tensor):
        inner = (getattr(tensor, name) for name in cast(Any, tensor).__tensor_flatten__()[0])
        return [part for one in inner if isinstance(one, torch.Tensor) for part in in_memory(one)]
    return [tensor] if tensor.numel() and not why_not_filled(tensor) else []
