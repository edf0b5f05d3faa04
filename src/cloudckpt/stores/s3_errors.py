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
    ObjectNotFoundError,
    PreconditionFailedError,
    RangeNotSatisfiableError,
    ServerError,
    StorageFullError,
    StoreError,
    ThrottledError,
    WrongRegionError,
)
from cloudckpt.stores.xml_answers import error_fields

__all__ = ["from_answer", "from_code"]

_BY_CODE: dict[str, tuple[type[StoreError], str]] = {
    "NoSuchBucket": (
        BucketNotFoundError,
        "the bucket does not exist; check its name and the endpoint",
    ),
    "NoSuchKey": (ObjectNotFoundError, "there is no such object"),
    "NoSuchUpload": (ObjectNotFoundError, "there is no such multipart upload any more"),
    "InvalidRange": (RangeNotSatisfiableError, "the object ends before the range does"),
    "PreconditionFailed": (PreconditionFailedError, "the object is not in the expected state"),
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
    "ExpiredToken": (CredentialsError, "the credentials have expired; renew them"),
    "ExpiredTokenException": (CredentialsError, "the credentials have expired; renew them"),
    "TokenRefreshRequired": (CredentialsError, "the credentials must be refreshed"),
    "InvalidToken": (CredentialsError, "the session token is malformed"),
    "InvalidAccessKeyId": (CredentialsError, "the store does not know this access key"),
    "SignatureDoesNotMatch": (
        CredentialsError,
        "the secret key does not fit the access key (or a proxy changed the request)",
    ),
    "RequestTimeTooSkewed": (CredentialsError, "this machine's clock is wrong by minutes"),
    "PermanentRedirect": (WrongRegionError, "the bucket is in another region"),
    "TemporaryRedirect": (WrongRegionError, "the bucket is in another region"),
    "AuthorizationHeaderMalformed": (WrongRegionError, "the request was signed for another region"),
    "IllegalLocationConstraintException": (WrongRegionError, "the bucket is in another region"),
    "QuotaExceeded": (StorageFullError, "the quota is used up"),
    "XMinioStorageFull": (StorageFullError, "the store's disks are full"),
    "SlowDown": (ThrottledError, "the store asks to slow down"),
    "SlowDownRead": (ThrottledError, "the store asks to slow down"),
    "SlowDownWrite": (ThrottledError, "the store asks to slow down"),
    "Throttling": (ThrottledError, "the store asks to slow down"),
    "ThrottlingException": (ThrottledError, "the store asks to slow down"),
    "TooManyRequests": (ThrottledError, "the store asks to slow down"),
    "RequestLimitExceeded": (ThrottledError, "the store asks to slow down"),
    "ServiceUnavailable": (ThrottledError, "the store is unavailable for the moment"),
    "InternalError": (ServerError, "the store failed inside"),
    "RequestTimeout": (ServerError, "the store gave up waiting for the request"),
    "OperationAborted": (ServerError, "another operation on the same object is under way"),
    "ConditionalRequestConflict": (ServerError, "another write of the same object is under way"),
    "BadDigest": (ServerError, "the bytes arrived damaged"),
    "XAmzContentChecksumMismatch": (ServerError, "the bytes arrived damaged"),
    "IncompleteBody": (ServerError, "the body arrived short"),
}

_BY_STATUS: dict[int, tuple[type[StoreError], str]] = {
    301: (WrongRegionError, "the bucket is in another region"),
    307: (WrongRegionError, "the bucket is in another region"),
    401: (CredentialsError, "the store does not accept these credentials"),
    403: (AccessDeniedError, "access denied; check the policies for these credentials"),
    404: (ObjectNotFoundError, "there is no such object"),
    408: (ServerError, "the store gave up waiting for the request"),
    409: (ServerError, "another write of the same object is under way"),
    412: (PreconditionFailedError, "the object is not in the expected state"),
    416: (RangeNotSatisfiableError, "the object ends before the range does"),
    429: (ThrottledError, "the store asks to slow down"),
    501: (InvalidRequestError, "the store does not know this operation"),
    503: (ThrottledError, "the store is unavailable for the moment"),
    507: (StorageFullError, "the store's disks are full"),
}


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
    if code in _BY_CODE:
        kind, meaning = _BY_CODE[code]
    elif status in _BY_STATUS:
        kind, meaning = _BY_STATUS[status]
    elif status >= 500 or status == 200:
        kind, meaning = ServerError, "the store failed inside"
    else:
        kind, meaning = InvalidRequestError, "the store rejects the request"
    if kind is WrongRegionError and (region := given.get("x-amz-bucket-region")):
        meaning += f"; set AWS_REGION={region}"
    details = [text for text in (code, f"HTTP {status}" if status else "", message) if text]
    cause = ": ".join((" ".join(details[:2]), *details[2:])) or None
    error = kind(f"{action}: {meaning}", uri=uri, cause=cause)
    wait = given.get("retry-after", "")
    if isinstance(error, (ThrottledError, ServerError)) and wait.isdigit():
        error.retry_after = float(wait)
    return error


def from_answer(
    status: int, headers: Mapping[str, str], body: bytes, action: str, uri: str
) -> StoreError:
    """The error for an answer that is no success."""
    fields = error_fields(body)
    return from_code(
        fields.get("Code", ""), status, fields.get("Message", ""), action, uri, headers
    )
