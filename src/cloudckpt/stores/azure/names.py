"""Refuses names that Azure would change or reject.

Azure drops a dot at the end of a path segment and takes a backslash for a slash: data saved under
such a name ends up under another one, where it can't be found, or replaces another blob. Other
names it rejects without a reason. Both are refused here before anything is sent, by these rules:
https://learn.microsoft.com/rest/api/storageservices/naming-and-referencing-containers--blobs--and-metadata
"""

from __future__ import annotations

import re

from cloudckpt.errors import InvalidRequestError, InvalidURIError
from cloudckpt.uri import CheckpointURI

__all__ = ["check_blob", "check_location"]

_LONGEST = 1024  # characters, counted in UTF-16 code units
_DEEPEST = 254  # path segments
_BENEATH = 64  # most characters that the keys of a checkpoint add to its prefix

_UNFIT = (
    (re.compile(r"[\x00-\x1f\x7f-\x9f]"), "contains a control character"),
    (re.compile(r"[\ud800-\udfff]"), "contains half of a surrogate pair"),
    (re.compile(r"\\"), "contains a backslash, which Azure treats as a slash"),
    (re.compile(r"\.(?:/|\Z)"), "has a segment that ends in a dot, which Azure drops"),
    (re.compile(r"/\Z"), "ends in a slash"),
)
_CONTAINER = re.compile(r"\$?[a-z0-9]+(?:-[a-z0-9]+)*")


def check_blob(name: str, uri: str) -> None:
    """Raises an error unless Azure would store a blob under exactly this name.

    Raises:
        InvalidRequestError: If Azure would change or reject the name.
    """
    why = _why_unfit(name, longest=_LONGEST, deepest=_DEEPEST) if name else "is empty"
    if why:
        raise InvalidRequestError(
            f"the name of the blob {why}; choose another name",
            uri=uri.encode("utf-8", "backslashreplace").decode(),  # so that it can be printed
            certain=True,
        )


def check_location(uri: CheckpointURI, *, is_checkpoint: bool) -> None:
    """Raises an error unless Azure would store objects under exactly this location.

    Args:
        uri: An ``az`` location.
        is_checkpoint: Whether the objects of a checkpoint will be stored beneath it, which need
            some characters of the length limit.

    Raises:
        InvalidURIError: If Azure would change or reject the name.
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
