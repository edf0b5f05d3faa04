"""Google's store against gcp-storage-emulator, which knows objects and how to compose them."""

import json
import urllib.request
import uuid
from urllib.parse import quote

import pytest

from cloudckpt import Config, GCSOptions, RetryPolicy
from cloudckpt.checkpoint.commit import Probe, conditions_work
from cloudckpt.checksum import crc32c
from cloudckpt.errors import ConfigError
from cloudckpt.stores.gcs import GCSStore
from cloudckpt.testing.contract import StoreContract
from cloudckpt.transfer.retry import Retrier

BUCKET = "contract"


@pytest.fixture(scope="module")
def emulator_store(gcs_url):
    call("POST", f"{gcs_url}/storage/v1/b", json.dumps({"name": BUCKET}).encode())
    options = GCSOptions(endpoint_url=gcs_url, upload_strategy="compose", checksum="on")
    store = GCSStore(BUCKET, Config(gcs=options))
    yield store
    store.close()


def call(method, url, body=None):
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers, method=method)) as reply:
        return reply.read()


class TestEmulator(StoreContract):
    # the emulator ignores all preconditions
    test_put_if_absent_leaves_an_object_that_is_there = None
    test_one_of_many_writers_that_put_if_absent_at_once_wins = None
    test_put_if_version_leaves_another_version = None
    test_put_if_version_does_not_bring_a_deleted_object_back = None

    @pytest.fixture
    def store(self, emulator_store, gcs_url):
        self.url = gcs_url
        return emulator_store

    @pytest.fixture
    def prefix(self):
        return f"{uuid.uuid4().hex}/"

    def put_directly(self, store, key, data):
        head = (
            b"--cut\r\nContent-Type: application/json\r\n\r\n{}\r\n--cut\r\nContent-Type: a/b\r\n"
        )
        request = urllib.request.Request(
            f"{self.url}/upload/storage/v1/b/{BUCKET}/o?uploadType=multipart&name={quote(key)}",
            head + b"\r\n" + data + b"\r\n--cut--\r\n",
            {"Content-Type": "multipart/related; boundary=cut"},
        )
        urllib.request.urlopen(request).close()

    def get_directly(self, store, key):
        return call("GET", f"{self.url}/download/storage/v1/b/{BUCKET}/o/{quote(key, safe='')}")


def test_that_it_ignores_preconditions_is_found_out(emulator_store):
    content = b"content"
    emulator_store.put("probe", [memoryview(content)], crc32c=crc32c(content))
    retrier = Retrier(RetryPolicy(attempts=1))
    with pytest.raises(ConfigError, match="ignores conditional writes"):
        conditions_work(emulator_store, "auto", Probe("probe", content), retrier)


def test_parts_that_need_two_rounds_are_composed(emulator_store):
    pieces = [bytes([number]) * (1000 + number) for number in range(70)]
    upload = emulator_store.create_upload("run/large", 1100)
    parts = [
        emulator_store.put_part(upload, number, [memoryview(data)], crc32c=crc32c(data))
        for number, data in enumerate(pieces, 1)
    ]
    info = emulator_store.complete_upload(upload, parts)
    assert bytes(emulator_store.get("run/large")[0]) == b"".join(pieces)
    assert list(emulator_store._objects.list("run/")) == [info]
