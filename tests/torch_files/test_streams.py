"""Objects as files: what is written arrives whole or not at all, what is read is of one version."""

import contextlib
import io
import os
import random
import uuid

import pytest
import torch

from background.waiting import eventually
from cloudckpt.config import MIB, Config, RetryPolicy
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointReplacedError,
    ConnectionLostError,
    InvalidRequestError,
)
from cloudckpt.stores.capabilities import Capabilities
from cloudckpt.torch_files.object_file import ObjectFile
from cloudckpt.torch_files.written_file import WrittenFile
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.upload import ObjectUpload
from support.faulty_store import FaultyStore
from support.memory_store import MemoryStore

KEY = "run/model.pt"
CONFIG = Config(
    connections=4,
    part_size=5 * MIB,
    memory_budget=32 * MIB,
    retry=RetryPolicy(attempts=4, base=0.0, cap=0.0),
)


@pytest.fixture
def store():
    return FaultyStore(MemoryStore(uuid.uuid4().hex))


def some_bytes(size):
    return random.Random(size).randbytes(size)


def put(store, data, key=KEY):
    store.inner.put(key, [memoryview(data)], checksum=0)


def send(store, chunks):
    with WrittenFile(store, KEY, CONFIG) as file:
        for chunk in chunks:
            assert file.write(chunk) == memoryview(chunk).nbytes


def held(store):
    objects = {info.key: bytes(store.inner.get(info.key)[0]) for info in store.inner.list("")}
    return objects, [upload.key for upload in store.inner.list_uploads("")]


# ---- writing


@pytest.mark.parametrize("size", [0, 1, 100_000, 5 * MIB, 5 * MIB + 1, 23 * MIB + 17])
def test_a_file_appears_whole_when_it_is_closed(store, size):
    put(store, b"old")
    data, draw = memoryview(some_bytes(size)), random.Random(1)
    with WrittenFile(store, KEY, CONFIG) as file:
        while data.nbytes:
            count = draw.choice([1, 30, 500, 4 * MIB, 9 * MIB])
            assert file.write(data[:count]) == min(count, data.nbytes)
            data = data[count:]
        assert file.tell() == size
        assert held(store)[0] == {KEY: b"old"}
    assert held(store) == ({KEY: some_bytes(size)}, [])
    with pytest.raises(ValueError, match="closed"):
        file.write(b"more")


def test_a_buffer_may_change_after_it_was_written(store):
    chunk = bytearray(3 * MIB)
    with WrittenFile(store, KEY, CONFIG) as file:
        for number in range(10):
            chunk[:] = bytes([number]) * len(chunk)
            file.write(chunk)
    (data,) = held(store)[0].values()
    assert data == b"".join(bytes([number]) * 3 * MIB for number in range(10))


@pytest.mark.parametrize("verb", ["create_upload", "put_part", "complete_upload"])
def test_a_failure_is_raised_as_it_is_and_leaves_what_was_there(store, verb):
    put(store, b"old")
    store.fail(verb, AccessDeniedError, calls=[2 if verb == "put_part" else 1])
    with pytest.raises(AccessDeniedError, match="injected"):
        send(store, [bytes(MIB)] * 30)
    assert held(store) == ({KEY: b"old"}, [])


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_writer_that_fails_leaves_what_was_there(store, error):
    put(store, b"old")

    def chunks():
        yield from [bytes(MIB)] * 20
        assert eventually(lambda: store.calls["put_part"] > 0)
        raise error

    with pytest.raises(error):
        send(store, chunks())
    assert held(store) == ({KEY: b"old"}, [])
    assert store.calls["put_part"] > 0
    assert store.calls["delete"] == 0


def test_uploads_of_others_to_the_same_key_are_left_alone(store, caplog):
    other = store.inner.create_upload(KEY, MIB)
    store.fail("create_upload", ConnectionLostError, calls=[1], when="after")
    send(store, [bytes(12 * MIB)])
    assert other in store.inner.list_uploads(KEY)
    assert "cloudckpt sweep" in caplog.text


def test_a_file_that_can_not_be_sent_says_why_at_each_write_and_at_its_end(store):
    store.fail("put_part", AccessDeniedError)
    file = WrittenFile(store, KEY, CONFIG)
    for action in (lambda: [file.write(bytes(5 * MIB)) for _ in range(40)], file.close):
        with pytest.raises(AccessDeniedError):
            action()
    file.close()
    assert held(store) == ({}, [])


def test_an_interrupt_ends_a_file_that_is_written(store, monkeypatch):
    def interrupted(upload, piece):
        raise KeyboardInterrupt

    file = WrittenFile(store, KEY, CONFIG)
    file.write(bytes(7 * MIB))
    monkeypatch.setattr(ObjectUpload, "write", interrupted)
    with pytest.raises(KeyboardInterrupt), file:
        file.write(bytes(7 * MIB))
    assert file.closed
    assert held(store) == ({}, [])


def test_a_fork_leaves_a_file_to_the_process_that_writes_it(store, monkeypatch):
    file = WrittenFile(store, KEY, CONFIG)
    file.write(bytes(23 * MIB))
    upload = file._upload
    with monkeypatch.context() as there:
        there.setattr(os, "getpid", lambda: 0)
        file.discard()
    file._upload = upload
    file._end()
    assert held(store) == ({KEY: bytes(23 * MIB)}, [])


def test_more_bytes_than_parts_can_hold_are_refused(store):
    store.capabilities = Capabilities(
        conditional_writes=True, min_part_size=1, max_part_size=1 << 40, max_parts=3,
        max_put_size=1 << 50,
    )  # fmt: skip
    with pytest.raises(InvalidRequestError, match="memory_budget") as caught:
        send(store, [bytes(5 * MIB)] * 4)
    assert caught.value.uri == store.uri(KEY)
    assert held(store) == ({}, [])


def test_the_stores_error_wins_over_that_of_a_writer_in_between(store):
    """torch's zip writer replaces the error of a write by one of its own, and writes on."""
    store.fail("create_upload", AccessDeniedError)

    def write(file):
        try:
            for _ in range(40):
                file.write(bytes(MIB))
        except AccessDeniedError:
            with contextlib.suppress(AccessDeniedError):
                file.write(b"end")
            raise RuntimeError("unexpected pos") from None

    with pytest.raises(AccessDeniedError), WrittenFile(store, KEY, CONFIG) as file:
        write(file)
    assert held(store) == ({}, [])


# ---- reading


def opened(store, data, stats=None):
    put(store, data)
    return ObjectFile(store, KEY, CONFIG, stats or TransferStats())


def test_reads_give_what_a_file_gives(store):
    data, draw = some_bytes(3 * MIB + 5), random.Random(3)
    ours, theirs = opened(store, data), io.BytesIO(data)
    for _ in range(300):
        offset, whence = draw.choice([(draw.randrange(4 * MIB), 0), (-draw.randrange(MIB), 2)])
        assert ours.seek(offset, whence) == theirs.seek(offset, whence)
        count = draw.choice([0, 1, 30, 4096, 100_000, 5 * MIB, -1])
        assert ours.read(count) == theirs.read(count)
        assert ours.tell() == theirs.tell()


def test_a_read_from_the_beginning_to_the_end_takes_few_requests(store):
    data = some_bytes(40 * MIB)
    file, got = opened(store, data), []
    while part := file.read(100_000):
        got.append(part)
    assert b"".join(got) == data
    assert store.calls["get_range"] < 20


def test_scattered_small_reads_fetch_little(store):
    stats = TransferStats()
    file = opened(store, bytes(64 * MIB), stats=stats)
    for position in (63 * MIB, 0, 30 * MIB, 10 * MIB):
        file.seek(position)
        file.read(100)
    assert stats.snapshot().nbytes <= 4 * 64 * 1024


def test_a_large_read_goes_straight_into_the_readers_memory_in_parallel(store):
    data = some_bytes(40 * MIB)
    file, room = opened(store, data), torch.zeros(40 * MIB, dtype=torch.uint8)
    assert file.readinto(memoryview(room.numpy())) == 40 * MIB
    assert room.numpy().tobytes() == data
    assert store.calls["get_range"] > 1


class Unconditional(FaultyStore):
    """Ignores what a read is on the condition of."""

    def get_range(self, key, start, into, *, if_version=None, progress=None):
        return super().get_range(key, start, into, progress=progress)


@pytest.mark.parametrize("kind", [FaultyStore, Unconditional])
def test_a_replaced_object_is_noticed(kind):
    store = kind(MemoryStore(uuid.uuid4().hex))
    file = opened(store, bytes(MIB))
    file.read(10)
    put(store, bytes([1]) * MIB)
    file.seek(900_000)
    for _ in range(2):
        with pytest.raises(CheckpointReplacedError, match="replaced"):
            file.read(10)
    assert isinstance(file.failure, CheckpointReplacedError)
