"""What Azure's error codes and HTTP statuses mean to cloudckpt.

Codes come from "Common REST API error codes" and "Blob Storage error codes" of the REST reference.
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
    StoreError,
    ThrottledError,
    TLSError,
)
from cloudckpt.stores.refusals import WRONG_TIME, Meaning, by_code, refusal
from cloudckpt.stores.xml_api import error_fields

__all__ = ["TOKEN_REFUSED", "from_answer"]

_ROLE = (
    "access denied; the identity needs the role 'Storage Blob Data Contributor' on the container "
    "or the account ('Storage Blob Data Reader' to load only), a shared access signature the "
    "permissions rwdl, and t if tags are set; or the firewall of the account does not let this "
    "network in; in accounts with a hierarchical namespace the access control lists count too"
)
_REFUSED: Meaning = (
    CredentialsError,
    "Azure does not accept the credentials: the key belongs to another account or was replaced, "
    "the shared access signature is malformed or has expired, or this machine's clock is wrong by "
    "minutes",
)
_BY_CODE = by_code(
    {
        BucketNotFoundError: {
            "ContainerNotFound FilesystemNotFound": (
                "the container does not exist; create it, or check its name and that of the account"
            ),
        },
        ObjectNotFoundError: {
            "InvalidBlockList": (
                "the blocks of this upload are not there any more: it was completed or aborted, "
                "another write of the same blob discarded them, or a week has passed"
            ),
        },
        PreconditionFailedError: {"BlobAlreadyExists ResourceAlreadyExists PathAlreadyExists": ""},
        CredentialsError: {
            "KeyBasedAuthenticationNotPermitted": (
                "the account forbids keys and what is signed with them; unset AZURE_STORAGE_* and "
                "use Microsoft Entra ID (a managed identity, AZURE_CLIENT_ID or 'az login')"
            ),
        },
        AccessDeniedError: {
            "UnauthorizedBlobOverwrite": (
                "the credentials may create blobs, but not replace the one that is there; give "
                "the shared access signature the permission w, or save to another location"
            ),
            "RequestForbiddenByContainerEncryptionPolicy": (
                "the container allows its own encryption scope only; leave out "
                "AzureOptions(encryption_scope=...), or name that one"
            ),
            "PublicAccessNotPermitted": "",
        },
        InvalidRequestError: {
            "BlobArchived BlobBeingRehydrated": (
                "the blob is in the archive tier; rehydrate it to an online tier first"
            ),
            "RequestBodyTooLarge": (
                "the store does not take so much in one request; set a smaller "
                "Config(part_size=...)"
            ),
            "UnsupportedRestVersion": (
                "the store is older than version 2021-12-02 of the REST API, which cloudckpt speaks"
            ),
            "BlockCountExceedsLimit InvalidBlobOrBlock": (
                "the blob holds unfinished blocks, of another writer perhaps, which go a week "
                "after the last; save to another location"
            ),
            "BlobOperationNotSupported": (
                "the Blob API can't do this to a file that was made through the Data Lake API; "
                "delete it first, or save to another location"
            ),
            "FeatureNotSupported": "the store does not know a part of this request",  # Azurite: 500
        },
        TLSError: {
            "TlsVersionNotPermitted": (
                "the account demands a newer version of TLS than this machine has"
            ),
        },
        ThrottledError: {"ServerBusy": ""},
        ServerError: {
            "ContainerBeingDeleted FilesystemBeingDeleted AccountBeingCreated": "",
            "Md5Mismatch Crc64Mismatch": "the bytes arrived damaged",
        },
    }
) | {"AuthenticationFailed": _REFUSED, "InvalidAuthenticationInfo": _REFUSED}

# words in codes, of which Azure has, or may get, more than it documents
_BY_WORD: dict[str, Meaning] = {
    "^KeyVault": (
        AccessDeniedError,
        "the account can't use the key vault with the key that encrypts it: look at the vault and "
        "its firewall, the key, and what the managed identity of the account may do there",
    ),
    "^Authorization(Protocol|SourceIP|Service|ResourceType)Mismatch$": (
        AccessDeniedError,
        "the shared access signature does not allow this protocol, address, service or type of "
        "resource: it takes https, b, and c and o",
    ),
    "ForHierarchicalNamespaceAccounts$": (
        InvalidRequestError,
        "the account has a hierarchical namespace, which does not support a part of this request; "
        "leave tags empty",
    ),
    "Tier": (
        InvalidRequestError,
        "the account, or a blob of this kind and size, can't have this access tier; leave out or "
        "change AzureOptions(access_tier=...)",
    ),
    "EncryptionScope": (
        InvalidRequestError,
        "the encryption scope is not there or disabled; check AzureOptions(encryption_scope=...)",
    ),
    "Immutab|LegalHold": (
        AccessDeniedError,
        "an immutability policy or a legal hold forbids that this blob is replaced or deleted",
    ),
    "Lease": (
        InvalidRequestError,
        "somebody holds a lease on the blob or its container; release or break it",
    ),
}

_BY_STATUS: dict[int, Meaning] = {
    401: _REFUSED,
    403: (AccessDeniedError, _ROLE),
    409: (InvalidRequestError, "the state of the blob or container forbids this"),
}

TOKEN_REFUSED: Meaning = (
    CredentialsError,
    "Azure does not accept the access token of this identity: it was revoked, or it is not of "
    "the tenant that the account trusts (sign in to that, with AZURE_TENANT_ID or 'az login "
    "--tenant'; a managed identity is of the tenant of its subscription), or of another cloud "
    "(AZURE_AUTHORITY_HOST); the identity needs the role 'Storage Blob Data Contributor'",
)
"""The meaning of a refused token."""


def from_answer(
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    action: str,
    uri: str,
    *,
    refused: Meaning | None = None,
) -> StoreError:
    """The error for a failed request: by its code, else by its HTTP status.

    ``refused`` is the meaning of refused credentials, if they are not a key or shared access
    signature.
    """
    given = {name.lower(): value for name, value in headers.items()}
    fields = error_fields(body)
    code = given.get("x-ms-error-code") or fields.get("Code", "")
    known, own = _documented(code, status), _BY_STATUS
    if known is None and "failed to authenticate" in fields.get("Message", ""):
        known = _REFUSED  # Azurite has another code for it
    if refused is not None:
        known, own = refused if known is _REFUSED else known, {**own, 401: refused}
    if "date header too old" in fields.get("AuthenticationErrorDetail", "").lower():
        known = WRONG_TIME
    named = fields.get("HeaderName") or fields.get("QueryParameterName") or ""
    texts = (fields.get("Message", ""), named, _detail(fields))
    words = [" ".join(text.split()) for text in texts]
    return refusal(
        status,
        code,
        words,
        action,
        uri,
        headers,
        known=known,
        own=own,
        is_foreign=True,  # Azure names a code, and Azurite: in a header, so also behind HEAD
    )


def _documented(code: str, status: int) -> Meaning | None:
    """What Azure documents about a code, or about similar codes."""
    if code in _BY_CODE or status >= 500 or status in (408, 429):
        return _BY_CODE.get(code)
    return next((meaning for word, meaning in _BY_WORD.items() if re.search(word, code)), None)


def _detail(fields: Mapping[str, str]) -> str:
    """Why credentials were refused, unless it quotes a signature or what was signed."""
    detail = fields.get("AuthenticationErrorDetail", "")
    return "" if "'" in detail or "string to sign" in detail.lower() else detail
