"""Maps S3's error codes to cloudckpt's exceptions.

The codes come from the list of error responses in the S3 API reference; other vendors use the same
codes, or only the HTTP status.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from cloudckpt import errors
from cloudckpt.errors import StoreError
from cloudckpt.stores.refusals import DAMAGED, NO_UPLOAD, Meaning, Refusal, refusal
from cloudckpt.stores.xml_api import error_fields

__all__ = ["REGION", "from_answer", "from_code"]

REGION = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
"""The syntax of a region's name: a label of a host name."""

# codes that may come in the body of a 200 (of copies and completions) need an explicit class
_MEANINGS = (
    Meaning("NoSuchBucket|NoSuchAccessPoint", errors.BucketNotFoundError),
    Meaning("NoSuchKey", errors.ObjectNotFoundError),
    Meaning("NoSuchUpload", errors.ObjectNotFoundError, NO_UPLOAD),
    Meaning("PreconditionFailed", errors.PreconditionFailedError),
    Meaning("AccessDenied", errors.AccessDeniedError),
    Meaning("NotImplemented", errors.InvalidRequestError),
    Meaning(
        "InvalidObjectState",
        errors.InvalidRequestError,
        "the object is in an archive; restore it by the store's own tools before you read it",
    ),
    Meaning(
        "ExpiredToken(Exception)?|TokenRefreshRequired|InvalidToken|InvalidSecurity"
        "|InvalidAccessKeyId|InvalidClientTokenId|UnrecognizedClientException"
        "|SignatureDoesNotMatch",
        errors.CredentialsError,
    ),
    Meaning("RequestTimeTooSkewed|RequestExpired", errors.ClockError),
    Meaning(
        "AuthorizationHeaderMalformed|IllegalLocationConstraintException|301|307",
        errors.WrongRegionError,
    ),
    Meaning("QuotaExceeded|XMinioStorageFull", errors.StorageFullError),
    Meaning(
        "KMS.ThrottlingException|SlowDown.*|.*Throttl.*|TooManyRequestsException"
        "|RequestLimitExceeded|BandwidthLimitExceeded|PriorRequestNotComplete|ServiceUnavailable",
        errors.ThrottledError,
    ),
    Meaning(
        "BadDigest|XAmzContent(SHA256|Checksum)Mismatch|IncompleteBody", errors.ServerError, DAMAGED
    ),
    Meaning(
        "RequestTimeout(Exception)?|IDPCommunicationError|KMS.DependencyTimeoutException",
        errors.ServerError,
    ),
    # documented to leave the object unchanged, also in the body of a 200
    Meaning(
        "ConditionalRequestConflict|OperationAborted",
        errors.ServerError,
        "the object was not written, because another write of it is in progress; try again",
        is_certain=True,
    ),
    Meaning("KMS.AccessDeniedException", errors.AccessDeniedError),
    Meaning(
        "KMS\\..*",
        None,
        "KMS can't use the encryption key; check kms_key_id, and the key's policy and region",
    ),
)


def from_code(
    response: Refusal,
    status: int,
    headers: Mapping[str, str],
    action: str = "",
    uri: str = "",
    region: str = "",
) -> StoreError:
    """Returns the exception for an S3 error code; for an unknown code, for the HTTP status.

    `region` is the bucket's region according to the body; a header takes precedence.
    """
    region = headers.get("x-amz-bucket-region") or region
    region = region if REGION.fullmatch(region) else ""
    if status == 400 and not response.code and region:  # a HEAD response has no body with the code
        response = response._replace(alias="AuthorizationHeaderMalformed")
    error = refusal(_MEANINGS, response, status, headers, action, uri)
    if isinstance(error, errors.WrongRegionError) and region:
        error.message += f" (the region is {region})"
        error.region = region
    return error


def from_answer(
    status: int, headers: Mapping[str, str], body: bytes, action: str, uri: str
) -> StoreError:
    """Returns the exception for an error response of S3; `headers` must accept lower-case names."""
    fields = error_fields(body)
    response = Refusal(
        fields.get("Code", ""),
        [fields.get("Message", "")],
        is_foreign=bool(body.strip()),  # responses to HEAD, and of some stores, have no body
        permission="s3:ListBucket",
    )
    return from_code(response, status, headers, action, uri, fields.get("Region", ""))
