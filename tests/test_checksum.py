"""Checksums of buffers: known values, blocks in any order, and where damage is."""

import base64
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.checksum import (
    ALGORITHMS,
    CRC32C,
    CRC64NVME,
    BlockChecksums,
    Blocks,
    block_size_for,
    to_base64,
)

KIB, MIB = 1024, 1024 * 1024


def cut(data, places):
    """``(start, view)`` of the pieces of ``data`` between these places."""
    edges = sorted({0, len(data), *(place for place in places if place < len(data))})
    return [(start, memoryview(data)[start:stop]) for start, stop in itertools.pairwise(edges)]


def some_bytes(size, seed=0):
    return random.Random(seed).randbytes(size)


algorithms = st.sampled_from(list(ALGORITHMS.values()))


@pytest.mark.parametrize(
    ("algorithm", "data", "expected"),
    [  # the check values of the catalogue of CRCs; what Azure answers to the last
        (CRC32C, b"", 0),
        (CRC32C, b"123456789", 0xE3069283),
        (CRC64NVME, b"", 0),
        (CRC64NVME, b"123456789", 0xAE8B14860A799888),
        (CRC64NVME, b"Hello World", int.from_bytes(base64.b64decode("YeJLfssylmU="), "little")),
    ],
)
def test_the_checksums_are_the_known_ones(algorithm, data, expected):
    assert algorithm.of(memoryview(data)) == expected
    assert BlockChecksums(algorithm, 7).add(0, memoryview(data)) == expected


@pytest.mark.parametrize(
    ("crc", "text"), [(0, "AAAAAA=="), (0xE3069283, "4waSgw=="), (0x00000001, "AAAAAQ==")]
)
def test_base64_has_the_bytes_in_network_order(crc, text):
    assert to_base64(crc) == text


@given(algorithms, st.lists(st.binary(max_size=300), max_size=8))
def test_neighbours_combine_to_the_checksum_of_the_whole(algorithm, pieces):
    whole = algorithm.of(b"".join(pieces))
    assert algorithm.combine((algorithm.of(piece), len(piece)) for piece in pieces) == whole


@given(algorithms, st.lists(st.integers(0, 0xFFFFFFFF), max_size=50).map(tuple))
def test_checksums_come_back_from_their_bytes(algorithm, values):
    assert algorithm.unpack(algorithm.pack(values)) == values
    assert len(algorithm.pack(values)) == algorithm.nbytes * len(values)


@given(
    algorithm=algorithms,
    size=st.integers(0, 5000),
    block_size=st.integers(1, 1500),
    places=st.lists(st.integers(0, 5000), max_size=12),
    shuffle=st.randoms(use_true_random=False),
)
def test_blocks_follow_from_pieces_in_any_order(algorithm, size, block_size, places, shuffle):
    data = some_bytes(size)
    pieces = cut(data, places)
    shuffle.shuffle(pieces)
    checksums = BlockChecksums(algorithm, block_size)
    for start, view in pieces:
        assert checksums.add(start, view) == algorithm.of(view)
    expected = [algorithm.of(data[at : at + block_size]) for at in range(0, size, block_size)]
    assert checksums.finish(size) == tuple(expected)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([(0, 10), (20, 80)], "byte 10 "),
        ([(0, 10), (10, 10), (10, 10), (20, 80)], "byte 20 "),
        ([(0, 60), (50, 50)], "byte "),
        ([(10, 90)], "byte 0 "),
        ([(0, 99)], "99 of 100 bytes"),
        ([(0, 101)], "101 of 100 bytes"),
        ([], "0 of 100 bytes"),
    ],
)
def test_bytes_that_were_not_sent_exactly_once_are_noticed(pieces, message):
    data = memoryview(some_bytes(200))
    checksums = BlockChecksums(CRC32C, 32)
    for start, length in pieces:
        checksums.add(start, data[start : start + length])
    with pytest.raises(ValueError, match=message):
        checksums.finish(100)


@given(
    algorithm=algorithms,
    size=st.integers(1, 5000),
    block_size=st.integers(1, 1500),
    places=st.lists(st.integers(0, 5000), max_size=12),
    data=st.data(),
)
def test_damage_is_found_in_the_block_where_it_is(algorithm, size, block_size, places, data):
    content = bytearray(some_bytes(size))
    right = [algorithm.of(content[at : at + block_size]) for at in range(0, size, block_size)]
    blocks = Blocks(algorithm, block_size, right)
    views = [view for _, view in cut(content, places)]
    assert blocks.bad(0, views) == []
    damaged = data.draw(st.integers(0, size - 1))
    content[damaged] ^= 1 << data.draw(st.integers(0, 7))
    assert blocks.bad(0, views) == [damaged // block_size]


@given(st.integers(0, 1 << 50))
def test_a_block_is_a_power_of_two_that_suits_the_item(nbytes):
    size = block_size_for(nbytes)
    assert size & (size - 1) == 0
    assert 64 * KIB <= size <= MIB
    if size > 64 * KIB:
        assert nbytes // size >= 64  # little more is read than a part that is to be verified
    if size < MIB:
        assert nbytes // size <= 128  # and its checksums stay few
