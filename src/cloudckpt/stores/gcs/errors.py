"""Maps the error codes of Google Cloud Storage to cloudckpt's exceptions.

The JSON API sends a ``reason``, the XML API a ``Code``; many differ only in the case of their first
letter. Both are listed in the API references ("HTTP status and error codes for JSON", "… for XML").
"""

from __future__ import annotations

import contextlib
import json
import re
import zlib
from collections.abc import Mapping

from cloudckpt import errors
from cloudckpt.errors import StoreError
from cloudckpt.stores.refusals import DAMAGED, NO_UPLOAD, Meaning, Refusal, refusal
from cloudckpt.stores.xml_api import error_fields

__all__ = ["from_answer"]

_LONGEST_BODY = 64 * 1024
_LONGEST_TEXT = 500
_OWN_TEXT = re.compile(r"No such object|bucket does not exist|storage\.\w+\.\w+|requester pays")
_OF_EMULATORS = re.compile(rb"Not Found|.*\bdomain\W+global\b.*", re.DOTALL)
"""Error bodies without a reason in Google's format that emulators send.

fake-gcs-server sends the first for reads, storage-testbench the second (an error nested in another)
for all requests.
"""

_MEANINGS = (
    Meaning("orgPolicyConstraintFailed", errors.AccessDeniedError),
    Meaning("noSuchBucket", errors.BucketNotFoundError),
    Meaning("noSuchUpload", errors.ObjectNotFoundError, NO_UPLOAD),
    Meaning("expiredToken", errors.CredentialsError),
    Meaning("requestTimeTooSkewed", errors.ClockError),
    Meaning(
        "userProjectMissing",
        errors.InvalidRequestError,
        "this is a requester-pays bucket: name the project to bill in GCSOptions(user_project=…)",
    ),
    Meaning("quotaExceeded", errors.StorageFullError),
    Meaning(
        "badDigest|crcMismatch|invalidDigest|incompleteBody|uploadBrokenConnection",
        errors.ServerError,
        DAMAGED,
    ),
    Meaning(".*[rR]ateLimitExceeded|slowDown|serviceUnavailable", errors.ThrottledError),
)
# errors without a specific reason are recognized by their message, as the API references word it
_BY_WORDS = (
    (404, "bucket does not exist", "noSuchBucket"),
    (400, "doesn't match calculated", "badDigest"),
    (400, "requester pays", "userProjectMissing"),
)


def from_answer(
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    action: str,
    uri: str,
    *,
    is_google: bool = True,
) -> StoreError:
    """Returns the exception for an error of the JSON or XML API.

    `headers` must accept lower-case names. `is_google` tells whether the endpoint is Google's own
    rather than an emulator.
    """
    if headers.get("content-encoding") == "gzip":
        with contextlib.suppress(zlib.error):
            body = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16).decompress(body, _LONGEST_BODY)
    reason, message = _fields(body)
    found = (code for of, words, code in _BY_WORDS if status == of and words in message)
    alias = next(found, reason[:1].lower() + reason[1:])
    if status == 503 and reason == "backendError":  # with 500 it is an internal error
        alias = "serviceUnavailable"
    is_foreign = _is_foreign(body.strip(), message, is_google=is_google)
    response = Refusal(reason, [message], alias, is_foreign, permission="storage.objects.list")
    return refusal(_MEANINGS, response, status, headers, action, uri)


def _is_foreign(body: bytes, message: str, *, is_google: bool) -> bool:
    """Returns whether an error body without a reason can come only from a proxy or gateway.

    From stores come three kinds of such bodies: Google's plain `message` to reads, the empty body
    of gcp-storage-emulator, and those of `_OF_EMULATORS`.
    """
    if body[:1] == b"<":
        return True
    if not body or message:
        return False
    return is_google or not _OF_EMULATORS.fullmatch(body)


def _fields(body: bytes) -> tuple[str, str]:
    """Returns the reason (or code) and the message of an error body; empty texts where missing."""
    begin = body.lstrip()[:1]
    if begin == b"<":
        fields = error_fields(body)
        texts = (fields.get("Message", ""), fields.get("Details", ""))
        return fields.get("Code", ""), ": ".join(text for text in texts if text)
    # reads are refused with plain text; other text may be a gateway's and is not quoted
    if begin != b"{":
        text = body[:_LONGEST_TEXT].decode("utf-8", "replace").strip()
        return "", text if _OWN_TEXT.search(text) else ""
    try:
        error = json.loads(body)["error"]
        first = (error.get("errors") or [{}])[0]
        reason = first.get("reason") or error.get("status") or ""
        return str(reason), str(error.get("message", ""))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return "", ""
