"""Copies of what can't be sent as it lies: exact, bounded in memory, never reused too soon."""

import contextlib
import itertools
import queue
import random
import threading
import weakref
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from cloudckpt.errors import TransferCancelledError
from cloudckpt.transfer.group import Cancellation
from cloudckpt.transfer.pool import MemoryPool
from cloudckpt.transfer.staging import StagingPool
from evolving.values import FORMS, Here, Tensor

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
    plain = tensor.detach().clone(memory_format=torch.contiguous_format)
    return plain.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).numpy().tobytes()


# pieces


@given(
    shape=st.lists(st.integers(0, 30), max_size=4),
    dtype=st.sampled_from(["uint8", "bool", "bfloat16", "float8_e4m3fn", "float32", "complex128"]),
    form=st.sampled_from(sorted(FORMS)),
)
@example(shape=[512], dtype="float16", form="spaced")  # exactly a slab
@example(shape=[3, 700], dtype="float32", form="turned")  # rows of more than a slab
def test_pieces_are_the_row_major_bytes(shape, dtype, form):
    """CUDA is not started for them, as pinned memory would: here it would raise an error."""
    tensor = Tensor(tuple(shape), dtype, form).made("t", Here(0, None, 1))
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        assert drain(StagingPool(BUDGET, Cancellation()), tensor) == expected(tensor)


def test_a_piece_keeps_its_bytes_until_it_is_given_back(pool):
    torch.manual_seed(0)
    tensor = torch.randn(64, 40).t()  # ten slabs of the sixteen
    held = list(pool.pieces(tensor))
    other = drain(pool, torch.zeros(100, 10).t())
    assert set(other) == {0}
    assert b"".join(piece.view for piece in held) == expected(tensor)
    for piece in held:
        piece.lease.release()


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
    """Of its user; and what the system could not give was never lent."""
    pool = MemoryPool(KIB, Cancellation())
    no_memory = mock.patch.object(pool, "allocate", side_effect=MemoryError)
    for error in (MemoryError, IndexError, IndexError):
        lacking = no_memory if error is MemoryError else contextlib.nullcontext()
        with lacking, pytest.raises(error), pool.take(2 * KIB) as lease:
            lease.view[5 * KIB] = 1
