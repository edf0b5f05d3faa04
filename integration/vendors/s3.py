"""The operations of S3, by boto3 and by our store."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import parse_qsl

import boto3
import botocore.config
from botocore import UNSIGNED

from cloudckpt import Config, S3Options
from cloudckpt.checksum import CRC32C, to_base64
from cloudckpt.stores.base import ATTEMPT, CopySource, ObjectInfo, Part, Upload
from cloudckpt.stores.s3.store import S3Store

from .differences import Operation
from .recorder import Answer, Recorded

__all__ = ["answer", "operations"]

BUCKET, KEY = "bucket", "run/a b/größe+%2F&=;#1~.metadata"
_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
DATA = b"what is in the object"
TAG = '"0123456789abcdef0123456789abcdef"'
UPLOAD = Upload(KEY, "an.upload_id-1", 5 * 1024**2)
PART = Part(1, len(DATA), TAG, CRC32C.of(DATA))
CRC = to_base64(CRC32C.of(DATA))
NAME = "0123456789abcdef"  # of a write

_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "a secret",
    "AWS_SESSION_TOKEN": "a session token",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


def answer(request: Recorded) -> Answer:
    """What S3 says, as far as both clients want to hear it."""
    query = dict(parse_qsl(request.target.partition("?")[2], keep_blank_values=True))
    if request.method == "PUT" and request.header("x-amz-copy-source"):
        kind = "CopyPartResult" if "uploadId" in query else "CopyObjectResult"
        return _xml(kind, f"<ETag>{TAG}</ETag>")
    if request.method == "PUT":
        return Answer(headers={"ETag": TAG})
    if request.method == "DELETE":
        return Answer(204)
    if request.method == "POST" and "uploads" in query:
        return _xml("InitiateMultipartUploadResult", f"<UploadId>{UPLOAD.id}</UploadId>")
    if request.method == "POST" and "uploadId" in query:
        return _xml("CompleteMultipartUploadResult", f"<ETag>{TAG}</ETag>")
    if request.method == "POST":
        return _xml("DeleteResult", "")
    if "uploads" in query:
        return _page("ListMultipartUploadsResult", query, "key-marker", _NEXT_UPLOADS)
    if "list-type" in query:
        return _page("ListBucketResult", query, "continuation-token", _NEXT_OBJECTS)
    return _content(request)


_NEXT_UPLOADS = "<NextKeyMarker>{key}</NextKeyMarker><NextUploadIdMarker>c+/d</NextUploadIdMarker>"
_NEXT_OBJECTS = "<NextContinuationToken>a+/b=</NextContinuationToken>"


def _page(root: str, query: Mapping[str, str], mark: str, marks: str) -> Answer:
    """The first or the last page of a listing without entries."""
    if mark in query:
        return _xml(root, "<IsTruncated>false</IsTruncated>")
    encoded = query.get("encoding-type") == "url"
    encoding = "<EncodingType>url</EncodingType>" if encoded else ""
    marks = marks.format(key="a%20b" if encoded else "a b")
    return _xml(root, f"{encoding}<IsTruncated>true</IsTruncated>{marks}")


def _xml(root: str, content: str) -> Answer:
    return Answer(body=f'<{root} xmlns="{_NAMESPACE}">{content}</{root}>'.encode())


def _content(request: Recorded) -> Answer:
    if span := request.header("Range").removeprefix("bytes="):
        first, _, last = span.partition("-")
        part = DATA[int(first) : int(last) + 1]
        where = f"bytes {span}/{len(DATA)}"
        return Answer(206, {"ETag": TAG, "Content-Range": where}, part)
    return Answer(headers={"ETag": TAG}, body=DATA)


def operations(folder: Path) -> Iterator[Operation]:
    """All of them, with several settings."""
    with _clients("s3", {"AWS_DEFAULT_REGION": "eu-central-1"}) as (client, store):
        yield from _all("s3", client, store)
    options = S3Options(
        sse="aws:kms",
        kms_key_id="arn:aws:kms:eu-central-1:1:key/k",
        storage_class="STANDARD_IA",
        tags={"team": "nlp & more", "run": "ü=7"},
        requester_pays=True,
    )
    name = "s3, all options"
    with _clients(name, {"AWS_DEFAULT_REGION": "eu-central-1"}, options) as (client, store):
        new = {
            "ServerSideEncryption": "aws:kms",
            "SSEKMSKeyId": "arn:aws:kms:eu-central-1:1:key/k",
            "StorageClass": "STANDARD_IA",
            "Tagging": "team=nlp+%26+more&run=%C3%BC%3D7",
        }
        yield from _all(name, client, store, new, {"RequestPayer": "requester"})
    name, options = "s3, another vendor", S3Options(endpoint_url="https://minio.example:9000")
    lenient = {"request_checksum_calculation": "when_required"}
    with _clients(name, {"AWS_DEFAULT_REGION": "us-east-1"}, options, lenient) as (client, store):
        yield from _all(name, client, store, checksums=False)
    name = "s3, us-east-1"
    with _clients(name, {"AWS_DEFAULT_REGION": "us-east-1"}) as (client, store):
        yield from _reading(name, client, store, {})
    name, options = "s3, anonymous", S3Options(anonymous=True)
    unsigned = {"signature_version": UNSIGNED}
    with _clients(name, {"AWS_DEFAULT_REGION": "eu-west-1"}, options, unsigned) as (client, store):
        yield from _reading(name, client, store, {})


@contextlib.contextmanager
def _clients(
    name: str,
    variables: Mapping[str, str],
    options: S3Options | None = None,
    config: Mapping[str, Any] | None = None,
) -> Iterator[tuple[Any, S3Store]]:
    options = options or S3Options()
    with mock.patch.dict(os.environ, {**_ENVIRONMENT, **variables}):
        client = boto3.session.Session().client(
            "s3",
            endpoint_url=options.endpoint_url,
            config=botocore.config.Config(**(config or {})),
        )
        store = S3Store(BUCKET, Config(s3=options))
        with contextlib.closing(client), contextlib.closing(store):
            yield client, store


def _all(
    name: str,
    client: Any,
    store: S3Store,
    new: Mapping[str, Any] | None = None,
    always: Mapping[str, Any] | None = None,
    *,
    checksums: bool = True,
) -> Iterator[Operation]:
    yield from _writing(name, client, store, new or {}, always or {}, checksums=checksums)
    yield from _reading(name, client, store, always or {})


def _writing(
    name: str,
    client: Any,
    store: S3Store,
    new: Mapping[str, Any],
    always: Mapping[str, Any],
    *,
    checksums: bool,
) -> Iterator[Operation]:
    """``new`` is said of new objects, ``always`` at every request."""
    at = {"Bucket": BUCKET, "Key": KEY, **always}
    new = {**new, "Metadata": {ATTEMPT: NAME}}
    of_upload = {**at, "UploadId": UPLOAD.id}
    crc = {"ChecksumCRC32C": CRC} if checksums else {}
    kind = {"ChecksumType": "FULL_OBJECT"} if checksums else {}
    algorithm = {"ChecksumAlgorithm": "CRC32C"} if checksums else {}

    def put(condition: Mapping[str, str]) -> Any:
        return lambda: client.put_object(**at, **new, **crc, **algorithm, **condition, Body=DATA)

    def our_put(**condition: Any) -> Any:
        given = {"checksum": PART.checksum, "attempt": NAME, **condition}
        return lambda: store.put(KEY, [memoryview(DATA)], **given)

    yield Operation(f"{name}: put", put({}), our_put())
    create_only = put({"IfNoneMatch": "*"})
    yield Operation(f"{name}: put, create only", create_only, our_put(if_version=""))
    replace = put({"IfMatch": TAG})
    yield Operation(f"{name}: put, replace", replace, our_put(if_version=TAG))
    yield Operation(
        f"{name}: create upload",
        lambda: client.create_multipart_upload(**at, **new, **algorithm, **kind),
        lambda: store.create_upload(KEY, UPLOAD.part_size),
    )
    yield Operation(
        f"{name}: part",
        lambda: client.upload_part(**of_upload, **crc, **algorithm, PartNumber=1, Body=DATA),
        lambda: store.put_part(UPLOAD, 1, [memoryview(DATA)], checksum=PART.checksum),
    )
    large = b"x" * (1024**2 + 1)  # more than may be hashed for a signature
    large_crc = {**algorithm, "ChecksumCRC32C": to_base64(CRC32C.of(large))} if checksums else {}
    yield Operation(
        f"{name}: part, large",
        lambda: client.upload_part(**of_upload, **large_crc, PartNumber=1, Body=large),
        lambda: store.put_part(UPLOAD, 1, [memoryview(large)], checksum=CRC32C.of(large)),
    )
    parts = [PART, Part(2, PART.size, TAG, PART.checksum)]
    named = [{"PartNumber": part.number, "ETag": TAG, **crc} for part in parts]
    whole = to_base64(CRC32C.combine((part.checksum, part.size) for part in parts))
    of_object = {"ChecksumCRC32C": whole} if checksums else {}
    yield Operation(
        f"{name}: completion",
        lambda: client.complete_multipart_upload(
            **of_upload, **of_object, **kind, MultipartUpload={"Parts": named}
        ),
        lambda: store.complete_upload(UPLOAD, parts),
    )
    found = ObjectInfo(KEY, 2 * len(DATA), TAG)
    source = {"CopySource": {"Bucket": BUCKET, "Key": KEY}, "CopySourceIfMatch": TAG}
    as_new = {"MetadataDirective": "REPLACE", "TaggingDirective": "REPLACE"}
    yield Operation(
        f"{name}: copy",
        lambda: client.copy_object(**at, **new, **algorithm, **source, **as_new, IfNoneMatch="*"),
        lambda: store.copy(CopySource(store, found), KEY, attempt=NAME, if_version=""),
    )
    span = {"CopySourceRange": f"bytes=3-{len(DATA) - 1}", "PartNumber": 1}
    yield Operation(
        f"{name}: copied part",
        lambda: client.upload_part_copy(**of_upload, **source, **span),
        lambda: store.copy_part(CopySource(store, found), UPLOAD, 1, 3, len(DATA)),
    )
    yield Operation(
        f"{name}: abort",
        lambda: client.abort_multipart_upload(**of_upload),
        lambda: store.abort_upload(UPLOAD),
    )
    yield Operation(
        f"{name}: delete",
        lambda: client.delete_object(Bucket=BUCKET, Key=KEY, **always),
        lambda: store.delete(KEY),
    )
    yield Operation(
        f"{name}: delete, pinned",
        lambda: client.delete_object(Bucket=BUCKET, Key=KEY, IfMatch=TAG, **always),
        lambda: store.delete(KEY, if_version=TAG),
    )


def _reading(
    name: str, client: Any, store: S3Store, always: Mapping[str, Any]
) -> Iterator[Operation]:
    at = {"Bucket": BUCKET, "Key": KEY, **always}

    def listed(operation: str, **more: str) -> Any:
        pages = client.get_paginator(operation)
        asked = {"Bucket": BUCKET, "Prefix": "run/a b+ü/", **more, **always}
        return lambda: list(pages.paginate(**asked))

    def read(version: str | None = None) -> None:
        store.get_range(KEY, 2, [memoryview(bytearray(3))], if_version=version)

    yield Operation(
        f"{name}: get", lambda: client.get_object(**at)["Body"].read(), lambda: store.get(KEY)
    )
    span = {**at, "Range": "bytes=2-4"}
    yield Operation(f"{name}: range", lambda: client.get_object(**span)["Body"].read(), read)
    yield Operation(
        f"{name}: range, pinned",
        lambda: client.get_object(**span, IfMatch=TAG)["Body"].read(),
        lambda: read(TAG),
    )
    yield Operation(f"{name}: head", lambda: client.head_object(**at), lambda: store.head(KEY))
    yield Operation(
        f"{name}: list", listed("list_objects_v2"), lambda: list(store.list("run/a b+ü/"))
    )
    yield Operation(
        f"{name}: list a level",
        listed("list_objects_v2", Delimiter="/"),
        lambda: list(store.list_level("run/a b+ü/")),
    )
    yield Operation(
        f"{name}: list uploads",
        listed("list_multipart_uploads"),
        lambda: list(store.list_uploads("run/a b+ü/")),
    )
