"""Google Cloud Storage's JSON API: the requests for objects, and what their answers hold.

The object's name is one segment of the path: its slashes are encoded.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

from cloudckpt.checksum import to_base64
from cloudckpt.config import GCSOptions
from cloudckpt.errors import (
    ConfigError,
    ObjectNotFoundError,
    ServerError,
    StoreError,
    TransientStoreError,
)
from cloudckpt.stores.base import ATTEMPT, Body, ObjectInfo, Progress, Retry, nbytes, random_suffix
from cloudckpt.stores.http.bodies import Reply
from cloudckpt.stores.http.messages import encode_query, http_date, iso_date
from cloudckpt.stores.pages import Marks, all_pages
from cloudckpt.stores.rest import RestStore

__all__ = [
    "CACHE_CONTROL",
    "JsonObjects",
    "carried_out",
    "creation_headers",
    "generation",
    "metadata_of",
    "parse_crc32c",
]

_NO_GENERATION = str(2**63 - 1)  # generations are times: no object has the last one
_RESOURCE = "name,size,generation,crc32c,metadata,timeCreated"

_LISTED = "name,size,generation,updated"
_BRIEF = {"prettyPrint": "false"}

Page = tuple[list[ObjectInfo], list[str]]
"""The objects and the folders, each with a slash at its end, that a page of a listing has."""

CACHE_CONTROL = "no-store"
"""Google caches publicly readable objects for an hour unless they forbid it; replacing or deleting
an object leaves the cache unchanged: https://cloud.google.com/storage/docs/caching"""

_HEADER_VALUE = re.compile(r"[\x20-\x7e]*")


def creation_headers(options: GCSOptions) -> dict[str, str]:
    """What the options say about new objects, as the XML API takes it.

    Raises:
        ConfigError: If it can't travel in headers.
    """
    wanted = {
        "Cache-Control": CACHE_CONTROL,
        "x-goog-storage-class": options.storage_class,
        "x-goog-encryption-kms-key-name": options.kms_key_name,
        **{f"x-goog-meta-{name}": value for name, value in options.metadata},
    }
    headers = {name: value for name, value in wanted.items() if value is not None}
    for name, value in headers.items():
        if not _HEADER_VALUE.fullmatch(value):
            raise ConfigError(f"{name}={value!r} can't be sent in a header; write plain ASCII")
    return headers


def metadata_of(options: GCSOptions, attempt: str) -> dict[str, str]:
    """The metadata of a new object: the options', and the name of the write, if it has one."""
    return {**dict(options.metadata), **({ATTEMPT: attempt} if attempt else {})}


def _resource_of(options: GCSOptions, attempt: str = "") -> dict[str, Any]:
    """What `creation_headers` says, and the name of the write, as the JSON API takes it.

    The key of the encryption is a parameter of requests.
    """
    wanted = {
        "contentType": "application/octet-stream",
        "cacheControl": CACHE_CONTROL,
        "storageClass": options.storage_class,
        "metadata": metadata_of(options, attempt) or None,
    }
    return {name: value for name, value in wanted.items() if value is not None}


class JsonObjects:
    """The objects of one bucket.

    Args:
        store: Whose requests they are.
        endpoint: The URL that paths are appended to.
        bucket: The bucket's name.
        options: What new objects get, and who pays.
        checksums: Whether to send CRC32C for the store to verify.
    """

    def __init__(
        self,
        store: RestStore,
        endpoint: str,
        bucket: str,
        options: GCSOptions,
        *,
        checksums: bool,
    ) -> None:
        self._store = store
        self._endpoint = endpoint
        self._path = f"/storage/v1/b/{quote(bucket, safe='')}/o"
        self._tokens: dict[tuple[object, ...], str] = {}  # of copies that are under way
        self._options = options
        self._checksums = checksums

    def url(self, key: str, query: Mapping[str, str]) -> str:
        """The URL of an object's metadata."""
        return self._endpoint + self._call(self._object_path(key), query)

    def content_url(self, key: str, if_generation: str | None) -> str:
        """The URL of an object's content, of that generation only if one is given.

        The URL of the metadata with ``alt=media`` may be answered by a redirect to this one, where
        Google's own clients read: https://cloud.google.com/storage/docs/request-endpoints
        """
        query = {"alt": "media", "ifGenerationMatch": if_generation or ""}
        return f"{self._endpoint}/download{self._call(self._object_path(key), query)}"

    def _call(self, path: str, query: Mapping[str, str]) -> str:
        """A path with its query. The discovery document demands ``userProject`` there."""
        given = {name: value for name, value in query.items() if value}
        if self._options.user_project is not None:
            given["userProject"] = self._options.user_project
        return f"{path}?{encode_query(given)}" if given else path

    def _object_path(self, key: str) -> str:
        return f"{self._path}/{quote(key, safe='')}"

    def insert(
        self,
        key: str,
        body: Body,
        *,
        crc32c: int,
        attempt: str = "",
        if_generation: str | None = None,
        progress: Progress | None = None,
    ) -> ObjectInfo:
        """Writes an object, its metadata and checksum in one request.

        Args:
            key: The key.
            body: The bytes.
            crc32c: Of the bytes.
            attempt: The name that the object keeps of its write; none if it is empty.
            if_generation: Only if the object has this generation; "0" if there must be none.
            progress: See :data:`~cloudckpt.stores.base.Progress`.
        """
        options = self._options
        resource = _resource_of(options, attempt)
        if self._checksums:
            resource["crc32c"] = to_base64(crc32c)
        boundary = f"cloudckpt-{random_suffix()}{random_suffix()}"
        head = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n"
            f"{json.dumps(resource)}\r\n"
            f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
        ).encode()
        query = {"uploadType": "multipart", "name": key, "fields": _RESOURCE}
        if if_generation is not None:
            query["ifGenerationMatch"] = if_generation
        if options.kms_key_name is not None:
            query["kmsKeyName"] = options.kms_key_name
        size = nbytes(body)
        with self._store.exchange(
            "POST",
            self._endpoint + self._call(f"/upload{self._path}", query),
            {"Content-Type": f"multipart/related; boundary={boundary}"},
            [memoryview(head), *body, memoryview(f"\r\n--{boundary}--\r\n".encode())],
            _of_payload(progress, len(head), size),
            key=key,
        ) as reply:
            found = self._parse(_answer(reply), key)
        if found.size != size:
            raise ServerError(
                f"{size} bytes were sent, but {found.size} stored", uri=self._store.uri(key)
            )
        return found

    def stat(self, key: str) -> ObjectInfo:
        """What an object's metadata say, which no cache keeps.

        Raises:
            ObjectNotFoundError: If there is none.
        """
        url = self.url(key, {"fields": _RESOURCE})
        with self._store.exchange("GET", url, {}, key=key) as reply:
            answered = http_date(reply.headers.get("Date", ""))
            return dataclasses.replace(self._parse(_answer(reply), key), answered=answered)

    def checked(self, made: ObjectInfo, size: int, crc32c: int | None) -> ObjectInfo:
        """Returns an object made of parts if it matches them.

        Raises:
            StoreError: If it does not. It is deleted; its parts are gone, so there is no retry.
        """
        if made.size == size and made.checksum in (None, crc32c):
            return made
        with contextlib.suppress(StoreError):
            self._store.delete(made.key)
        raise StoreError(
            "the store put the parts together wrongly: size or CRC32C are not theirs; the object "
            "was deleted",
            uri=self._store.uri(made.key),
        )

    def pages(self, prefix: str, retry: Retry, delimiter: str = "") -> Iterator[Page]:
        """The objects and the folders of each page of a listing."""
        query = {
            "projection": "noAcl",
            "prefix": prefix,
            "delimiter": delimiter,
            "fields": f"items({_LISTED}),{'prefixes,' if delimiter else ''}nextPageToken",
            **_BRIEF,
        }

        def ask(marks: Marks) -> tuple[Page, Marks | None]:
            more = {"pageToken": marks[0]} if marks else {}
            url = self._endpoint + self._call(self._path, {**query, **more})
            with self._store.exchange("GET", url, {}, key=prefix) as reply:
                page = _answer(reply)
                found = [_listed(item) for item in page.get("items", ())]
                token = page.get("nextPageToken")
                return (found, sorted(page.get("prefixes", ()))), (token,) if token else None

        return all_pages(self._store.uri(prefix), ask, retry)

    def delete(self, key: str, if_generation: str | None) -> None:
        """Removes an object; a missing object is not an error."""
        url = self.url(key, {"ifGenerationMatch": if_generation or "", **_BRIEF})
        with (
            contextlib.suppress(ObjectNotFoundError),
            self._store.exchange("DELETE", url, {}, key=key),
        ):
            pass

    def copy(
        self, source: JsonObjects, found: ObjectInfo, key: str, *, attempt: str, if_absent: bool
    ) -> ObjectInfo:
        """Copies an object of the bucket of ``source``.

        Google copies at once within a location and storage class. Otherwise it takes several
        requests, each for as much as Google likes; a retry continues where the last one ended.
        """
        options = self._options
        kms = options.kms_key_name
        resource = {**_resource_of(options, attempt), "metadata": metadata_of(options, attempt)}
        body = json.dumps({**resource, **({"kmsKeyName": kms} if kms else {})}).encode()
        query = {
            "destinationKmsKeyName": kms or "",
            "ifGenerationMatch": "0" if if_absent else "",
            "ifSourceGenerationMatch": generation(found.version),
            **_BRIEF,
        }
        origin = source._object_path(found.key)
        path = f"{origin}/rewriteTo{self._object_path(key).removeprefix('/storage/v1')}"
        copied = (path, found.version, attempt, if_absent)
        token = self._tokens.pop(copied, "")
        while True:
            url = self._endpoint + self._call(path, {**query, "rewriteToken": token})
            try:
                with self._store.exchange(
                    "POST",
                    url,
                    {"Content-Type": "application/json"},
                    [memoryview(body)],
                    key=key,
                    is_long=True,
                ) as reply:
                    answer = _answer(reply)
                    if answer["done"]:
                        made = self._parse(answer["resource"], key)
                        break
                    token = str(answer["rewriteToken"])
            except TransientStoreError:
                if token:
                    self._tokens[copied] = token
                raise
        if made.size != found.size:
            raise ServerError(
                f"{found.size} bytes were copied, but {made.size} stored", uri=self._store.uri(key)
            )
        return made

    def _parse(self, resource: Mapping[str, Any], key: str) -> ObjectInfo:
        version = str(int(resource["generation"]))
        size = int(resource["size"])
        attempt = str(dict(resource.get("metadata") or {}).get(ATTEMPT, ""))
        crc32c = parse_crc32c(f"crc32c={resource.get('crc32c', '')}")
        modified = iso_date(str(resource.get("timeCreated", "")))
        return ObjectInfo(key, size, version, crc32c, modified, attempt)


def _listed(item: Mapping[str, Any]) -> ObjectInfo:
    """An object as a listing describes it."""
    modified = iso_date(str(item.get("updated", "")))
    return ObjectInfo(
        str(item["name"]), int(item["size"]), str(int(item["generation"])), modified=modified
    )


def _answer(reply: Reply) -> dict[str, Any]:
    answer = json.loads(reply.read_all())
    return answer if isinstance(answer, dict) else {}


@contextlib.contextmanager
def carried_out() -> Iterator[None]:
    """Wraps a request made after a write: its failure does not mean that nothing was written."""
    try:
        yield
    except StoreError as error:
        error.certain = False
        raise


def generation(version: str) -> str:
    """The generation to compare with; one that no object has if ``version`` is not a number."""
    return version if version.isascii() and version.isdigit() else _NO_GENERATION


def parse_crc32c(text: str) -> int | None:
    """The CRC32C in a value of ``x-goog-hash``; None if there is none."""
    match = re.search(r"\bcrc32c=([A-Za-z0-9+/]{6}==)", text)
    return int.from_bytes(base64.b64decode(match.group(1)), "big") if match else None


def _of_payload(progress: Progress | None, before: int, size: int) -> Progress | None:
    """Reports of a body only the ``size`` bytes after the first ``before``."""
    if progress is None:
        return None
    sent = reported = 0

    def moved(count: int) -> None:
        nonlocal sent, reported
        sent += count
        payload = min(max(sent - before, 0), size)
        step, reported = payload - reported, payload
        progress(step)

    return moved
