"""Finds the bytes of an earlier checkpoint by digest, so that a save need not send them again.

An item (a rank's chunk of a tensor, or a pickled value) is identified by a digest of 128 bits
(XXH3) of its bytes, its element type and its shape. A checkpoint that was saved with
``Config(incremental=True)`` has the digest of each item in its metadata. A save computes the
digests of its own items, and does not send an item whose digest the earlier checkpoint has.
Instead, the new checkpoint names the object with these bytes directly: after any number of
incremental saves, no reader has to go through the checkpoints in between.

XXH3 is not a cryptographic hash. Two different items from training share a digest by chance once in
10^38 pairs; constructing tensors with equal digests can only corrupt one's own checkpoint. The
store's checksums can't identify an item: 32 or 64 bits may be equal by chance.
"""

from __future__ import annotations

import bisect
import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import xxhash

from cloudckpt.checkpoint.object_plan import Place
from cloudckpt.checkpoint.record import Extents, Record, no_times
from cloudckpt.checkpoint.structure import Structure

__all__ = ["VALUE", "Base", "Digest", "Digester", "digest_of_bytes", "type_prefix"]

Digest = tuple[int, int]
"""The high and the low half of a 128-bit digest, each as int64."""

_HALVES = struct.Struct(">qq")


@functools.lru_cache(maxsize=8192)
def type_prefix(dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    """Returns bytes that identify a tensor's element type and shape, as a prefix for its digest."""
    return f"{dtype}{list(shape)}\0".encode()


VALUE = b"\0"
"""The prefix for the digest of a pickled value; a tensor has :func:`type_prefix` instead."""


class Digester:
    """Computes the digest of one item; releases the GIL while it hashes all but small inputs.

    Args:
        kind: The prefix that is hashed first: :func:`type_prefix` of a tensor, or ``VALUE``.
    """

    __slots__ = ("_hash", "add")

    def __init__(self, kind: bytes) -> None:
        self._hash = xxhash.xxh3_128(kind)
        self.add: Callable[[bytes | memoryview], None] = self._hash.update
        """Hashes the next bytes of the item."""

    def result(self) -> Digest:
        """Returns the digest of all bytes added so far."""
        high, low = _HALVES.unpack(self._hash.digest())
        return high, low


def digest_of_bytes(kind: bytes, view: bytes | memoryview) -> Digest:
    """Returns the digest of an item whose bytes are all in one buffer; see :class:`Digester`."""
    digester = Digester(kind)
    digester.add(view)
    return digester.result()


class Base:
    """Looks up the items of a checkpoint by digest.

    It takes 16 bytes of memory per item, in addition to the record.

    Args:
        record: The items of the checkpoint with their locations and digests. Contiguous columns are
            not copied.
        folder: The name of the checkpoint's folder, which is set on objects that have no folder;
            may be empty if all objects have one.

    Attributes:
        attempt: The random name of the save that made the checkpoint.
        objects: The objects that hold the items, each with its folder.
    """

    def __init__(self, record: Record, folder: str = "") -> None:
        objects = [one if one.folder else replace(one, folder=folder) for one in record.objects]
        self.attempt, self.objects = record.attempt, objects
        # columns that are contiguous are used in place, not copied
        extents = Extents(*(column.contiguous() for column in record.extents.columns))
        self._record = replace(
            record,
            table=None,
            extents=extents,
            objects=objects,
            structure=Structure(),
            times=no_times(),
        )
        # memoryviews: reading a number from one makes no tensor
        self._highs, self._rows = (one.numpy().data for one in torch.sort(extents.columns[3]))
        self._columns = [column.numpy().data for column in extents.columns]

    def find(self, digest: Digest) -> Place | None:
        """Returns the location of the item with this digest; None if the checkpoint lacks it.

        The location's ``object`` is an index into ``objects``.
        """
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
        return Base, (self._record,)
