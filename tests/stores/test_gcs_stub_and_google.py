"""Google's own client finds in the stub of Cloud Storage what it expects of the service."""

import os

import pytest
from google.api_core.exceptions import Forbidden, NotFound, PreconditionFailed
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from google.cloud.storage import transfer_manager

from support.stubs.gcs import GcsStub

MIB = 1024 * 1024
KEY = "a b/ü+"


@pytest.fixture
def stub():
    with GcsStub("bucket") as running:
        yield running


@pytest.fixture
def bucket(stub):
    """The checksums of all that it sends and fetches are compared, by both sides."""
    client = storage.Client(
        "project", AnonymousCredentials(), client_options={"api_endpoint": stub.url}
    )
    yield client.bucket("bucket")
    client.close()


@pytest.mark.parametrize("size", [0, 1, 70_000, 5 * MIB])
def test_an_object_comes_back_whole_and_by_range(bucket, size):
    data = os.urandom(size)
    bucket.blob(KEY).upload_from_string(data, checksum="crc32c")
    assert bucket.blob(KEY).download_as_bytes(checksum="crc32c") == data
    found = bucket.get_blob(KEY)
    assert found.size == size
    if size > 100:
        assert found.download_as_bytes(start=50, end=99) == data[50:100]


def test_its_multipart_upload_is_taken(bucket, tmp_path):
    """The client's only use of the XML API, with a checksum for each part."""
    file = tmp_path / "large"
    file.write_bytes(os.urandom(12 * MIB + 5))
    transfer_manager.upload_chunks_concurrently(
        str(file),
        bucket.blob(KEY),
        chunk_size=5 * MIB,
        worker_type=transfer_manager.THREAD,
        max_workers=3,
        checksum="crc32c",
    )
    assert bucket.blob(KEY).download_as_bytes(checksum="crc32c") == file.read_bytes()


def test_generations_guard_writes_and_reads(bucket):
    blob = bucket.blob(KEY)
    blob.upload_from_string(b"1", if_generation_match=0)
    with pytest.raises(PreconditionFailed):
        blob.upload_from_string(b"2", if_generation_match=0)
    first = bucket.get_blob(KEY).generation
    blob.upload_from_string(b"3", if_generation_match=first)
    with pytest.raises(PreconditionFailed):
        blob.upload_from_string(b"4", if_generation_match=first)
    with pytest.raises(PreconditionFailed):
        blob.download_as_bytes(if_generation_match=first)
    assert blob.download_as_bytes() == b"3"


def test_listing_and_deleting(bucket):
    keys = [f"p/{index:02}&ü" for index in range(25)]
    for key in keys:
        bucket.blob(key).upload_from_string(b"x")
    listed = bucket.client.list_blobs("bucket", prefix="p/", page_size=7)
    assert [blob.name for blob in listed] == keys
    for key in keys[:20]:
        bucket.delete_blob(key)
    assert [blob.name for blob in bucket.list_blobs()] == keys[20:]
    with pytest.raises(NotFound):
        bucket.delete_blob(keys[0])


def test_a_refusal_arrives_as_its_error(bucket, stub):
    stub.state.denied = {"storage.objects.create"}
    with pytest.raises(Forbidden, match=r"storage\.objects\.create"):
        bucket.blob(KEY).upload_from_string(b"1", retry=None)
