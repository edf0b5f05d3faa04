"""How a save is cut in its middle, on any machine and at any speed.

One rank stops when it has handed over most of its items. Its save is then open for as long as we
like: data is in the store, the rest can't follow, so nothing can be committed. The driver looks at
the store until it sees that state, and kills the rank there.
"""

from __future__ import annotations

import io
import threading
import time
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from cloudckpt.checkpoint.objects import METADATA
from cloudckpt.config import MIB, Config
from cloudckpt.transfer.opening import open_store
from cloudckpt.transfer.retry import Retrier
from cloudckpt.uri import CheckpointURI

__all__ = ["Remains", "StallingPlanner", "find_remains", "wait_until_torn"]

_POLL = 0.05  # seconds between two looks at the store


class StallingPlanner(DefaultSavePlanner):
    """Hands over three quarters of the rank's items, and then nothing more, ever."""

    def __init__(self) -> None:
        super().__init__()
        self._resolved = 0

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        self._resolved += 1
        if self._resolved > len(self.plan.items) * 3 // 4:
            threading.Event().wait()
        data: torch.Tensor | io.BytesIO = super().resolve_data(write_item)
        return data


@dataclass(frozen=True)
class Remains:
    """What the store holds of a save.

    Attributes:
        objects: Complete objects, the commit excepted.
        bytes: Their size.
        uploads: Multipart uploads that were begun and not finished.
        committed: Whether there is a ``.metadata``: the checkpoint exists.
    """

    objects: int
    bytes: int
    uploads: int
    committed: bool

    @property
    def is_torn(self) -> bool:
        """Whether the data of one rank is there while that of another is on its way."""
        return self.bytes >= MIB and self.uploads > 0 and not self.committed

    def __str__(self) -> str:
        commit = "a .metadata" if self.committed else "no .metadata"
        return (
            f"{self.objects} data object(s) of {self.bytes / 1e6:.0f} MB, "
            f"{self.uploads} unfinished upload(s), {commit}"
        )


def find_remains(checkpoint: CheckpointURI) -> Remains:
    """Looks at the store."""
    config = Config()
    store, retrier = open_store(checkpoint, config), Retrier(config.retry)
    below = checkpoint.key("")
    found = retrier.call(lambda: list(store.list(below)))
    uploads = retrier.call(lambda: list(store.list_uploads(below)))
    data = [info for info in found if info.key != checkpoint.key(METADATA)]
    size = sum(info.size for info in data)
    return Remains(len(data), size, len(uploads), committed=len(data) < len(found))


def wait_until_torn(checkpoint: CheckpointURI, seconds: float) -> Remains:
    """Looks until the save is in its middle; returns the last look even if it never was."""
    deadline = time.monotonic() + seconds
    while True:
        remains = find_remains(checkpoint)
        if remains.is_torn or time.monotonic() > deadline:
            return remains
        time.sleep(_POLL)
