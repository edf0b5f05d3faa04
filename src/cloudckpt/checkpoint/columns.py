"""Columns of whole numbers in few bytes: what each differs by from the one before, compressed.

Places and offsets of chunks mostly grow by the same from row to row: their differences are small
and equal, and zlib packs long runs of them to little. All is done on whole columns; no number
becomes an object of Python.
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
    "byte_rows",
    "column_of",
    "counted",
    "deflated",
    "inflated",
    "matrix_of",
    "numbers_in",
    "pack_columns",
    "raw_bytes",
    "repeated",
    "unfilled",
    "unpack_columns",
]

_WIDTHS = (1, 2, 4, 8)  # bytes of a difference


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
    """A row of bytes for each number of a column."""
    # not contiguous(): a single number may be so with any stride, which has no view as bytes
    found = column.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return found.view(-1, column.itemsize)


def raw_bytes(column: torch.Tensor) -> bytes:
    """The bytes of a column's numbers."""
    whole = column.contiguous()  # kept while it is read
    return bytes(bytes_of(whole))


def numbers_in(
    data: bytearray | memoryview, dtype: torch.dtype, count: int, start: int = 0
) -> torch.Tensor:
    """``count`` little-endian numbers of a type, from byte ``start`` of a writable buffer."""
    if not count:
        return torch.empty(0, dtype=dtype, device="cpu")
    found = torch.frombuffer(data, dtype=torch.uint8, count=count * dtype.itemsize, offset=start)
    return (found.clone() if start % dtype.itemsize else found).view(dtype)


def pack_columns(columns: Iterable[torch.Tensor]) -> bytes:
    """Columns of int64: of each the width of the differences, and these as little-endian."""
    return b"".join(map(_packed, columns))


def _packed(column: torch.Tensor) -> bytes:
    numbers = column.numpy()
    differences = numbers.copy()
    differences[1:] -= numbers[:-1]  # wraps around
    low, high = int(differences.min(initial=0)), int(differences.max(initial=0))
    width = next(w for w in _WIDTHS if -1 << 8 * w - 1 <= low and high < 1 << 8 * w - 1)
    packed: bytes = differences.astype(f"<i{width}").tobytes()
    return bytes([width]) + packed


def unpack_columns(data: bytes | memoryview, into: Iterable[torch.Tensor]) -> None:
    """Fills columns of the right lengths with what :func:`pack_columns` has packed.

    Raises:
        ValueError: If these are others.
    """
    at = 0
    for column in into:
        width, count = data[at] if at < len(data) else 0, column.numel()
        end = at + 1 + width * count
        if width not in _WIDTHS or end > len(data):
            raise ValueError("a packed column has an unknown width, or is truncated")
        if count:
            differences = np.frombuffer(data, f"<i{width}", count, at + 1)
            np.cumsum(differences, dtype=np.int64, out=column.numpy())
        at = end
    if at != len(data):
        raise ValueError("there are more packed columns than expected")


def deflated(data: bytes) -> bytes:
    """``data``, compressed fast."""
    return zlib.compress(data, 1)


def inflated(data: memoryview, size: int) -> bytes:
    """The ``size`` bytes that were compressed to ``data``; no more memory is used than for them.

    Raises:
        ValueError: If they are more, or fewer, or damaged.
    """
    stream = zlib.decompressobj()
    try:
        found = stream.decompress(data, size + 1)
    except zlib.error as exc:
        raise ValueError(str(exc)) from exc
    if len(found) != size or not stream.eof or stream.unused_data:
        raise ValueError("the uncompressed data does not have the expected size")
    return found
