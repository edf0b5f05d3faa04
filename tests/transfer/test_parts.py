"""The plan of an upload: any stream of pieces becomes equal parts."""

import random

from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.checksum import ALGORITHMS, CRC32C, BlockChecksums
from cloudckpt.config import MIB
from cloudckpt.stores.capabilities import Capabilities
from cloudckpt.transfer.parts import PartCutter, Piece, choose_part_size, even_share
from transfer.props import cut

S3 = Capabilities(
    conditional_writes=True,
    min_part_size=5 * MIB,
    max_part_size=5 * 1024 * MIB,
    max_parts=10_000,
    max_put_size=5 * 1024 * MIB,
)


class Loan:
    """Memory on loan to one holder; remembers how often it was given back."""

    def __init__(self):
        self.holders, self.returns = 1, 0

    def retain(self):
        assert self.holders > 0
        self.holders += 1

    def release(self):
        self.holders -= 1
        assert self.holders >= 0
        self.returns += self.holders == 0


def parts_of(pieces, part_size):
    """All parts of a stream of pieces."""
    cutter = PartCutter(part_size)
    parts = [part for piece in pieces for part in cutter.push(piece)]
    last = cutter.finish()
    return parts if last is None else [*parts, last]


def bytes_of(part):
    return b"".join(piece.view for piece in part.pieces)


@given(sizes=st.lists(st.integers(0, 400), max_size=20), part_size=st.integers(1, 300))
def test_parts_are_the_stream_in_equal_pieces(sizes, part_size):
    data = random.Random(0).randbytes(sum(sizes))
    parts = parts_of(cut(data, sizes), part_size)
    assert b"".join(bytes_of(part) for part in parts) == data
    assert [part.number for part in parts] == list(range(1, len(parts) + 1))
    assert all(part.size == part_size for part in parts[:-1])
    assert all(0 < part.size <= part_size for part in parts)
    assert all(part.size == len(bytes_of(part)) for part in parts)
    assert len(parts) == -(-len(data) // part_size)


@given(
    algorithm=st.sampled_from(list(ALGORITHMS.values())),
    items=st.lists(st.integers(0, 2000), max_size=6),
    cuts=st.lists(st.integers(1, 500), min_size=1, max_size=6),
    part_size=st.integers(1, 700),
    block_size=st.integers(1, 600),
    shuffle=st.randoms(use_true_random=False),
)
def test_checksums_of_parts_and_items_are_right_in_any_order(
    algorithm, items, cuts, part_size, block_size, shuffle
):
    """Each item stands between two pieces of envelope, and comes in pieces of its own."""
    pieces, expected = [], []
    for number, size in enumerate(items):
        data = random.Random(number).randbytes(size)
        checksums = BlockChecksums(algorithm, block_size)
        expected.append((data, checksums))
        pieces.append(Piece(memoryview(b"before")))
        at = 0
        while at < size:
            length = cuts[len(pieces) % len(cuts)]
            pieces.append(Piece(memoryview(data)[at : at + length], checksums, start=at))
            at += length
        pieces.append(Piece(memoryview(b"behind")))
    parts = parts_of(pieces, part_size)
    shuffle.shuffle(parts)
    for part in parts:
        assert part.checksum(algorithm) == algorithm.of(bytes_of(part))
    for data, checksums in expected:
        blocks = [data[at : at + block_size] for at in range(0, len(data), block_size)]
        assert checksums.finish(len(data)) == tuple(algorithm.of(block) for block in blocks)


@given(sizes=st.lists(st.integers(1, 400), max_size=12), part_size=st.integers(1, 300))
def test_every_loan_is_given_back_once_with_its_last_part(sizes, part_size):
    loans = [Loan() for _ in sizes]
    pieces = [
        Piece(memoryview(bytes(size)), lease=loan) for size, loan in zip(sizes, loans, strict=True)
    ]
    for part in parts_of(pieces, part_size):
        held = {id(piece.lease) for piece in part.pieces}
        assert all(loan.holders > 0 for loan in loans if id(loan) in held)
        part.release()
    assert [(loan.holders, loan.returns) for loan in loans] == [(0, 1)] * len(loans)


def test_bytes_that_are_still_on_their_way_are_waited_for():
    memory = bytearray(b"....")

    def arrive():
        memory[:] = b"data"

    (part,) = parts_of([Piece(memoryview(memory), ready=arrive)], 10)
    part.await_bytes()
    assert part.checksum(CRC32C) == CRC32C.of(b"data")


# part sizes


def test_requests_grow_with_what_each_connection_sends():
    shares = [even_share(gib << 30, 16) // MIB for gib in (0, 2, 3, 64)]
    assert shares == [16, 32, 48, 64]


CONNECTIONS = st.integers(1, 512)


@given(nbytes=st.integers(0, 60 << 40), connections=CONNECTIONS)
def test_the_automatic_part_size_fits_the_object_into_the_upload(nbytes, connections):
    size = choose_part_size(nbytes, None, S3, connections=connections)
    assert 16 * MIB <= size <= 5 * 1024 * MIB
    assert size % MIB == 0
    assert size * 10_000 >= min(nbytes, 10_000 * 5 * 1024 * MIB)
    if size < 5 * 1024 * MIB:
        assert (size + 1) * 9_000 >= nbytes  # there is room if it was underestimated
    if size > 64 * MIB:
        assert nbytes > 9_000 * (size - MIB)  # larger than useful only because there is no choice


@given(nbytes=st.integers(0, 40 << 40), wanted=st.integers(5 * MIB, 5 * 1024 * MIB))
def test_the_wanted_part_size_is_taken_where_the_object_fits(nbytes, wanted):
    size = choose_part_size(nbytes, wanted, S3, connections=16)
    assert 5 * MIB <= size <= 5 * 1024 * MIB
    assert size * 10_000 >= min(nbytes, 10_000 * 5 * 1024 * MIB)
    if wanted * 10_000 >= nbytes:
        assert wanted <= size < wanted + MIB  # whole mebibytes


@given(
    nbytes=st.integers(0, 40 << 40),
    wanted=st.none() | st.integers(5 * MIB, 5 * 1024 * MIB),
    budget=st.integers(32 * MIB, 4096 * MIB),
    connections=CONNECTIONS,
)
def test_parts_of_copies_leave_room_in_the_budget(nbytes, wanted, budget, connections):
    """One part is sent while two are held back, and half of the pool may be fragments."""
    size = choose_part_size(nbytes, wanted, S3, connections=connections, copied=budget)
    assert size >= 5 * MIB
    assert size < max(budget // 6, 5 * MIB) + MIB  # whole mebibytes
    unlimited = choose_part_size(0, wanted, S3, connections=connections)
    assert size >= min(budget // 6, unlimited)
