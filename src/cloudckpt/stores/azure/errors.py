"""Maps Azure's error codes to cloudckpt's exceptions.

The codes come from "Common REST API error codes" and "Blob Storage error codes" of the REST
reference. Azure has more codes about leases, key vaults and immutability than it documents; such
codes are recognized by a word in them, such as ``Lease``.
"""

from __future__ import annotations

from collections.abc import Mapping

from cloudckpt import errors
from cloudckpt.errors import StoreError
from cloudckpt.stores.refusals import DAMAGED, Meaning, Refusal, refusal
from cloudckpt.stores.xml_api import error_fields

__all__ = ["from_answer"]

_MEANINGS = (
    Meaning("(Container|Filesystem)NotFound", errors.BucketNotFoundError),
    Meaning(
        "InvalidBlockList",
        errors.ObjectNotFoundError,
        "the blocks of this upload are gone: it was completed or aborted, another write of the "
        "same blob discarded them, or a week has passed; save again",
    ),
    Meaning("(Blob|Resource|Path)AlreadyExists", errors.PreconditionFailedError),
    Meaning(
        "AuthenticationFailed|InvalidAuthenticationInfo|KeyBasedAuthenticationNotPermitted|401",
        errors.CredentialsError,
        "Azure refuses the credentials. Check that a key is a current key of this account, and "
        "that the account allows keys; that a signature is complete and has not expired; that a "
        "token is of the right tenant (AZURE_TENANT_ID, 'az login --tenant') and cloud "
        "(AZURE_AUTHORITY_HOST); and that this machine's clock is right",
    ),
    Meaning("DateHeaderTooOld", errors.ClockError),
    Meaning(
        "PublicAccessNotPermitted",
        errors.AccessDeniedError,
        "the account allows no access without credentials; leave anonymous=True out",
    ),
    Meaning(
        ".*(Immutab|LegalHold).*",
        errors.AccessDeniedError,
        "an immutability policy or a legal hold forbids this; use a container without it",
    ),
    Meaning(
        "KeyVault.*",
        errors.AccessDeniedError,
        "the account can't use the key vault that has its encryption key: check the vault and "
        "its firewall, the key, and the permissions of the account's managed identity there",
    ),
    Meaning(".*Lease.*", errors.InvalidRequestError, "a lease forbids this; break the lease"),
    Meaning("TlsVersionNotPermitted", errors.TLSError),
    Meaning("ServerBusy", errors.ThrottledError),
    Meaning("(Container|Filesystem)BeingDeleted|AccountBeingCreated", errors.ServerError),
    Meaning("(Md5|Crc64)Mismatch", errors.ServerError, DAMAGED),
    Meaning(
        "403",
        errors.AccessDeniedError,
        "access denied: grant the role 'Storage Blob Data Contributor' on the container or the "
        "account ('Storage Blob Data Reader' to load only), or use a shared access signature with "
        "the permissions rwdl, and t if tags are set. Check also the account's firewall and, with "
        "a hierarchical namespace, the access control lists",
    ),
    Meaning("409", errors.InvalidRequestError),
)


def from_answer(
    status: int, headers: Mapping[str, str], body: bytes, action: str, uri: str
) -> StoreError:
    """Returns the exception for an error response; `headers` must accept lower-case names."""
    fields = error_fields(body)
    code = headers.get("x-ms-error-code") or fields.get("Code", "")
    detail, alias = fields.get("AuthenticationErrorDetail", ""), ""
    if "date header too old" in detail.lower():
        alias = "DateHeaderTooOld"
    elif "failed to authenticate" in fields.get("Message", ""):
        alias = "AuthenticationFailed"  # Azurite sends another code
    if "'" in detail or "string to sign" in detail.lower():  # the detail quotes a signature
        detail = ""
    named = fields.get("HeaderName") or fields.get("QueryParameterName") or ""
    words = [" ".join(text.split()) for text in (fields.get("Message", ""), named, detail)]
    # foreign: Azure and Azurite name a code in a header, also in responses to HEAD
    response = Refusal(code, words, alias, is_foreign=True)
    return refusal(_MEANINGS, response, status, headers, action, uri)
