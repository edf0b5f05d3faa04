"""Packs columns of integers as differences between neighbours, which compress to few bytes.

A column has a number for each item of a save, such as its offset in an object. These mostly grow by
the same amount from item to item. So their differences are small and equal, and zlib packs long
runs of them well. All functions work on whole columns, without a Python object for each number.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from cloudckpt.transfer.memory import bytes_of

__all__ = [
    "NotInColumnsError",
    "PackedColumns",
    "byte_rows",
    "column_of",
    "counted",
    "inflated",
    "matrix_of",
    "numbers_in",
    "pack_columns",
    "raw_bytes",
    "repeated",
    "unfilled",
]


class NotInColumnsError(ValueError):
    """Columns can't express metadata or a plan: wrong numbers, or custom classes or fields."""


_WIDTHS = (1, 2, 4, 8)  # bytes of a difference


def column_of(numbers: Sequence[Any]) -> torch.Tensor:
    """Returns a list as an int64 tensor on the CPU; a list of rows, each a list, as a matrix."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def unfilled(*shape: int) -> torch.Tensor:
    """Returns an uninitialized int64 tensor of this shape, on the CPU."""
    return torch.empty(shape, dtype=torch.int64, device="cpu")


def matrix_of(flat: array[int], columns: int, rows: int) -> torch.Tensor:
    """Returns ``flat``, the numbers of a matrix row by row, as a matrix that shares its memory."""
    if not flat:
        return unfilled(rows, columns)
    return torch.frombuffer(flat, dtype=torch.int64).view(rows, columns)


def counted(start: int, stop: int) -> torch.Tensor:
    """Returns the integers from ``start`` up to, but not including, ``stop``."""
    return torch.arange(start, stop, device="cpu")


def repeated(column: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Returns a column in which each number is repeated as often as its count says.

    ``Tensor.repeat_interleave`` waits for torch's threads even for two numbers. In a forked child,
    which has no such threads, it would hang.
    """
    ends = counts.cumsum(0)
    total = int(counts.sum())
    steps = torch.zeros(total + 1, dtype=torch.int64, device="cpu")
    steps.index_add_(0, ends, torch.ones_like(ends))
    return column[steps.cumsum(0)[:total]]


def byte_rows(column: torch.Tensor) -> torch.Tensor:
    """Returns a uint8 matrix with a row for each number of a column: the bytes of the number.

    They are in the machine's byte order.
    """
    # clone, not contiguous(): a column of one number is contiguous with any stride, and then has no
    # view as bytes
    found = column.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return found.view(-1, column.itemsize)


def raw_bytes(column: torch.Tensor) -> bytes:
    """Returns a column's numbers as bytes, in the machine's byte order."""
    whole = column.contiguous()  # keeps the memory alive while it is read
    return bytes(bytes_of(whole))


def numbers_in(
    data: bytearray | memoryview, dtype: torch.dtype, count: int, start: int = 0
) -> torch.Tensor:
    """Returns ``count`` little-endian numbers of a type, from byte ``start`` of a writable buffer.

    The result shares the buffer's memory if ``start`` is a multiple of the size of a number;
    otherwise it is a copy.
    """
    if not count:
        return torch.empty(0, dtype=dtype, device="cpu")
    found = torch.frombuffer(data, dtype=torch.uint8, count=count * dtype.itemsize, offset=start)
    return (found.clone() if start % dtype.itemsize else found).view(dtype)


def pack_columns(columns: Iterable[torch.Tensor]) -> bytes:
    """Packs int64 columns into bytes, as the differences between neighbouring numbers.

    Each column becomes one byte with the size of its differences (1, 2, 4 or 8 bytes), followed by
    the differences, little-endian. The first difference is the column's first number itself.
    """
    return b"".join(map(_packed, columns))


def _packed(column: torch.Tensor) -> bytes:
    numbers = column.numpy()
    differences = numbers.copy()
    differences[1:] -= numbers[:-1]  # int64 overflow wraps around, and unpacking wraps it back
    low, high = int(differences.min(initial=0)), int(differences.max(initial=0))
    width = next(w for w in _WIDTHS if -1 << 8 * w - 1 <= low and high < 1 << 8 * w - 1)
    packed: bytes = differences.astype(f"<i{width}").tobytes()
    return bytes([width]) + packed


class PackedColumns:
    """Reads columns from the result of :func:`pack_columns`, one after another.

    Each number takes at least a byte of ``data``, so a damaged count can't allocate much memory.
    """

    def __init__(self, data: bytes | memoryview) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        """The number of bytes that were not read yet."""
        return len(self._data) - self._at

    def take(self, count: int) -> torch.Tensor:
        """Returns the next column, which has ``count`` numbers.

        Raises:
            ValueError: If the data ends within the column, or the column's width is unknown.
        """
        width = self._data[self._at] if self._at < len(self._data) else 0
        start, end = self._at + 1, self._at + 1 + width * count
        if width not in _WIDTHS or not start <= end <= len(self._data):
            raise ValueError("a packed column has an unknown width, or is truncated")
        self._at = end
        if not count:
            return unfilled(0)
        differences = np.frombuffer(self._data, f"<i{width}", count, start)
        return torch.from_numpy(np.cumsum(differences, dtype=np.int64))

    def matrix(self, rows: int, columns: int) -> torch.Tensor:
        """Returns a matrix of ``rows`` rows, made of the next ``columns`` columns.

        Raises:
            ValueError: As in :meth:`take`.
        """
        found = [self.take(rows) for _ in range(columns)]
        return torch.stack(found).t() if found else unfilled(rows, 0)


def inflated(data: memoryview, size: int) -> bytes:
    """Decompresses ``data`` to ``size`` bytes, and allocates no more memory than that.

    Raises:
        ValueError: If the result has another size, or the data is damaged.
    """
    stream = zlib.decompressobj()
    try:
        found = stream.decompress(data, size + 1)
    except zlib.error as exc:
        raise ValueError(str(exc)) from exc
    if len(found) != size or not stream.eof or stream.unused_data:
        raise ValueError(
            "the compressed data is truncated, is followed by other bytes, or has another size "
            "than expected when uncompressed"
        )
    return found
