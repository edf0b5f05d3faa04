"""The contents of an earlier checkpoint, by digest: bytes it has need not be sent again.

An item (a rank's chunk of a tensor, or a pickled value) is identified by a digest of 128 bits
(XXH3) of its bytes, its element type and its shape. The digests are in the record of a checkpoint
that was saved with ``Config(incremental=True)``, a pair of numbers for each row. A save computes
the digests of its own items and does not send an item whose digest is there: its row in the new
checkpoint names the object that has the bytes. That object is never itself a reference, so that all
bytes are one step away, however many saves there were.

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

__all__ = ["VALUE", "Base", "Digest", "Digester", "digest_of_bytes", "kind_of"]

Digest = tuple[int, int]
"""Both halves of a digest, as int64."""

_HALVES = struct.Struct(">qq")


@functools.lru_cache(maxsize=8192)
def kind_of(dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    """The meaning of a tensor's row-major bytes: element type and shape."""
    return f"{dtype}{list(shape)}\0".encode()


VALUE = b"\0"
"""The same for the bytes of a pickled value."""


class Digester:
    """Computes the digest of one item; releases the GIL while reading all but small inputs.

    Args:
        kind: What the bytes mean: :func:`kind_of` a tensor, or ``VALUE``.
    """

    __slots__ = ("_hash", "add")

    def __init__(self, kind: bytes) -> None:
        self._hash = xxhash.xxh3_128(kind)
        self.add: Callable[[bytes | memoryview], None] = self._hash.update
        """Takes the next bytes."""

    def result(self) -> Digest:
        """The digest of all bytes so far."""
        high, low = _HALVES.unpack(self._hash.digest())
        return high, low


def digest_of_bytes(kind: bytes, view: bytes | memoryview) -> Digest:
    """The digest of an item whose bytes are all available; see :class:`Digester`."""
    digester = Digester(kind)
    digester.add(view)
    return digester.result()


class Base:
    """Items of a checkpoint, by digest; takes 16 bytes per item in addition to the record.

    Args:
        record: What a save has written, with digests; ``attempt`` is the save that made the
            checkpoint. Its columns are kept as they are.
        folder: The name of the checkpoint; empty if the record's objects have theirs.

    Attributes:
        attempt: The random name of the save that made the checkpoint.
        objects: The objects that hold the items, each with its folder.
    """

    def __init__(self, record: Record, folder: str = "") -> None:
        if not record.extents.has_digests:
            raise ValueError(
                "this record has no digests, so an incremental save can't compare with it"
            )
        objects = [one if one.folder else replace(one, folder=folder) for one in record.objects]
        self.attempt, self.objects = record.attempt, objects
        # read where they lie in memory: nothing is copied of columns that are contiguous
        extents = Extents(*(column.contiguous() for column in record.extents.all_columns))
        self._record = replace(
            record,
            table=None,
            extents=extents,
            objects=objects,
            structure=Structure(),
            times=no_times(),
        )
        # without a tensor for each number
        self._highs, self._rows = (one.numpy().data for one in torch.sort(extents.all_columns[3]))
        self._columns = [column.numpy().data for column in extents.all_columns]

    def find(self, digest: Digest) -> Place | None:
        """Where the bytes with a digest are (the object is an index into ``objects``), or None."""
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
