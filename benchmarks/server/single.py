"""Requests on one object: put, copy, get, head, delete."""

from __future__ import annotations

import re
from urllib.parse import unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from benchmarks.server.answers import (
    checksums,
    commit,
    element,
    error,
    iso_time,
    kept_headers,
    sinks,
    xml,
)
from benchmarks.server.message import Answer, Body, Request, http_date
from benchmarks.server.objects import Buckets, StoredObject


def put_object(buckets: Buckets, request: Request, body: Body) -> Answer:
    """Stores one body under its key."""
    blob = body.receive(sink=sinks(request.bucket))
    stored = StoredObject(request.key, (blob,), kept_headers(request.headers))
    refusal = commit(buckets, request, stored)
    return refusal or Answer(200, {"ETag": stored.etag, **checksums(request.headers)})


def copy_object(buckets: Buckets, request: Request, body: Body) -> Answer:
    """Makes a second object of the same bytes."""
    body.read()
    source = unquote(request.headers["x-amz-copy-source"]).lstrip("/").partition("?")[0]
    bucket, _, key = source.partition("/")
    found = buckets.get(bucket, key)
    if found is None:
        return error(404, "NoSuchKey", source)
    stored = StoredObject(request.key, found.blobs, found.headers)
    refusal = commit(buckets, request, stored)
    return refusal or xml(
        element(
            "CopyObjectResult",
            f"<LastModified>{iso_time(stored.modified)}</LastModified>"
            f"<ETag>{escape(stored.etag)}</ETag>",
        )
    )


def get_object(buckets: Buckets, request: Request, body: Body) -> Answer:
    """Answers with an object, or a range or part of it."""
    answer = head_object(buckets, request, body)
    if answer.status not in (200, 206):
        return answer
    stored = buckets.get(request.bucket, request.key)
    if stored is None:
        return error(404, "NoSuchKey", request.key)
    if stored.sunk:
        return error(410, "BodyDropped", "this bucket keeps no large bodies")
    start = 0
    if content_range := answer.headers.get("Content-Range"):
        start = int(content_range.split()[1].split("-")[0])
    length = int(answer.headers["Content-Length"])
    return Answer(answer.status, answer.headers, b"", stored.blobs, start, length)


def head_object(buckets: Buckets, request: Request, body: Body) -> Answer:
    """Answers with what `get_object` would, less the bytes."""
    body.read()
    stored = buckets.get(request.bucket, request.key)
    if stored is None:
        return error(404, "NoSuchKey", request.key)
    if request.headers.get("if-match", stored.etag) not in (stored.etag, "*"):
        return error(412, "PreconditionFailed")
    if request.headers.get("if-none-match") == stored.etag:
        return Answer(304, {"ETag": stored.etag})
    headers = {
        "ETag": stored.etag,
        "Last-Modified": http_date(stored.modified),
        "Accept-Ranges": "bytes",
        "Content-Type": "binary/octet-stream",
        **dict(stored.headers),
    }
    size = stored.size
    span = _span(request, stored)
    if span is None:
        return Answer(200, {**headers, "Content-Length": str(size)})
    start, end = span
    if start >= min(end, size):
        return error(416, "InvalidRange")
    end = min(end, size)
    if "partNumber" in request.query:
        headers["x-amz-mp-parts-count"] = str(len(stored.blobs))
    headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    return Answer(206, {**headers, "Content-Length": str(end - start)})


def _span(request: Request, stored: StoredObject) -> tuple[int, int] | None:
    if "partNumber" in request.query:
        number = int(request.query["partNumber"])
        lengths = [blob.length for blob in stored.blobs]
        return sum(lengths[: number - 1]), sum(lengths[:number])
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:
        return max(0, stored.size - int(last)), stored.size
    return int(first), int(last) + 1 if last else stored.size


def delete_object(buckets: Buckets, request: Request, body: Body) -> Answer:
    """Deletes one object."""
    body.read()
    buckets.delete(request.bucket, request.key)
    return Answer(204)


def delete_objects(buckets: Buckets, request: Request, body: Body) -> Answer:
    """Deletes the objects whose keys the body lists."""
    keys = [
        node.text or ""
        for node in ElementTree.fromstring(body.read()).iter()
        if node.tag.endswith("Key")
    ]
    for key in keys:
        buckets.delete(request.bucket, key)
    deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
    return xml(element("DeleteResult", deleted))
