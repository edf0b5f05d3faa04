"""Running servers: the way to them that can be broken, and what is in them without cloudckpt."""

import contextlib
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from azure.storage.blob import ContainerClient

from cloudckpt.checkpoint.committed import CommitObject, Fetched
from cloudckpt.stores.base import ObjectInfo
from dcp.places import boto_client
from support.emulators import azurite_server
from support.stubs.gcs import GcsStub
from support.stubs.gcs_state import Attributes
from support.wire.naming import Naming, azure_naming, google_naming, s3_naming
from support.wire.proxy import FaultyProxy

BUCKET = "faults"
AZURITE = os.environ.get(
    "CLOUDCKPT_TEST_AZURITE"
)  # before the tests are given surroundings of their own


class S3Bucket:
    """By boto3, as the others by their vendor's own means.

    ``uploads`` are the keys of what was begun, and is neither there nor discarded.
    """

    def __init__(self, client, name: str) -> None:
        self.root = f"s3://{name}"
        self.name = name
        self._client = client

    def keys(self, prefix: str) -> set[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self.name, Prefix=prefix
        )
        return {entry["Key"] for page in pages for entry in page.get("Contents", ())}

    def uploads(self, prefix: str) -> list[str]:
        entries = self._client.list_multipart_uploads(Bucket=self.name).get("Uploads", ())
        return [entry["Key"] for entry in entries if entry["Key"].startswith(prefix)]

    def get(self, key: str) -> bytes:
        return self._client.get_object(Bucket=self.name, Key=key)["Body"].read()

    def put(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=self.name, Key=key, Body=data)

    def delete(self, key: str) -> None:
        self._client.delete_object(Bucket=self.name, Key=key)


class GoogleBucket:
    """In the memory of the stub."""

    root = f"gs://{BUCKET}"

    def __init__(self, stub: GcsStub) -> None:
        self._state = stub.state

    def keys(self, prefix: str) -> set[str]:
        return set(self._state.keys(BUCKET, prefix))

    def uploads(self, prefix: str) -> list[str]:
        with self._state.lock:
            begun = [upload.key for upload in self._state.uploads.values()]
        return [key for key in begun if key.startswith(prefix)]

    def get(self, key: str) -> bytes:
        return self._state.find(BUCKET, key).data

    def put(self, key: str, data: bytes) -> None:
        self._state.put(BUCKET, key, data, Attributes())

    def delete(self, key: str) -> None:
        self._state.delete(BUCKET, key)

    def forget(self, prefix: str) -> None:
        with self._state.lock:
            begun = {i: u for i, u in self._state.uploads.items() if u.key.startswith(prefix)}
            for upload in begun:
                del self._state.uploads[upload]
        for key in self._state.keys(BUCKET, prefix):
            self._state.delete(BUCKET, key)


class AzureBucket:
    """By Azure's SDK; blobs with nothing but uncommitted blocks count as uploads."""

    root = f"az://{BUCKET}"

    def __init__(self, client: ContainerClient) -> None:
        self._client = client

    def keys(self, prefix: str) -> set[str]:
        return set(self._client.list_blob_names(name_starts_with=prefix))

    def uploads(self, prefix: str) -> list[str]:
        blobs = self._client.list_blobs(name_starts_with=prefix, include=["uncommittedblobs"])
        return sorted({blob.name for blob in blobs} - self.keys(prefix))

    def get(self, key: str) -> bytes:
        return self._client.download_blob(key).readall()

    def put(self, key: str, data: bytes) -> None:
        self._client.upload_blob(key, data, overwrite=True)

    def delete(self, key: str) -> None:
        self._client.delete_blob(key)


Bucket: TypeAlias = S3Bucket | GoogleBucket | AzureBucket


class Folder:
    """The objects under a prefix of a bucket."""

    def __init__(self, bucket: Bucket, prefix: str) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self.root = bucket.root
        self.bucket_name = bucket.root.rpartition("/")[2]
        self.get, self.put, self.delete = bucket.get, bucket.put, bucket.delete

    def uri(self, name: str) -> str:
        """Of what is in this folder."""
        return f"{self.root}/{self._prefix}{name}"

    def key_of(self, uri: str) -> str:
        return uri.removeprefix(f"{self.root}/")

    def uri_of(self, key: str) -> str:
        return f"{self.root}/{key}"

    def forget(self) -> None:
        """Gives back the memory of what is there, if it is that of this process."""
        if isinstance(self._bucket, GoogleBucket):
            self._bucket.forget(self._prefix)

    def objects(self) -> set[str]:
        """Their keys."""
        return self._bucket.keys(self._prefix)

    def key(self, suffix: str) -> str:
        """The only key that ends so."""
        [key] = [key for key in self.objects() if key.endswith(suffix)]
        return key

    def uploads(self) -> list[str]:
        """The keys of what was begun, and is neither there nor discarded."""
        return self._bucket.uploads(self._prefix)

    def assert_tidy(self) -> None:
        """Nothing is there but one checkpoint and what it names."""
        assert self.uploads() == []
        commit = self.key("/.metadata")
        run = commit.rpartition("/")[0]
        data = self.get(commit)
        fetched = Fetched(ObjectInfo(commit, len(data), ""), bytearray(data))
        named = CommitObject.parse(fetched, commit).names(commit)
        assert self.objects() == {commit, *(f"{run}/{name}" for name in named)}


@dataclass(frozen=True)
class Place:
    """A running server with a bucket, and a proxy before it."""

    url: str
    bucket: Bucket
    proxy: FaultyProxy


@contextlib.contextmanager
def _place(
    url: str, bucket: Bucket, naming: Naming, tls: ssl.SSLContext | None = None
) -> Iterator[Place]:
    with FaultyProxy(url, naming=naming, tls=tls) as proxy:
        yield Place(url, bucket, proxy)


@contextlib.contextmanager
def s3_place(url: str, tls: ssl.SSLContext | None = None) -> Iterator[Place]:
    """In a moto server that is there already; the way through the proxy speaks TLS if wanted."""
    with contextlib.closing(boto_client(url)) as client:
        client.create_bucket(Bucket=BUCKET)
        with _place(url, S3Bucket(client, BUCKET), s3_naming, tls) as place:
            yield place


@contextlib.contextmanager
def google_place() -> Iterator[Place]:
    """In a stub of Google's protocol, which goes further than the emulators do."""
    with GcsStub(BUCKET) as stub, _place(stub.url, GoogleBucket(stub), google_naming) as place:
        yield place


@contextlib.contextmanager
def azure_place() -> Iterator[Place]:
    """In Azurite."""
    with (
        azurite_server(AZURITE) as server,
        ContainerClient.from_connection_string(server.connection_string, BUCKET) as client,
    ):
        client.create_container()
        url = server.url.removesuffix(f"/{server.account}")
        with _place(url, AzureBucket(client), azure_naming) as place:
            yield place
