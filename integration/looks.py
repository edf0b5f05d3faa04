"""Buckets and containers as their vendors' clients see them: without cloudckpt.

Each look knows how to put, get, list and remove, and what is unfinished. Keys are whole.
"""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from typing import Any, Protocol
from urllib.parse import quote

import boto3
import botocore.config
import google.auth
import requests
from azure.core.exceptions import HttpResponseError
from azure.identity import DefaultAzureCredential
from azure.storage.blob import ContainerClient
from botocore.exceptions import ClientError
from google.auth.transport.requests import AuthorizedSession

__all__ = ["AzureLook", "GCSLook", "Look", "S3Look"]

_TIMEOUT = 120.0  # seconds


class Look(Protocol):
    """What the tests want to know of a bucket."""

    def put(self, key: str, data: bytes) -> None:
        """Creates or replaces an object."""

    def get(self, key: str) -> bytes:
        """The bytes of an object."""

    def keys(self, prefix: str) -> list[str]:
        """The objects, finished ones only, in the order of their keys."""

    def uploads(self, prefix: str) -> list[str]:
        """The keys of objects that are being sent in parts."""

    def remove(self, prefix: str) -> None:
        """Removes whatever there is, finished or not, and what was replaced or deleted."""

    def left(self, prefix: str) -> list[str]:
        """Whatever there is and is billed, finished or not, current or not."""


class S3Look:
    """By boto3."""

    def __init__(self, bucket: str) -> None:
        # moto gives multipart objects a checksum that real S3 would not
        config = botocore.config.Config(
            response_checksum_validation="when_required", max_pool_connections=16
        )
        self.client = boto3.client("s3", config=config)
        self._bucket = bucket

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self._bucket, Key=key, Body=data)

    def get(self, key: str) -> bytes:
        return self.client.get_object(Bucket=self._bucket, Key=key)["Body"].read()

    def keys(self, prefix: str) -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=prefix
        )
        return [entry["Key"] for page in pages for entry in page.get("Contents", ())]

    def uploads(self, prefix: str) -> list[str]:
        return sorted(key for key, _ in self._uploads(prefix))

    def _uploads(self, prefix: str) -> list[tuple[str, str]]:
        pages = self.client.get_paginator("list_multipart_uploads").paginate(
            Bucket=self._bucket, Prefix=prefix
        )
        found = [entry for page in pages for entry in page.get("Uploads", ())]
        return [(entry["Key"], entry["UploadId"]) for entry in found]

    def remove(self, prefix: str) -> None:
        for key, upload in self._uploads(prefix):
            self.client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload)
        objects = self._objects(prefix)
        for start in range(0, len(objects), 1000):
            wanted = {"Objects": objects[start : start + 1000]}
            answer = self.client.delete_objects(Bucket=self._bucket, Delete=wanted)
            assert not answer.get("Errors"), answer["Errors"]

    def left(self, prefix: str) -> list[str]:
        return [*self.uploads(prefix), *(str(entry) for entry in self._objects(prefix))]

    def _objects(self, prefix: str) -> list[dict[str, str]]:
        """Keys and versions of all that was written and of the marks of what was deleted."""
        pages = self.client.get_paginator("list_object_versions").paginate(
            Bucket=self._bucket, Prefix=prefix
        )
        try:
            found = [
                entry
                for page in pages
                for entry in (*page.get("Versions", ()), *page.get("DeleteMarkers", ()))
            ]
        except ClientError as error:
            if error.response["Error"]["Code"] != "NotImplemented":
                raise
            return [{"Key": key} for key in self.keys(prefix)]  # R2 has no versions
        return [{"Key": entry["Key"], "VersionId": entry["VersionId"]} for entry in found]


class GCSLook:
    """By the JSON API; open multipart uploads, which only the XML API knows, by that.

    An emulator is told apart by ``STORAGE_EMULATOR_HOST``, as Google's libraries do it.
    """

    def __init__(self, bucket: str) -> None:
        emulator = os.environ.get("STORAGE_EMULATOR_HOST")
        self._endpoint = emulator or "https://storage.googleapis.com"
        self._session = requests.Session() if emulator else _authorized()
        self._bucket = quote(bucket, safe="")

    def create_bucket(self, name: str) -> None:
        """Makes a bucket in an emulator."""
        self._send("POST", "/storage/v1/b?project=test", json={"name": name})

    def put(self, key: str, data: bytes) -> None:
        head = (
            b"--cut\r\nContent-Type: application/json\r\n\r\n"
            + json.dumps({"name": key}).encode()
            + b"\r\n--cut\r\nContent-Type: application/octet-stream\r\n\r\n"
        )
        self._send(
            "POST",
            f"/upload/storage/v1/b/{self._bucket}/o?uploadType=multipart",
            data=head + data + b"\r\n--cut--\r\n",
            headers={"Content-Type": "multipart/related; boundary=cut"},
        )

    def get(self, key: str) -> bytes:
        return self._send("GET", f"{self._object(key)}?alt=media").content

    def keys(self, prefix: str) -> list[str]:
        return [item["name"] for item in self._objects({"prefix": prefix})]

    def _objects(self, query: dict[str, str]) -> list[dict[str, str]]:
        found = []
        while True:
            page = self._send("GET", f"/storage/v1/b/{self._bucket}/o", params=query).json()
            found += page.get("items", ())
            if not page.get("nextPageToken"):
                return found
            query = {**query, "pageToken": page["nextPageToken"]}

    def uploads(self, prefix: str) -> list[str]:
        return sorted(key for key, _ in self._uploads(prefix))

    def _uploads(self, prefix: str) -> Iterator[tuple[str, str]]:
        query = {"uploads": "", "prefix": prefix}
        while True:
            answer = self._send("GET", f"/{self._bucket}", params=query).content
            root = ElementTree.fromstring(answer)
            for entry in root.iterfind("{*}Upload"):
                yield entry.findtext("{*}Key") or "", entry.findtext("{*}UploadId") or ""
            if root.findtext("{*}IsTruncated") != "true":
                return
            query["key-marker"] = root.findtext("{*}NextKeyMarker") or ""
            query["upload-id-marker"] = root.findtext("{*}NextUploadIdMarker") or ""

    def remove(self, prefix: str) -> None:
        for key, upload in list(self._uploads(prefix)):
            self._send("DELETE", f"/{self._bucket}/{quote(key)}", params={"uploadId": upload})
        for item in self._objects({"prefix": prefix, "versions": "true"}):
            query = {"generation": item["generation"]}
            self._send("DELETE", self._object(item["name"]), params=query)

    def left(self, prefix: str) -> list[str]:
        found = self._objects({"prefix": prefix, "versions": "true"})
        return [*self.uploads(prefix), *(f"{one['name']}#{one['generation']}" for one in found)]

    def _object(self, key: str) -> str:
        return f"/storage/v1/b/{self._bucket}/o/{quote(key, safe='')}"

    def _send(self, method: str, path: str, **request: Any) -> requests.Response:
        url = self._endpoint + path
        answer = self._session.request(method, url, timeout=_TIMEOUT, **request)
        answer.raise_for_status()
        return answer


def _authorized() -> requests.Session:
    scope = "https://www.googleapis.com/auth/devstorage.read_write"
    credentials, _ = google.auth.default(scopes=[scope])
    return AuthorizedSession(credentials)


class AzureLook:
    """By azure-storage-blob."""

    def __init__(self, container: str, endpoint: str = "") -> None:
        """``endpoint`` is needed where no connection string is in the environment."""
        text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING")
        if text and not endpoint:
            self.client = ContainerClient.from_connection_string(text, container)
            return
        account = os.environ.get("AZURE_STORAGE_ACCOUNT", "")
        secret = os.environ.get("AZURE_STORAGE_KEY") or os.environ.get("AZURE_STORAGE_SAS_TOKEN")
        self.client = ContainerClient(
            endpoint or f"https://{account}.blob.core.windows.net",
            container,
            credential=secret or DefaultAzureCredential(),
        )

    def put(self, key: str, data: bytes) -> None:
        self.client.upload_blob(key, data, overwrite=True)

    def get(self, key: str) -> bytes:
        return self.client.download_blob(key).readall()

    def keys(self, prefix: str) -> list[str]:
        return list(self.client.list_blob_names(name_starts_with=prefix))

    def uploads(self, prefix: str) -> list[str]:
        committed = set(self.keys(prefix))
        found = self.client.list_blobs(prefix, include=["uncommittedblobs"])
        return sorted({blob.name for blob in found} - committed)

    def remove(self, prefix: str) -> None:
        for name in self.uploads(prefix):
            self.put(name, b"")  # blocks alone can't be deleted; a blob in their place can
        names = {blob.name for blob in self.client.list_blobs(prefix)}
        for name in sorted(names, reverse=True):  # what is in a directory before itself
            self.client.delete_blob(name, delete_snapshots="include")
        for name, version in self._versions(prefix):
            if version:
                self.client.delete_blob(name, version_id=version)

    def left(self, prefix: str) -> list[str]:
        versions = (f"{name} {version or ''}" for name, version in self._versions(prefix))
        return [*self.uploads(prefix), *versions]

    def _versions(self, prefix: str) -> list[tuple[str, str | None]]:
        try:
            found = list(self.client.list_blobs(prefix, include=["versions", "snapshots"]))
        except HttpResponseError:  # a hierarchical namespace has no versions
            found = list(self.client.list_blobs(prefix))
        return [(blob.name, blob.version_id) for blob in found]
