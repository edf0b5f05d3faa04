"""What an earlier checkpoint holds, by content: bytes that are there need not be sent again.

An item (a rank's chunk of a tensor, or a pickled value) is known by a digest of 128 bits (XXH3) of
its bytes, its element type and its shape. The digests stand in the record of a checkpoint that was
saved with ``Config(incremental=True)``, a pair of numbers for each row. Who saves computes those of
its own items, and does not send one whose digest is there: the row of the new checkpoint names the
object that has the bytes. That object is never itself a reference, so that what is to be read is
one step away, however many saves there were.

XXH3 is no cryptographic hash. Two states that training brings about by chance have the same digest
once in 10^38 pairs; whoever makes up tensors on purpose so that two digests agree can make only a
checkpoint of his own wrong. A checksum is no identity: those of 32 or 64 bits are equal by chance.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Sequence
from dataclasses import replace

import torch
import xxhash

from cloudckpt.checkpoint.objects import WrittenObject, pack_objects, unpack_objects
from cloudckpt.checkpoint.shard import Place
from cloudckpt.checkpoint.written import Extents
from cloudckpt.transfer.memory import bytes_of

__all__ = ["Base", "Digest", "Digester"]

Digest = tuple[int, int]
"""Both halves, as numbers of int64."""


class Digester:
    """The digest of one item; feeding it lets go of the GIL while it reads more than a little.

    Args:
        kind: What the bytes mean: element type and shape of a tensor.
    """

    __slots__ = ("_hash",)

    def __init__(self, kind: str) -> None:
        self._hash = xxhash.xxh3_128(f"{kind}\0".encode())

    def add(self, view: bytes | memoryview) -> Digester:
        """Takes the next bytes."""
        self._hash.update(view)
        return self

    def result(self) -> Digest:
        """That of all bytes so far."""
        high, low = struct.unpack(">qq", self._hash.digest())
        return high, low

    @classmethod
    def of_tensor(cls, dtype: torch.dtype, shape: Sequence[int]) -> Digester:
        """For the elements of a tensor, in row-major order."""
        return cls(f"{dtype}{list(shape)}")

    @classmethod
    def of_value(cls) -> Digester:
        """For what is pickled."""
        return cls("")


class Base:
    """Items of a checkpoint, by digest: 8 bytes each, besides the columns that it is given.

    Attributes:
        attempt: The random name of the save that has made the checkpoint.
        objects: The objects that have the items, each with its folder.
    """

    def __init__(self, attempt: str, objects: Sequence[WrittenObject], extents: Extents) -> None:
        """
        Args:
            attempt: See above.
            objects: See above.
            extents: Where the items are, with their digests.
        """
        if extents.high is None or extents.low is None:
            raise ValueError("a base without digests")
        self.attempt, self.objects = attempt, objects
        self._extents = extents
        self._sorted = torch.argsort(extents.high)
        self._order, *self._columns = map(_numbers, (self._sorted, *extents.all_columns))

    @classmethod
    def of(
        cls, attempt: str, folder: str, objects: Sequence[WrittenObject], extents: Extents
    ) -> Base:
        """That of what a save has written to the checkpoint that is called ``folder``."""
        placed = [one if one.folder else replace(one, folder=folder) for one in objects]
        return cls(attempt, placed, extents)

    def find(self, digest: Digest) -> Place | None:
        """Where bytes of a digest are, by the number of the object in ``objects``; or None."""
        objects, offsets, lengths, highs, lows = self._columns
        high, low = digest
        first = bisect.bisect_left(self._order, high, key=highs.__getitem__)
        for row in self._order[first:]:
            if highs[row] != high:
                break
            if lows[row] == low:
                return Place(objects[row], offsets[row], lengths[row])
        return None

    def __reduce__(self) -> tuple[object, ...]:
        return _unpacked, (self.attempt, *pack_objects(self.objects), self._extents)


def _numbers(column: torch.Tensor) -> memoryview:
    """The numbers of a column of int64 that somebody keeps, each without a tensor of its own."""
    return memoryview(bytes_of(column)).cast("q") if column.numel() else memoryview(b"").cast("q")


def _unpacked(attempt: str, packed: bytes, folders: tuple[str, ...], extents: Extents) -> Base:
    return Base(attempt, unpack_objects(packed, folders), extents)
