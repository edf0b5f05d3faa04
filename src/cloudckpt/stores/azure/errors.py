"""Maps Azure's error codes to cloudckpt's exceptions.

The codes come from "Common REST API error codes" and "Blob Storage error codes" of the REST
reference. Groups of which Azure has more codes than it documents are recognized by a word in the
code.
"""

from __future__ import annotations

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
    StoreError,
    ThrottledError,
    TLSError,
)
from cloudckpt.stores.refusals import Meaning, refusal
from cloudckpt.stores.xml_api import error_fields

__all__ = ["from_answer"]

_MEANINGS = (
    Meaning(
        "(Container|Filesystem)NotFound",
        BucketNotFoundError,
        "the container does not exist; create it, or check its name and that of the account",
    ),
    Meaning(
        "InvalidBlockList",
        ObjectNotFoundError,
        "the blocks of this upload are gone: it was completed or aborted, another write of the "
        "same blob discarded them, or a week has passed",
    ),
    Meaning("(Blob|Resource|Path)AlreadyExists", PreconditionFailedError),
    Meaning(
        "AuthenticationFailed|InvalidAuthenticationInfo|401",
        CredentialsError,
        "Azure refuses the credentials: the key belongs to another account or was replaced, "
        "the shared access signature is malformed or has expired, the token is of another tenant "
        "(AZURE_TENANT_ID, 'az login --tenant') or cloud (AZURE_AUTHORITY_HOST), or this machine's "
        "clock is wrong by minutes; a token takes the role 'Storage Blob Data Contributor'",
    ),
    Meaning(
        "KeyBasedAuthenticationNotPermitted",
        CredentialsError,
        "the account allows neither account keys nor signatures made with them; unset "
        "AZURE_STORAGE_* and use Microsoft Entra ID (a managed identity, AZURE_CLIENT_ID or "
        "'az login')",
    ),
    Meaning("DateHeaderTooOld", ClockError),
    Meaning(
        "UnauthorizedBlobOverwrite",
        AccessDeniedError,
        "the credentials may create blobs, but not replace existing ones; give the shared "
        "access signature the permission w, or save to another location",
    ),
    Meaning(
        "RequestForbiddenByContainerEncryptionPolicy",
        AccessDeniedError,
        "the container allows its own encryption scope only; leave out "
        "AzureOptions(encryption_scope=...), or name that one",
    ),
    Meaning("PublicAccessNotPermitted", AccessDeniedError),
    Meaning(
        "KeyVault.*",
        AccessDeniedError,
        "the account can't use the key vault that has its encryption key: check the vault and "
        "its firewall, the key, and the permissions of the account's managed identity there",
    ),
    Meaning(
        "Authorization(Protocol|SourceIP|Service|ResourceType)Mismatch",
        AccessDeniedError,
        "the shared access signature does not allow this protocol, address, service or type of "
        "resource: it needs https, b, and c and o",
    ),
    Meaning(
        ".*(Immutab|LegalHold).*",
        AccessDeniedError,
        "an immutability policy or a legal hold protects this blob from being replaced or "
        "deleted; wait until it ends, or use another location",
    ),
    Meaning(
        "RequestBodyTooLarge",
        InvalidRequestError,
        "the request was too large for the store; set a smaller Config(part_size=...)",
    ),
    Meaning(
        "BlockCountExceedsLimit|InvalidBlobOrBlock",
        InvalidRequestError,
        "the blob has unfinished blocks, perhaps of another writer, which are deleted a week "
        "after the last one; save to another location",
    ),
    Meaning(
        "BlobOperationNotSupported",
        InvalidRequestError,
        "the Blob API can't do this with a file that was made through the Data Lake API; "
        "delete it first, or save to another location",
    ),
    Meaning(
        ".*ForHierarchicalNamespaceAccounts",
        InvalidRequestError,
        "a part of this request is not supported by accounts with a hierarchical namespace; "
        "leave tags empty",
    ),
    Meaning(
        ".*Tier.*",
        InvalidRequestError,
        "the account, or a blob of this kind and size, can't have this access tier; change or "
        "leave out AzureOptions(access_tier=...)",
    ),
    Meaning(".*EncryptionScope.*", InvalidRequestError),
    Meaning(
        ".*Lease.*",
        InvalidRequestError,
        "the blob or its container has a lease; release or break it",
    ),
    Meaning("TlsVersionNotPermitted", TLSError),
    Meaning("ServerBusy", ThrottledError),
    Meaning("(Container|Filesystem)BeingDeleted|AccountBeingCreated", ServerError),
    Meaning("(Md5|Crc64)Mismatch", ServerError, "the bytes were damaged on their way to the store"),
    Meaning(
        "403",
        AccessDeniedError,
        "access denied; the identity needs the role 'Storage Blob Data Contributor' on the "
        "container or the account ('Storage Blob Data Reader' to load only), a shared access "
        "signature the permissions rwdl, and t if tags are set; or the account's firewall does not "
        "let this network in; with a hierarchical namespace the access control lists count too",
    ),
    Meaning(
        "409",
        InvalidRequestError,
        "the state of the blob or container does not allow this; see the code in the cause",
    ),
)


def from_answer(
    status: int, headers: Mapping[str, str], body: bytes, action: str, uri: str
) -> StoreError:
    """Returns the exception for an error response: by its error code, else by its HTTP status."""
    given = {name.lower(): value for name, value in headers.items()}
    fields = error_fields(body)
    code = given.get("x-ms-error-code") or fields.get("Code", "")
    detail, means = fields.get("AuthenticationErrorDetail", ""), ""
    if "date header too old" in detail.lower():
        means = "DateHeaderTooOld"
    elif "failed to authenticate" in fields.get("Message", ""):
        means = "AuthenticationFailed"  # Azurite sends another code
    if "'" in detail or "string to sign" in detail.lower():  # the detail quotes a signature
        detail = ""
    named = fields.get("HeaderName") or fields.get("QueryParameterName") or ""
    words = [" ".join(text.split()) for text in (fields.get("Message", ""), named, detail)]
    return refusal(
        _MEANINGS,
        status,
        code,
        words,
        action,
        uri,
        headers,
        means=means,
        is_foreign=True,  # Azure and Azurite name a code in a header, also in responses to HEAD
    )
