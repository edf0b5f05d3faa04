"""What S3's error codes and HTTP statuses mean to cloudckpt.

Codes come from the list of error responses in the S3 API reference; other vendors use the same
ones, or only the status.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from cloudckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    CredentialsError,
    InvalidRequestError,
    ObjectNotFoundError,
    PreconditionFailedError,
    ServerError,
    StorageFullError,
    StoreError,
    ThrottledError,
    WrongRegionError,
)
from cloudckpt.stores.refusals import WRONG_TIME, Meaning, by_code, by_status, refusal
from cloudckpt.stores.xml_api import error_fields

__all__ = ["REGION", "from_answer", "from_code"]

REGION = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
"""A region's name: a label of a host name."""

_KMS = "KMS refuses, or can't use, the key of the encryption"

_DENIED = "access denied; check the IAM, bucket and key policies for these credentials"

# what copies and completions answer in the body of a success needs its class here, too
_BY_CODE = by_code(
    {
        BucketNotFoundError: {
            "NoSuchBucket": "",
            "NoSuchAccessPoint": "there is no such access point; check its name and its account",
        },
        ObjectNotFoundError: {
            "NoSuchKey": "",
            "NoSuchUpload": "there is no such multipart upload any more",
        },
        PreconditionFailedError: {"PreconditionFailed": ""},
        AccessDeniedError: {
            "AccessDenied": _DENIED,
            "KMS.AccessDeniedException": (
                "the KMS key may not be used; check its policy and the IAM policies"
            ),
        },
        InvalidRequestError: {
            "NotImplemented": "",
            "InvalidObjectState": "the object is archived; restore it from its storage class first",
            "KMS.NotFoundException": (
                "there is no such KMS key; check its name, its region and kms_key_id"
            ),
        },
        CredentialsError: {
            "ExpiredToken ExpiredTokenException": "the credentials have expired; renew them",
            "TokenRefreshRequired InvalidToken InvalidSecurity": "",
            "InvalidAccessKeyId InvalidClientTokenId UnrecognizedClientException": (
                "the store does not know this access key"
            ),
            "SignatureDoesNotMatch": (
                "the secret key does not fit the access key (or a proxy changed the request)"
            ),
        },
        WrongRegionError: {
            "IllegalLocationConstraintException": "",
            "AuthorizationHeaderMalformed": "the request was signed for another region",
        },
        StorageFullError: {"QuotaExceeded XMinioStorageFull": ""},
        ThrottledError: {
            "SlowDown SlowDownRead SlowDownWrite Throttling ThrottlingException "
            "ThrottledException TooManyRequestsException RequestLimitExceeded RequestThrottled "
            "RequestThrottledException BandwidthLimitExceeded PriorRequestNotComplete "
            "ServiceUnavailable": "",
            "KMS.ThrottlingException": "KMS asks to slow down; consider an S3 Bucket Key",
        },
        ServerError: {
            "BadDigest XAmzContentSHA256Mismatch XAmzContentChecksumMismatch": (
                "the bytes arrived damaged"
            ),
            "IncompleteBody": "the body arrived short",
            "RequestTimeout RequestTimeoutException IDPCommunicationError "
            "KMS.DependencyTimeoutException": "",
            "ConditionalRequestConflict": (
                "not written: another write of the same object is under way"
            ),
        },
    }
)

_ELSEWHERE = _BY_CODE["IllegalLocationConstraintException"]
_BY_STATUS: dict[int, Meaning] = {
    301: _ELSEWHERE,
    307: _ELSEWHERE,
    403: (AccessDeniedError, _DENIED),
}

_OF_TIME = {"RequestTimeTooSkewed", "RequestExpired"}

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
    is_foreign: bool = False,
) -> StoreError:
    """The error for an S3 error code, or where it is unknown or absent, for the HTTP status.

    ``region`` is what the body says of where the bucket is; ``is_foreign`` as of :func:`refusal`.
    """
    given = {name.lower(): value for name, value in (headers or {}).items()}
    region = given.get("x-amz-bucket-region") or region
    region = region if REGION.fullmatch(region) else ""
    known = WRONG_TIME if code in _OF_TIME else _BY_CODE.get(code)
    if known is None and code.startswith("KMS."):
        known = by_status(400 if status == 200 else status)[0], _KMS
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
        is_foreign=is_foreign,
        certain=True if code in _NOT_DONE else None,
    )
    if isinstance(error, AccessDeniedError) and action in ("GET", "HEAD"):
        error.message += "; without s3:ListBucket, S3 answers so if there is no such object, too"
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
    has_page = bool(body.strip())  # the answer to HEAD has none, and that of some stores
    return from_code(
        code, status, message, action, uri, headers, region=region, is_foreign=has_page
    )
