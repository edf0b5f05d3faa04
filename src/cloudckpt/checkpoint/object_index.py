"""The index of a data object, as it is read; ``index`` has how it is written."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cloudckpt.checkpoint.columns import column_of, numbers_in
from cloudckpt.checkpoint.envelope import Envelope, envelope
from cloudckpt.checkpoint.index import DTYPES, HEADER, ITEM, KINDS, MAGIC
from cloudckpt.checkpoint.objects import WrittenObject
from cloudckpt.checksum import CRC32C, Blocks, ChecksumAlgorithm, block_size_for
from cloudckpt.errors import CheckpointCorruptError
from cloudckpt.transfer.boxes import ALIGNMENT

__all__ = ["IndexItem", "ObjectIndex", "code_of"]

_END = 1 << 63
_CONTRADICTION = "index and metadata contradict each other"

_TYPES = {
    code: dtype
    for code, name in enumerate(DTYPES, 1)
    if (dtype := getattr(torch, name, None)) is not None
}
_CODES = {dtype: code for code, dtype in _TYPES.items()}


def code_of(dtype: torch.dtype) -> int | None:
    """The number of an element type in an index; None if the format has none for it."""
    return _CODES.get(dtype)


@dataclass(frozen=True, slots=True)
class IndexItem:
    """What an index says of an item.

    Attributes:
        head: Bytes of the envelope before the data proper.
        tail: Bytes of the envelope behind it.
        dtype: The element type of a plain tensor; None for anything else, which has no envelope.
        raw_length: Bytes of the data proper.
        blocks: Their checksums.
    """

    head: int
    tail: int
    dtype: torch.dtype | None
    raw_length: int
    blocks: Blocks


class ObjectIndex:
    """The index of one object, as it was read."""

    def __init__(
        self,
        data: bytearray | memoryview,
        record: WrittenObject,
        algorithm: ChecksumAlgorithm,
        uri: str,
    ) -> None:
        """
        Args:
            data: Its bytes.
            record: What the commit object says of the object.
            algorithm: The checksums of the checkpoint.
            uri: The object, for messages.

        Raises:
            CheckpointCorruptError: If it is not the one that the commit object means.
        """
        self._uri = uri
        self._record = record
        self._algorithm = algorithm
        if len(data) != record.index_size or CRC32C.of(data) != record.index_crc:
            raise self._corrupt("the index of the object does not match its checksum")
        try:
            self._parse(data, record.size - record.index_size)
        except (ValueError, RuntimeError, struct.error) as exc:
            raise self._corrupt(f"the index of the object makes no sense: {exc}", exc) from exc

    def _parse(self, data: bytearray | memoryview, end: int) -> None:
        magic, count, kind = HEADER.unpack_from(data)
        if magic != MAGIC or KINDS.get(kind) is not self._algorithm:
            raise ValueError("it is of a newer version, or of another algorithm")
        if HEADER.size + ITEM * count > len(data):
            raise ValueError("it is too short for its items")
        at = HEADER.size
        self._heads = numbers_in(data, torch.uint16, count, at).to(torch.int64)
        self._tails = numbers_in(data, torch.uint16, count, at + 2 * count).to(torch.int64)
        self._codes = data[at + 4 * count : at + 5 * count]
        self._raws = raws = numbers_in(data, torch.int64, count, at + 5 * count)
        self._sums = at + ITEM * count
        self._data = data
        if count and not 0 <= int(raws.min()) <= int(raws.max()) <= end:
            raise ValueError("an item is larger than its object")
        # the sum of lengths that are each at most that of the object: it can't overflow unseen
        self._lengths = self._heads + raws + self._tails
        steps = (self._lengths + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        if steps.to(torch.float64).sum() > 2.0**62:
            raise ValueError("its items are larger than any object")
        behind = steps.cumsum(0)
        self._starts = behind - steps
        if (int(behind[-1]) if count else 0) != end or end % ALIGNMENT:
            raise ValueError("its items do not end where it begins")
        blocks = torch.full_like(raws, block_size_for(0))
        for power in range(block_size_for(0).bit_length(), block_size_for(_END).bit_length()):
            blocks += blocks * (raws // 64 >= 1 << power)
        self._blocks = ((raws + blocks - 1) // blocks).cumsum(0)
        total = int(self._blocks[-1]) if count else 0
        if len(data) != self._sums + total * self._algorithm.nbytes:
            raise ValueError("it has checksums too many, or too few")

    def find(
        self, offsets: Sequence[int], lengths: Sequence[int], items: Sequence[str]
    ) -> list[IndexItem]:
        """The items that take these bytes of the object; ``items`` are for messages.

        Raises:
            CheckpointCorruptError: If there is none for some.
        """
        if not offsets:
            return []
        if not self._codes:
            raise self._corrupt(_CONTRADICTION, item=items[0])
        numbers, wrong = self._numbers(offsets, lengths)
        if bool(wrong.any()):
            raise self._corrupt(_CONTRADICTION, item=items[int(wrong.nonzero()[0])])
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

    def _numbers(
        self, offsets: Sequence[int], lengths: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The items that take bytes of the object, or come next to that; and where these differ."""
        wanted, sizes = column_of(offsets), column_of(lengths)
        # empty items begin where the next one does, which is the last of those
        first = torch.searchsorted(self._starts, wanted)
        behind = torch.searchsorted(self._starts, wanted, right=True)
        numbers = torch.where(sizes > 0, behind - 1, first).clamp(0, len(self._codes) - 1)
        return numbers, (self._starts[numbers] != wanted) | (self._lengths[numbers] != sizes)

    def contradictions(
        self,
        offsets: Sequence[int],
        lengths: Sequence[int],
        counts: Sequence[int | None],
        digests: Sequence[object],
    ) -> dict[int, str]:
        """What the metadata say of items, and the index does not.

        Args:
            offsets: Where they begin in the object.
            lengths: The bytes that they take.
            counts: How many elements each has; None of what is no tensor.
            digests: Of what each holds; None where it is not known. Those that hold the same may
                share a place.

        Returns:
            By the numbers of those that :meth:`find` must not be asked for, what is wrong.
        """
        if not self._codes:
            return dict.fromkeys(range(len(offsets)), "the object's index has no item")
        found: dict[int, str] = {}
        seen: dict[int, object] = {}
        numbers, wrong = self._numbers(offsets, lengths)
        edges = (self._heads + self._tails)[numbers].tolist()
        contents = zip(edges, self._raws[numbers].tolist(), counts, strict=True)
        rows = zip(numbers.tolist(), wrong.tolist(), offsets, lengths, contents, strict=True)
        for place, (number, is_wrong, offset, length, content) in enumerate(rows):
            what = None
            if is_wrong:
                start, size = int(self._starts[number]), int(self._lengths[number])
                what = (
                    f"it takes bytes {offset} to {offset + length} by the metadata, and the "
                    f"object's index has an item at {start} to {start + size}, and none there"
                )
            elif (
                length
                and number in seen
                and (digests[place] is None or seen[number] != digests[place])
            ):
                what = f"another item lies at bytes {offset} to {offset + length}, too"
            else:
                what = _unlike(self._codes[number], *content)
            if what is not None:
                found[place] = what
            seen[number] = digests[place]
        return found

    def between(
        self, items: Mapping[int, tuple[str, tuple[int, ...]]]
    ) -> list[tuple[int, Blocks, str]]:
        """What must stand around the data proper of the items: envelopes, and zeros.

        It follows from element types and shapes, and is certain if the checksum of the whole object
        follows from it.

        Args:
            items: Names and shapes of the items, by their first bytes in the object; none of those
                without bytes.

        Returns:
            First bytes, the only block there, and what stands there, for messages. Nothing if it is
            not certain, as of another version's envelopes.
        """
        algorithm = self._algorithm
        made: list[tuple[int, Blocks, str]] = []
        total, at, tail, name = 0, 0, b"", ""

        def add(expected: bytes, behind: str) -> int:
            where = f"between {name} and {behind}" if name else f"before {behind}"
            checksum = algorithm.of(expected)
            if expected:
                made.append(
                    (at, Blocks(algorithm, len(expected), (checksum,)), f"the bytes {where}")
                )
            return algorithm.joined(total, checksum, len(expected))

        columns = (self._starts, self._heads, self._raws, self._tails, self._blocks)
        first = 0
        for code, (start, head, raw, behind, stop) in zip(
            self._codes, zip(*(column.tolist() for column in columns), strict=True), strict=True
        ):
            if not head + raw + behind:
                continue  # the next one begins at the same byte
            following, shape = items.get(start, ("", ()))
            around = envelope(_TYPES[code], shape) if code in _TYPES else Envelope(b"", b"")
            if not following or (len(around.head), len(around.tail)) != (head, behind):
                return []
            total = add(tail + bytes(start - at - len(tail)) + around.head, following)
            total = algorithm.joined(total, self._of_payload(first, stop, raw), raw)
            at, first, tail, name = start + head + raw, stop, around.tail, following
        end = self._record.size - self._record.index_size
        total = add(tail + bytes(end - at - len(tail)), "the index")
        total = algorithm.joined(total, algorithm.of(self._data), len(self._data))
        return made if total == self._record.checksum else []

    def gaps(self) -> list[tuple[int, int]]:
        """The bytes before, between and behind the payloads, each by its first byte and its end.

        The one before a payload ends with the beginning of its envelope; the next one begins with
        the rest of it.
        """
        found, at = [], 0
        columns = (self._starts, self._heads, self._raws)
        for start, head, raw in zip(*(column.tolist() for column in columns), strict=True):
            found.append((at, start + head))
            at = start + head + raw
        return [*found, (at, self._record.size - self._record.index_size)]

    def unlike(
        self, read: Sequence[bytes], items: Mapping[int, tuple[str, tuple[int, ...]]]
    ) -> tuple[set[int], bool]:
        """Which items' envelopes are not what follows from their element types and shapes.

        Args:
            read: What the object has in its gaps.
            items: As of :meth:`between`.

        Returns:
            The first bytes of these items. Whether all gaps are as they were written, so that such
            an envelope is another version's, and not damaged.
        """
        algorithm, found, total, first = self._algorithm, set[int](), 0, 0
        columns = (self._starts, self._heads, self._raws, self._tails, self._blocks)
        for number, (start, head, raw, tail, stop) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            total = algorithm.joined(total, algorithm.of(read[number]), len(read[number]))
            total = algorithm.joined(total, self._of_payload(first, stop, raw), raw)
            first = stop
            if start in items and head + raw + tail:
                around = envelope(_TYPES[self._codes[number]], items[start][1])
                before, behind = read[number][-head:] if head else b"", read[number + 1][:tail]
                if (before, behind) != (around.head, around.tail):
                    found.add(start)
        total = algorithm.joined(total, algorithm.of(read[-1]), len(read[-1]))
        total = algorithm.joined(total, algorithm.of(self._data), len(self._data))
        return found, total == self._record.checksum

    def _of_payload(self, first: int, stop: int, nbytes: int) -> int:
        """The checksum of a payload whose blocks have these numbers."""
        size = block_size_for(nbytes)
        lengths = [min(size, nbytes - begin) for begin in range(0, nbytes, size)]
        return self._algorithm.combine(zip(self._sums_of(first, stop), lengths, strict=True))

    def _sums_of(self, first: int, stop: int) -> tuple[int, ...]:
        """The checksums of blocks."""
        size = self._algorithm.nbytes
        packed = self._data[self._sums + first * size : self._sums + stop * size]
        return self._algorithm.unpack(bytes(packed))

    def _item(
        self, item: str, code: int, head: int, tail: int, raw: int, first: int, stop: int
    ) -> IndexItem:
        algorithm, dtype = self._algorithm, _TYPES.get(code)
        if (dtype is None and code) or (not code and (head or tail)):
            raise self._corrupt(f"this torch does not know the element type {code}", item=item)
        blocks = Blocks(algorithm, block_size_for(raw), self._sums_of(first, stop))
        return IndexItem(head, tail, dtype, raw, blocks)

    def _corrupt(
        self, message: str, cause: Exception | None = None, item: str | None = None
    ) -> CheckpointCorruptError:
        return CheckpointCorruptError(message, uri=self._uri, item=item, cause=cause)


def _unlike(code: int, edges: int, raw: int, count: int | None) -> str | None:
    """What an index says of the content of an item, and can't be.

    Args:
        code: The number of its element type.
        edges: Bytes of the envelope on both sides.
        raw: Bytes of the data proper.
        count: How many elements it has by the metadata; None if it is no tensor.
    """
    if not code:
        return "the object's index has an archive around what is no tensor" if edges else None
    if code not in _TYPES:
        return f"this torch does not know the element type {code} of the object's index"
    dtype = _TYPES[code]
    name = str(dtype).removeprefix("torch.")
    if count is None:
        return f"it is no tensor by the metadata, and one of {name} by the object's index"
    if count * dtype.itemsize != raw:
        return (
            f"it has {count} elements by the metadata, and {raw} bytes of {name} by the object's "
            "index"
        )
    return None
