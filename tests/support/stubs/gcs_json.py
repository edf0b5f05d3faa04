"""The JSON API of the Cloud Storage stub.

Documented (https://cloud.google.com/storage/docs/json_api/v1): paths, parameters, the object
resource, uploads of both kinds, preconditions, rewrite (.../json_api/v1/objects/rewrite). Taken
from reports: refusals of media requests are plain text.
Assumed: ``x-goog-hash`` with both hashes in one line, that ``x-goog-hash`` of a media upload is
verified like ``crc32c`` in the metadata.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from email.utils import formatdate
from typing import Any
from urllib.parse import unquote, urlencode

from . import gcs_answers as answers
from .gcs_answers import Answer, Call, RefusalError, Request, json_answer
from .gcs_multipart import related
from .gcs_state import (
    Attributes,
    State,
    StoredObject,
    byte_range,
    header_checksum,
    timestamp,
    whole_number,
)

_OBJECTS = re.compile(r"(?:/upload)?/storage/v1/b/([^/]+)/o")
_OBJECT = re.compile(r"(?:/download)?/storage/v1/b/([^/]+)/o/([^/]+)")
_REWRITE = re.compile(r"/storage/v1/b/([^/]+)/o/([^/]+)/rewriteTo/b/([^/]+)/o/([^/]+)")


def is_json_api(path: str) -> bool:
    """Whether a path belongs to the JSON API."""
    return re.match(r"(/upload|/download)?/storage/v1(/|$)", path) is not None


def answer(state: State, call: Call) -> Answer:
    """Carries out a request."""
    request = call.request
    media = request.query.get("alt") == "media"
    try:
        state.check_caller(call.bearer)
        payer = request.query.get("userProject") or request.headers.get("x-goog-user-project")
        state.check_payer(payer)
        if media and not request.path.startswith("/download/"):
            # the service may answer so, though it need not
            target = f"/download{request.path}?{urlencode(request.query)}"
            return Answer(303, [("Location", target)])
        return _route(request)(state, call)
    except RefusalError as refusal:
        return refusal.as_text() if media else refusal.as_json()


def _route(request: Request) -> Callable[[State, Call], Answer]:
    path, method = request.path, request.method
    if _OBJECTS.fullmatch(path):
        uploads = path.startswith("/upload/")
        found = {"POST": _insert} if uploads else {"GET": _list}
    elif _OBJECT.fullmatch(path):
        found = {"GET": _get, "DELETE": _delete}
    elif _REWRITE.fullmatch(path):
        found = {"POST": _rewrite}
    else:
        raise RefusalError(404, "notFound", "Not Found", "NoSuchKey")
    if method not in found:
        raise RefusalError(405, "methodNotAllowed", "Method Not Allowed", "MethodNotAllowed")
    return found[method]


def _names(pattern: re.Pattern[str], path: str) -> tuple[str, str]:
    found = pattern.fullmatch(path)
    assert found is not None
    return unquote(found[1]), unquote(found[found.lastindex or 1])


def _expected(request: Request) -> int | None:
    return whole_number(request.query.get("ifGenerationMatch"))


def _insert(state: State, call: Call) -> Answer:
    request = call.request
    bucket, _ = _names(_OBJECTS, request.path)
    state.check(bucket, "storage.objects.create")
    kind, content_type = request.query.get("uploadType"), request.headers.get("content-type")
    described: dict[str, Any] = {}
    data = call.body
    if kind == "multipart":
        described, content_type, data = related(call.body, content_type or "")
    elif kind != "media":
        raise answers.invalid(f"Invalid upload type: {kind}")
    key = described.get("name") or request.query.get("name")
    if not key:
        raise RefusalError(400, "required", "Required parameter: name", "InvalidArgument")
    stored = state.put(
        bucket,
        key,
        data,
        _attributes(described, content_type, request.query.get("kmsKeyName")),
        expected=_expected(request),
        checksum=described.get("crc32c") or header_checksum(request.headers),
    )
    return json_answer(_resource(stored))


def _attributes(
    described: Mapping[str, Any], content_type: str | None, kms_key: str | None
) -> Attributes:
    return Attributes(
        content_type=described.get("contentType") or content_type,
        cache_control=described.get("cacheControl"),
        storage_class=described.get("storageClass") or "",
        custom_time=described.get("customTime"),
        kms_key=kms_key,
        metadata=described.get("metadata") or {},
    )


def _resource(stored: StoredObject) -> dict[str, Any]:
    attributes, created = stored.attributes, timestamp(stored.created)
    resource: dict[str, Any] = {
        "kind": "storage#object",
        "id": f"{stored.bucket}/{stored.key}/{stored.generation}",
        "name": stored.key,
        "bucket": stored.bucket,
        "generation": str(stored.generation),
        "metageneration": "1",
        "storageClass": attributes.storage_class,
        "size": str(len(stored.data)),
        "crc32c": stored.crc32c,
        "etag": base64.b64encode(str(stored.generation).encode()).decode(),
        "timeCreated": created,
        "updated": created,
    }
    optional = {
        "cacheControl": attributes.cache_control,
        "contentType": attributes.content_type,
        "customTime": attributes.custom_time,
        "metadata": attributes.metadata,
        "componentCount": stored.components,
        "md5Hash": base64.b64encode(stored.md5).decode() if stored.md5 else None,
        "kmsKeyName": f"{attributes.kms_key}/cryptoKeyVersions/1" if attributes.kms_key else None,
    }
    return resource | {name: value for name, value in optional.items() if value}


def _get(state: State, call: Call) -> Answer:
    request = call.request
    bucket, key = _names(_OBJECT, request.path)
    state.check(bucket, "storage.objects.get")
    generation = whole_number(request.query.get("generation"))
    expected = _expected(request)
    if request.query.get("alt") != "media":
        return json_answer(
            _resource(state.find(bucket, key, expected=expected, generation=generation))
        )
    stored = state.read(request, bucket, key, expected=expected, generation=generation)
    hashes = [f"crc32c={stored.crc32c}"]
    if stored.md5:
        hashes.append(f"md5={base64.b64encode(stored.md5).decode()}")
    headers = [("x-goog-hash", ",".join(hashes)), ("Cache-Control", state.cache_control(stored))]
    return media(stored, request, headers)


def media(stored: StoredObject, request: Request, more: answers.Headers) -> Answer:
    """The bytes of an object, or a range of them, with the headers that both APIs send."""
    span = byte_range(request.headers.get("range"), len(stored.data))
    headers = [
        ("Content-Type", stored.attributes.content_type or "application/octet-stream"),
        ("ETag", stored.etag),
        ("Last-Modified", formatdate(stored.created, usegmt=True)),
        ("Accept-Ranges", "bytes"),
        ("x-goog-generation", str(stored.generation)),
        ("x-goog-metageneration", "1"),
        ("x-goog-storage-class", stored.attributes.storage_class),
        ("x-goog-stored-content-encoding", "identity"),
        ("x-goog-stored-content-length", str(len(stored.data))),
        *more,
    ]
    if span is None:
        return Answer(200, headers, stored.data)
    start, end = span
    headers.append(("Content-Range", f"bytes {start}-{end}/{len(stored.data)}"))
    return Answer(206, headers, stored.data[start : end + 1])


def _list(state: State, call: Call) -> Answer:
    query = call.request.query
    bucket, _ = _names(_OBJECTS, call.request.path)
    state.check(bucket, "storage.objects.list")
    after = b""
    if token := query.get("pageToken"):
        try:
            after = base64.b64decode(token, validate=True)
        except ValueError:
            raise answers.invalid("Invalid page token") from None
    limit = whole_number(query.get("maxResults"))
    limit = min(limit or state.page, state.page)
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    with state.lock:
        names = dict.fromkeys(_listed(key, prefix, delimiter) for key in state.keys(bucket, prefix))
        names = [name for name in names if name.encode() > after]
        shown = [state.objects.get((bucket, name)) for name in names[:limit]]
    page: dict[str, Any] = {"kind": "storage#objects"}
    if items := [_resource(stored) for stored in shown if stored is not None]:
        page["items"] = items
    if folders := [name for name, at in zip(names, shown, strict=False) if at is None]:
        page["prefixes"] = folders
    if len(names) > limit:
        page["nextPageToken"] = base64.b64encode(names[limit - 1].encode()).decode()
    return json_answer(page)


def _listed(key: str, prefix: str, delimiter: str) -> str:
    """What a listing shows of a key: itself, or what it has in common with others."""
    rest = key.removeprefix(prefix)
    if not delimiter or delimiter not in rest:
        return key
    return prefix + rest.partition(delimiter)[0] + delimiter


def _delete(state: State, call: Call) -> Answer:
    bucket, key = _names(_OBJECT, call.request.path)
    state.check(bucket, "storage.objects.delete")
    generation = whole_number(call.request.query.get("generation"))
    state.delete(bucket, key, _expected(call.request), generation)
    return Answer(204)


def _rewrite(state: State, call: Call) -> Answer:
    """In one call, or in calls of ``state.rewritten`` bytes, with a token for the next one."""
    request = call.request
    found = _REWRITE.fullmatch(request.path)
    assert found is not None
    source_bucket, source_key, bucket, key = map(unquote, found.groups())
    state.check(source_bucket, "storage.objects.get")
    state.check(bucket, "storage.objects.create")
    query = request.query
    source = state.find(
        source_bucket,
        source_key,
        generation=whole_number(query.get("sourceGeneration")),
        expected=whole_number(query.get("ifSourceGenerationMatch")),
    )
    size = len(source.data)
    done = int(query.get("rewriteToken") or 0) + (state.rewritten or size)
    progress = {"kind": "storage#rewriteResponse", "objectSize": str(size)}
    if done < size:
        more = {"totalBytesRewritten": str(done), "done": False, "rewriteToken": str(done)}
        return json_answer(progress | more)
    described = json.loads(call.body) if call.body else {}
    stored = state.put(
        bucket,
        key,
        source.data,
        _attributes(described, None, query.get("destinationKmsKeyName")),
        expected=_expected(request),
    )
    last = {"totalBytesRewritten": str(size), "done": True, "resource": _resource(stored)}
    return json_answer(progress | last)
