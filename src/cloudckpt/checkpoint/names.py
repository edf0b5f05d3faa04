"""What the objects of a checkpoint are called, relative to its prefix."""

from __future__ import annotations

import re

from cloudckpt.errors import CheckpointCorruptError

__all__ = [
    "METADATA",
    "checked",
    "data_name",
    "is_metadata_of_a_rank",
    "manifest_name",
    "metadata_name",
    "rank_of",
]

METADATA = ".metadata"
"""The object whose presence makes a checkpoint; torch's name for it."""

_UNUSABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")  # control characters, halves of pairs


def metadata_name(rank: int | None) -> str:
    """The commit object: one for all, or of one rank if it saves without collectives."""
    return METADATA if rank is None else f"__{rank}{METADATA}"


def is_metadata_of_a_rank(name: str) -> bool:
    """Whether it is the commit object of one rank."""
    return re.fullmatch(r"__\d+" + re.escape(METADATA), name) is not None


def data_name(rank: int, ordinal: int, attempt: str) -> str:
    """A shard object. ``attempt`` keeps two attempts from ever writing to the same key."""
    return f"__{rank}_{ordinal}.{attempt}.distcp"


def rank_of(data_name: str) -> int:
    """Who has written a shard object."""
    return int(data_name.removeprefix("__").partition("_")[0])


def manifest_name(attempt: str) -> str:
    """The manifest of an attempt."""
    return f".manifest.{attempt}.json"


def checked(name: object, uri: str) -> str:
    """``name``, if it stays beneath the checkpoint's prefix.

    Names come from the bucket; one that leads elsewhere must not be read, much less deleted.

    Raises:
        CheckpointCorruptError: If it does not.
    """
    if not isinstance(name, str):
        raise CheckpointCorruptError(
            f"the metadata names an object by a {type(name).__name__}", uri=uri
        )
    parts = name.split("/")
    if not name or _UNUSABLE.search(name) or "" in parts or "." in parts or ".." in parts:
        raise CheckpointCorruptError(
            f"the metadata names an object outside of the checkpoint: {name[:200]!r}", uri=uri
        )
    return name
