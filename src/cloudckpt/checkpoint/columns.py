"""Columns of whole numbers in few bytes: what each differs by from the one before, compressed.

Places and offsets of chunks mostly grow by the same from row to row: their differences are small
and equal, and zlib packs long runs of them to little. All is done on whole columns; no number
becomes an object of Python. numpy keeps the GIL for a short column; torch lets go of it at each
operation, and a thread that saves beside one that computes waits milliseconds to have it back.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
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

_WIDTHS = (1, 2, 4, 8)  # bytes of a difference
_PIECE = 1024 * 1024  # bytes that are decompressed at a time
_FED = 64 * 1024  # bytes that are decompressed from at a time, as the rest of them is copied
_OF_ANOTHER_SIZE = "compressed data of another size than is said"
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
    """A column of int64: the width of the differences, and these as little-endian numbers."""
    numbers = column.numpy()
    differences = numbers.copy()
    differences[1:] -= numbers[:-1]  # wraps around
    low, high = int(differences.min(initial=0)), int(differences.max(initial=0))
    width = next(w for w in _WIDTHS if -1 << 8 * w - 1 <= low and high < 1 << 8 * w - 1)
    packed: bytes = differences.astype(f"<i{width}").tobytes()
    return bytes([width]) + packed


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
    if width not in _WIDTHS:
        raise ValueError("a column is of no known width")
    packed = bytearray(width * count)
    if data.readinto(packed) < len(packed):
        raise ValueError("a column is cut short")
    np.cumsum(np.frombuffer(packed, f"<i{width}"), dtype=np.int64, out=into.numpy())


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
