"""What S3's error codes and HTTP statuses mean to cloudckpt.

Codes come from the list of error responses in the S3 API reference; other vendors use the same
ones, or only the status.
"""

from __future__ import annotations

from collections.abc import Mapping

from cloudckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    CredentialsError,
    InvalidRequestError,
    ServerError,
    StorageFullError,
    StoreError,
    ThrottledError,
    WrongRegionError,
)
from cloudckpt.stores.refusals import (
    CUT_SHORT,
    DAMAGED,
    EXPIRED,
    NO_OBJECT,
    NO_UPLOAD,
    NOT_AS_EXPECTED,
    SLOW_DOWN,
    TOO_SHORT,
    Meaning,
    from_elsewhere,
    is_certain,
    meant,
    refusal,
)
from cloudckpt.stores.xml_answers import error_fields

__all__ = ["from_answer", "from_code"]

_ELSEWHERE: Meaning = (WrongRegionError, "the bucket is in another region")

_BY_CODE: dict[str, Meaning] = {
    "NoSuchBucket": (
        BucketNotFoundError,
        "the bucket does not exist; check its name and the endpoint",
    ),
    "NoSuchKey": NO_OBJECT,
    "NoSuchUpload": NO_UPLOAD,
    "InvalidRange": TOO_SHORT,
    "PreconditionFailed": NOT_AS_EXPECTED,
    "AccessDenied": (
        AccessDeniedError,
        "access denied; check the IAM, bucket and key policies for these credentials",
    ),
    "InvalidObjectState": (
        InvalidRequestError,
        "the object is archived; restore it from its storage class first",
    ),
    "NotImplemented": (InvalidRequestError, "the store does not know this operation"),
    "AllAccessDisabled": (AccessDeniedError, "all access to the bucket is disabled"),
    "AccountProblem": (AccessDeniedError, "there is a problem with the AWS account"),
    "ExpiredToken": EXPIRED,
    "ExpiredTokenException": EXPIRED,
    "TokenRefreshRequired": (CredentialsError, "the credentials must be refreshed"),
    "InvalidToken": (CredentialsError, "the session token is malformed"),
    "InvalidAccessKeyId": (CredentialsError, "the store does not know this access key"),
    "SignatureDoesNotMatch": (
        CredentialsError,
        "the secret key does not fit the access key (or a proxy changed the request)",
    ),
    "RequestTimeTooSkewed": (CredentialsError, "this machine's clock is wrong by minutes"),
    "PermanentRedirect": _ELSEWHERE,
    "TemporaryRedirect": _ELSEWHERE,
    "AuthorizationHeaderMalformed": (WrongRegionError, "the request was signed for another region"),
    "IllegalLocationConstraintException": _ELSEWHERE,
    "QuotaExceeded": (StorageFullError, "the quota is used up"),
    "XMinioStorageFull": (StorageFullError, "the store's disks are full"),
    "SlowDown": SLOW_DOWN,
    "SlowDownRead": SLOW_DOWN,
    "SlowDownWrite": SLOW_DOWN,
    "Throttling": SLOW_DOWN,
    "ThrottlingException": SLOW_DOWN,
    "TooManyRequests": SLOW_DOWN,
    "RequestLimitExceeded": SLOW_DOWN,
    "ServiceUnavailable": (ThrottledError, "the store is unavailable for the moment"),
    "InternalError": (ServerError, "the store failed inside"),
    "RequestTimeout": (ServerError, "the store gave up waiting for the request"),
    "OperationAborted": (ServerError, "another operation on the same object is under way"),
    "ConditionalRequestConflict": (ServerError, "another write of the same object is under way"),
    "BadDigest": DAMAGED,
    "XAmzContentChecksumMismatch": DAMAGED,
    "IncompleteBody": CUT_SHORT,
}

_BY_STATUS: dict[int, Meaning] = {301: _ELSEWHERE, 307: _ELSEWHERE}


def from_code(
    code: str,
    status: int,
    message: str,
    action: str,
    uri: str,
    headers: Mapping[str, str] | None = None,
) -> StoreError:
    """The error for an S3 error code, or where it is unknown or absent, for the HTTP status."""
    given = {name.lower(): value for name, value in (headers or {}).items()}
    known = _BY_CODE.get(code)
    kind, meaning = meant(status, known, _BY_STATUS)
    if kind is WrongRegionError and (region := given.get("x-amz-bucket-region")):
        meaning += f"; set AWS_REGION={region}"
    details = [text for text in (code, f"HTTP {status}" if status else "", message) if text]
    cause = ": ".join((" ".join(details[:2]), *details[2:])) or None
    certain = is_certain(code, status, known)
    return refusal((kind, meaning), action, uri, cause, given, certain=certain)


def from_answer(
    status: int, headers: Mapping[str, str], body: bytes, action: str, uri: str
) -> StoreError:
    """The error for an answer that is no success."""
    fields = error_fields(body)
    if error := from_elsewhere(status, fields.get("Code", ""), body, action, uri):
        return error
    return from_code(
        fields.get("Code", ""), status, fields.get("Message", ""), action, uri, headers
    )
