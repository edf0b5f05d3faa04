"""Objects are sent whole or not at all, whatever the store does to single requests."""

import contextlib
import dataclasses
import logging
import threading
import uuid

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cloudckpt import errors
from cloudckpt.checksum import CRC32C, BlockChecksums
from cloudckpt.config import Config, RetryPolicy
from cloudckpt.transfer.download import download
from cloudckpt.transfer.landing import BytesSink, StoredBytes, Wanted
from cloudckpt.transfer.parts import PartPlan, Piece
from cloudckpt.transfer.retry import Retrier
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.upload import NamedUpload, ObjectUpload, put_whole
from support.faulty_store import FaultyStore
from support.memory_store import MemoryStore
from transfer.props import AT_ONCE, KEY, PART, Crowd, cut, held, put, send, some_bytes


class Checking(MemoryStore):
    """A store that verifies checksums, as S3 does, and remembers whose memory it was sent."""

    def __init__(self):
        super().__init__(uuid.uuid4().hex)
        self.owners = []

    def put(self, key, body, *, checksum, **others):
        self._check(body, checksum)
        return super().put(key, body, checksum=checksum, **others)

    def put_part(self, upload, number, body, *, checksum, **others):
        self._check(body, checksum)
        return super().put_part(upload, number, body, checksum=checksum, **others)

    def complete_upload(self, upload, parts, **options):
        assert [part.number for part in parts] == list(range(1, len(parts) + 1))
        assert all(part.size == upload.part_size for part in parts[:-1])
        return super().complete_upload(upload, parts, **options)

    def _check(self, body, crc):
        assert CRC32C.of(b"".join(body)) == crc
        self.owners.extend(view.obj for view in body)


@pytest.fixture
def store():
    return FaultyStore(Checking())


def pieces_of(data, size):
    return cut(data, [size] * -(-len(data) // size))


def test_nothing_is_copied_on_the_way_to_the_store(store):
    data = bytearray(some_bytes(5 * PART + 1))
    send(store, pieces_of(data, 1300))
    assert store.inner.owners
    assert all(owner is data for owner in store.inner.owners)


@settings(max_examples=100)
@given(
    sizes=st.lists(st.sampled_from([0, 1, PART - 1, PART, PART + 1]) | st.integers(0, 2500)),
    seed=st.integers(0, 1 << 30),
    share=st.floats(0, 0.5),
    width=st.integers(1, 6),
)
@example(sizes=[], seed=0, share=0.0, width=1)
@example(sizes=[PART], seed=0, share=0.0, width=1)
@example(sizes=[PART, PART], seed=0, share=0.0, width=1)
@example(sizes=[PART, PART, 1], seed=0, share=0.0, width=1)
def test_an_object_arrives_through_any_passing_faults(sizes, seed, share, width):
    store = FaultyStore(Checking(), seed=seed)
    for verb in ("put", "create_upload", "put_part", "complete_upload"):
        store.fail(verb, errors.ThrottledError, probability=share / 3)
        store.fail(verb, errors.ConnectionLostError, probability=share / 3, when="after")
    for verb in ("put", "put_part"):
        store.fail(verb, errors.ConnectionLostError, probability=share / 3, when="during", moved=1)
    data = some_bytes(sum(sizes))
    patient = RetryPolicy(attempts=200, base=0.0, cap=0.0)
    upload, stats = send(store, cut(data, sizes), width=width, policy=patient)
    assert bytes(store.inner.get(KEY)[0]) == data
    assert upload.info == store.inner.head(KEY)
    assert (upload.position, upload.checksum) == (len(data), CRC32C.of(data))
    assert held(store.inner) == [KEY]
    assert stats.retries == sum(store.failed.values())


# answers that were lost


REFUSALS = [
    errors.AccessDeniedError,
    errors.PreconditionFailedError,
    errors.InvalidRequestError,
    errors.ObjectNotFoundError,
]


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("verb", ["put", "complete_upload"])
@pytest.mark.parametrize(
    "there", ["its own", "nothing", "other bytes", "the same bytes", "of nobody"]
)
def test_a_refusal_after_a_lost_answer_is_success_only_if_this_write_made_the_object(
    store, verb, refusal, there
):
    """It exists, is retained or held, or its upload is gone."""
    data = some_bytes(700 if verb == "put" else 2500)
    if there not in ("its own", "nothing"):
        other = data[::-1] if there == "other bytes" else data
        put(store.inner, KEY, other, attempt="" if there == "of nobody" else "f" * 16)
    is_own = there == "its own"
    store.fail(verb, errors.ConnectionLostError, calls=[1], when="after" if is_own else "before")
    store.fail(verb, refusal, calls=[2])
    with contextlib.nullcontext() if is_own else pytest.raises(refusal) as caught:
        upload, _ = send(store, pieces_of(data, 700))
        assert upload.info == store.inner.head(KEY)
        assert bytes(store.inner.get(KEY)[0]) == data
    assert is_own or not caught.value.certain  # the try before may have been carried out


@pytest.mark.parametrize("size", [700, 2500])
def test_an_object_with_a_random_key_replaces_none(store, size):
    data = some_bytes(size)
    put(store.inner, KEY, b"somebody else's")
    with pytest.raises(errors.PreconditionFailedError):
        send(store, pieces_of(data, 700), create_only=True)
    verb = "put" if size < PART else "complete_upload"
    store.inner.delete(KEY)
    store.fail(verb, errors.ConnectionLostError, calls=[store.calls[verb] + 1], when="after")
    upload, _ = send(store, pieces_of(data, 700), create_only=True)  # met its own first try
    assert upload.info == store.inner.head(KEY)


@pytest.mark.parametrize("when", ["before", "after"])
def test_of_two_writers_of_the_same_bytes_one_creates_the_object_though_answers_are_lost(
    store, when
):
    """As two jobs that both want to create a lock, or a mark."""
    data, retrier = memoryview(b"locked"), Retrier(AT_ONCE)
    store.fail("put", errors.ConnectionLostError, calls=[1, 3], when=when)
    put_whole(store, KEY, data, retrier, if_version="")
    with pytest.raises(errors.PreconditionFailedError):
        put_whole(store, KEY, data, retrier, if_version="")


def test_an_object_of_which_the_server_kept_the_beginning_is_no_success(store):
    data, whole = memoryview(some_bytes(700)), store.inner.put

    def cut(key, body, *, checksum, **options):
        store.inner.put = whole
        MemoryStore.put(store.inner, key, [body[0][:5]], checksum=checksum, **options)
        raise errors.ConnectionLostError("lost")

    for write in (
        lambda: put_whole(store, KEY, data, Retrier(AT_ONCE), if_version=""),
        lambda: send(store, pieces_of(data, 700), create_only=True),
    ):
        store.inner.put = cut
        with pytest.raises(errors.PreconditionFailedError):
            write()
        store.inner.delete(KEY)


def test_an_object_that_was_put_together_wrongly_is_no_success_though_it_is_ours(store):
    """Google is sent no checksum of the whole, but tells it."""
    data = some_bytes(2500)
    store.fail("complete_upload", errors.ConnectionLostError, calls=[1], when="after")
    head = store.inner.head

    def told(key):
        return dataclasses.replace(head(key), checksum=CRC32C.of(data) ^ 1)

    store.inner.head = told
    with pytest.raises(errors.ObjectNotFoundError):
        send(store, pieces_of(data, 700))


@pytest.mark.parametrize("fails", [False, True])
def test_an_upload_whose_beginning_was_lost_leaves_no_twin(store, fails):
    store.fail("create_upload", errors.ConnectionLostError, calls=[1], when="after")
    if fails:
        store.fail("put_part", errors.AccessDeniedError, calls=[2])
        with pytest.raises(errors.AccessDeniedError):
            send(store, pieces_of(some_bytes(2500), 700))
        assert held(store.inner) == []
    else:
        send(store, pieces_of(some_bytes(2500), 700))
        assert held(store.inner) == [KEY]


@pytest.mark.parametrize(
    ("kind", "advice"), [(ObjectUpload, "cloudckpt sweep"), (NamedUpload, "a lifecycle rule")]
)
def test_what_aborts_an_upload_that_stays_is_named(store, kind, advice, caplog):
    """Of the uploads of keys that users have chosen, sweep deletes none in a bucket."""
    store.fail("create_upload", errors.ConnectionLostError, calls=[1], when="after")
    store.fail("put_part", errors.AccessDeniedError, calls=[2])
    store.fail("abort_upload", errors.AccessDeniedError)
    with pytest.raises(errors.AccessDeniedError):
        send(store, pieces_of(some_bytes(2500), 700), kind=kind)
    assert caplog.messages
    assert all(advice in text for text in caplog.messages)


# failures


@pytest.mark.parametrize(
    ("verb", "size"),
    [("put", 500), ("create_upload", 2500), ("put_part", 5500), ("complete_upload", 2500)],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_object_that_failed_leaves_nothing_behind(store, verb, size, when):
    store.fail(verb, errors.StorageFullError, calls=[1], when=when)
    with pytest.raises(errors.StorageFullError):
        send(store, pieces_of(some_bytes(size), 700))
    if (verb, when) == ("create_upload", "after"):
        return  # a store that refuses has begun no upload
    assert held(store.inner) == []


def up(store):
    send(store, pieces_of(some_bytes(2 * PART), PART), width=2)


def down(store):
    sources = [StoredBytes(key, 0, 4, None, None, "item") for key in ("1", "2")]
    wanted = [Wanted(source, 0, 4, BytesSink(4), True) for source in sources]
    download(store, wanted, Config(connections=2), TransferStats())


@pytest.mark.parametrize("move", [up, down])
def test_an_error_of_one_request_stops_the_others(move):
    store = Endless(uuid.uuid4().hex)
    with pytest.raises(errors.AccessDeniedError, match="the second"):
        move(store)
    assert store.stopped == [1]
    assert held(store) == []


class Endless(MemoryStore):
    """The first request never ends by itself; the second fails while that is on its way."""

    def __init__(self, name):
        super().__init__(name)
        self.stopped, self._on_its_way = [], threading.Event()

    def put_part(self, upload, number, body, *, progress, **others):
        self._move(number, progress)

    def get_range(self, key, start, into, *, progress, **others):
        self._move(int(key), progress)

    def _move(self, number, progress):
        if number == 2:
            assert self._on_its_way.wait(30)
            raise errors.AccessDeniedError("the second")
        try:
            while True:
                progress(1)
                self._on_its_way.set()
        except errors.TransferCancelledError:
            self.stopped.append(number)
            raise


@pytest.mark.parametrize("error", [errors.ServerError, errors.AccessDeniedError])
def test_what_can_not_be_cleaned_up_is_logged_and_hides_no_error(store, caplog, error):
    store.fail("put_part", errors.StorageFullError, calls=[2])
    store.fail("abort_upload", error)
    store.fail("delete", error)
    with caplog.at_level(logging.WARNING, "cloudckpt"), pytest.raises(errors.StorageFullError):
        send(store, pieces_of(some_bytes(2500), 700))
    assert "could not be aborted" in caplog.text
    assert store.calls["abort_upload"] <= 5


def test_few_threads_at_a_time_compute_checksums(store, monkeypatch):
    """There is a call for each block, and each gives the GIL away: many threads would queue."""
    crowd, usual = Crowd(), PartPlan.checksum

    def watched(self, algorithm):
        crowd()
        return usual(self, algorithm)

    monkeypatch.setattr(PartPlan, "checksum", watched)
    send(store, pieces_of(some_bytes(60 * PART), PART), width=16)
    assert len(crowd.counts) == 60
    assert max(crowd.counts) <= 2


# what is known only when the checksums of all else are


def index_of(data, size, sums):
    """The end of an object that holds ``data``: its checksum, at the end of ``size`` bytes."""
    index = bytearray(size)
    made = []

    def make():
        made.append(1)
        index[-4:] = sums.finish(len(data))[0].to_bytes(4, "little") if data else bytes(4)

    return made, Piece(memoryview(index), made=make)


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("size", [0, 1, PART - 4, PART - 3, PART, PART + 1, 12_345, 13_000])
@pytest.mark.parametrize("length", [4, 1000, 2500])
def test_an_end_that_is_made_of_the_checksums_before_it_arrives(store, size, length, width):
    data, sums = some_bytes(size), BlockChecksums(CRC32C, 1 << 20)
    made, end = index_of(data, length, sums)
    pieces = [Piece(memoryview(data)[at : at + 333], sums, start=at) for at in range(0, size, 333)]
    upload, _ = send(store, [*pieces, end], width=width)
    expected = data + bytes(length - 4) + (CRC32C.of(data) if data else 0).to_bytes(4, "little")
    assert bytes(store.inner.get(KEY)[0]) == expected
    assert (upload.position, upload.checksum) == (len(expected), CRC32C.of(expected))
    assert made
    assert held(store.inner) == [KEY]


@pytest.mark.parametrize("fails", [False, True])
def test_an_end_waits_for_parts_that_are_still_copied_and_ends_if_one_fails(store, fails):
    """And parts that are copied keep none from its checksum, however few may compute theirs."""
    data, sums = some_bytes(4 * PART), BlockChecksums(CRC32C, 1 << 20)
    made, end = index_of(data, 4, sums)
    has_begun = threading.Event()
    end.ready = has_begun.set

    def arrive():
        assert has_begun.wait(10)
        if fails:
            raise errors.AccessDeniedError("the device is gone")

    parts = [(at, memoryview(data)[at : at + PART]) for at in range(0, len(data), PART)]
    pieces = [Piece(view, sums, at, ready=arrive) for at, view in parts]
    with pytest.raises(errors.AccessDeniedError) if fails else contextlib.nullcontext():
        send(store, [*pieces, end], width=8)
    assert (made, held(store.inner)) == (([], []) if fails else ([1], [KEY]))


@pytest.mark.parametrize("call", [1, 3, 5])
@pytest.mark.parametrize("width", [1, 2])
def test_an_end_whose_parts_fail_leaves_nothing(store, call, width):
    data, sums = some_bytes(3 * PART), BlockChecksums(CRC32C, 1 << 20)
    _, end = index_of(data, 2500, sums)
    store.fail("put_part", errors.AccessDeniedError, calls=[call])
    with pytest.raises(errors.AccessDeniedError):
        send(store, [Piece(memoryview(data), sums), end], width=width)
    assert held(store.inner) == []
