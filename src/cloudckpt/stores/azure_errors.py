"""What Azure's error codes and HTTP statuses mean to cloudckpt.

Codes come from "Common REST API error codes" and "Blob Storage error codes" of the REST reference.
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
    StoreError,
)
from cloudckpt.stores.refusals import (
    DAMAGED,
    SLOW_DOWN,
    Meaning,
    by_status,
    from_elsewhere,
    is_certain,
    refusal,
)
from cloudckpt.stores.xml_answers import error_fields

__all__ = ["from_answer", "token_refused"]

_ROLE = (
    "access denied; the identity needs the role 'Storage Blob Data Contributor' on the container "
    "or the account ('Storage Blob Data Reader' to load only), a shared access signature the "
    "permissions rwdl, and t if tags are set"
)
_REFUSED: Meaning = (
    CredentialsError,
    "Azure does not accept the credentials: the key belongs to another account or was replaced, "
    "the shared access signature is malformed or has expired, or this machine's clock is wrong by "
    "minutes",
)
_IMMUTABLE: Meaning = (
    AccessDeniedError,
    "an immutability policy or a legal hold forbids that this blob is replaced or deleted",
)
_ARCHIVED: Meaning = (
    InvalidRequestError,
    "the blob is in the archive tier; rehydrate it to an online tier first",
)
_LEASED: Meaning = (
    InvalidRequestError,
    "somebody holds a lease on the blob or its container; release or break it",
)
_OTHER_TYPE: Meaning = (
    InvalidRequestError,
    "under this name there is no block blob, but a directory or a blob of another type",
)

_NO_BLOB: Meaning = (ObjectNotFoundError, "there is no such blob")
_NOT_AS_EXPECTED: Meaning = (PreconditionFailedError, "the blob is not in the expected state")
_TOO_SHORT: Meaning = (RangeNotSatisfiableError, "the blob ends before the range does")

_BY_CODE: dict[str, Meaning] = {
    "ContainerNotFound": (
        BucketNotFoundError,
        "the container does not exist; create it, or check its name and that of the account",
    ),
    "FilesystemNotFound": (BucketNotFoundError, "the container does not exist"),
    "BlobNotFound": _NO_BLOB,
    "PathNotFound": _NO_BLOB,
    "ResourceNotFound": (ObjectNotFoundError, "there is no such container or blob"),
    "InvalidBlockList": (
        ObjectNotFoundError,
        "the blocks of this upload are not there any more: it was completed or aborted, another "
        "write of the same blob discarded them, or a week has passed",
    ),
    "BlobAlreadyExists": (PreconditionFailedError, "the blob exists already"),
    "ConditionNotMet": _NOT_AS_EXPECTED,
    "TargetConditionNotMet": _NOT_AS_EXPECTED,
    "InvalidRange": _TOO_SHORT,
    "AuthenticationFailed": _REFUSED,
    "InvalidAuthenticationInfo": _REFUSED,
    "NoAuthenticationInformation": (CredentialsError, "the request arrived without credentials"),
    "KeyBasedAuthenticationNotPermitted": (
        CredentialsError,
        "the account forbids keys and what is signed with them; unset AZURE_STORAGE_* and use "
        "Microsoft Entra ID (a managed identity, AZURE_CLIENT_ID or 'az login')",
    ),
    "AuthorizationFailure": (
        AccessDeniedError,
        f"{_ROLE}; or the firewall of the account does not let this network in",
    ),
    "AuthorizationPermissionMismatch": (AccessDeniedError, _ROLE),
    "AuthorizationProtocolMismatch": (
        AccessDeniedError,
        "the shared access signature does not allow this protocol; use https",
    ),
    "AuthorizationSourceIPMismatch": (
        AccessDeniedError,
        "the shared access signature does not allow the address of this machine",
    ),
    "AuthorizationServiceMismatch": (
        AccessDeniedError,
        "the shared access signature is not for the blob service",
    ),
    "AuthorizationResourceTypeMismatch": (
        AccessDeniedError,
        "the shared access signature lacks the resource types container (c) and object (o)",
    ),
    "InsufficientAccountPermissions": (AccessDeniedError, "the account does not allow this"),
    "PublicAccessNotPermitted": (AccessDeniedError, "the account does not allow public access"),
    "AccountIsDisabled": (AccessDeniedError, "the storage account is disabled"),
    "ContainerDisabled": (AccessDeniedError, "an administrator has disabled the container"),
    "BlobImmutableDueToPolicy": _IMMUTABLE,
    "BlobImmutableDueToLegalHold": _IMMUTABLE,
    "BlobArchived": _ARCHIVED,
    "BlobBeingRehydrated": _ARCHIVED,
    "LeaseIdMissing": _LEASED,
    "LeaseIdMismatchWithBlobOperation": _LEASED,
    "LeaseIdMismatchWithContainerOperation": _LEASED,
    "LeaseLost": _LEASED,
    "InvalidBlobType": _OTHER_TYPE,
    "ResourceTypeMismatch": _OTHER_TYPE,
    "InvalidBlobOrBlock": (
        InvalidRequestError,
        "the blob holds unfinished blocks of another writer; save to another location",
    ),
    "BlobUsesCustomerSpecifiedEncryption": (
        InvalidRequestError,
        "the blob was written with a customer-provided key, which cloudckpt does not support",
    ),
    "BlobOperationNotSupported": (
        InvalidRequestError,
        "the Blob API can't do this to a file that was made through the Data Lake API; delete it "
        "first, or save to another location",
    ),
    "FeatureNotSupported": (  # Azurite's, with status 500
        InvalidRequestError,
        "the store does not know a part of this request",
    ),
    "ServerBusy": SLOW_DOWN,
    "TooManyRequests": SLOW_DOWN,
    "InternalError": (ServerError, "the store failed inside"),
    "OperationTimedOut": (ServerError, "the store could not finish the operation in time"),
    "ContainerBeingDeleted": (ServerError, "the container is being deleted"),
    "AccountBeingCreated": (ServerError, "the storage account is still being created"),
    "Md5Mismatch": DAMAGED,
    "Crc64Mismatch": DAMAGED,
}

_BY_STATUS: dict[int, Meaning] = {
    401: _REFUSED,
    403: (AccessDeniedError, _ROLE),
    404: _NO_BLOB,
    409: (InvalidRequestError, "the state of the blob or container forbids this"),
    412: _NOT_AS_EXPECTED,
    416: _TOO_SHORT,
}


def token_refused(tenant: str) -> Meaning:
    """What it means that a token was refused, where the account is of a tenant; empty: unknown."""
    named = f", {tenant}" if tenant else ""
    return (
        CredentialsError,
        "Azure does not accept the access token of this identity: it was revoked, or it is not of "
        f"the tenant that the account trusts{named} (sign in to that, with AZURE_TENANT_ID or 'az "
        "login --tenant'; a managed identity is of the tenant of its subscription), or of another "
        "cloud (AZURE_AUTHORITY_HOST); the identity needs the role 'Storage Blob Data Contributor'",
    )


def from_answer(
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    action: str,
    uri: str,
    *,
    refused: Meaning | None = None,
) -> StoreError:
    """The error for an answer that is no success: by its code, else by its HTTP status.

    ``refused`` is what it means that the credentials were not accepted, if they are no key or
    shared access signature.
    """
    given = {name.lower(): value for name, value in headers.items()}
    fields = error_fields(body)
    code = given.get("x-ms-error-code") or fields.get("Code", "")
    if error := from_elsewhere(status, code, body, action, uri):
        return error
    known = _BY_CODE.get(code)
    meaning = known or _BY_STATUS.get(status) or by_status(status)
    if meaning is _REFUSED and refused is not None:
        meaning = refused
    words = [" ".join(text.split()) for text in (fields.get("Message", ""), _detail(fields))]
    cause = ": ".join((f"{code} HTTP {status}".strip(), *filter(None, words)))
    certain = is_certain(code, status, known)
    return refusal(meaning, action, uri, cause, headers, certain=certain)


def _detail(fields: Mapping[str, str]) -> str:
    """Why credentials were refused, unless it quotes a signature or what was signed."""
    detail = fields.get("AuthenticationErrorDetail", "")
    return "" if "'" in detail or "string to sign" in detail.lower() else detail
