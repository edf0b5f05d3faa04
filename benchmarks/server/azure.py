"""Azure's Blob service: which operation a request is, and how blobs come and go.

The account is the first segment of the path, as in Azure's emulator.
"""

from __future__ import annotations

import re
from dataclasses import replace
from xml.sax.saxutils import escape

from benchmarks.server import batch, single
from benchmarks.server.answers import sinks, xml
from benchmarks.server.call import Call, Handler
from benchmarks.server.listing import LIST_LIMIT, page_of
from benchmarks.server.message import Answer, Body, Request, http_date
from benchmarks.server.objects import Buckets, PreconditionError, StoredObject

ACCOUNT = "devstoreaccount1"
"""The only account: its name, and the first segment of every path."""

_CODES = {404: "BlobNotFound", 410: "BodyDropped", 412: "ConditionNotMet", 416: "InvalidRange"}


def call_of(request: Request) -> Call:
    """Returns what `request` calls for."""
    container, _, key = request.key.partition("/")
    named = replace(request, bucket=container, key=key)
    comp = request.query.get("comp", "")
    table = _OF_BLOBS if key else _OF_CONTAINERS
    operation, handler = table.get((request.method, comp), ("Unknown", _unknown))
    return Call(operation, named, handler)


def _put_blob(buckets: Buckets, request: Request, body: Body) -> Answer:
    blob = body.receive(sink=sinks(request.bucket))
    return _commit(buckets, request, StoredObject(request.key, (blob,)))


def _put_block(buckets: Buckets, request: Request, body: Body) -> Answer:
    blob = body.receive(sink=sinks(request.bucket))
    _, upload = buckets.upload_to(request.bucket, request.key)
    upload.parts[request.query["blockid"]] = ("", blob)
    return Answer(201)


def _put_block_list(buckets: Buckets, request: Request, body: Body) -> Answer:
    """Joins the blocks that the XML lists into a blob; all others are dropped."""
    text = body.read().decode()
    names = re.findall(r"<(?:Uncommitted|Latest)>(.*?)</", text)
    upload_id, upload = buckets.upload_to(request.bucket, request.key)
    if not upload.parts.keys() >= set(names):
        return _error(400, "InvalidBlockList")
    blobs = tuple(upload.parts[name][1] for name in names)
    answer = _commit(buckets, request, StoredObject(request.key, blobs))
    if answer.status == 201:
        buckets.close_upload(upload_id)
    return answer


def _commit(buckets: Buckets, request: Request, stored: StoredObject) -> Answer:
    absent = request.headers.get("if-none-match")
    try:
        buckets.put(request.bucket, stored, request.headers.get("if-match"), absent)
    except (PreconditionError, KeyError):
        return _error(409, "BlobAlreadyExists") if absent else _error(412, "ConditionNotMet")
    return Answer(201, {"ETag": stored.etag, "Last-Modified": http_date(stored.modified)})


def _get_block_list(buckets: Buckets, request: Request, body: Body) -> Answer:
    """Lists the blocks that are in no blob yet."""
    body.read()
    _, upload = buckets.upload_to(request.bucket, request.key)
    if not upload.parts and buckets.get(request.bucket, request.key) is None:
        return _error(404, "BlobNotFound")
    blocks = "".join(
        f"<Block><Name>{name}</Name><Size>{blob.length}</Size></Block>"
        for name, (_, blob) in list(upload.parts.items())
    )
    return xml(f"<BlockList><UncommittedBlocks>{blocks}</UncommittedBlocks></BlockList>")


def _get_blob(buckets: Buckets, request: Request, body: Body) -> Answer:
    if wanted := request.headers.get("x-ms-range"):
        request = replace(request, headers={**request.headers, "range": wanted})
    return _translated(single.get_object(buckets, request, body))


def _head_blob(buckets: Buckets, request: Request, body: Body) -> Answer:
    return _translated(single.head_object(buckets, request, body))


def _translated(answer: Answer) -> Answer:
    """Returns S3's answer to a read in Azure's words."""
    if code := _CODES.get(answer.status):
        return _error(answer.status, code)
    return replace(answer, headers={**answer.headers, "x-ms-blob-type": "BlockBlob"})


def _delete_blob(buckets: Buckets, request: Request, body: Body) -> Answer:
    body.read()
    status = _delete(buckets, request.bucket, request.key)
    return Answer(status) if status == 202 else _error(status, "BlobNotFound")


def _delete(buckets: Buckets, container: str, key: str) -> int:
    """Deletes the blob, or the blocks of one that was never made; returns the status."""
    present = buckets.get(container, key) is not None
    buckets.delete(container, key)
    dropped = buckets.close_upload(f"{container}/{key}")
    return 202 if present or dropped is not None else 404


def _batch(buckets: Buckets, request: Request, body: Body) -> Answer:
    def delete(path: str) -> int:
        _, _, target = path.removeprefix("/").partition("/")
        container, _, key = target.partition("/")
        return _delete(buckets, container, key)

    return batch.delete_each(body, 202, delete)


def _list_blobs(buckets: Buckets, request: Request, body: Body) -> Answer:
    body.read()
    query = request.query
    prefix, marker = query.get("prefix", ""), query.get("marker", "")
    limit = min(int(query.get("maxresults", LIST_LIMIT)), LIST_LIMIT)
    delimiter = query.get("delimiter", "")
    page = page_of(buckets, request.bucket, prefix, marker, delimiter, limit)
    rows = [
        f"<BlobPrefix><Name>{escape(entry)}</Name></BlobPrefix>"
        if isinstance(entry, str)
        else _row(entry.key, entry.size, entry.etag.strip('"'), entry.modified)
        for entry in page.entries
    ]
    if "uncommittedblobs" in query.get("include", "") and not page.after:
        rows += [
            _row(upload.key, 0, "", upload.started)
            for _, upload in buckets.uploads(request.bucket)
            if upload.key.startswith(prefix) and buckets.get(upload.bucket, upload.key) is None
        ]
    return xml(
        f'<EnumerationResults ContainerName="{request.bucket}"><Prefix>{escape(prefix)}</Prefix>'
        f"<Blobs>{''.join(rows)}</Blobs><NextMarker>{escape(page.after)}</NextMarker>"
        "</EnumerationResults>"
    )


def _row(name: str, size: int, etag: str, modified: float) -> str:
    return (
        f"<Blob><Name>{escape(name)}</Name><Properties><Content-Length>{size}</Content-Length>"
        f"<Last-Modified>{http_date(modified)}</Last-Modified><Etag>{etag}</Etag>"
        "<BlobType>BlockBlob</BlobType></Properties></Blob>"
    )


def _unknown(_buckets: Buckets, request: Request, body: Body) -> Answer:
    body.read()
    return _error(501, "NotImplemented")


def _error(status: int, code: str) -> Answer:
    answer = xml(f"<Error><Code>{code}</Code><Message>{code}</Message></Error>", status)
    return replace(answer, headers={**answer.headers, "x-ms-error-code": code})


_OF_BLOBS: dict[tuple[str, str], tuple[str, Handler]] = {
    ("PUT", ""): ("PutObject", _put_blob),
    ("PUT", "block"): ("UploadPart", _put_block),
    ("PUT", "blocklist"): ("CompleteMultipartUpload", _put_block_list),
    ("GET", "blocklist"): ("ListParts", _get_block_list),
    ("GET", ""): ("GetObject", _get_blob),
    ("HEAD", ""): ("HeadObject", _head_blob),
    ("DELETE", ""): ("DeleteObject", _delete_blob),
}
_OF_CONTAINERS: dict[tuple[str, str], tuple[str, Handler]] = {
    ("GET", "list"): ("ListObjectsV2", _list_blobs),
    ("POST", "batch"): ("DeleteObjects", _batch),
}
