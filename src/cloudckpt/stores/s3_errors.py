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
_FAILED: Meaning = (ServerError, "the store failed inside")
_NO_KEY: Meaning = (
    InvalidRequestError,
    "there is no such KMS key; check its name, its region and kms_key_id",
)
_KEY_STATE: Meaning = (
    InvalidRequestError,
    "the KMS key is not in a state in which it can be used: pending deletion, or without material",
)
_GAVE_UP: Meaning = (ServerError, "the store gave up waiting for the request")

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
    "NotSignedUp": (AccessDeniedError, "the AWS account is not signed up for S3"),
    "UnauthorizedAccess": (AccessDeniedError, "the AWS account may not use this region"),
    "KMS.AccessDeniedException": (
        AccessDeniedError,
        "the KMS key may not be used; check its policy and the IAM policies",
    ),
    "KMS.DisabledException": (InvalidRequestError, "the KMS key is disabled; enable it"),
    "KMS.NotFoundException": _NO_KEY,
    "KMS.InvalidArnException": _NO_KEY,
    "KMS.InvalidKeyUsageException": (
        InvalidRequestError,
        "the KMS key is not for this; give a symmetric key for encryption",
    ),
    "KMS.KMSInvalidStateException": _KEY_STATE,
    "KMS.InvalidStateException": _KEY_STATE,
    "KMS.KeyUnavailableException": (ServerError, "the KMS key is unavailable for the moment"),
    "KMS.DependencyTimeoutException": (ServerError, "KMS did not answer the store in time"),
    "KMS.KMSInternalException": (ServerError, "KMS failed inside"),
    "KMS.ThrottlingException": (ThrottledError, "KMS asks to slow down; consider bucket_key=True"),
    "ExpiredToken": EXPIRED,
    "ExpiredTokenException": EXPIRED,
    "TokenRefreshRequired": (CredentialsError, "the credentials must be refreshed"),
    "InvalidToken": (CredentialsError, "the session token is malformed"),
    "InvalidSecurity": (CredentialsError, "the credentials are not valid"),
    "InvalidAccessKeyId": (CredentialsError, "the store does not know this access key"),
    "InvalidClientTokenId": (CredentialsError, "AWS does not know this access key"),
    "UnrecognizedClientException": (CredentialsError, "AWS does not know this access key"),
    "SignatureDoesNotMatch": (
        CredentialsError,
        "the secret key does not fit the access key (or a proxy changed the request)",
    ),
    "RequestTimeTooSkewed": (CredentialsError, "this machine's clock is wrong by minutes"),
    "RequestExpired": (CredentialsError, "this machine's clock is wrong by minutes"),
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
    "ThrottledException": SLOW_DOWN,
    "TooManyRequests": SLOW_DOWN,
    "TooManyRequestsException": SLOW_DOWN,
    "RequestLimitExceeded": SLOW_DOWN,
    "RequestThrottled": SLOW_DOWN,
    "RequestThrottledException": SLOW_DOWN,
    "BandwidthLimitExceeded": SLOW_DOWN,
    "PriorRequestNotComplete": (ThrottledError, "an earlier request is still under way"),
    "ServiceUnavailable": (ThrottledError, "the store is unavailable for the moment"),
    "InternalError": _FAILED,
    "InternalFailure": _FAILED,
    "InternalServerError": _FAILED,
    "InternalServerException": _FAILED,
    "RequestTimeout": _GAVE_UP,
    "RequestTimeoutException": _GAVE_UP,
    "OperationAborted": (
        ServerError,
        "not carried out: another operation on the same object is under way",
    ),
    "ConditionalRequestConflict": (
        ServerError,
        "not written: another write of the same object is under way",
    ),
    "BadDigest": DAMAGED,
    "XAmzContentSHA256Mismatch": DAMAGED,
    "XAmzContentChecksumMismatch": DAMAGED,
    "IncompleteBody": CUT_SHORT,
}

_BY_STATUS: dict[int, Meaning] = {301: _ELSEWHERE, 307: _ELSEWHERE}

_NOT_DONE = {"ConditionalRequestConflict", "OperationAborted"}
"""Documented to leave the object as it is, also behind the status 200 of a long completion."""


def from_code(
    code: str,
    status: int,
    message: str,
    action: str,
    uri: str,
    headers: Mapping[str, str] | None = None,
    region: str = "",
) -> StoreError:
    """The error for an S3 error code, or where it is unknown or absent, for the HTTP status.

    ``region`` is what the body says of where the bucket is.
    """
    given = {name.lower(): value for name, value in (headers or {}).items()}
    known = _BY_CODE.get(code)
    kind, meaning = meant(status, known, _BY_STATUS)
    if known is None and code.startswith("KMS."):
        meaning = "KMS refuses, or can't use, the key of the encryption"
    region = given.get("x-amz-bucket-region") or region
    if status == 400 and not code and region:  # the answer to HEAD has no body to tell more
        kind, meaning = _ELSEWHERE
    if kind is WrongRegionError and region:
        meaning += f"; set AWS_REGION={region}"
    details = [text for text in (code, f"HTTP {status}" if status else "", message) if text]
    cause = ": ".join((" ".join(details[:2]), *details[2:])) or None
    certain = code in _NOT_DONE or (known is not _GAVE_UP and is_certain(code, status, known))
    error = refusal((kind, meaning), action, uri, cause, given, certain=certain)
    if isinstance(error, WrongRegionError):
        error.region = region or None
    return error


def from_answer(
    status: int, headers: Mapping[str, str], body: bytes, action: str, uri: str
) -> StoreError:
    """The error for an answer that is no success."""
    fields = error_fields(body)
    if error := from_elsewhere(status, fields.get("Code", ""), body, action, uri):
        return error
    return from_code(
        fields.get("Code", ""),
        status,
        fields.get("Message", ""),
        action,
        uri,
        headers,
        fields.get("Region", ""),
    )
