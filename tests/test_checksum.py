"""Checksums of buffers: known values, blocks in any order, and where damage is."""

import base64
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudckpt.checksum import (
    BlockChecksums,
    block_size_for,
    combine,
    crc32c,
    crc64,
    crc64_to_base64,
    first_bad_block,
    to_base64,
)

KIB, MIB = 1024, 1024 * 1024


def cut(data, places):
    """``(start, view)`` of the pieces of ``data`` between these places."""
    edges = sorted({0, len(data), *(place for place in places if place < len(data))})
    return [(start, memoryview(data)[start:stop]) for start, stop in itertools.pairwise(edges)]


def some_bytes(size, seed=0):
    return random.Random(seed).randbytes(size)


@pytest.mark.parametrize(
    ("data", "crc"),
    [  # RFC 3720, B.4, and the check value of the catalogue of CRCs
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_the_checksum_is_crc32c(data, crc):
    assert crc32c(memoryview(data)) == crc
    assert BlockChecksums(7).add(0, memoryview(data)) == crc


@pytest.mark.parametrize(
    ("crc", "text"), [(0, "AAAAAA=="), (0xE3069283, "4waSgw=="), (0x00000001, "AAAAAQ==")]
)
def test_base64_has_the_bytes_in_network_order(crc, text):
    assert to_base64(crc) == text


@pytest.mark.parametrize(
    ("data", "text"),
    [  # the first is what Azure answers to these bytes, the second that of the catalogue of CRCs
        (b"Hello World", "YeJLfssylmU="),
        (b"123456789", base64.b64encode((0xAE8B14860A799888).to_bytes(8, "little")).decode()),
        (b"", "AAAAAAAAAAA="),
    ],
)
def test_the_checksum_of_azure_is_crc64(data, text):
    assert crc64_to_base64(crc64([memoryview(data)])) == text


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_crc64_goes_on_from_view_to_view(pieces):
    assert crc64(memoryview(piece) for piece in pieces) == crc64([memoryview(b"".join(pieces))])


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_neighbours_combine_to_the_checksum_of_the_whole(pieces):
    assert combine((crc32c(piece), len(piece)) for piece in pieces) == crc32c(b"".join(pieces))


@settings(deadline=None)
@given(
    size=st.integers(0, 5000),
    block_size=st.integers(1, 1500),
    places=st.lists(st.integers(0, 5000), max_size=12),
    shuffle=st.randoms(use_true_random=False),
)
def test_blocks_follow_from_pieces_in_any_order(size, block_size, places, shuffle):
    data = some_bytes(size)
    pieces = cut(data, places)
    shuffle.shuffle(pieces)
    checksums = BlockChecksums(block_size)
    for start, view in pieces:
        assert checksums.add(start, view) == crc32c(view)
    expected = [crc32c(data[at : at + block_size]) for at in range(0, size, block_size)]
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
    checksums = BlockChecksums(32)
    for start, length in pieces:
        checksums.add(start, data[start : start + length])
    with pytest.raises(ValueError, match=message):
        checksums.finish(100)


@settings(deadline=None)
@given(
    size=st.integers(1, 5000),
    block_size=st.integers(1, 1500),
    places=st.lists(st.integers(0, 5000), max_size=12),
    data=st.data(),
)
def test_damage_is_found_in_the_block_where_it_is(size, block_size, places, data):
    content = bytearray(some_bytes(size))
    crcs = [crc32c(content[at : at + block_size]) for at in range(0, size, block_size)]
    views = [view for _, view in cut(content, places)]
    assert first_bad_block(views, crcs, block_size) is None
    damaged = data.draw(st.integers(0, size - 1))
    content[damaged] ^= 1 << data.draw(st.integers(0, 7))
    assert first_bad_block(views, crcs, block_size) == damaged // block_size


def test_of_several_damages_the_first_is_told():
    content = bytearray(some_bytes(100))
    crcs = [crc32c(content[at : at + 10]) for at in range(0, 100, 10)]
    content[35] ^= 1
    content[71] ^= 1
    assert first_bad_block([memoryview(content)], crcs, 10) == 3


@given(st.integers(0, 1 << 50))
def test_a_block_is_a_power_of_two_that_suits_the_item(nbytes):
    size = block_size_for(nbytes)
    assert size & (size - 1) == 0
    assert 64 * KIB <= size <= MIB
    if size > 64 * KIB:
        assert nbytes // size >= 64  # little more is read than a part that is to be verified
    if size < MIB:
        assert nbytes // size <= 128  # and its checksums stay few
