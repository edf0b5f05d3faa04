"""A tensor that changes while it is sent is noticed, whether the store verifies it or not."""

import dataclasses
import uuid
from unittest import mock

import pytest

from cloudckpt.checksum import CRC32C, BlockChecksums
from cloudckpt.errors import ConnectionLostError, ServerError, TensorChangedError
from cloudckpt.transfer.parts import Piece
from support.faulty_store import FaultyStore
from support.memory_store import MemoryStore
from transfer.props import KEY, PART, held, send, some_bytes

BLOCK = 256


class Slow(MemoryStore):
    """Calls functions of the test before and behind the moment at which it takes bytes."""

    def __init__(self, *, verifies):
        super().__init__(uuid.uuid4().hex)
        self.capabilities = dataclasses.replace(self.capabilities, verifies=verifies)
        self.before = self.behind = lambda body, number: None
        self.tries = 0

    def put(self, key, body, *, checksum, **others):
        send = super().put
        return self._take(body, 1, checksum, lambda: send(key, body, checksum=0))

    def put_part(self, upload, number, body, *, checksum, **others):
        send = super().put_part
        return self._take(
            body, number, checksum, lambda: send(upload, number, body, checksum=checksum)
        )

    def _take(self, body, number, checksum, send):
        self.tries += 1
        self.before(body, number)
        if self.capabilities.verifies and CRC32C.of(b"".join(body)) != checksum:
            raise ServerError("PUT: the bytes arrived damaged")
        sent = send()
        self.behind(body, number)
        return sent


def pieces_of(data, item="weight"):
    """An envelope of immutable bytes around a tensor's memory."""
    checksums = BlockChecksums(CRC32C, BLOCK)
    return [
        Piece(memoryview(b"head" * 10)),
        Piece(memoryview(data), checksums, item=item),
        Piece(memoryview(b"tail" * 10)),
    ]


SIZES = pytest.mark.parametrize("size", [300, 3 * PART], ids=["whole", "parts"])


def tensor(size):
    return bytearray(some_bytes(size))


def change(body, number):
    """Changes all memory that is not immutable."""
    for view in body:
        if not view.readonly:
            view[-1] ^= 255


@SIZES
@pytest.mark.parametrize("verifies", [False, True])
def test_what_changes_before_it_is_sent_is_named_and_not_kept(size, verifies):
    store, data = Slow(verifies=verifies), tensor(size)
    store.before = change
    with pytest.raises(TensorChangedError) as caught:
        send(store, pieces_of(data))
    assert caught.value.item == "weight"
    assert caught.value.uri == store.uri(KEY)
    assert store.tries <= (1 if size < PART else 4)  # not sent again and again
    assert held(store) == []


@SIZES
@pytest.mark.parametrize("verifies", [False, True])
def test_what_does_not_change_before_a_verifying_store_has_it_is_sent_once(size, verifies):
    store, data = Slow(verifies=verifies), tensor(size)
    before = bytes(data)
    if verifies:
        store.behind = change
    send(store, pieces_of(data))
    assert before in bytes(store.get(KEY)[0])
    assert store.tries == (1 if size < PART else 4)


@pytest.mark.parametrize("part", [1, 2, 3, 4])
def test_a_change_of_any_part_is_noticed(part):
    store, data = Slow(verifies=False), tensor(3 * PART)
    store.behind = lambda body, number: change(body, number) if number == part else None
    with pytest.raises(TensorChangedError):
        send(FaultyStore(store), pieces_of(data))


def test_a_failure_of_the_network_while_nothing_changes_is_tried_again():
    store, data = FaultyStore(Slow(verifies=False)), tensor(300)
    store.fail("put", ConnectionLostError, calls=[1, 2])
    send(store, pieces_of(data))
    assert bytes(data) in bytes(store.inner.get(KEY)[0])


def test_memory_that_nobody_else_can_write_is_not_looked_at_again(monkeypatch):
    """Slabs of copies are on loan, and envelopes are immutable."""
    store, looked = Slow(verifies=False), []

    def of(view, *before):
        looked.append(view.nbytes)
        return CRC32C.of(view, *before)

    seen = dataclasses.replace(CRC32C, of=of)
    store.capabilities = dataclasses.replace(store.capabilities, checksum=seen)
    send(store, [Piece(memoryview(b"head")), Piece(memoryview(bytearray(100)), lease=mock.Mock())])
    assert looked == [4, 100]
