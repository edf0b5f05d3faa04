"""A breakable way to the server, and eyes on the bucket that do not go that way."""

import itertools
import json
import threading
import uuid
from collections.abc import Iterator

import boto3
import pytest

from cloudckpt import Config
from cloudckpt.testing.proxy import FaultyProxy

from .nursery import Nursery
from .states import impatient

_counter = itertools.count(1)


class Folder:
    """The objects under a prefix, as boto3 sees them."""

    def __init__(self, client, bucket: str, prefix: str) -> None:
        self.bucket = bucket
        self._client = client
        self._prefix = prefix

    def uri(self, name: str) -> str:
        return f"s3://{self.bucket}/{self._prefix}{name}"

    def objects(self) -> set[str]:
        """Their keys."""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=self._prefix
        )
        return {entry["Key"] for page in pages for entry in page.get("Contents", ())}

    def key(self, suffix: str) -> str:
        """The only key that ends so."""
        [key] = [key for key in self.objects() if key.endswith(suffix)]
        return key

    def uploads(self) -> list[str]:
        """The keys of the multipart uploads that are open."""
        entries = self._client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", ())
        return [entry["Key"] for entry in entries if entry["Key"].startswith(self._prefix)]

    def assert_tidy(self) -> None:
        """Nothing is there but one checkpoint and what its manifest names."""
        assert self.uploads() == []
        manifest = self.key(".json")
        run = manifest.rpartition("/")[0]
        named = {entry[0] for entry in json.loads(self.get(manifest))["objects"]}
        assert self.objects() == {manifest, f"{run}/.metadata", *(f"{run}/{n}" for n in named)}

    def get(self, key: str) -> bytes:
        return self._client.get_object(Bucket=self.bucket, Key=key)["Body"].read()

    def put(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=self.bucket, Key=key, Body=data)

    def delete(self, key: str) -> None:
        self._client.delete_object(Bucket=self.bucket, Key=key)


# A store costs boto3 a fifth of a second: one bucket, one proxy and two configurations serve most
# tests, each in a folder of its own.


@pytest.fixture(scope="session")
def _client(s3_url):
    client = boto3.client("s3", endpoint_url=s3_url)
    client.create_bucket(Bucket="faults")
    yield client
    client.close()


@pytest.fixture
def store(_client) -> Folder:
    """The folder of this test."""
    return Folder(_client, "faults", f"{uuid.uuid4().hex[:12]}/")


@pytest.fixture(scope="session")
def _proxy(s3_url) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3_url) as proxy:
        yield proxy


@pytest.fixture
def proxy(_proxy) -> Iterator[FaultyProxy]:
    """A proxy before the server, without faults as yet."""
    yield _proxy
    _proxy.clear()


@pytest.fixture
def direct(s3_url) -> Config:
    """Options that lead to the server itself."""
    return impatient(s3_url)


@pytest.fixture
def shaky(proxy) -> Config:
    """Options that lead through the proxy."""
    return impatient(proxy.url)


@pytest.fixture
def unshared():
    """Makes options that no other test has had: their store is a new one."""
    return lambda url, **options: impatient(url, read_timeout=2 + next(_counter) / 1e6, **options)


@pytest.fixture(scope="session")
def nursery(s3_url) -> Iterator[Nursery]:
    """A process that forks children which have torch and cloudckpt imported."""
    with Nursery() as nursery:
        yield nursery


def busy_threads() -> list[str]:
    """The threads of cloudckpt, but for the watch over connections."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("cloudckpt") and name != "cloudckpt-watch"]


@pytest.fixture(autouse=True)
def _no_thread_stays_behind() -> Iterator[None]:
    yield
    assert busy_threads() == []
