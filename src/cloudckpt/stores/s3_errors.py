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
    by_code,
    by_status,
    refusal,
)
from cloudckpt.stores.xml_api import error_fields

__all__ = ["from_answer", "from_code"]

_ELSEWHERE: Meaning = (WrongRegionError, "the bucket is in another region")
_KMS = "KMS refuses, or can't use, the key of the encryption"

_BY_CODE = {
    "NoSuchKey": NO_OBJECT,
    "NoSuchUpload": NO_UPLOAD,
    "InvalidRange": TOO_SHORT,
    "PreconditionFailed": NOT_AS_EXPECTED,
    "IncompleteBody": CUT_SHORT,
    **dict.fromkeys(
        ("BadDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"), DAMAGED
    ),
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException"), EXPIRED),
    **by_code(
        {
            BucketNotFoundError: {
                "NoSuchBucket": "the bucket does not exist; check its name and the endpoint",
            },
            AccessDeniedError: {
                "AccessDenied": (
                    "access denied; check the IAM, bucket and key policies for these credentials"
                ),
                "AllAccessDisabled": "all access to the bucket is disabled",
                "AccountProblem": "there is a problem with the AWS account",
                "NotSignedUp": "the AWS account is not signed up for S3",
                "UnauthorizedAccess": "the AWS account may not use this region",
                "KMS.AccessDeniedException": (
                    "the KMS key may not be used; check its policy and the IAM policies"
                ),
            },
            InvalidRequestError: {
                "InvalidObjectState": (
                    "the object is archived; restore it from its storage class first"
                ),
                "NotImplemented": "the store does not know this operation",
                "KMS.DisabledException": "the KMS key is disabled; enable it",
                "KMS.NotFoundException KMS.InvalidArnException": (
                    "there is no such KMS key; check its name, its region and kms_key_id"
                ),
                "KMS.InvalidKeyUsageException": (
                    "the KMS key is not for this; give a symmetric key for encryption"
                ),
                "KMS.KMSInvalidStateException KMS.InvalidStateException": (
                    "the KMS key is not in a state in which it can be used: pending deletion, or "
                    "without material"
                ),
            },
            CredentialsError: {
                "TokenRefreshRequired": "the credentials must be refreshed",
                "InvalidToken": "the session token is malformed",
                "InvalidSecurity": "the credentials are not valid",
                "InvalidAccessKeyId": "the store does not know this access key",
                "InvalidClientTokenId UnrecognizedClientException": (
                    "AWS does not know this access key"
                ),
                "SignatureDoesNotMatch": (
                    "the secret key does not fit the access key (or a proxy changed the request)"
                ),
                "RequestTimeTooSkewed RequestExpired": ("this machine's clock is wrong by minutes"),
            },
            WrongRegionError: {
                "PermanentRedirect TemporaryRedirect IllegalLocationConstraintException": (
                    _ELSEWHERE[1]
                ),
                "AuthorizationHeaderMalformed": "the request was signed for another region",
            },
            StorageFullError: {
                "QuotaExceeded": "the quota is used up",
                "XMinioStorageFull": "the store's disks are full",
            },
            ThrottledError: {
                "SlowDown SlowDownRead SlowDownWrite Throttling ThrottlingException "
                "ThrottledException TooManyRequests TooManyRequestsException RequestLimitExceeded "
                "RequestThrottled RequestThrottledException BandwidthLimitExceeded": SLOW_DOWN[1],
                "PriorRequestNotComplete": "an earlier request is still under way",
                "ServiceUnavailable": "the store is unavailable for the moment",
                "KMS.ThrottlingException": "KMS asks to slow down; consider bucket_key=True",
            },
            ServerError: {
                "InternalError InternalFailure InternalServerError InternalServerException": (
                    "the store failed inside"
                ),
                "RequestTimeout RequestTimeoutException": (
                    "the store gave up waiting for the request"
                ),
                "OperationAborted": (
                    "not carried out: another operation on the same object is under way"
                ),
                "ConditionalRequestConflict": (
                    "not written: another write of the same object is under way"
                ),
                "IDPCommunicationError": "STS can't reach who vouches for the identity",
                "KMS.KeyUnavailableException": "the KMS key is unavailable for the moment",
                "KMS.DependencyTimeoutException": "KMS did not answer the store in time",
                "KMS.KMSInternalException": "KMS failed inside",
            },
        }
    ),
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
    *,
    region: str = "",
    page: bytes = b"",
) -> StoreError:
    """The error for an S3 error code, or where it is unknown or absent, for the HTTP status.

    ``region`` is what the body says of where the bucket is; ``page`` as of :func:`refusal`.
    """
    given = {name.lower(): value for name, value in (headers or {}).items()}
    region = given.get("x-amz-bucket-region") or region
    known = _BY_CODE.get(code)
    if known is None and code.startswith("KMS."):
        known = by_status(status)[0], _KMS
    elif status == 400 and not code and region:  # the answer to HEAD has no body to tell more
        known = _ELSEWHERE
    error = refusal(
        status,
        code,
        [message],
        action,
        uri,
        given,
        known=known,
        own=_BY_STATUS,
        page=page,
        certain=True if code in _NOT_DONE else None,
    )
    if isinstance(error, WrongRegionError) and region:
        error.message += f"; set AWS_REGION={region}"
        error.region = region
    return error


def from_answer(
    status: int, headers: Mapping[str, str], body: bytes, action: str, uri: str
) -> StoreError:
    """The error for an answer that is no success."""
    fields = error_fields(body)
    code, message = fields.get("Code", ""), fields.get("Message", "")
    region = fields.get("Region", "")
    return from_code(code, status, message, action, uri, headers, region=region, page=body)
