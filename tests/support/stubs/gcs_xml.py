"""The XML API of the Cloud Storage stub: multipart uploads.

Documented (https://cloud.google.com/storage/docs/xml-api/post-object-multipart,
.../put-object-multipart, .../post-object-complete, .../get-bucket-uploads): methods, parameters,
headers. Taken from reports: a part is answered with its ``x-goog-hash``, a completion with that of
the object; with a retention period it is the completion that fails.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import quote, unquote
from xml.sax.saxutils import escape

from awscrt.checksums import crc32c

from cloudckpt.checksum import to_base64

from . import gcs_answers as answers
from .gcs_answers import Answer, Call, RefusalError, Request, xml_answer
from .gcs_state import Attributes, State, header_checksum, part_tag, verify, whole_number

_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_MOST_PARTS = 10_000


def answer(state: State, call: Call) -> Answer:
    """Carries out a request."""
    request = call.request
    try:
        state.check_payer(request.payer)
        bucket, _, key = unquote(request.path).removeprefix("/").partition("/")
        state.check_bucket(bucket)
        about = "bucket" if not key else "uploads" if "uploads" in request.query else "upload"
        operation = _OPERATIONS.get((request.method, about))
        if operation is None:
            text = "The specified method is not allowed against this resource."
            raise RefusalError(405, "methodNotAllowed", text, "MethodNotAllowed")
        return operation(state, call, bucket, key)
    except RefusalError as refusal:
        return refusal.as_xml()


def _attributes(request: Request) -> Attributes:
    headers, prefix = request.headers, "x-goog-meta-"
    metadata = {n.removeprefix(prefix): v for n, v in headers.items() if n.startswith(prefix)}
    return Attributes(headers.get("cache-control"), metadata)


def _begin(state: State, call: Call, bucket: str, key: str) -> Answer:
    upload = state.begin(bucket, key, _attributes(call.request))
    fields = [("Bucket", bucket), ("Key", key), ("UploadId", upload.id)]
    return _document("InitiateMultipartUploadResult", _elements(fields))


def _put_part(state: State, call: Call, bucket: str, key: str) -> Answer:
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
    upload = state.upload(bucket, key, call.request.query["uploadId"])
    stored = state.complete(upload, _named_parts(call.body))
    headers = [
        ("x-goog-generation", str(stored.generation)),
        ("x-goog-hash", f"crc32c={stored.crc32c}"),
    ]
    fields = [("Bucket", bucket), ("Key", key), ("ETag", f'"-{stored.generation:x}"')]
    return _document("CompleteMultipartUploadResult", _elements(fields), headers)


def _named_parts(body: bytes) -> list[tuple[int, str]]:
    """The numbers and ETags in a completion, whether it names a namespace or not."""
    root = ElementTree.fromstring(re.sub(rb"\sxmlns=\"[^\"]*\"", b"", body))
    return [
        (int(part.findtext("PartNumber", "")), part.findtext("ETag", ""))
        for part in root.iterfind("Part")
    ]


def _abort(state: State, call: Call, bucket: str, key: str) -> Answer:
    with state.lock:
        del state.uploads[state.upload(bucket, key, call.request.query["uploadId"]).id]
    return Answer(204)


def _list_uploads(state: State, call: Call, bucket: str, key: str) -> Answer:
    """All of them, on one page."""
    query = call.request.query
    prefix, is_encoded = query.get("prefix", ""), query.get("encoding-type") == "url"
    spelled: Callable[[str], str] = quote if is_encoded else str
    with state.lock:
        held = sorted(state.uploads.values(), key=lambda upload: (upload.key.encode(), upload.id))
    entries = "".join(
        f"<Upload>{_elements([('Key', spelled(upload.key)), ('UploadId', upload.id)])}</Upload>"
        for upload in held
        if upload.bucket == bucket and upload.key.startswith(prefix)
    )
    fields = [("Bucket", bucket), ("IsTruncated", "false")]
    fields += [("EncodingType", "url")] if is_encoded else []
    return _document("ListMultipartUploadsResult", _elements(fields) + entries)


def _elements(fields: Iterable[tuple[str, str]]) -> str:
    return "".join(f"<{name}>{escape(value)}</{name}>" for name, value in fields)


def _document(name: str, inner: str, headers: answers.Headers = ()) -> Answer:
    return xml_answer(f"<{name} xmlns='{_NAMESPACE}'>{inner}</{name}>", 200, headers)


_OPERATIONS: dict[tuple[str, str], Any] = {
    ("GET", "bucket"): _list_uploads,
    ("POST", "uploads"): _begin,
    ("PUT", "upload"): _put_part,
    ("POST", "upload"): _complete,
    ("DELETE", "upload"): _abort,
}
"""By the method, and what it is about."""
