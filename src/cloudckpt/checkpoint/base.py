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
import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import xxhash

from cloudckpt.checkpoint.objects import WrittenObject, pack_objects, unpack_objects
from cloudckpt.checkpoint.shard import Place
from cloudckpt.checkpoint.written import Extents
from cloudckpt.transfer.memory import bytes_of

__all__ = ["VALUE", "Base", "Digest", "Digester", "digest_of_bytes", "kind_of"]

Digest = tuple[int, int]
"""Both halves, as numbers of int64."""

_HALVES = struct.Struct(">qq")


@functools.lru_cache(maxsize=8192)
def kind_of(dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    """What the bytes of a tensor mean, its elements being in row-major order."""
    return f"{dtype}{list(shape)}\0".encode()


VALUE = b"\0"
"""What those of a pickled value do."""


class Digester:
    """The digest of one item; feeding it lets go of the GIL while it reads more than a little.

    Args:
        kind: What the bytes mean: :func:`kind_of` a tensor, or ``VALUE``.
    """

    __slots__ = ("_hash", "add")

    def __init__(self, kind: bytes) -> None:
        self._hash = xxhash.xxh3_128(kind)
        self.add: Callable[[bytes | memoryview], None] = self._hash.update
        """Takes the next bytes."""

    def result(self) -> Digest:
        """That of all bytes so far."""
        high, low = _HALVES.unpack(self._hash.digest())
        return high, low


def digest_of_bytes(kind: bytes, view: bytes | memoryview) -> Digest:
    """That of an item whose bytes are all there; see :class:`Digester`."""
    digester = Digester(kind)
    digester.add(view)
    return digester.result()


class Base:
    """Items of a checkpoint, by digest: 16 bytes each, besides the columns that it is given.

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
        self._sorted = torch.sort(extents.high)
        self._highs, self._rows = map(_numbers, self._sorted)
        self._columns = [_numbers(column) for column in extents.all_columns]

    @classmethod
    def of(
        cls, attempt: str, folder: str, objects: Sequence[WrittenObject], extents: Extents
    ) -> Base:
        """That of what a save has written to the checkpoint that is called ``folder``."""
        placed = [one if one.folder else replace(one, folder=folder) for one in objects]
        return cls(attempt, placed, extents)

    def find(self, digest: Digest) -> Place | None:
        """Where bytes of a digest are, by the number of the object in ``objects``; or None."""
        objects, offsets, lengths, _, lows = self._columns
        high, low = digest
        for place in range(bisect.bisect_left(self._highs, high), len(self._highs)):
            if self._highs[place] != high:
                break
            row = self._rows[place]
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
