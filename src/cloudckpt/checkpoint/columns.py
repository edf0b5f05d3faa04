"""Columns of whole numbers in few bytes: what each differs by from the one before, byte by byte.

Places and offsets of chunks mostly grow by the same from row to row. Their differences are small
and equal, and with all first bytes before all second ones zlib packs long runs of them to next to
nothing, at memory speed. All is done on whole columns; no number becomes an object of Python.
"""

from __future__ import annotations

import struct
import sys
import zlib
from array import array
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from cloudckpt.transfer.memory import bytes_of

__all__ = [
    "Inflating",
    "Readable",
    "byte_rows",
    "column_of",
    "counted",
    "deflated",
    "inflated",
    "matrix_of",
    "numbers_in",
    "packed_column",
    "raw_bytes",
    "repeated",
    "unfilled",
    "unpack_column",
]

_BY_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CODES = {1: "b", 2: "h", 4: "i", 8: "q"}  # of struct
_FEW = 4096  # numbers that are packed faster one by one than torch's operations begin
_PIECE = 1024 * 1024  # bytes that are decompressed at a time
_FED = 64 * 1024  # bytes that are decompressed from at a time, as the rest of them is copied
_AT_ONCE = 1 << 16  # numbers that are unpacked at a time, to need little memory besides the column
_OF_ANOTHER_SIZE = "compressed data of another size than is said"
_END = 1 << 63
_IS_BIG = sys.byteorder == "big"


def column_of(numbers: Sequence[Any]) -> torch.Tensor:
    """Numbers as int64; of rows of numbers, a matrix. On the host, whatever the default device."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def unfilled(*shape: int) -> torch.Tensor:
    """Room for numbers of int64."""
    return torch.empty(shape, dtype=torch.int64, device="cpu")


def matrix_of(flat: array[int], columns: int, rows: int) -> torch.Tensor:
    """A matrix over the numbers of ``flat``, row by row; it shares their memory."""
    if not flat:
        return unfilled(rows, columns)
    return torch.frombuffer(flat, dtype=torch.int64).view(rows, columns)


def counted(start: int, stop: int) -> torch.Tensor:
    """The numbers from one up to another."""
    return torch.arange(start, stop, device="cpu")


def repeated(column: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Each number of a column as many times as its count says.

    Tensor.repeat_interleave waits for threads of torch even for two numbers. In a forked child,
    which has none of them, it would wait for ever.
    """
    ends = counts.cumsum(0)
    total = int(counts.sum())
    steps = torch.zeros(total + 1, dtype=torch.int64, device="cpu")
    steps.index_add_(0, ends, torch.ones_like(ends))
    return column[steps.cumsum(0)[:total]]


def byte_rows(column: torch.Tensor) -> torch.Tensor:
    """A row of little-endian bytes for each number of a column."""
    # not contiguous(): a single number may be so with any stride, which has no view as bytes
    found = column.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    found = found.view(-1, column.itemsize)
    return found.flip(1) if _IS_BIG else found


def raw_bytes(column: torch.Tensor) -> bytes:
    """The elements as little-endian bytes."""
    whole = column.contiguous()
    return bytes(bytes_of(byte_rows(whole).contiguous() if _IS_BIG else whole))


def numbers_in(
    data: bytearray | memoryview, dtype: torch.dtype, count: int, start: int = 0
) -> torch.Tensor:
    """``count`` little-endian numbers of a type, from byte ``start`` of a writable buffer."""
    if not count:
        return torch.empty(0, dtype=dtype, device="cpu")
    size = count * dtype.itemsize
    found = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=start)
    if _IS_BIG and dtype.itemsize > 1:
        found = found.view(-1, dtype.itemsize).flip(1).reshape(-1)
    elif start % dtype.itemsize:
        found = found.clone()
    return found.view(dtype)


def packed_column(column: torch.Tensor) -> bytes:
    """A column of int64: the width of the differences, and their bytes."""
    if column.numel() <= _FEW:
        return _packed_few(column.tolist())
    differences = column.clone()
    differences[1:] -= column[:-1]
    low, high = (int(end) for end in differences.aminmax()) if column.numel() else (0, 0)
    limits = ((width, torch.iinfo(dtype)) for width, dtype in _BY_WIDTH.items())
    width = next(width for width, limit in limits if limit.min <= low and high <= limit.max)
    dtype = _BY_WIDTH[width]
    return bytes([width]) + raw_bytes(byte_rows(differences.to(dtype)).t().reshape(-1))


def _packed_few(numbers: Sequence[int]) -> bytes:
    """The same without torch, each of whose operations lets go of the GIL.

    A thread that saves beside one that computes in Python waits milliseconds to have it back.
    """
    differences = [number - before for number, before in zip(numbers, (0, *numbers), strict=False)]
    low, high = min(differences, default=0), max(differences, default=0)
    if low < -_END or high >= _END:  # as int64 has them
        differences = [(one + _END) % (2 * _END) - _END for one in differences]
        low, high = min(differences), max(differences)
    width = min(w for w in _BY_WIDTH if -1 << 8 * w - 1 <= low and high < 1 << 8 * w - 1)
    packed = struct.pack(f"<{len(numbers)}{_CODES[width]}", *differences)
    return b"".join((bytes([width]), *(packed[plane::width] for plane in range(width))))


class Readable(Protocol):
    """Bytes that are read from the front, as of a file."""

    def readinto(self, into: bytearray, /) -> int:
        """Fills ``into``; returns how many bytes there were."""


def unpack_column(data: Readable, into: torch.Tensor) -> None:
    """Fills ``into`` with the column that comes next.

    Raises:
        ValueError: If there is none.
    """
    count = into.numel()
    head = bytearray(1)
    data.readinto(head)
    width = head[0]
    if (dtype := _BY_WIDTH.get(width)) is None:
        raise ValueError("a column is of no known width")
    packed = bytearray(width * count)
    if data.readinto(packed) < len(packed):
        raise ValueError("a column is cut short")
    planes = numbers_in(packed, torch.uint8, width * count).view(width, count)
    if _IS_BIG:
        planes = planes.flip(0)
    before = 0
    for start in range(0, count, _AT_ONCE):
        # not reshape(-1): a single number would stay a view, with the stride of its bytes
        rows = planes[:, start : start + _AT_ONCE].t()
        differences = rows.clone(memory_format=torch.contiguous_format).view(-1).view(dtype)
        part = into[start : start + _AT_ONCE]
        torch.cumsum(differences, 0, dtype=torch.int64, out=part)
        before = int(part.add_(before)[-1])


def deflated(data: bytes) -> bytes:
    """``data``, compressed fast."""
    return zlib.compress(data, 1)


class Inflating:
    """Bytes that were compressed, as they are asked for: no others are ever in memory."""

    def __init__(self, data: memoryview, size: int) -> None:
        """
        Args:
            data: What they were compressed to.
            size: How many they are said to be.
        """
        self.left = size
        self._data, self._at = data, 0
        self._rest = b""
        self._stream = zlib.decompressobj()

    def readinto(self, into: bytearray, /) -> int:
        """Fills ``into``; returns its length.

        Raises:
            ValueError: If there are fewer bytes, or they are damaged.
        """
        filled = 0
        while filled < len(into):
            piece = self._next(min(len(into) - filled, _PIECE))
            if not piece:
                raise ValueError(_OF_ANOTHER_SIZE)
            into[filled : filled + len(piece)] = piece
            filled += len(piece)
        self.left -= filled
        return filled

    def end(self) -> None:
        """Refuses what follows.

        Raises:
            ValueError: If there are more bytes than were read, or than are said.
        """
        more = self._next(1)
        unused = len(self._data) - self._at + len(self._stream.unused_data)
        if more or self.left or unused or not self._stream.eof:
            raise ValueError(_OF_ANOTHER_SIZE)

    def _next(self, most: int) -> bytes:
        """Some bytes; none at the end."""
        while not self._stream.eof:
            if not self._rest:
                self._rest = bytes(self._data[self._at : self._at + _FED])
                self._at += len(self._rest)
            try:
                piece = self._stream.decompress(self._rest, most)
            except zlib.error as exc:
                raise ValueError(str(exc)) from exc
            is_fed = not self._rest
            self._rest = self._stream.unconsumed_tail
            if piece or is_fed:
                return piece
        return b""


def inflated(data: memoryview, size: int) -> bytearray:
    """The ``size`` bytes that were compressed to ``data``; no more memory is used than for them.

    Raises:
        ValueError: If they are more, or fewer, or damaged.
    """
    stream, found = Inflating(data, size), bytearray(size)
    stream.readinto(found)
    stream.end()
    return found
