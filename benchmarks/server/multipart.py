"""Multipart uploads: open, parts, complete, abort."""

from __future__ import annotations

import re
from xml.sax.saxutils import escape, unescape

from benchmarks.server.answers import checksums, commit, element, error, kept_headers, sinks, xml
from benchmarks.server.message import Answer, Body, Request
from benchmarks.server.objects import Buckets, StoredObject


def create_upload(buckets: Buckets, request: Request, body: Body) -> Answer:
    """Opens a multipart upload."""
    body.read()
    upload_id = buckets.open_upload(request.bucket, request.key, kept_headers(request.headers))
    return xml(
        element(
            "InitiateMultipartUploadResult",
            f"<Bucket>{request.bucket}</Bucket><Key>{escape(request.key)}</Key>"
            f"<UploadId>{upload_id}</UploadId>",
        )
    )


def upload_part(buckets: Buckets, request: Request, body: Body) -> Answer:
    """Takes one part."""
    blob = body.receive(sink=sinks(request.bucket))
    upload = buckets.upload(request.query["uploadId"])
    if upload is None:
        return error(404, "NoSuchUpload")
    stored = StoredObject(request.key, (blob,))
    upload.parts[int(request.query["partNumber"])] = (stored.etag, blob)
    return Answer(200, {"ETag": stored.etag, **checksums(request.headers)})


def complete_upload(buckets: Buckets, request: Request, body: Body) -> Answer:
    """Joins the parts that the XML lists into one object."""
    text = body.read().decode()
    upload = buckets.upload(request.query["uploadId"])
    if upload is None:
        return error(404, "NoSuchUpload")
    numbers = [int(number) for number in re.findall(r"<PartNumber>(\d+)</PartNumber>", text)]
    etags = [unescape(tag, {"&quot;": '"'}) for tag in re.findall(r"<ETag>(.*?)</ETag>", text)]
    if not numbers or numbers != sorted(set(numbers)):
        return error(400, "InvalidPartOrder")
    for number, etag in zip(numbers, etags, strict=True):
        if upload.parts.get(number, ("",))[0].strip('"') != etag.strip('"'):
            return error(400, "InvalidPart", str(number))
    blobs = tuple(upload.parts[number][1] for number in numbers)
    stored = StoredObject(request.key, blobs, upload.headers)
    if refusal := commit(buckets, request, stored):
        return refusal
    buckets.close_upload(request.query["uploadId"])
    return xml(
        element(
            "CompleteMultipartUploadResult",
            f"<Bucket>{request.bucket}</Bucket><Key>{escape(request.key)}</Key>"
            f"<ETag>{escape(stored.etag)}</ETag>",
        )
    )


def abort_upload(buckets: Buckets, request: Request, body: Body) -> Answer:
    """Forgets an upload and its parts."""
    body.read()
    found = buckets.close_upload(request.query["uploadId"])
    return error(404, "NoSuchUpload") if found is None else Answer(204)
