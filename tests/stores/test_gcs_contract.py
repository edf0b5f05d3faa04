"""Google's store keeps the contract of the seam, and what its buckets forbid is named."""

import uuid

import pytest

from cloudckpt import Config, GCSOptions
from cloudckpt.checksum import CRC32C
from cloudckpt.errors import AccessDeniedError, ConnectionLostError
from cloudckpt.stores.base import CopySource
from cloudckpt.stores.gcs.store import GCSStore
from support.contract import StoreContract, put_part
from support.contract.data import put as put_at
from support.contract.data import some_bytes
from support.stubs.gcs import GcsStub
from support.stubs.gcs_state import Attributes


@pytest.fixture(scope="module")
def stub():
    with GcsStub("bucket") as running:
        running.state.page = 100
        yield running


@pytest.fixture(scope="module")
def stores(stub):
    stores = {}
    for checksum in ("on", "off"):
        options = GCSOptions(endpoint_url=stub.url)
        stores[checksum] = GCSStore("bucket", Config(gcs=options, checksum=checksum))
    yield stores
    for store in stores.values():
        store.close()


class GCSContract(StoreContract):
    checksum: str
    object_count = 120

    @pytest.fixture
    def store(self, stores, stub):
        self.state = stub.state
        return stores[self.checksum]

    @pytest.fixture
    def prefix(self):
        return f"{uuid.uuid4().hex}/"

    def put_directly(self, store, key, data):
        self.state.put("bucket", key, data, Attributes())

    def get_directly(self, store, key):
        return self.state.find("bucket", key).data


class TestWithChecksums(GCSContract):
    checksum = "on"


class TestWithoutChecksums(GCSContract):
    checksum = "off"


# what a bucket forbids or demands

KEY = "run/step-1/__0_0.0123456789abcdef.distcp"


@pytest.fixture
def own():
    """A stub of this test's own."""
    with GcsStub("bucket") as running:
        yield running


@pytest.fixture
def state(own):
    return own.state


@pytest.fixture
def open_gcs(own, opened):
    def open_one(**options):
        given = GCSOptions(endpoint_url=own.url, **options)
        return opened(GCSStore("bucket", Config(gcs=given, checksum="on")))

    return open_one


def put(store, data):
    store.put(KEY, [memoryview(data)], checksum=CRC32C.of(data))


def test_what_a_retention_policy_protects_is_kept(open_gcs, state):
    store = open_gcs()
    state.retention = 60.0
    put(store, b"1")
    for change in (lambda: put(store, b"2"), lambda: store.delete(KEY)):
        with pytest.raises(AccessDeniedError, match="retention policy"):
            change()
    assert state.find("bucket", KEY).data == b"1"


def test_a_bucket_whose_requesters_pay_is_told_who_pays(open_gcs, state):
    state.billable = "my-project"
    store = open_gcs(user_project="my-project")
    data = b"x" * 100
    upload = store.create_upload(KEY, 5 * 1024**2)
    store.complete_upload(upload, [put_part(store, upload, 1, data)])
    assert [info.key for info in store.list("run/")] == [KEY]
    assert bytes(store.get(KEY)[0]) == data
    store.delete(KEY)
    assert state.keys("bucket") == []
    assert list(store.list_uploads("run/")) == []


# copies that take several calls


def test_a_copy_that_takes_several_calls_goes_on_where_it_was(state, open_gcs):
    store, data = open_gcs(), some_bytes(1000)
    state.rewritten = 300
    found = put_at(store, "source", data)
    state.inject(lambda r: r.query.get("rewriteToken") == "600", None)
    with pytest.raises(ConnectionLostError):
        store.copy(CopySource(store, found), "copy")
    copied = store.copy(CopySource(store, found), "copy")
    assert (copied.size, copied.checksum) == (1000, CRC32C.of(data))
    assert state.find("bucket", "copy").data == data
    calls = [request for request in state.requests if "/rewriteTo/" in request.path]
    tokens = [request.query.get("rewriteToken") for request in calls]
    assert tokens == [None, "300", "600", "600", "900"]


# a bucket that everybody may read, whose data is cached for an hour


@pytest.mark.parametrize("written_by", ["us", "others"])
def test_a_cached_object_does_not_come_back(state, open_gcs, written_by):
    store, state.public = open_gcs(), True
    for data in (b"1", b"2", b"3"):
        if written_by == "us":
            put(store, data)
        else:
            state.put("bucket", KEY, data, Attributes())
        for _ in range(2):
            assert store.get(KEY)[0] == data
            memory = bytearray(1)
            store.get_range(KEY, 0, [memoryview(memory)])
            assert memory == data


def test_nothing_that_is_written_may_be_cached(state, open_gcs):
    store = open_gcs()
    put(store, b"1")
    upload = store.create_upload("in parts", 5 * 1024**2)
    store.complete_upload(upload, [put_part(store, upload, 1, b"2")])
    store.copy(CopySource(store, store.head(KEY)), "copy")
    found = {stored.attributes.cache_control for stored in state.objects.values()}
    assert found == {"no-store"}
