"""Every store keeps the contract of the seam."""

import time
import uuid
from pathlib import Path

import boto3
import botocore.config
import pytest

from cloudckpt import Config, S3Options
from cloudckpt.stores.local import LocalStore
from cloudckpt.stores.s3.store import S3Store
from support.contract import StoreContract
from support.emulators import PAGE
from support.memory_store import MemoryObject, MemoryStore


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self):
        return MemoryStore(uuid.uuid4().hex)

    def put_directly(self, store, key, data):
        bucket = store._bucket
        version = f"directly-{next(bucket.versions)}"
        bucket.objects[key] = MemoryObject(data, version, time.time())

    def get_directly(self, store, key):
        return store._bucket.objects[key][0]


class TestLocal(StoreContract):
    keeps_attempts = False  # its calls return when all is done

    @pytest.fixture
    def store(self):
        return LocalStore()

    @pytest.fixture
    def prefix(self, tmp_path):
        return f"{tmp_path}/"

    def put_directly(self, store, key, data):
        Path(key).parent.mkdir(parents=True, exist_ok=True)
        Path(key).write_bytes(data)

    def get_directly(self, store, key):
        return Path(key).read_bytes()


@pytest.fixture(scope="module")
def direct(s3_url):
    # moto gives multipart objects a checksum that real S3 would not
    config = botocore.config.Config(response_checksum_validation="when_required")
    return boto3.client("s3", endpoint_url=s3_url, config=config)


@pytest.fixture(scope="module")
def s3_stores(s3_url, direct):
    """Stores for all tests, with and without checksums: boto3 takes its time to begin."""
    bucket = f"contract-{uuid.uuid4().hex[:12]}"
    direct.create_bucket(Bucket=bucket)
    stores = {}
    for checksum in ("on", "off"):
        options = S3Options(endpoint_url=s3_url, addressing_style="path")
        stores[checksum] = S3Store(bucket, Config(s3=options, checksum=checksum))
    yield stores
    for store in stores.values():
        store.close()


class S3Contract(StoreContract):
    checksum: str
    honours_conditional_copies = False  # moto looks neither at the source nor at the target

    @pytest.fixture
    def store(self, s3_stores, direct):
        self.client = direct
        return s3_stores[self.checksum]

    @pytest.fixture
    def prefix(self):
        return f"{uuid.uuid4().hex}/"

    def put_directly(self, store, key, data):
        self.client.put_object(Bucket=store.root.removeprefix("s3://"), Key=key, Body=data)

    def get_directly(self, store, key):
        bucket = store.root.removeprefix("s3://")
        return self.client.get_object(Bucket=bucket, Key=key)["Body"].read()


class TestS3WithChecksums(S3Contract):
    checksum = "on"
    object_count = PAGE + 10


class TestS3WithoutChecksums(S3Contract):
    checksum = "off"
    object_count = 20  # the pages are those of the other variant
