# ruff: noqa: D103 - a test's name is its docstring
"""The loopback server speaks enough of Google's APIs for Google's client, and for our store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from google.api_core.exceptions import NotFound, PreconditionFailed
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage  # type: ignore[import-untyped]

from benchmarks.server.process import ServerHandle
from cloudckpt import Config, GCSOptions
from cloudckpt.checksum import CRC32C
from cloudckpt.stores.gcs.store import GCSStore

MIB = 1024 * 1024


def _anonymous() -> Any:
    return AnonymousCredentials()  # type: ignore[no-untyped-call]


@pytest.fixture
def bucket(server: ServerHandle) -> Any:
    server.clear()
    server.reset()
    options = {"api_endpoint": server.endpoint}
    client = storage.Client("project", _anonymous(), client_options=options)
    return client.bucket("keep")


@pytest.fixture
def store(server: ServerHandle) -> Iterator[GCSStore]:
    opened = GCSStore("keep", Config(gcs=GCSOptions(endpoint_url=server.endpoint)))
    yield opened
    opened.close()


@pytest.mark.parametrize("size", [0, 1, 2, 70_000, 5 * MIB])
def test_an_object_comes_back_whole_and_by_range(bucket: Any, size: int) -> None:
    data = os.urandom(size)
    blob = bucket.blob("a b/ü+")
    blob.upload_from_string(data)
    assert blob.download_as_bytes(checksum=None) == data
    assert bucket.get_blob("a b/ü+").size == size
    if size > 100:
        assert blob.download_as_bytes(start=50, end=99, checksum=None) == data[50:100]


def test_generations_guard_the_write(bucket: Any) -> None:
    blob = bucket.blob("k")
    blob.upload_from_string(b"1", if_generation_match=0)
    with pytest.raises(PreconditionFailed):
        blob.upload_from_string(b"2", if_generation_match=0)
    first = bucket.get_blob("k").generation
    blob.upload_from_string(b"3", if_generation_match=first)
    with pytest.raises(PreconditionFailed):
        blob.upload_from_string(b"4", if_generation_match=first)
    with pytest.raises(PreconditionFailed):
        blob.download_as_bytes(if_generation_match=first)
    assert blob.download_as_bytes(checksum=None) == b"3"


def test_listing_pages_groups_and_deletes(bucket: Any) -> None:
    keys = [f"p/{index % 5}/{index:02}&" for index in range(25)]
    for key in keys:
        bucket.blob(key).upload_from_string(b"x")
    listed = bucket.client.list_blobs("keep", prefix="p/", page_size=7)
    assert [blob.name for blob in listed] == sorted(keys)
    listed = bucket.client.list_blobs("keep", prefix="p/", delimiter="/", page_size=2)
    assert not list(listed)
    assert sorted(listed.prefixes) == [f"p/{index}/" for index in range(5)]
    bucket.delete_blob(keys[0])
    with pytest.raises(NotFound):
        bucket.delete_blob(keys[0])


def test_our_store_uploads_in_parts_and_deletes_one_by_one(
    bucket: Any, store: GCSStore, server: ServerHandle
) -> None:
    pieces = [os.urandom(5 * MIB), os.urandom(5 * MIB), b"end"]
    upload = store.create_upload("ü/big", 5 * MIB)
    parts = [
        store.put_part(upload, number, [memoryview(piece)], checksum=CRC32C.of(piece))
        for number, piece in enumerate(pieces, 1)
    ]
    made = store.complete_upload(upload, parts)
    assert store.get("ü/big") == (bytearray(b"".join(pieces)), made)
    across = bytearray(6 * MIB)
    store.get_range("ü/big", 4 * MIB, [memoryview(across)], if_version=made.version)
    assert across == b"".join(pieces)[4 * MIB : 10 * MIB]
    bucket.blob("ü/other").upload_from_string(b"x")
    for key in ("ü/big", "ü/missing", "ü/other"):
        store.delete(key)
    assert not list(store.list(""))


def test_a_sink_drops_large_bodies(server: ServerHandle) -> None:
    opened = GCSStore("sink", Config(gcs=GCSOptions(endpoint_url=server.endpoint)))
    large = memoryview(bytes(9 * MIB))
    opened.put("large", [large], checksum=CRC32C.of(large))
    opened.put("small", [large[:3]], checksum=CRC32C.of(large[:3]))
    assert opened.head("large").size == 9 * MIB
    assert opened.get("small")[0] == bytes(3)
    opened.close()
