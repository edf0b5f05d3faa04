"""The JSON API of the Cloud Storage stub.

Documented (https://cloud.google.com/storage/docs/json_api/v1): paths, parameters, the object
resource, uploads of several parts (RFC 2046), preconditions, rewrite
(.../json_api/v1/objects/rewrite). Taken from reports: refusals of media requests are plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlencode

from .gcs_answers import Answer, Call, RefusalError, Request, json_answer
from .gcs_state import Attributes, State, StoredObject, byte_range, timestamp, whole_number


def is_json_api(path: str) -> bool:
    """Whether a path belongs to the JSON API."""
    return re.match(r"(/upload|/download)?/storage/v1(/|$)", path) is not None


def answer(state: State, call: Call) -> Answer:
    """Carries out a request."""
    request = call.request
    is_media = request.query.get("alt") == "media"
    try:
        state.check_payer(request.payer)
        if is_media and not request.path.startswith("/download/"):
            # the service may answer so, though it need not
            target = f"/download{request.path}?{urlencode(request.query)}"
            return Answer(303, [("Location", target)])
        for method, form, operation in _OPERATIONS:
            found = re.fullmatch(form, request.path)
            if found is not None and method == request.method:
                names = [unquote(name) for name in found.groups()]
                state.check_bucket(names[0])
                return operation(state, call, *names)
        raise RefusalError(404, "notFound", "Not Found", "NoSuchKey")
    except RefusalError as refusal:
        return refusal.as_text() if is_media else refusal.as_json()


def _expected(request: Request) -> int | None:
    return whole_number(request.query.get("ifGenerationMatch"))


def _insert(state: State, call: Call, bucket: str) -> Answer:
    request = call.request
    [boundary] = re.findall(r"boundary=\"?([^\";\s]+)", request.headers["content-type"])
    # a line break before a delimiter belongs to the delimiter
    _, first, second, end = (b"\r\n" + call.body).split(f"\r\n--{boundary}".encode())
    assert end.startswith(b"--")
    described = json.loads(first.partition(b"\r\n\r\n")[2])
    stored = state.put(
        bucket,
        described.get("name") or request.query["name"],
        second.partition(b"\r\n\r\n")[2],
        _attributes(described),
        expected=_expected(request),
        checksum=described.get("crc32c"),
    )
    return json_answer(_resource(stored))


def _attributes(described: Mapping[str, Any]) -> Attributes:
    return Attributes(described.get("cacheControl"), described.get("metadata") or {})


def _resource(stored: StoredObject) -> dict[str, Any]:
    return {
        "kind": "storage#object",
        "name": stored.key,
        "bucket": stored.bucket,
        "generation": str(stored.generation),
        "metageneration": "1",
        "size": str(len(stored.data)),
        "crc32c": stored.crc32c,
        "timeCreated": timestamp(stored.created),
        "metadata": dict(stored.attributes.metadata),
    }


def _get(state: State, call: Call, bucket: str, key: str) -> Answer:
    request = call.request
    expected = _expected(request)
    if request.query.get("alt") != "media":
        return json_answer(_resource(state.find(bucket, key, expected)))
    stored = state.read(request, bucket, key, expected)
    span = byte_range(request.headers.get("range"), len(stored.data))
    headers = [
        ("Content-Type", "application/octet-stream"),
        ("Cache-Control", state.cache_control(stored)),
        ("x-goog-generation", str(stored.generation)),
        ("x-goog-hash", f"crc32c={stored.crc32c}"),
        ("x-goog-stored-content-encoding", "identity"),
    ]
    if span is None:
        return Answer(200, headers, stored.data)
    start, end = span
    headers.append(("Content-Range", f"bytes {start}-{end}/{len(stored.data)}"))
    return Answer(206, headers, stored.data[start : end + 1])


def _list(state: State, call: Call, bucket: str) -> Answer:
    query = call.request.query
    after = query.get("pageToken", "").encode()
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    with state.lock:
        names = dict.fromkeys(_listed(key, prefix, delimiter) for key in state.keys(bucket, prefix))
        names = [name for name in names if name.encode() > after]
        shown = [state.objects.get((bucket, name)) for name in names[: state.page]]
    page: dict[str, Any] = {"kind": "storage#objects"}
    if items := [_resource(stored) for stored in shown if stored is not None]:
        page["items"] = items
    if folders := [name for name, at in zip(names, shown, strict=False) if at is None]:
        page["prefixes"] = folders
    if len(names) > state.page:
        page["nextPageToken"] = names[state.page - 1]
    return json_answer(page)


def _listed(key: str, prefix: str, delimiter: str) -> str:
    """What a listing shows of a key: itself, or what it has in common with others."""
    rest = key.removeprefix(prefix)
    if not delimiter or delimiter not in rest:
        return key
    return prefix + rest.partition(delimiter)[0] + delimiter


def _delete(state: State, call: Call, bucket: str, key: str) -> Answer:
    state.delete(bucket, key, _expected(call.request))
    return Answer(204)


def _rewrite(
    state: State, call: Call, source_bucket: str, source_key: str, bucket: str, key: str
) -> Answer:
    """In one call, or in calls of ``state.rewritten`` bytes, with a token for the next one."""
    state.check_bucket(bucket)
    query = call.request.query
    source_expected = whole_number(query.get("ifSourceGenerationMatch"))
    source = state.find(source_bucket, source_key, source_expected)
    size = len(source.data)
    done = int(query.get("rewriteToken") or 0) + (state.rewritten or size)
    progress = {"kind": "storage#rewriteResponse", "objectSize": str(size)}
    if done < size:
        more = {"totalBytesRewritten": str(done), "done": False, "rewriteToken": str(done)}
        return json_answer(progress | more)
    described = json.loads(call.body) if call.body else {}
    expected = _expected(call.request)
    stored = state.put(bucket, key, source.data, _attributes(described), expected=expected)
    last = {"totalBytesRewritten": str(size), "done": True, "resource": _resource(stored)}
    return json_answer(progress | last)


_OBJECTS = r"/storage/v1/b/([^/]+)/o"
_OBJECT = rf"{_OBJECTS}/([^/]+)"
_OPERATIONS: list[tuple[str, str, Any]] = [
    ("POST", f"/upload{_OBJECTS}", _insert),
    ("GET", _OBJECTS, _list),
    ("GET", f"(?:/download)?{_OBJECT}", _get),
    ("DELETE", _OBJECT, _delete),
    ("POST", rf"{_OBJECT}/rewriteTo/b/([^/]+)/o/([^/]+)", _rewrite),
]
"""Method, path and function."""
