"""The XML multipart requests of Google's store, carried out by a server that is not ours.

moto speaks the XML that S3 made and Google took over. It knows no ``x-goog-`` headers and no
JSON API, so this is about multipart uploads only, up to their completion.
"""

import uuid

import boto3
import pytest

from cloudckpt import Config, GCSOptions
from cloudckpt.checksum import CRC32C
from cloudckpt.errors import StoreError
from cloudckpt.stores.base import ObjectInfo
from cloudckpt.stores.gcs.store import GCSStore
from support.emulators import DUMMY_AWS, moto_server

PART = 5 * 1024**2


@pytest.fixture(scope="module")
def moto(needs):
    needs("moto")
    with moto_server() as url:
        yield boto3.client(
            "s3",
            endpoint_url=url,
            aws_access_key_id=DUMMY_AWS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=DUMMY_AWS["AWS_SECRET_ACCESS_KEY"],
            region_name="us-east-1",
        )


@pytest.fixture
def bucket(moto):
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    moto.create_bucket(Bucket=name)
    return name


@pytest.fixture
def store(moto, bucket):
    options = GCSOptions(
        endpoint_url=moto.meta.endpoint_url,
    )
    store = GCSStore(bucket, Config(gcs=options, checksum="on"))
    yield store
    store.close()


def put_part(store, upload, number, data):
    return store.put_part(upload, number, [memoryview(data)], checksum=CRC32C.of(data))


@pytest.mark.parametrize("key", ["run/object", "a b/größe+%2F&=;#1", "重み"])
def test_parts_become_the_object(store, moto, bucket, key, monkeypatch):
    pieces = [b"a" * PART, b"b" * PART, b"the last"]
    upload = store.create_upload(key, PART)
    parts = [put_part(store, upload, n, pieces[n - 1]) for n in (3, 1, 2)]
    whole = CRC32C.of(b"".join(pieces))
    info = ObjectInfo(key, 2 * PART + 8, "1", whole)  # moto names no generation
    monkeypatch.setattr(store, "head", lambda key: info)
    assert store.complete_upload(upload, sorted(parts, key=lambda part: part.number)) == info
    assert moto.get_object(Bucket=bucket, Key=key)["Body"].read() == b"".join(pieces)
    assert list(store.list_uploads("")) == []


def test_an_upload_is_listed_until_it_is_aborted(store):
    wanted = [store.create_upload(key, PART) for key in ("run/a", "run/a b+ü", "run/b")]
    store.create_upload("other", PART)
    put_part(store, wanted[0], 1, b"data")
    found = {(upload.key, upload.id) for upload in store.list_uploads("run/")}
    assert found == {(upload.key, upload.id) for upload in wanted}
    for upload in wanted:
        store.abort_upload(upload)
        store.abort_upload(upload)
    assert list(store.list_uploads("run/")) == []
    with pytest.raises(StoreError):
        put_part(store, wanted[0], 2, b"too late")


def test_parts_that_were_never_sent_are_refused(store):
    upload = store.create_upload("run/object", PART)
    part = put_part(store, upload, 1, b"data")
    store.abort_upload(upload)
    with pytest.raises(StoreError):
        store.complete_upload(upload, [part])


def test_a_bucket_that_is_not_there_is_named(moto):
    options = GCSOptions(endpoint_url=moto.meta.endpoint_url)
    store = GCSStore("no-such-bucket", Config(gcs=options))
    with pytest.raises(StoreError, match="the bucket does not exist"):
        store.create_upload("run/object", PART)
    store.close()
