"""Azure's signatures of requests, computed anew from what arrived, by their documentation.

https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Mapping
from urllib.parse import unquote

__all__ = ["ACCOUNT", "KEY", "is_signed"]

ACCOUNT = "account"
KEY = "U0VDUkVUS0VZU0VDUkVUS0VZU0VDUkVUS0VZU0VDUkVUS0VZ"

_STANDARD = (
    "content-encoding", "content-language", "content-length", "content-md5", "content-type", "date",
    "if-modified-since", "if-match", "if-none-match", "if-unmodified-since", "range",
)  # fmt: skip


def is_signed(method: str, target: str, headers: Mapping[str, str]) -> bool:
    """Whether a request has the signature that its headers and URL make.

    Args:
        method: The HTTP method.
        target: Path and query, as sent.
        headers: Values by names in small letters.
    """
    said = dict(headers)
    if said.get("content-length") == "0":
        del said["content-length"]
    path, _, query = target.partition("?")
    pairs = (pair.partition("=") for pair in filter(None, query.split("&")))
    lines = [
        method,
        *(said.get(name, "") for name in _STANDARD),
        *(f"{name}:{said[name]}" for name in sorted(said) if name.startswith("x-ms-")),
        f"/{ACCOUNT}{path}",
        *sorted(f"{unquote(name).lower()}:{unquote(value)}" for name, _, value in pairs),
    ]
    text = "\n".join(lines).encode()
    digest = hmac.digest(base64.b64decode(KEY), text, "sha256")
    wanted = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode('ascii')}"
    return said.get("authorization") == wanted
