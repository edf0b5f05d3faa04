"""Whether there is a committed checkpoint at a location, and which there are beneath it."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from cloudckpt.checkpoint.names import METADATA, metadata_name
from cloudckpt.errors import (
    CloudCheckpointError,
    ObjectNotFoundError,
    RangeNotSatisfiableError,
)
from cloudckpt.stores.base import ObjectStore
from cloudckpt.transfer.retry import Retrier
from cloudckpt.uri import CheckpointURI

__all__ = ["Beneath", "beneath", "is_committed"]

_COMMITS = (METADATA, metadata_name(0))  # of all ranks; of the first, if they save each by itself
_MOST_KEYS = 5000  # that are listed for a hint: five pages of S3


def is_committed(store: ObjectStore, uri: CheckpointURI, retrier: Retrier) -> bool:
    """Whether the store has a commit object there; False only if it said that it has none.

    Raises:
        StoreError: If it said anything else, for example that there is no such bucket.
    """
    for name in _COMMITS:
        key = uri.key(name)
        try:
            # other than the answer to HEAD, this one tells a missing bucket from a missing object
            retrier.call(lambda key=key: store.get_range(key, 0, [memoryview(bytearray(1))]))  # type: ignore[misc]
        except ObjectNotFoundError:
            continue
        except RangeNotSatisfiableError:  # it is empty
            return True
        return True
    return False


@dataclass(frozen=True)
class Beneath:
    """The checkpoints that were found beneath a location.

    Attributes:
        uris: Where they are, those with the highest numbers in their names last.
        complete: Whether these are all.
    """

    uris: tuple[str, ...]
    complete: bool

    def __str__(self) -> str:
        """For a message; empty if there are none."""
        if not self.uris:
            return ""
        known = "One is" if len(self.uris) == 1 else f"{len(self.uris)} are"
        count = known if self.complete else "Some are"
        others = ", ".join(self.uris[-2:-5:-1])
        more = f" Others are {others}" if others else ""
        return f"{count} beneath it: did you mean {self.uris[-1]}?{more}"


def beneath(store: ObjectStore, uri: CheckpointURI) -> Beneath:
    """The checkpoints beneath a location, as far as a short look finds them.

    It is for the message of another error: what fails here finds nothing, and is not tried again.
    """
    found: set[str] = set()
    seen, top = 0, uri.key("")
    try:
        for listed in itertools.islice(store.list(top), _MOST_KEYS):
            seen += 1
            folder, _, name = listed.key.rpartition("/")
            if name in _COMMITS and len(folder) >= len(top):
                found.add(store.uri(folder))
    except CloudCheckpointError:
        return Beneath((), False)
    return Beneath(tuple(sorted(found, key=_natural)), seen < _MOST_KEYS)


def _natural(text: str) -> list[tuple[bool, int, str]]:
    """Orders names by the numbers in them: step-200 stands before step-1000."""
    return [
        (part.isdigit(), int(part) if part.isdigit() else 0, part)
        for part in re.split(r"([0-9]+)", text)
    ]
