"""The options of Azure Blob Storage."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cloudckpt.config.options import (
    Pairs,
    Switch,
    as_pairs,
    check_endpoint,
    check_switch,
    check_tags,
    check_types,
    option,
    parse_flag,
    parse_pairs,
    require,
)

__all__ = ["AzureOptions"]


@dataclass(frozen=True, kw_only=True)
class AzureOptions:
    """What is special to Azure Blob Storage.

    Secrets are no options: the connection string, account key or shared access signature is read
    from ``AZURE_STORAGE_*``, else azure-identity finds credentials, unless ``anonymous`` is given.
    """

    endpoint_url: str | None = option(
        None,
        "CLOUDCKPT_AZURE_ENDPOINT_URL",
        str,
        "blob endpoint of the account; default: https://<account>.blob.core.windows.net",
    )
    account: str | None = option(
        None,
        "CLOUDCKPT_AZURE_ACCOUNT",
        str,
        "storage account of az://container URIs; AZURE_STORAGE_ACCOUNT works too",
    )
    anonymous: bool = option(
        False,
        "CLOUDCKPT_AZURE_ANONYMOUS",
        parse_flag,
        "send no credentials: for containers that everybody may read",
    )
    checksum: Switch = option(
        "auto",
        "CLOUDCKPT_AZURE_CHECKSUM",
        str,
        "send CRC64 for the store to verify; 'auto' is on for Azure and off for custom endpoints",
    )
    access_tier: str | None = option(
        None, "CLOUDCKPT_AZURE_ACCESS_TIER", str, "access tier of the blobs, e.g. Cool"
    )
    encryption_scope: str | None = option(
        None, "CLOUDCKPT_AZURE_ENCRYPTION_SCOPE", str, "encryption scope of the blobs"
    )
    tags: Pairs = option(
        (), "CLOUDCKPT_AZURE_TAGS", parse_pairs, "blob index tags, e.g. team=nlp,run=7"
    )

    def __post_init__(self) -> None:
        check_types(self)
        check_switch("checksum", self.checksum)
        object.__setattr__(self, "tags", as_pairs("tags", self.tags))
        # https://learn.microsoft.com/rest/api/storageservices/set-blob-tags
        check_tags(self.tags, r"[A-Za-z0-9 +\-./:=_]")
        tier = self.access_tier
        require(
            tier is None or re.fullmatch("[A-Za-z0-9]+", tier) is not None,
            f"access_tier={tier!r}: write the name of a tier, e.g. 'Cool' or 'Cold'",
        )
        require(
            tier is None or tier.lower() != "archive",
            f"access_tier={tier!r}: what is in the archive tier can't be loaded before it is "
            "rehydrated, which takes hours; write 'Cold', and archive old checkpoints by a "
            "lifecycle rule",
        )
        check_endpoint(self.endpoint_url)
