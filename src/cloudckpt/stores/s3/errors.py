"""Maps S3's error codes to cloudckpt's exceptions.

The codes come from the list of error responses in the S3 API reference; other vendors use the same
codes, or only the HTTP status.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from cloudckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    ClockError,
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
from cloudckpt.stores.refusals import DAMAGED, Meaning, refusal
from cloudckpt.stores.xml_api import error_fields

__all__ = ["REGION", "from_answer", "from_code"]

REGION = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
"""The syntax of a region's name: a label of a host name."""

# codes that may come in the body of a 200 (of copies and completions) need an explicit class
_MEANINGS = (
    Meaning("NoSuchBucket|NoSuchAccessPoint", BucketNotFoundError),
    Meaning("NoSuchKey|NoSuchUpload", ObjectNotFoundError),
    Meaning("PreconditionFailed", PreconditionFailedError),
    Meaning("AccessDenied", AccessDeniedError),
    Meaning("NotImplemented", InvalidRequestError),
    Meaning(
        "InvalidObjectState",
        InvalidRequestError,
        "the object is archived; restore it from its storage class first",
    ),
    Meaning(
        "ExpiredToken(Exception)?|TokenRefreshRequired|InvalidToken|InvalidSecurity"
        "|InvalidAccessKeyId|InvalidClientTokenId|UnrecognizedClientException"
        "|SignatureDoesNotMatch",
        CredentialsError,
    ),
    Meaning("RequestTimeTooSkewed|RequestExpired", ClockError),
    Meaning(
        "AuthorizationHeaderMalformed|IllegalLocationConstraintException|301|307", WrongRegionError
    ),
    Meaning("QuotaExceeded|XMinioStorageFull", StorageFullError),
    Meaning(
        "KMS.ThrottlingException|SlowDown.*|.*Throttl.*|TooManyRequestsException"
        "|RequestLimitExceeded|BandwidthLimitExceeded|PriorRequestNotComplete|ServiceUnavailable",
        ThrottledError,
    ),
    Meaning("BadDigest|XAmzContent(SHA256|Checksum)Mismatch|IncompleteBody", ServerError, DAMAGED),
    Meaning(
        "RequestTimeout(Exception)?|IDPCommunicationError|KMS.DependencyTimeoutException",
        ServerError,
    ),
    # documented to leave the object unchanged, also in the body of a 200
    Meaning(
        "ConditionalRequestConflict|OperationAborted",
        ServerError,
        "not written: another write of the same object is in progress",
        is_certain=True,
    ),
    Meaning("KMS.AccessDeniedException", AccessDeniedError),
    Meaning(
        "KMS\\..*",
        None,
        "KMS can't use the key of the encryption; check kms_key_id, the key's policy and region",
    ),
)


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
    """Returns the exception for an S3 error code; for an unknown code, for the HTTP status.

    `region` is the bucket's region according to the body; `is_foreign` as in :func:`refusal`.
    """
    given = {name.lower(): value for name, value in (headers or {}).items()}
    region = given.get("x-amz-bucket-region") or region
    region = region if REGION.fullmatch(region) else ""
    # a HEAD response has no body with the code
    means = "AuthorizationHeaderMalformed" if status == 400 and not code and region else ""
    error = refusal(
        _MEANINGS,
        status,
        code,
        [message],
        action,
        uri,
        given,
        means=means,
        is_foreign=is_foreign,
    )
    if isinstance(error, AccessDeniedError) and action in ("GET", "HEAD"):
        error.message += (
            "; without the permission s3:ListBucket, S3 gives the same answer for an object "
            "that does not exist"
        )
    if isinstance(error, WrongRegionError) and region:
        error.message += f"; set AWS_REGION={region}"
        error.region = region
    return error


def from_answer(
    status: int, headers: Mapping[str, str], body: bytes, action: str, uri: str
) -> StoreError:
    """Returns the exception for an error response of S3."""
    fields = error_fields(body)
    code, message = fields.get("Code", ""), fields.get("Message", "")
    region = fields.get("Region", "")
    has_page = bool(body.strip())  # responses to HEAD have no body, and those of some stores
    return from_code(
        code, status, message, action, uri, headers, region=region, is_foreign=has_page
    )
