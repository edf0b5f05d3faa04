"""Signatures of requests with the key of a storage account: "Shared Key" in Azure's reference.

The key never travels, and neither does anything that could be used again. A shared access signature
made of it would be bound to a version of the API that not every cloud of Azure knows, and to what
the account's policy allows of its life.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

from cloudckpt.errors import CredentialsError
from cloudckpt.stores.credentials import raise_alone

__all__ = ["SharedKey"]

_SIGNED = (  # in this order, whether they are sent or not
    "content-encoding",
    "content-language",
    "content-length",
    "content-md5",
    "content-type",
    "date",
    "if-modified-since",
    "if-match",
    "if-none-match",
    "if-unmodified-since",
    "range",
)


class SharedKey:
    """Signs requests to the blobs of one account.

    https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key
    """

    def __init__(self, account: str, key: str, uri: str) -> None:
        """
        Raises:
            CredentialsError: If the key is none.
        """
        self._account = account
        try:
            self._key = base64.b64decode(key, validate=True)
        except binascii.Error:
            raise_alone(  # without the text of the cause, which might quote it
                CredentialsError(
                    "the key of the storage account is not valid base64; copy it anew from "
                    "'Access keys' of the account",
                    uri=uri,
                )
            )

    def authorization(self, method: str, url: str, headers: Mapping[str, str]) -> str:
        """The Authorization header of a request, all of whose other headers are given."""
        given = {name.lower(): value.strip() for name, value in headers.items()}
        if given.get("content-length") == "0":
            given["content-length"] = ""
        parts = urlsplit(url)
        lines = [method, *(given.get(name, "") for name in _SIGNED)]
        lines += [f"{name}:{given[name]}" for name in sorted(given) if name.startswith("x-ms-")]
        lines += [f"/{self._account}{parts.path}"]  # encoded as it is sent
        pairs = (pair.partition("=") for pair in parts.query.split("&") if pair)
        lines += sorted(f"{name.lower()}:{unquote(value)}" for name, _, value in pairs)
        digest = hmac.digest(self._key, "\n".join(lines).encode(), "sha256")
        return f"SharedKey {self._account}:{base64.b64encode(digest).decode('ascii')}"
