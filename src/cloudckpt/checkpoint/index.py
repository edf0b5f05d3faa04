"""The index at the end of a data object: its items' locations, and the checksums of all blocks.

The items of an object are in ascending order, each at the next multiple of 64, and the index
follows them in the same way. So it holds no offsets: they follow from the lengths. It is trusted
only if its size and CRC32C match the commit object. This module writes it, and ``object_index``
reads it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from cloudckpt.checksum import CRC32C, CRC64NVME, ChecksumAlgorithm, block_size_for

__all__ = [
    "DTYPES",
    "HEADER",
    "ITEM",
    "KINDS",
    "LONGEST_EDGE",
    "MAGIC",
    "MOST_INDEX",
    "index_bytes",
    "index_growth",
    "index_size",
    "kind_of",
]

MAGIC = b"ckptidx\1"
"""The first bytes of an index."""

HEADER = struct.Struct("<8sIB3x")
"""The header: the magic bytes, the number of items, and the kind of checksums."""

ITEM = 2 + 2 + 1 + 8
"""The fields of an item before its checksums: head, tail, type, length of the payload."""

LONGEST_EDGE = (1 << 16) - 1
"""Maximum bytes of an envelope before a tensor, and after it."""

MOST_INDEX = (1 << 32) - 1
"""Maximum bytes of an index."""

KINDS = {1: CRC32C, 2: CRC64NVME}
"""The numbers by which indexes and commit objects name the algorithm of checksums."""

DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"),
    *("bool", "complex128", "complex64", "complex32", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("float4_e2m1fn_x2", "bits1x8", "bits2x4", "bits4x2", "bits8", "bits16", "bcomplex32"),
)
"""The element types, by torch's names; their numbers count from 1."""


def kind_of(algorithm: ChecksumAlgorithm) -> int:
    """The algorithm's number in indexes and commit objects."""
    return next(kind for kind, known in KINDS.items() if known is algorithm)


def index_size(raw_lengths: Sequence[int], algorithm: ChecksumAlgorithm) -> int:
    """The size in bytes of the index of items with these payload lengths."""
    return HEADER.size + sum(index_growth(length, algorithm) for length in raw_lengths)


def index_growth(raw_length: int, algorithm: ChecksumAlgorithm) -> int:
    """The bytes that an item with this payload length takes in an index."""
    return ITEM + algorithm.nbytes * -(-raw_length // block_size_for(raw_length))


def index_bytes(
    heads: Sequence[int],
    tails: Sequence[int],
    codes: Sequence[int],
    raw_lengths: Sequence[int],
    checksums: Sequence[int],
    algorithm: ChecksumAlgorithm,
) -> bytes:
    """The index of items, by columns; ``checksums`` are those of all blocks of all items."""
    count = len(codes)
    return b"".join(
        (
            HEADER.pack(MAGIC, count, kind_of(algorithm)),
            struct.pack(f"<{count}H", *heads),
            struct.pack(f"<{count}H", *tails),
            bytes(codes),
            struct.pack(f"<{count}Q", *raw_lengths),
            algorithm.pack(checksums),
        )
    )
