"""Google's store keeps the contract of the seam, by both ways of sending large objects."""

import uuid

import pytest

from cloudckpt import Config, GCSOptions
from cloudckpt.stores.gcs import GCSStore
from contract import StoreContract
from stubs.gcs import GcsStub
from stubs.gcs_state import Attributes


@pytest.fixture(scope="module")
def stub():
    with GcsStub("bucket") as running:
        yield running


@pytest.fixture(scope="module")
def stores(stub):
    stores = {}
    for strategy, checksum in (("multipart", "on"), ("multipart", "off"), ("compose", "on")):
        options = GCSOptions(endpoint_url=stub.url, upload_strategy=strategy, checksum=checksum)
        stores[strategy, checksum] = GCSStore("bucket", Config(gcs=options))
    yield stores
    for store in stores.values():
        store.close()


class GCSContract(StoreContract):
    strategy: str
    checksum = "on"

    @pytest.fixture
    def store(self, stores, stub):
        self.state = stub.state
        return stores[self.strategy, self.checksum]

    @pytest.fixture
    def prefix(self):
        return f"{uuid.uuid4().hex}/"

    def put_directly(self, store, key, data):
        self.state.put("bucket", key, data, Attributes())

    def get_directly(self, store, key):
        return self.state.find("bucket", key).data


class TestMultipart(GCSContract):
    strategy = "multipart"


class TestMultipartWithoutChecksums(GCSContract):
    strategy, checksum = "multipart", "off"
    object_count = 120


class TestCompose(GCSContract):
    strategy = "compose"
