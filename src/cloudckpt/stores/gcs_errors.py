"""What Google Cloud Storage's reasons, codes and HTTP statuses mean to cloudckpt.

The JSON API names a ``reason``, the XML API a ``Code``; many differ in their first letter only.
Both lists are those of the API references ("HTTP status and error codes for JSON", "… for XML").
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from cloudckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    CredentialsError,
    InvalidRequestError,
    ObjectNotFoundError,
    PreconditionFailedError,
    RangeNotSatisfiableError,
    ServerError,
    StorageFullError,
    StoreError,
    ThrottledError,
)
from cloudckpt.stores.xml_answers import error_fields

__all__ = ["from_answer"]

_Meaning = tuple[type[StoreError], str]

_LONGEST_TEXT = 500
_OWN_TEXT = re.compile(r"No such object|bucket does not exist|storage\.\w+\.\w+|requester pays")

_NO_BUCKET: _Meaning = (
    BucketNotFoundError,
    "the bucket does not exist; check its name and the endpoint",
)
_DAMAGED: _Meaning = (ServerError, "the bytes arrived damaged")
_SLOW_DOWN: _Meaning = (ThrottledError, "the store asks to slow down")
_NO_PROJECT: _Meaning = (
    InvalidRequestError,
    "the bucket's requesters pay: name the project to bill in GCSOptions(user_project=…)",
)
_KEEP = "forbids to replace or delete the object; nothing is lost"

_BY_REASON: dict[str, _Meaning] = {
    "accountDisabled": (AccessDeniedError, "the project's account is disabled"),
    "authError": (CredentialsError, "the store does not accept these credentials"),
    "badDigest": _DAMAGED,
    "conditionNotMet": (PreconditionFailedError, "the object is not in the expected state"),
    "expiredToken": (CredentialsError, "the credentials have expired; renew them"),
    "incompleteBody": (ServerError, "the body arrived short"),
    "invalidRange": (RangeNotSatisfiableError, "the object ends before the range does"),
    "noSuchBucket": _NO_BUCKET,
    "noSuchKey": (ObjectNotFoundError, "there is no such object"),
    "noSuchUpload": (ObjectNotFoundError, "there is no such multipart upload any more"),
    "objectUnderActiveHold": (AccessDeniedError, f"a hold {_KEEP} until it is released"),
    "orgPolicyConstraintFailed": (AccessDeniedError, "a policy of the organization forbids it"),
    "preconditionFailed": (PreconditionFailedError, "the object is not in the expected state"),
    "quotaExceeded": (StorageFullError, "a quota is used up"),
    "rateLimitExceeded": _SLOW_DOWN,
    "requestedRangeNotSatisfiable": (
        RangeNotSatisfiableError,
        "the object ends before the range does",
    ),
    "requestTimeout": (ServerError, "the store gave up waiting for the request"),
    "retentionPolicyNotMet": (AccessDeniedError, f"the retention policy {_KEEP} until it is over"),
    "slowDown": _SLOW_DOWN,
    "uploadBrokenConnection": (ServerError, "the body arrived short"),
    "usageLimits.rateLimitExceeded": _SLOW_DOWN,
    "userProjectAccessDenied": (
        AccessDeniedError,
        "the project to bill may not be used: it takes serviceusage.services.use",
    ),
    "userProjectMissing": _NO_PROJECT,
    "userRateLimitExceeded": _SLOW_DOWN,
}

_BY_STATUS: dict[int, _Meaning] = {
    401: (CredentialsError, "the store does not accept these credentials"),
    403: (AccessDeniedError, "access denied; check the IAM roles of these credentials"),
    404: (ObjectNotFoundError, "there is no such object"),
    408: (ServerError, "the store gave up waiting for the request"),
    409: (ServerError, "another operation on the same object is under way"),
    412: (PreconditionFailedError, "the object is not in the expected state"),
    416: (RangeNotSatisfiableError, "the object ends before the range does"),
    429: _SLOW_DOWN,
    501: (InvalidRequestError, "the store does not know this operation"),
    503: (ThrottledError, "the store is unavailable for the moment"),
}


def from_answer(
    status: int, headers: Mapping[str, str], body: bytes, action: str, uri: str
) -> StoreError:
    """The error for an answer that is no success, of either API."""
    reason, message = _fields(body)
    kind, meaning = _meaning(status, reason, message)
    details = [text for text in (reason, f"HTTP {status}") if text]
    error = kind(
        f"{action}: {meaning}",
        uri=uri,
        cause=": ".join(text for text in (" ".join(details), message) if text),
    )
    wait = next((value for name, value in headers.items() if name.lower() == "retry-after"), "")
    if isinstance(error, (ThrottledError, ServerError)) and wait.isascii() and wait.isdigit():
        error.retry_after = float(wait)
    return error


def _meaning(status: int, reason: str, message: str) -> _Meaning:
    # what has no reason of its own is told by its message, worded so in the API references
    if status == 404 and "bucket does not exist" in message:
        return _NO_BUCKET
    if status == 400 and "doesn't match calculated" in message:
        return _DAMAGED
    if status == 400 and "requester pays" in message:
        return _NO_PROJECT
    known = _BY_REASON.get(reason[:1].lower() + reason[1:]) or _BY_STATUS.get(status)
    if known is not None:
        return known
    if status >= 500 or status == 200:
        return ServerError, "the store failed inside"
    return InvalidRequestError, "the store rejects the request"


def _fields(body: bytes) -> tuple[str, str]:
    """The reason (or code) of an error and its message; empty where the body is no such thing."""
    begin = body.lstrip()[:1]
    if begin == b"<":
        fields = error_fields(body)
        texts = (fields.get("Message", ""), fields.get("Details", ""))
        return fields.get("Code", ""), ": ".join(text for text in texts if text)
    if begin != b"{":  # how reads are refused; what is no text of the store's is not repeated
        text = body[:_LONGEST_TEXT].decode("utf-8", "replace").strip()
        return "", text if _OWN_TEXT.search(text) else ""
    try:
        error = json.loads(body)["error"]
        first = (error.get("errors") or [{}])[0]
        return str(first.get("reason", "")), str(error.get("message", ""))
    except (ValueError, LookupError, TypeError, AttributeError):
        return "", ""
