"""Parses the index at the end of a data object; ``index`` writes it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cloudckpt.checkpoint.columns import column_of, numbers_in
from cloudckpt.checkpoint.index import ALGORITHMS, DTYPES, HEADER, ITEM, MAGIC
from cloudckpt.checkpoint.objects import WrittenObject
from cloudckpt.checksum import CRC32C, Blocks, ChecksumAlgorithm, block_size_for
from cloudckpt.errors import CheckpointCorruptError
from cloudckpt.transfer.boxes import ALIGNMENT

__all__ = ["CONTRADICTION", "IndexItem", "ObjectIndex", "code_of"]

_END = 1 << 63
CONTRADICTION = (
    "the index of the object and the metadata of the checkpoint contradict each other: load an "
    "older checkpoint"
)

_TYPES = {
    code: dtype
    for code, name in enumerate(DTYPES, 1)
    if (dtype := getattr(torch, name, None)) is not None
}
_CODES = {dtype: code for code, dtype in _TYPES.items()}


def code_of(dtype: torch.dtype) -> int | None:
    """Returns the number of an element type in an index; None if the format lacks the type."""
    return _CODES.get(dtype)


@dataclass(frozen=True, slots=True)
class IndexItem:
    """An item's entry in an object index: its sizes, element type and checksums.

    Attributes:
        head: Size in bytes of the envelope (:mod:`cloudckpt.checkpoint.envelope`) before the
            payload.
        tail: Size in bytes of the envelope after the payload.
        dtype: The element type of a plain tensor; None for anything else, which has no envelope.
        raw_length: Size in bytes of the payload.
        blocks: The checksums of the payload's blocks.
    """

    head: int
    tail: int
    dtype: torch.dtype | None
    raw_length: int
    blocks: Blocks


class ObjectIndex:
    """The parsed index of one object."""

    def __init__(
        self,
        data: bytearray | memoryview,
        record: WrittenObject,
        algorithm: ChecksumAlgorithm,
        uri: str,
    ) -> None:
        """Parses and verifies the bytes of an index.

        Args:
            data: The bytes of the index.
            record: The object, as the commit object describes it.
            algorithm: The checksum algorithm of the checkpoint.
            uri: The object, for messages.

        Raises:
            CheckpointCorruptError: If the bytes do not match the commit object, or are invalid.
        """
        self._uri = uri
        self._algorithm = algorithm
        if len(data) != record.index_size or CRC32C.of(data) != record.index_crc:
            raise self._corrupt(
                "the index of the object does not match its checksum: restore the object from a "
                "backup, or load an older checkpoint"
            )
        try:
            self._parse(data, record.size - record.index_size)
        except (ValueError, RuntimeError, struct.error) as exc:
            raise self._corrupt(
                "the object's index is invalid: it is damaged, or of a newer cloudckpt. Install a "
                "newer version, restore the object from a backup, or load an older checkpoint",
                exc,
            ) from exc

    def _parse(self, data: bytearray | memoryview, end: int) -> None:
        magic, count, kind = HEADER.unpack_from(data)
        if magic != MAGIC or ALGORITHMS.get(kind) is not self._algorithm:
            raise ValueError("it has another version, or another checksum algorithm")
        if HEADER.size + ITEM * count > len(data):
            raise ValueError("it is too short for the items that it lists")
        at = HEADER.size
        self._heads = numbers_in(data, torch.uint16, count, at).to(torch.int64)
        self._tails = numbers_in(data, torch.uint16, count, at + 2 * count).to(torch.int64)
        self._codes = data[at + 4 * count : at + 5 * count]
        self._raws = raws = numbers_in(data, torch.int64, count, at + 5 * count)
        self._sums = at + ITEM * count
        self._data = data
        if count and not 0 <= int(raws.min()) <= int(raws.max()) <= end:
            raise ValueError("an item is larger than the object")
        # each length is at most that of the object, so that a sum can't overflow unnoticed
        self._lengths = self._heads + raws + self._tails
        steps = (self._lengths + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        if steps.to(torch.float64).sum() > 2.0**62:
            raise ValueError("the items are larger than any object")
        ends = steps.cumsum(0)
        self._starts = ends - steps
        if (int(ends[-1]) if count else 0) != end or end % ALIGNMENT:
            raise ValueError("the items do not end where the index begins")
        blocks = torch.full_like(raws, block_size_for(0))
        for power in range(block_size_for(0).bit_length(), block_size_for(_END).bit_length()):
            blocks += blocks * (raws // 64 >= 1 << power)
        self._blocks = ((raws + blocks - 1) // blocks).cumsum(0)
        total = int(self._blocks[-1]) if count else 0
        if len(data) != self._sums + total * self._algorithm.nbytes:
            raise ValueError("the number of checksums does not fit the items")

    def find(
        self, offsets: Sequence[int], lengths: Sequence[int], items: Sequence[str]
    ) -> list[IndexItem]:
        """Returns the entries of the items at these byte ranges of the object, in their order.

        Args:
            offsets: The items' first bytes in the object, envelopes included.
            lengths: The items' lengths in bytes, envelopes included.
            items: The items' names, for messages.

        Raises:
            CheckpointCorruptError: If the index has no item at one of these ranges, its entry is
                invalid, or this torch lacks its element type.
        """
        if not offsets:
            return []
        if not self._codes:
            raise self._corrupt(CONTRADICTION, item=items[0])
        wanted, sizes = column_of(offsets), column_of(lengths)
        # several items may begin at one offset: the last of them, and all others are empty
        first = torch.searchsorted(self._starts, wanted)
        after = torch.searchsorted(self._starts, wanted, right=True)
        numbers = torch.where(sizes > 0, after - 1, first).clamp(0, len(self._codes) - 1)
        wrong = (self._starts[numbers] != wanted) | (self._lengths[numbers] != sizes)
        if bool(wrong.any()):
            raise self._corrupt(CONTRADICTION, item=items[int(wrong.nonzero()[0])])
        stops = self._blocks[numbers]
        starts = torch.where(numbers > 0, self._blocks[(numbers - 1).clamp(min=0)], 0)
        rows = zip(
            items,
            (self._codes[number] for number in numbers.tolist()),
            self._heads[numbers].tolist(),
            self._tails[numbers].tolist(),
            self._raws[numbers].tolist(),
            starts.tolist(),
            stops.tolist(),
            strict=True,
        )
        return [self._item(*row) for row in rows]

    def _item(
        self, item: str, code: int, head: int, tail: int, raw: int, first: int, stop: int
    ) -> IndexItem:
        algorithm, dtype = self._algorithm, _TYPES.get(code)
        if not code and (head or tail):
            raise self._corrupt(
                "the index of the object is invalid, as it describes a value like a tensor: "
                "restore the object from a backup, or load an older checkpoint",
                item=item,
            )
        if dtype is None and code:
            raise self._corrupt(
                f"this torch does not know the element type with code {code}: install a newer "
                "torch",
                item=item,
            )
        start, end = (self._sums + number * algorithm.nbytes for number in (first, stop))
        sums = algorithm.unpack(bytes(self._data[start:end]))
        blocks = Blocks(algorithm, block_size_for(raw), sums)
        return IndexItem(head, tail, dtype, raw, blocks)

    def _corrupt(
        self, message: str, cause: Exception | None = None, item: str | None = None
    ) -> CheckpointCorruptError:
        return CheckpointCorruptError(message, uri=self._uri, item=item, cause=cause)
