"""Columns of numbers come back, in few bytes, and damaged ones are refused."""

import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.checkpoint.columns import (
    PackedColumns,
    column_of,
    deflated,
    inflated,
    numbers_in,
    pack_columns,
    raw_bytes,
    repeated,
)

NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 300)


@given(st.lists(NUMBERS, max_size=20))
def test_a_column_comes_back(numbers):
    packed = PackedColumns(pack_columns([column_of(numbers), column_of([7])]))
    assert packed.take(len(numbers)).tolist() == numbers
    assert packed.take(1).tolist() == [7]
    assert packed.left == 0


@given(st.lists(st.tuples(NUMBERS, st.integers(0, 4)), max_size=20))
def test_numbers_are_repeated_as_torch_repeats_them(pairs):
    column, counts = (column_of([pair[side] for pair in pairs]) for side in (0, 1))
    assert repeated(column, counts).equal(column.repeat_interleave(counts))


def test_numbers_that_grow_evenly_take_next_to_nothing():
    column = torch.arange(500_000) * 1_000_003
    assert len(deflated(pack_columns([column]))) < 10_000


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_columns_of_any_stride_are_packed(stride, count):
    matrix = torch.arange(count * stride).view(count, stride)
    for column in matrix.unbind(1):
        assert torch.equal(PackedColumns(pack_columns([column])).take(count), column)
        assert raw_bytes(column) == b"".join(n.to_bytes(8, "little") for n in column.tolist())


@pytest.mark.parametrize("data", [b"", b"\1", b"\1\0\0", b"\3" + bytes(99)])
def test_a_column_that_is_cut_short_or_unknown_is_refused(data):
    with pytest.raises(ValueError, match="column"):
        PackedColumns(data).take(3)


@pytest.mark.parametrize("start", [0, 1, 3])
def test_numbers_stand_anywhere(start):
    data = bytearray(start) + bytearray(range(8))
    assert numbers_in(data, torch.uint16, 4, start).tolist() == [0x100, 0x302, 0x504, 0x706]


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (zlib.compress(b"x" * 100), 99),
        (zlib.compress(b"x" * 100), 101),
        (zlib.compress(b"x" * (1 << 24)), 1000),
        (zlib.compress(b"x" * 100)[:-1], 100),
        (zlib.compress(b"x" * 100) + b"more", 100),
        (b"", 0),
        (b"no zlib", 7),
    ],
    ids=["less", "more", "a bomb", "cut", "surplus", "nothing", "garbage"],
)
def test_compressed_data_of_another_size_is_refused(data, size):
    with pytest.raises(ValueError):  # noqa: PT011 - the body tells it as damage
        inflated(memoryview(data), size)


def test_compressed_data_come_back():
    assert inflated(memoryview(deflated(b"abc" * 99)), 297) == b"abc" * 99
