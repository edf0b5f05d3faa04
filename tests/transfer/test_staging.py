"""Copies of what can't be sent as it lies: exact, bounded in memory, never reused too soon."""

import itertools
import queue
import random
import threading
import weakref

import numpy as np
import pytest
import torch

from cloudckpt.errors import TransferCancelledError
from cloudckpt.transfer.group import Cancellation
from cloudckpt.transfer.pool import MemoryPool
from cloudckpt.transfer.staging import StagingPool

KIB = 1024
BUDGET = 16 * KIB  # slabs of 1 KiB


@pytest.fixture
def pool():
    return StagingPool(BUDGET, Cancellation())


def drain(pool, tensor):
    """The bytes that a pool makes of a tensor, each piece given back at once."""
    out = bytearray()
    for piece in pool.pieces(tensor):
        if piece.ready is not None:
            piece.ready()
        assert piece.start == len(out)
        out += piece.view
        piece.lease.release()
    return bytes(out)


def expected(tensor):
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


# pieces

ODD_TENSORS = {
    "transposed": lambda: torch.randn(37, 53).t(),
    "every other column": lambda: torch.arange(4000.0).view(40, 100)[:, ::2],
    "permuted": lambda: torch.randn(5, 7, 11, 3).permute(3, 1, 0, 2),
    "expanded": lambda: torch.randn(7, 1).expand(7, 300),
    "conjugated": lambda: torch.randn(300, dtype=torch.complex64).conj(),
    "conjugated and transposed": lambda: torch.randn(30, 20, dtype=torch.complex128).t().conj(),
    "negated": lambda: torch.randn(300, dtype=torch.complex64).conj().imag,
    "bfloat16": lambda: torch.randn(60, 50).to(torch.bfloat16).t(),
    "float8": lambda: torch.randn(60, 50).to(torch.float8_e4m3fn).t(),
    "bool": lambda: (torch.randn(60, 50) > 0).t(),
    "uint8": lambda: torch.randint(0, 256, (60, 50), dtype=torch.uint8).t(),
    "one element": lambda: torch.randn(5)[2],
    "no element": lambda: torch.randn(5, 0).t(),
    "exactly a slab": lambda: torch.randn(512).view(256, 2)[:, 0:1].expand(256, 1),
    "rows of more than a slab": lambda: torch.randn(700, 3).t(),
    "plain all the same": lambda: torch.randn(33, 77),
    "channels last": lambda: torch.randn(2, 3, 9, 8).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("name", ODD_TENSORS)
def test_pieces_are_the_row_major_bytes(pool, name):
    torch.manual_seed(0)
    tensor = ODD_TENSORS[name]()
    assert drain(pool, tensor) == expected(tensor)


def test_a_piece_keeps_its_bytes_until_it_is_given_back(pool):
    torch.manual_seed(0)
    tensor = torch.randn(64, 40).t()  # ten slabs of the sixteen
    held = list(pool.pieces(tensor))
    other = drain(pool, torch.zeros(100, 10).t())
    assert set(other) == {0}
    assert b"".join(piece.view for piece in held) == expected(tensor)
    for piece in held:
        piece.lease.release()


def test_memory_is_reused_and_stays_within_the_budget(pool):
    tensor = torch.randn(700, 300).t()
    places = set()
    for piece in pool.pieces(tensor):
        places.add(np.frombuffer(piece.view, np.uint8).ctypes.data // KIB)
        piece.lease.release()
    assert len(places) <= 2 * 16  # a slab of 1 KiB may touch two of these


def test_a_full_pool_waits_for_memory_to_come_back(pool):
    torch.manual_seed(0)
    tensor = torch.randn(64, 100).t()  # more than there is
    pieces, full, out = queue.SimpleQueue(), threading.Event(), bytearray()

    def consume():
        assert full.wait(30)
        for piece in iter(pieces.get, None):
            out.extend(piece.view)
            piece.lease.release()

    consumer = threading.Thread(target=consume)
    consumer.start()
    for number, piece in enumerate(pool.pieces(tensor)):
        pieces.put(piece)
        if number == 12:
            full.set()
    pieces.put(None)
    consumer.join(30)
    assert out == expected(tensor)


def test_a_cancellation_ends_the_wait():
    cancellation = Cancellation()
    pool = StagingPool(BUDGET, cancellation)
    held = []

    def hold_all():
        for number, piece in enumerate(pool.pieces(torch.randn(64, 1000).t())):
            held.append(piece)
            if number == 12:
                cancellation.cancel()

    with pytest.raises(TransferCancelledError):
        hold_all()
    assert len(held) >= 12


def test_slabs_of_a_closed_pool_are_freed_when_nobody_holds_them(pool):
    slabs = [pool.reserve(pool.slab_bytes)[0] for _ in range(3)]
    found = [weakref.ref(slab.memory) for slab in slabs]
    slabs.pop(0).release()
    pool.close()
    assert found[0]() is None
    slabs.pop().release()
    assert found[2]() is None
    slabs.pop().release()
    assert found[1]() is None


def test_room_is_aligned_and_does_not_overlap(pool):
    taken, slabs = [], []
    for nbytes in [1, 63, 64, 65, 500, 1024, 7, 900, 200]:
        slab, place = pool.reserve(nbytes)
        slabs.append(slab)
        assert place % 64 == 0
        begin = np.frombuffer(slab.view, np.uint8).ctypes.data + place
        taken.append((begin, begin + nbytes))
        assert place + nbytes <= len(slab.view)
    taken.sort()
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(taken))


def test_copies_of_host_memory_do_not_start_cuda(monkeypatch, pool):
    """Pinning would, in a process that has no use for it; here it would raise an error."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    tensor = torch.randn(64, 200).t()
    assert drain(pool, tensor) == expected(tensor)


# blocks of any size


def test_blocks_stay_within_the_budget_whatever_is_asked_for():
    budget, lent, most = 16 * KIB, 0, 0
    pool, lock = MemoryPool(budget, Cancellation()), threading.Lock()

    def work(seed):
        nonlocal lent, most
        sizes = random.Random(seed)
        for _ in range(40):
            with pool.take(sizes.randint(1, 6 * KIB)) as lease:
                with lock:
                    lent += lease.view.nbytes
                    most = max(most, lent)
                lease.view[0] = seed
                with lock:
                    lent -= lease.view.nbytes

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert 0 < most <= budget


def test_a_block_that_exceeds_the_budget_is_lent_alone_and_comes_back_after_an_error():
    pool = MemoryPool(KIB, Cancellation())

    def use():
        with pool.take(2 * KIB) as lease:
            lease.view[5 * KIB] = 1

    for _ in range(3):
        with pytest.raises(IndexError):
            use()
