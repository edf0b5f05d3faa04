"""Refuses names that Azure would change or reject.

Azure drops a dot at the end of a path segment and takes a backslash for a slash: data saved under
such a name ends up elsewhere, where nobody looks for it, or replaces what is there. Other names it
refuses without saying why. Both kinds are refused here before anything is sent, by these rules:
https://learn.microsoft.com/rest/api/storageservices/naming-and-referencing-containers--blobs--and-metadata
"""

from __future__ import annotations

import re

from cloudckpt.errors import InvalidRequestError, InvalidURIError
from cloudckpt.uri import CheckpointURI

__all__ = ["check_blob", "check_location"]

_LONGEST = 1024  # characters, counted as UTF-16 has them
_DEEPEST = 254  # segments between slashes
_BENEATH = 64  # most characters that a checkpoint's objects have after its prefix

_UNFIT = (
    (re.compile(r"[\x00-\x1f\x7f-\x9f]"), "contains a control character"),
    (re.compile(r"[\ud800-\udfff]"), "contains half of a surrogate pair"),
    (re.compile(r"\\"), "contains a backslash, which Azure treats as a slash"),
    (re.compile(r"\.(?:/|\Z)"), "has a segment that ends in a dot, which Azure drops"),
    (re.compile(r"/\Z"), "ends in a slash"),
)
_CONTAINER = re.compile(r"\$?[a-z0-9]+(?:-[a-z0-9]+)*")


def check_blob(name: str, uri: str) -> None:
    """Checks that Azure would store a blob under exactly this name.

    Raises:
        InvalidRequestError: If it would not.
    """
    why = _why_unfit(name, longest=_LONGEST, deepest=_DEEPEST) if name else "is empty"
    if why:
        raise InvalidRequestError(
            f"the name of the blob {why}; choose another name",
            uri=uri.encode("utf-8", "backslashreplace").decode(),  # which can be printed
            certain=True,
        )


def check_location(uri: CheckpointURI, *, is_checkpoint: bool) -> None:
    """Checks that Azure would store what is written to a location at exactly this place.

    Args:
        uri: An ``az`` location.
        is_checkpoint: Whether objects go beneath it, whose names need room.

    Raises:
        InvalidURIError: If it would not.
    """
    if len(uri.bucket) > 63 or not _CONTAINER.fullmatch(uri.bucket):
        raise InvalidURIError(
            f"{str(uri)!r}: not a valid container name; use 3 to 63 lowercase letters, digits "
            "and single hyphens between them"
        )
    beneath = (_BENEATH, 1) if is_checkpoint else (0, 0)
    why = _why_unfit(uri.prefix, longest=_LONGEST - beneath[0], deepest=_DEEPEST - beneath[1])
    if why:
        raise InvalidURIError(f"{str(uri)!r}: the name {why}; choose another location")


def _why_unfit(name: str, *, longest: int, deepest: int) -> str | None:
    for pattern, why in _UNFIT:
        if pattern.search(name):
            return why
    if len(name.encode("utf-16-le")) // 2 > longest:
        return f"has more than {longest:,} characters, which is the limit"
    if name.count("/") >= deepest:
        return f"has more than {deepest} segments, which is the limit"
    return None
