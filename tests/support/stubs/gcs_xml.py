"""The XML API of the Cloud Storage stub.

Documented (https://cloud.google.com/storage/docs/xml-api/reference-headers, .../put-object-upload,
.../post-object-multipart, .../put-object-multipart, .../post-object-complete,
.../get-bucket-uploads): methods, parameters, headers, that completed objects have no MD5, that
multipart uploads know no preconditions. Taken from reports: a part is answered with its
``x-goog-hash``, a completion with that of the object unless a Cloud KMS key encrypts it; with a
retention period it is the completion that fails. Assumed: a precondition on a multipart upload is
answered 501 ``NotImplemented``.
"""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import quote, unquote
from xml.sax.saxutils import escape

from awscrt.checksums import crc32c

from cloudckpt.checksum import to_base64

from . import gcs_answers as answers
from .gcs_answers import XML_NAMESPACE, Answer, Call, RefusalError, Request, xml_answer
from .gcs_state import (
    Attributes,
    State,
    StoredObject,
    header_checksum,
    part_tag,
    verify,
    whole_number,
)

_MOST_PARTS = 10_000
_Operation = Callable[[State, Call, str, str], Answer]
_CONDITION = "x-goog-if-generation-match"


def answer(state: State, call: Call) -> Answer:
    """Carries out a request."""
    request = call.request
    try:
        state.check_caller(call.bearer)
        state.check_payer(request.headers.get("x-goog-user-project"))
        bucket, _, key = unquote(request.path).removeprefix("/").partition("/")
        result = _route(request, key)(state, call, bucket, key)
    except RefusalError as refusal:
        result = refusal.as_xml()
    if request.method == "HEAD":
        return Answer(result.status, result.headers, size=len(result.body))
    return result


def _route(request: Request, key: str) -> _Operation:
    query, method = request.query, request.method
    found: dict[str, _Operation]
    if not key:
        found = {"GET": _list_uploads}
    elif "uploads" in query:
        found = {"POST": _begin}
    elif "uploadId" in query:
        found = {"PUT": _put_part, "POST": _complete, "DELETE": _abort}
    else:
        found = {}
    if method not in found:
        text = "The specified method is not allowed against this resource."
        raise RefusalError(405, "methodNotAllowed", text, "MethodNotAllowed")
    return found[method]


def _attributes(request: Request) -> Attributes:
    headers, prefix = request.headers, "x-goog-meta-"
    return Attributes(
        content_type=headers.get("content-type"),
        cache_control=headers.get("cache-control"),
        storage_class=headers.get("x-goog-storage-class", ""),
        custom_time=headers.get("x-goog-custom-time"),
        kms_key=headers.get("x-goog-encryption-kms-key-name"),
        metadata={
            name.removeprefix(prefix): value
            for name, value in headers.items()
            if name.startswith(prefix)
        },
    )


def _hashes(stored: StoredObject) -> list[tuple[str, str]]:
    hashes = [("x-goog-hash", f"crc32c={stored.crc32c}")]
    if stored.md5:
        hashes.append(("x-goog-hash", f"md5={base64.b64encode(stored.md5).decode()}"))
    return hashes


def _versions(stored: StoredObject) -> list[tuple[str, str]]:
    return [("x-goog-generation", str(stored.generation)), ("x-goog-metageneration", "1")]


def _no_conditions(request: Request) -> None:
    if _CONDITION in request.headers:
        text = "A header you provided implies functionality that is not implemented."
        raise RefusalError(501, "notImplemented", text, "NotImplemented")


def _begin(state: State, call: Call, bucket: str, key: str) -> Answer:
    state.check(bucket, "storage.multipartUploads.create")
    _no_conditions(call.request)
    upload = state.begin(bucket, key, _attributes(call.request))
    fields = [("Bucket", bucket), ("Key", key), ("UploadId", upload.id)]
    return _document("InitiateMultipartUploadResult", _elements(fields))


def _put_part(state: State, call: Call, bucket: str, key: str) -> Answer:
    state.check(bucket, "storage.multipartUploads.create")
    _no_conditions(call.request)
    query = call.request.query
    upload = state.upload(bucket, key, query["uploadId"])
    number = whole_number(query.get("partNumber"))
    if number is None or not 1 <= number <= _MOST_PARTS:
        raise answers.invalid("The part number must be between 1 and 10000.")
    verify(call.body, header_checksum(call.request.headers))
    with state.lock:
        upload.parts[number] = call.body
    checksum = f"crc32c={to_base64(crc32c(call.body))}"
    return Answer(200, [("ETag", part_tag(call.body)), ("x-goog-hash", checksum)])


def _complete(state: State, call: Call, bucket: str, key: str) -> Answer:
    state.check(bucket, "storage.multipartUploads.create")
    _no_conditions(call.request)
    upload = state.upload(bucket, key, call.request.query["uploadId"])
    stored = state.complete(upload, _named_parts(call.body))
    headers = _versions(stored)
    if stored.attributes.kms_key is None:
        headers += _hashes(stored)
    location = f"http://{call.request.headers.get('host', '')}/{bucket}/{quote(key)}"
    fields = [("Location", location), ("Bucket", bucket), ("Key", key), ("ETag", stored.etag)]
    return _document("CompleteMultipartUploadResult", _elements(fields), headers)


def _named_parts(body: bytes) -> list[tuple[int, str]]:
    """The numbers and ETags in a completion, whether it names a namespace or not."""
    text = re.sub(rb"\sxmlns=(\"[^\"]*\"|'[^']*')", b"", body)
    try:
        root = ElementTree.fromstring(text)
        return [
            (int(part.findtext("PartNumber", "")), part.findtext("ETag", ""))
            for part in root.iterfind("Part")
        ]
    except (ElementTree.ParseError, ValueError):
        raise answers.invalid("The XML you provided was not well-formed.", "MalformedXML") from None


def _abort(state: State, call: Call, bucket: str, key: str) -> Answer:
    state.check(bucket, "storage.multipartUploads.abort")
    with state.lock:
        del state.uploads[state.upload(bucket, key, call.request.query["uploadId"]).id]
    return Answer(204)


def _list_uploads(state: State, call: Call, bucket: str, key: str) -> Answer:
    state.check(bucket, "storage.multipartUploads.list")
    query = call.request.query
    prefix, key_marker = query.get("prefix", ""), query.get("key-marker", "")
    id_marker = query.get("upload-id-marker", "")
    limit = min(whole_number(query.get("max-uploads")) or state.page, state.page)

    def is_next(place: tuple[bytes, str]) -> bool:
        if id_marker:
            return place > (key_marker.encode(), id_marker)
        return place[0] > key_marker.encode()

    with state.lock:
        places = sorted(
            ((upload.key.encode(), upload.id), upload)
            for upload in state.uploads.values()
            if upload.bucket == bucket and upload.key.startswith(prefix)
        )
    found = [upload for place, upload in places if is_next(place)]
    page, more = found[:limit], len(found) > limit
    spell = _speller(query)
    fields = [("Bucket", bucket), ("KeyMarker", spell(key_marker)), ("UploadIdMarker", id_marker)]
    fields += [("Prefix", spell(prefix)), ("MaxUploads", str(limit))]
    if more:
        fields += [("NextKeyMarker", spell(page[-1].key)), ("NextUploadIdMarker", page[-1].id)]
    fields += _encoding(query)
    fields.append(("IsTruncated", "true" if more else "false"))
    entries = "".join(
        f"<Upload>{_elements([('Key', spell(upload.key)), ('UploadId', upload.id)])}</Upload>"
        for upload in page
    )
    return _document("ListMultipartUploadsResult", _elements(fields) + entries)


def _speller(query: Mapping[str, str]) -> Callable[[str], str]:
    return quote if query.get("encoding-type") == "url" else str


def _encoding(query: Mapping[str, str]) -> list[tuple[str, str]]:
    return [("EncodingType", "url")] if query.get("encoding-type") == "url" else []


def _elements(fields: Iterable[tuple[str, str]]) -> str:
    return "".join(f"<{name}>{escape(value)}</{name}>" for name, value in fields)


def _document(name: str, inner: str, headers: answers.Headers = ()) -> Answer:
    return xml_answer(f"<{name} xmlns='{XML_NAMESPACE}'>{inner}</{name}>", 200, headers)
