"""Checksums of buffers, and their combination.

The blocks of a checkpoint have the checksum that its store verifies as well: CRC32C on S3 and
Google Cloud Storage, CRC64 on Azure. So every byte is processed once: the checksum of a part or an
object is computed from those of its blocks. awscrt computes both at memory speed, without copying
and without the GIL.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from awscrt import checksums

from cloudckpt.errors import TensorChangedError

__all__ = [
    "ALGORITHMS",
    "CRC32C",
    "CRC64NVME",
    "BlockChecksums",
    "Blocks",
    "ChecksumAlgorithm",
    "block_size_for",
    "from_base64",
    "to_base64",
]

_SMALLEST_BLOCK = 64 * 1024
_LARGEST_BLOCK = 1024 * 1024
_BLOCKS_PER_ITEM = 64


@dataclass(frozen=True, slots=True)
class ChecksumAlgorithm:
    """A checksum algorithm whose checksums of adjacent pieces can be combined.

    Attributes:
        name: The usual name of the algorithm.
        of: Returns the checksum of a buffer. With the checksum of the preceding bytes as a second
            argument, returns the checksum of those bytes and the buffer together.
        joined: Returns the checksum of two adjacent pieces, given both checksums and the length of
            the second in bytes.
        code: The format character of a checksum in :mod:`struct`.
    """

    name: str
    of: Callable[..., int]
    joined: Callable[[int, int, int], int]
    code: str

    @property
    def nbytes(self) -> int:
        """The size of a checksum in bytes."""
        return struct.calcsize(self.code)

    def combine(self, pieces: Iterable[tuple[int, int]]) -> int:
        """Returns the checksum of adjacent pieces, given each one's checksum and size in bytes."""
        total = 0
        for checksum, length in pieces:
            total = self.joined(total, checksum, length)
        return total

    def pack(self, values: Sequence[int]) -> bytes:
        """Returns checksums in their stored form: little-endian, one after another."""
        return struct.pack(f"<{len(values)}{self.code}", *values)

    def unpack(self, packed: bytes) -> tuple[int, ...]:
        """Returns the checksums in the result of :meth:`pack`."""
        return struct.unpack(f"<{len(packed) // self.nbytes}{self.code}", packed)


CRC32C = ChecksumAlgorithm("crc32c", checksums.crc32c, checksums.combine_crc32c, "I")
"""The Castagnoli CRC: polynomial 0x1EDC6F41, reflected."""

CRC64NVME = ChecksumAlgorithm("crc64nvme", checksums.crc64nvme, checksums.combine_crc64nvme, "Q")
"""The CRC of NVM Express and Azure Storage: polynomial 0xAD93D23594C93659, reflected."""

ALGORITHMS = {algorithm.name: algorithm for algorithm in (CRC32C, CRC64NVME)}
"""The algorithms by their names."""


def to_base64(crc32c: int) -> str:
    """Returns the four big-endian bytes of a CRC32C in base64, as S3 and Google write it."""
    return base64.b64encode(struct.pack(">I", crc32c)).decode("ascii")


def from_base64(text: str) -> int:
    """Parses a CRC32C written by `to_base64`."""
    return int.from_bytes(base64.b64decode(text), "big")


def block_size_for(nbytes: int) -> int:
    """Returns the size in bytes of the blocks of an item of `nbytes`; each block has a checksum.

    It is the largest power of two that gives the item 64 blocks or more, but at least 64 KiB and at
    most 1 MiB. With smaller blocks there would be more checksums to store; with larger ones, a
    reader of part of an item, which must fetch whole blocks to verify them, would fetch more that
    it does not need.
    """
    wanted = max(1, nbytes // _BLOCKS_PER_ITEM)
    power = 1 << (wanted.bit_length() - 1)
    return min(max(power, _SMALLEST_BLOCK), _LARGEST_BLOCK)


class BlockChecksums:
    """Collects the checksums of an item's blocks from pieces that are added in any order.

    Pieces may end anywhere, and several threads may add pieces of the same item.

    Args:
        algorithm: The algorithm of the checksums.
        block_size: Bytes of a block.
        expected: The checksums of all blocks, if they were computed before; else empty.
        reuse: Whether the checksums of full blocks that lie within one piece are taken from
            ``expected``, so that their bytes are not read again.
        item: The name of the item, for messages.
    """

    __slots__ = ("_algorithm", "_expected", "_found", "_item", "_reuse", "block_size")

    def __init__(
        self,
        algorithm: ChecksumAlgorithm,
        block_size: int,
        expected: Sequence[int] = (),
        *,
        reuse: bool = False,
        item: str | None = None,
    ) -> None:
        self.block_size = block_size
        self._algorithm = algorithm
        self._expected = expected
        self._item = item
        self._reuse = reuse and bool(expected)
        self._found: list[tuple[int, int, int]] = []  # append is atomic

    def add(self, start: int, view: memoryview) -> int:
        """Adds `view`, the bytes from `start` of the item on; returns the checksum of `view`."""
        of, joined = self._algorithm.of, self._algorithm.joined
        size, block = view.nbytes, self.block_size
        if start // block == (start + size - 1) // block and not self._reuse:
            checksum = of(view)
            self._found.append((start, size, checksum))
            return checksum
        total, position = 0, 0
        while position < size:
            length = min(block - (start + position) % block, size - position)
            if self._reuse and length == block:
                checksum = self._expected[(start + position) // block]
            else:
                checksum = of(view[position : position + length])
            self._found.append((start + position, length, checksum))
            total = joined(total, checksum, length)
            position += length
        return total

    def finish(self, nbytes: int) -> tuple[int, ...]:
        """Returns the checksum of each block of the item, which has `nbytes` bytes.

        Raises:
            ValueError: If the pieces do not cover the item exactly once.
            TensorChangedError: If there are expected checksums, and the blocks have others.
        """
        blocks: list[int] = []
        expected = 0
        for start, length, checksum in sorted(self._found):
            if start != expected:
                raise ValueError(
                    f"byte {expected} of {self._item or 'an item'} was not sent exactly once: "
                    "report this bug of cloudckpt"
                )
            if start % self.block_size == 0:
                blocks.append(checksum)
            else:
                blocks[-1] = self._algorithm.joined(blocks[-1], checksum, length)
            expected = start + length
        if expected != nbytes:
            raise ValueError(
                f"{expected} of {nbytes} bytes of {self._item or 'an item'} were sent: report this "
                "bug of cloudckpt"
            )
        if self._expected and blocks != list(self._expected):
            raise TensorChangedError.of(self._item)
        return tuple(blocks)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The expected checksums of an item's blocks.

    Attributes:
        algorithm: The algorithm of the checksums.
        size: Bytes of a block; the last one may be shorter.
        checksums: The checksum of each block.
    """

    algorithm: ChecksumAlgorithm
    size: int
    checksums: Sequence[int]

    def bad(self, first: int, views: Sequence[memoryview]) -> list[int]:
        """Returns the numbers of damaged blocks; empty if there are none.

        The combined checksum of all blocks is compared first. This takes one call for each view:
        after each call, this thread may have to wait for the GIL. Only if the combined checksum
        differs is each block checked.

        Args:
            first: The number of the first block to check.
            views: The bytes of that block and of those after it, in order.
        """
        total, size = 0, 0
        for view in views:
            total = self.algorithm.of(view, total)
            size += view.nbytes
        whole, rest = divmod(size, self.size)
        lengths = [self.size] * whole + ([rest] if rest else [])
        expected = self.checksums[first : first + len(lengths)]
        if total == self.algorithm.combine(zip(expected, lengths, strict=True)):
            return []
        return self._bad_blocks(first, views)

    def _bad_blocks(self, first: int, views: Sequence[memoryview]) -> list[int]:
        of, size, expected = self.algorithm.of, self.size, self.checksums
        index, checksum, filled = first, 0, 0
        numbers: list[int] = []
        for view in views:
            position = 0
            while position < view.nbytes:
                length = min(size - filled, view.nbytes - position)
                checksum = of(view[position : position + length], checksum)
                position += length
                filled += length
                if filled == size:
                    if checksum != expected[index]:
                        numbers.append(index)
                    index, checksum, filled = index + 1, 0, 0
        if filled and checksum != expected[index]:
            numbers.append(index)
        return numbers
