"""Refuses names that Azure would change.

Azure drops a dot at the end of a path segment and takes a backslash for a slash: data saved under
such a name ends up under another one, where it can't be found, or replaces another blob. So such
names are refused before anything is sent; what Azure itself refuses is left to it:
https://learn.microsoft.com/rest/api/storageservices/naming-and-referencing-containers--blobs--and-metadata
"""

from __future__ import annotations

import re

from cloudckpt.errors import InvalidRequestError, InvalidURIError
from cloudckpt.uri import CheckpointURI

__all__ = ["check_blob", "check_location"]

_UNFIT = (
    (re.compile(r"[\ud800-\udfff]"), "contains a character that UTF-8 can't encode"),
    (re.compile(r"\\"), "contains a backslash, which Azure treats as a slash"),
    (re.compile(r"\.(?:/|\Z)"), "has a segment that ends in a dot, which Azure drops"),
)


def check_blob(root: str, name: str) -> None:
    """Refuses a blob's name that Azure would change.

    Raises:
        InvalidRequestError: If Azure would change the name, or UTF-8 can't encode it.
    """
    if why := _why_unfit(name):
        raise InvalidRequestError(
            f"the name of the blob {why}; choose another name",
            uri=f"{root}/{name}".encode("utf-8", "backslashreplace").decode(),  # to be printed
            certain=True,
        )


def check_location(uri: CheckpointURI) -> None:
    """Refuses a location whose name Azure would change.

    Raises:
        InvalidURIError: If Azure would change the name, or UTF-8 can't encode it.
    """
    if why := _why_unfit(uri.prefix):
        raise InvalidURIError(f"{str(uri)!r}: the name {why}; choose another location")


def _why_unfit(name: str) -> str | None:
    return next((why for pattern, why in _UNFIT if pattern.search(name)), None)
