"""CRC32C of buffers, and arithmetic on it.

CRC32C (Castagnoli) is the checksum that S3, GCS and we share. awscrt computes it at memory speed
without a copy, releases the GIL, and can combine the checksums of neighbours, so every byte is
looked at once: the checksum of a part or an object follows from those of its blocks. Azure alone
verifies another one, CRC64.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable, Sequence
from typing import cast

from awscrt.checksums import combine_crc32c, crc32c, crc64nvme

__all__ = [
    "BlockChecksums",
    "block_size_for",
    "combine",
    "crc32c",
    "crc64",
    "crc64_to_base64",
    "first_bad_block",
    "to_base64",
]

_SMALLEST_BLOCK = 64 * 1024
_LARGEST_BLOCK = 1024 * 1024
_BLOCKS_PER_ITEM = 64


def to_base64(crc: int) -> str:
    """The four big-endian bytes of a CRC32C in base64, as S3 and GCS spell it."""
    return base64.b64encode(struct.pack(">I", crc)).decode("ascii")


def crc64(views: Iterable[memoryview]) -> int:
    """The CRC64 of neighbouring buffers, as Azure Storage computes it.

    Its polynomial, 0x9A6C9329AC4BC9B5 reflected, is also that of NVM Express.
    """
    total = 0
    for view in views:
        total = crc64nvme(view, total)
    return total


def crc64_to_base64(crc: int) -> str:
    """The eight little-endian bytes of a CRC64 in base64, as Azure spells it."""
    return base64.b64encode(struct.pack("<Q", crc)).decode("ascii")


def combine(pieces: Iterable[tuple[int, int]]) -> int:
    """The CRC32C of neighbouring buffers, given ``(crc, length in bytes)`` of each, in order."""
    total = 0
    for crc, length in pieces:
        total = combine_crc32c(total, crc, length)
    return total


def block_size_for(nbytes: int) -> int:
    """Bytes that share one checksum in an item of ``nbytes``: a power of two, 64 KiB to 1 MiB.

    A reader that wants part of an item must fetch whole blocks to verify them. Sixty-four blocks
    an item keep that surplus at a few percent, while 1 MiB keeps the checksums of a terabyte at
    4 MiB.
    """
    wanted = max(1, nbytes // _BLOCKS_PER_ITEM)
    power = 1 << (wanted.bit_length() - 1)
    return min(max(power, _SMALLEST_BLOCK), _LARGEST_BLOCK)


class BlockChecksums:
    """Collects the CRC32C of an item block by block, from pieces that come in any order.

    Pieces may end anywhere; one writer thread handles one piece, several threads may add to the
    same item. A piece's own checksum is a by-product, so that nothing is read twice.
    """

    __slots__ = ("_found", "block_size")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._found: list[tuple[int, int, int]] = []  # append is atomic

    def add(self, start: int, view: memoryview) -> int:
        """Takes the bytes of the item that begin at ``start``; returns the CRC32C of ``view``."""
        size, block = view.nbytes, self.block_size
        if start // block == (start + size - 1) // block:
            crc = crc32c(view)
            self._found.append((start, size, crc))
            return cast(int, crc)
        total, position = 0, 0
        while position < size:
            length = min(block - (start + position) % block, size - position)
            crc = crc32c(view[position : position + length])
            self._found.append((start + position, length, crc))
            total = combine_crc32c(total, crc, length)
            position += length
        return total

    def finish(self, nbytes: int) -> tuple[int, ...]:
        """The checksum of each block of the item of ``nbytes``.

        Raises:
            ValueError: If the pieces do not cover the item exactly once.
        """
        blocks: list[int] = []
        expected = 0
        for start, length, crc in sorted(self._found):
            if start != expected:
                raise ValueError(f"byte {expected} of the item was not sent exactly once")
            if start % self.block_size == 0:
                blocks.append(crc)
            else:
                blocks[-1] = combine_crc32c(blocks[-1], crc, length)
            expected = start + length
        if expected != nbytes:
            raise ValueError(f"{expected} of {nbytes} bytes of the item were sent")
        return tuple(blocks)


def first_bad_block(
    views: Sequence[memoryview], crcs: Sequence[int], block_size: int
) -> int | None:
    """Checks whole blocks that lie, in order, in ``views``; returns the first wrong one.

    Args:
        views: Buffers that, concatenated, begin at a block's first byte.
        crcs: The expected checksum of each block.
        block_size: Bytes of a block; the last one may be shorter.

    Returns:
        The position in ``crcs`` of the first block that differs, or None if all are right.
    """
    index, crc, filled = 0, 0, 0
    for view in views:
        position = 0
        while position < view.nbytes:
            length = min(block_size - filled, view.nbytes - position)
            crc = crc32c(view[position : position + length], crc)
            position += length
            filled += length
            if filled == block_size:
                if crc != crcs[index]:
                    return index
                index, crc, filled = index + 1, 0, 0
    return index if filled and crc != crcs[index] else None
