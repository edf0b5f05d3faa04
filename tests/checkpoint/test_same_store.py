"""What other ranks have written is seen before it is promised, in few requests."""

import functools
import uuid

import pytest

from cloudckpt.checkpoint.commit import _elsewhere
from cloudckpt.checkpoint.objects import WrittenObject, look_for
from cloudckpt.config import Config, RetryPolicy
from cloudckpt.errors import AccessDeniedError, ConnectionLostError, DifferentCheckpointsError
from cloudckpt.uri import CheckpointURI
from support.faulty_store import FaultyStore
from support.memory_store import MemoryStore

FEW, MANY = 20, 300


@pytest.fixture
def store():
    return FaultyStore(MemoryStore(uuid.uuid4().hex))


@pytest.fixture
def uri(store):
    return CheckpointURI.parse(f"{store.root}/run")


@pytest.fixture
def written(store, uri):
    """Writes objects of a byte; returns what their ranks say of them."""

    def written(count: int) -> list[WrittenObject]:
        records = [WrittenObject(rank, 0, "0" * 16, 1, 0, 0, 0) for rank in range(count)]
        for record in records:
            store.inner.put(uri.key(record.name), [memoryview(b"1")], checksum=0)
        return records

    return written


def look(store, uri, records, *, width=4):
    retry = RetryPolicy(attempts=3, base=0.0, cap=0.0)
    config = Config(retry=retry, connections=width)
    look_for(store, uri, records, config, functools.partial(_elsewhere, uri))


@pytest.mark.parametrize(("count", "asked"), [(0, {}), (FEW, {"head": FEW}), (MANY, {"list": 1})])
def test_few_objects_are_looked_at_one_by_one_and_many_are_listed(
    store, uri, written, count, asked
):
    look(store, uri, written(count))
    assert dict(store.calls) == asked


def test_what_a_listing_lacks_is_looked_at_before_that_is_believed(store, uri, written):
    records = written(MANY)
    listing = list(store.inner.list(uri.key("__")))
    store.list = lambda prefix, retry: iter(listing[7:])
    look(store, uri, records)
    assert dict(store.calls) == {"head": 7}


def test_a_listing_that_is_denied_is_done_without(store, uri, written):
    store.fail("list", AccessDeniedError)
    look(store, uri, written(MANY))
    assert dict(store.calls) == {"list": 1, "head": MANY}
    store.heal()
    store.fail("list", ConnectionLostError)
    with pytest.raises(ConnectionLostError):
        look(store, uri, written(MANY))


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("count", [FEW, MANY])
@pytest.mark.parametrize("is_there", [False, True])
def test_an_object_that_is_another_or_not_there_is_named_with_its_rank(
    store, uri, written, count, width, is_there
):
    records = written(count)
    key = uri.key(records[13].name)
    store.inner.delete(key)
    if is_there:
        store.inner.put(key, [memoryview(b"123")], checksum=0)
    with pytest.raises(DifferentCheckpointsError) as caught:
        look(store, uri, records, width=width)
    said = str(caught.value)
    assert f"rank 13 wrote {records[13].name} (1 bytes)" in said
    assert ("which has 3 bytes" if is_there else "does not exist") in said
    assert caught.value.uri == str(uri)
