"""Encodes the index at the end of a data object: its items' sizes and types, and all checksums.

In a data object, each item begins at a multiple of 64 bytes, the first one after the end of the
previous item; so does the index, after the last item. The offsets therefore follow from the
lengths, and are not stored. A reader trusts an index only if its size and CRC32C are those in the
commit object. :mod:`cloudckpt.checkpoint.object_index` parses indexes.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

from cloudckpt.checksum import CRC32C, CRC64NVME, ChecksumAlgorithm, block_size_for

__all__ = [
    "DTYPES",
    "HEADER",
    "ITEM",
    "ALGORITHMS",
    "LONGEST_EDGE",
    "MAGIC",
    "MOST_INDEX",
    "index_bytes",
    "index_growth",
    "index_size",
    "number_of",
]

MAGIC = b"ckptidx\1"
"""The first bytes of an index."""

HEADER = struct.Struct("<8sIB3x")
"""The header: the magic bytes, the number of items, and the number of the checksum algorithm."""

ITEM = 2 + 2 + 1 + 8
"""Bytes of an item's entry without checksums: head (2), tail (2), type (1), and length (8)."""

LONGEST_EDGE = (1 << 16) - 1
"""Maximum bytes of the envelope before a tensor's data, and also of the envelope after the data."""

MOST_INDEX = (1 << 32) - 1
"""Maximum bytes of an index."""

ALGORITHMS = {1: CRC32C, 2: CRC64NVME}
"""The checksum algorithms by their numbers in indexes and commit objects."""

DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"),
    *("bool", "complex128", "complex64", "complex32", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("float4_e2m1fn_x2", "bits1x8", "bits2x4", "bits4x2", "bits8", "bits16", "bcomplex32"),
)
"""The names of the element types in torch; an index has their positions in this tuple, from 1."""


def number_of(algorithm: ChecksumAlgorithm) -> int:
    """Returns the number of a checksum algorithm in indexes and commit objects."""
    return next(number for number, known in ALGORITHMS.items() if known is algorithm)


def index_size(raw_lengths: Sequence[int], algorithm: ChecksumAlgorithm) -> int:
    """Returns the size in bytes of the index of items with these payload lengths."""
    return HEADER.size + sum(index_growth(length, algorithm) for length in raw_lengths)


@functools.lru_cache(maxsize=8192)
def index_growth(raw_length: int, algorithm: ChecksumAlgorithm) -> int:
    """Returns how many bytes an item with this payload length takes in an index."""
    return ITEM + algorithm.nbytes * -(-raw_length // block_size_for(raw_length))


def index_bytes(
    heads: Sequence[int],
    tails: Sequence[int],
    codes: Sequence[int],
    raw_lengths: Sequence[int],
    checksums: Sequence[int],
    algorithm: ChecksumAlgorithm,
) -> bytes:
    """Returns the bytes of an index.

    Args:
        heads: For each item, the size in bytes of the envelope before its payload
            (:mod:`cloudckpt.checkpoint.envelope`).
        tails: For each item, the size in bytes of the envelope after its payload.
        codes: For each item, the number of its element type; 0 for a pickled value.
        raw_lengths: For each item, the size in bytes of its payload.
        checksums: The checksums of all blocks of the first item, then those of the next, and so on.
        algorithm: The algorithm of the checksums.
    """
    count = len(codes)
    return b"".join(
        (
            HEADER.pack(MAGIC, count, number_of(algorithm)),
            struct.pack(f"<{count}H", *heads),
            struct.pack(f"<{count}H", *tails),
            bytes(codes),
            struct.pack(f"<{count}Q", *raw_lengths),
            algorithm.pack(checksums),
        )
    )
