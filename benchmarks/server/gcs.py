"""Google's JSON API: which operation a request is, and how objects come and go by generation."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from benchmarks.server import batch, single
from benchmarks.server.answers import iso_time, sinks
from benchmarks.server.call import Call, Handler
from benchmarks.server.listing import LIST_LIMIT, page_of
from benchmarks.server.message import Answer, Body, Request
from benchmarks.server.objects import Blob, Buckets, PreconditionError, StoredObject, etag_of

ROOTS = ("storage", "upload", "download", "batch")
"""The first segments of this API's paths."""

_OBJECT = re.compile(r"(?:storage/)?v1/b/([^/]+)/o(?:/(.*))?", re.DOTALL)


def call_of(request: Request) -> Call:
    """Returns what `request` calls for."""
    if request.bucket == "batch":
        return Call("DeleteObjects", request, _batch)
    match = _OBJECT.fullmatch(request.key)
    if match is None:
        return Call("Unknown", request, _unknown)
    named = replace(request, bucket=match[1], key=match[2] or request.query.get("name", ""))
    operation, handler = _operation_of(request.bucket, named)
    return Call(operation, named, handler)


def _operation_of(root: str, request: Request) -> tuple[str, Handler]:
    method = request.method
    if method == "POST":
        return ("PutObject", _insert) if root == "upload" else ("Unknown", _unknown)
    if method == "GET" and request.key:
        if request.query.get("alt") == "media":
            return "GetObject", _read
        return "HeadObject", _describe
    if method == "GET":
        return "ListObjectsV2", _list
    return ("DeleteObject", _delete) if method == "DELETE" else ("Unknown", _unknown)


def _insert(buckets: Buckets, request: Request, body: Body) -> Answer:
    """Takes ``multipart/related``: a JSON part, of which the name counts, then the object's."""
    found = re.search(r'boundary="?([^";]+)', request.headers.get("content-type", ""))
    if found is None:
        body.read()
        return _error(400, "invalid", "uploadType=multipart is understood, and no other")
    dashes = f"--{found[1]}".encode()
    _, resource = (list(iter(body.readline, dashes)) for _ in range(2))
    while body.readline():
        pass
    # Whether a line end follows the last boundary is up to the client: without one, the last
    # two bytes of the object come in the tail.
    end = b"\r\n" + dashes + b"--"
    blob = body.receive_until(len(end) + 2, sink=sinks(request.bucket))
    tail = body.read().removesuffix(b"\r\n")
    if not tail.endswith(end):
        return _error(400, "invalid", "the last boundary is not where the body ends")
    rest = tail.removesuffix(end)
    blobs = (blob, Blob(len(rest), data=rest)) if rest else (blob,)
    key = request.key or json.loads(b"".join(resource[resource.index(b"") :]))["name"]
    return _commit(buckets, request, StoredObject(key, blobs))


def _commit(buckets: Buckets, request: Request, stored: StoredObject) -> Answer:
    wanted = request.query.get("ifGenerationMatch")
    try:
        buckets.put(
            request.bucket,
            stored,
            etag_of(int(wanted)) if wanted not in (None, "0") else None,
            "*" if wanted == "0" else None,
        )
    except (PreconditionError, KeyError):
        return _not_met()
    return _json(_resource(request.bucket, stored))


def _read(buckets: Buckets, request: Request, body: Body) -> Answer:
    """Answers with an object's bytes, or a range of them."""
    stored = buckets.get(request.bucket, request.key)
    wanted = request.query.get("ifGenerationMatch")
    if stored is not None and wanted is not None and stored.generation != int(wanted):
        body.read()
        return _not_met()
    answer = single.get_object(buckets, request, body)
    if answer.status == 404 or stored is None:
        return _error(404, "notFound", f"No such object: {request.bucket}/{request.key}")
    if not answer.blobs:
        return answer
    headers = {**answer.headers, "X-Goog-Generation": str(stored.generation)}
    return replace(answer, headers=headers)


def _describe(buckets: Buckets, request: Request, body: Body) -> Answer:
    body.read()
    stored = buckets.get(request.bucket, request.key)
    if stored is None:
        return _error(404, "notFound", f"No such object: {request.bucket}/{request.key}")
    return _json(_resource(request.bucket, stored))


def _list(buckets: Buckets, request: Request, body: Body) -> Answer:
    body.read()
    query = request.query
    page = page_of(
        buckets,
        request.bucket,
        query.get("prefix", ""),
        query.get("pageToken", ""),
        query.get("delimiter", ""),
        min(int(query.get("maxResults", LIST_LIMIT)), LIST_LIMIT),
    )
    items = [entry for entry in page.entries if isinstance(entry, StoredObject)]
    answer = {
        "items": [_resource(request.bucket, stored) for stored in items],
        "prefixes": [entry for entry in page.entries if isinstance(entry, str)],
        "nextPageToken": page.after,
    }
    return _json({name: value for name, value in answer.items() if value})


def _delete(buckets: Buckets, request: Request, body: Body) -> Answer:
    body.read()
    if buckets.get(request.bucket, request.key) is None:
        return _error(404, "notFound", f"No such object: {request.bucket}/{request.key}")
    buckets.delete(request.bucket, request.key)
    return Answer(204)


def _batch(buckets: Buckets, request: Request, body: Body) -> Answer:
    def delete(path: str) -> int:
        match = _OBJECT.fullmatch(path.removeprefix("/storage/"))
        if match is None or buckets.get(match[1], match[2]) is None:
            return 404
        buckets.delete(match[1], match[2])
        return 204

    return batch.delete_each(body, 200, delete)


def _unknown(_buckets: Buckets, request: Request, body: Body) -> Answer:
    body.read()
    return _error(501, "notImplemented", f"{request.method} {request.key}")


def _resource(bucket: str, stored: StoredObject) -> dict[str, str]:
    return {
        "kind": "storage#object",
        "bucket": bucket,
        "name": stored.key,
        "size": str(stored.size),
        "generation": str(stored.generation),
        "updated": iso_time(stored.modified),
    }


def _json(document: Any, status: int = 200) -> Answer:
    return Answer(status, {"Content-Type": "application/json"}, json.dumps(document).encode())


def _not_met() -> Answer:
    return _error(412, "conditionNotMet", "At least one of the pre-conditions did not hold.")


def _error(status: int, reason: str, message: str) -> Answer:
    details = [{"domain": "global", "reason": reason, "message": message}]
    return _json({"error": {"code": status, "message": message, "errors": details}}, status)
