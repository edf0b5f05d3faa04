"""What is not about bytes, on S3: requests that boto3 composes and whose answers it reads."""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote_plus

import urllib3
from botocore import UNSIGNED
from botocore.awsrequest import AWSPreparedRequest, AWSResponse

from cloudckpt.errors import ConnectionLostError, ObjectNotFoundError
from cloudckpt.stores.base import ATTEMPT, ObjectInfo, Part, Retry, Upload
from cloudckpt.stores.http.messages import iso_date
from cloudckpt.stores.pages import all_pages
from cloudckpt.stores.rest import RestStore
from cloudckpt.stores.s3.access import BucketAccess
from cloudckpt.stores.sdk import SdkCalls
from cloudckpt.stores.xml_api import check_root, error_fields

__all__ = ["Control"]

_BEGINNING = 64 * 1024  # bytes; white space comes before what is told late
_LISTINGS = {
    "ListObjectsV2": "ListBucketResult",
    "ListMultipartUploads": "ListMultipartUploadsResult",
}
"""The roots of answers that botocore takes for empty if they are no such answers."""

_Page = tuple[list[ObjectInfo], list[str]]
"""The objects and the names of folders that a page of a listing has."""


class Control:
    """The control requests of one bucket.

    Args:
        store: Whose requests they are.
        access: To the bucket.
        created: Headers of every request that makes an object.
        checksums: Whether the store knows CRC32C.
    """

    def __init__(
        self,
        store: RestStore,
        access: BucketAccess,
        created: Mapping[str, str],
        *,
        checksums: bool,
    ) -> None:
        self._store = store
        self._access = access
        self._created = created
        self._checksums = checksums
        self._any_prefix = access.dialect.any_prefix
        self._calls = SdkCalls(store)
        self._client = access.client
        events = self._client.meta.events
        events.register("choose-signer.s3", lambda **_: UNSIGNED)  # the store signs
        events.register_first("before-sign.s3", _without_sessions)
        events.register("before-send.s3", self._send)

    def _send(self, request: AWSPreparedRequest, event_name: str, **_: Any) -> AWSResponse:
        answer = self._calls.send(request.method, request.url, request.headers, request.body)
        # a success is sent before the work is done
        if b"<Error" in answer.body[:_BEGINNING] and error_fields(answer.body):
            uri = self._calls.uri
            raise self._store.belated(answer.headers, answer.body, request.method, uri)
        if (root := _LISTINGS.get(event_name.rpartition(".")[2])) is not None:
            check_root(answer.body, root, self._calls.uri)
        raw = urllib3.HTTPResponse(io.BytesIO(answer.body), preload_content=False)
        return AWSResponse(request.url, answer.status, answer.headers, raw)

    def list(self, prefix: str, retry: Retry) -> Iterator[ObjectInfo]:
        """The objects whose key begins with ``prefix``, in order; page by page, if possible."""
        if self._any_prefix:
            for objects, _ in self._pages(prefix, retry):
                yield from objects
            return
        pages = self._pages(_folder_of(prefix), retry)
        found = [info for objects, _ in pages for info in objects]
        yield from sorted(
            (info for info in found if info.key.startswith(prefix)), key=lambda info: info.key
        )

    def list_level(self, prefix: str, retry: Retry) -> Iterator[ObjectInfo | str]:
        """The objects and the folders directly beneath ``prefix``; page by page, if possible."""
        pages = self._pages(prefix, retry, Delimiter="/")
        if self._any_prefix:
            for objects, folders in pages:
                yield from objects
                yield from folders
            return
        all_objects, all_folders = list[ObjectInfo](), set[str]()
        for objects, folders in pages:
            all_objects += objects
            all_folders.update(folders)
        yield from sorted(all_objects, key=lambda info: info.key)
        yield from sorted(all_folders)

    def _pages(self, prefix: str, retry: Retry, **wanted: str) -> Iterator[_Page]:
        def ask(marks: tuple[str, ...]) -> tuple[_Page, tuple[str, ...] | None]:
            more = {"ContinuationToken": marks[0]} if marks else {}
            with self._calls.about(prefix):
                page = self._client.list_objects_v2(
                    Bucket=self._access.bucket, Prefix=prefix, **wanted, **more
                )
                found = _objects_in(page), _folders_in(page, prefix)
            follows = page.get("IsTruncated", False)
            return found, (page.get("NextContinuationToken", ""),) if follows else None

        return all_pages(self._store.uri(prefix), ask, retry)

    def list_uploads(self, prefix: str, retry: Retry) -> Iterator[Upload]:
        """The uploads under ``prefix`` that are open, page by page."""
        asked = prefix if self._any_prefix else _folder_of(prefix)

        def ask(marks: tuple[str, ...]) -> tuple[Sequence[Upload], tuple[str, ...] | None]:
            named = zip(("KeyMarker", "UploadIdMarker"), marks, strict=False)
            # directory buckets have no markers by uploads
            more = {name: mark for name, mark in named if mark or self._any_prefix}
            with self._calls.about(prefix):
                page = self._client.list_multipart_uploads(
                    Bucket=self._access.bucket, Prefix=asked, EncodingType="url", **more
                )
                found = _uploads_in(page)
            following = (
                _key(page, page.get("NextKeyMarker", "")),
                page.get("NextUploadIdMarker", ""),
            )
            return found, following if page.get("IsTruncated") else None

        for uploads in all_pages(self._store.uri(prefix), ask, retry):
            yield from (upload for upload in uploads if upload.key.startswith(prefix))

    def delete(self, key: str, tag: str | None) -> None:
        """Removes an object; on the condition that it has an ETag, if one is given."""
        condition = {} if tag is None else {"IfMatch": tag}
        with contextlib.suppress(ObjectNotFoundError), self._calls.about(key):
            self._client.delete_object(Bucket=self._access.bucket, Key=key, **condition)

    def copy(
        self,
        source: BucketAccess,
        found: ObjectInfo,
        key: str,
        *,
        attempt: str,
        if_absent: bool,
    ) -> tuple[str, int | None]:
        """Copies an object as :meth:`~cloudckpt.stores.base.ObjectStore.copy` says.

        Args:
            source: The bucket that it is in.
            found: The object.
            key: The key of the copy.
            attempt: The name that the copy keeps of its write; none if it is empty.
            if_absent: Whether the copy must not replace an object.

        Returns:
            The copy's ETag, empty if the store tells none, and its CRC32C, if it tells that.
        """
        algorithm = {"ChecksumAlgorithm": "CRC32C"} if self._checksums else {}
        condition = {"If-None-Match": "*"} if if_absent else {}  # which older boto3 does not know
        with self._calls.about(key, {**self._created, **condition}, is_long=True):
            answer = self._client.copy_object(
                Bucket=self._access.bucket,
                Key=key,
                MetadataDirective="REPLACE",
                Metadata={ATTEMPT: attempt} if attempt else {},
                TaggingDirective="REPLACE",
                **_source(source, found),
                **algorithm,
            )
            made = answer.get("CopyObjectResult", {})
            of_whole = made.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT"
            return made.get("ETag", ""), _crc32c(made) if of_whole else None

    def copy_part(
        self,
        source: BucketAccess,
        found: ObjectInfo,
        upload: Upload,
        number: int,
        start: int,
        stop: int,
    ) -> Part:
        """The same for a part; of a source up to 5 MB, S3 copies no range but the whole."""
        span = {"CopySourceRange": f"bytes={start}-{stop - 1}"}
        if (start, stop) == (0, found.size):
            span = {}
        with self._calls.about(upload.key, is_long=True):
            answer = self._client.upload_part_copy(
                Bucket=self._access.bucket,
                Key=upload.key,
                UploadId=upload.id,
                PartNumber=number,
                **_source(source, found),
                **span,
            )
            made = answer.get("CopyPartResult", {})
            if not made.get("ETag"):
                raise ConnectionLostError("the answer has no ETag", uri=self._store.uri(upload.key))
            return Part(number, stop - start, made["ETag"], _crc32c(made))

    def close(self) -> None:
        """Gives back what the client holds."""
        self._client.close()


def _without_sessions(request: Any, **_: Any) -> None:
    """Nobody signs here: botocore would look for the session of a copy, and fail."""
    request.context.get("signing", {}).pop("signing_name", None)


def _folder_of(prefix: str) -> str:
    """The longest prefix of a prefix that ends in a slash; empty if there is none."""
    return prefix[: prefix.rfind("/") + 1]


def _key(page: Mapping[str, Any], key: str) -> str:
    """A key in a listing of uploads, which boto3 leaves encoded."""
    return unquote_plus(key) if page.get("EncodingType") == "url" else key


def _objects_in(page: Mapping[str, Any]) -> list[ObjectInfo]:
    """The objects that a page of a listing names; KeyError if it does not say what they are."""
    return [
        ObjectInfo(
            entry["Key"],
            entry["Size"],
            entry.get("ETag", ""),
            modified=iso_date(entry.get("LastModified", "")),
        )
        for entry in page.get("Contents", ())
    ]


def _folders_in(page: Mapping[str, Any], prefix: str) -> list[str]:
    """The names beneath a prefix that a page of a listing has; KeyError as `_objects_in`."""
    return [
        folder["Prefix"].removeprefix(prefix).rstrip("/")
        for folder in page.get("CommonPrefixes", ())
    ]


def _uploads_in(page: Mapping[str, Any]) -> list[Upload]:
    return [
        Upload(_key(page, entry["Key"]), entry["UploadId"], 0, iso_date(entry.get("Initiated", "")))
        for entry in page.get("Uploads", ())
    ]


def _source(source: BucketAccess, found: ObjectInfo) -> dict[str, Any]:
    return {
        "CopySource": {"Bucket": source.bucket, "Key": found.key},
        "CopySourceIfMatch": found.version,
    }


def _crc32c(made: Mapping[str, Any]) -> int | None:
    """The CRC32C that a result tells; one with a number behind it is of parts, not of bytes."""
    text = made.get("ChecksumCRC32C", "")
    return int.from_bytes(base64.b64decode(text), "big") if text and "-" not in text else None
