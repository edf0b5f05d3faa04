"""Whether all of a checkpoint is as it was written."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cloudckpt.config import Config
from cloudckpt.errors import CheckpointCorruptError, Damage
from cloudckpt.runs.contents import parts
from cloudckpt.stores.base import RangeReader
from cloudckpt.transfer.download import download
from cloudckpt.transfer.landing import Sink, StoredBytes, Wanted
from cloudckpt.transfer.retry import open_store
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["Verified", "find_damages", "one_error", "verify"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What has been read, and was found to be as it was written.

    Attributes:
        items: How many pieces of entries.
        nbytes: Their bytes.
        has_checksums: Whether each block was compared with its checksum; else it is only known that
            all bytes are there.
    """

    items: int
    nbytes: int
    has_checksums: bool


def verify(
    checkpoint_id: URILike,
    *,
    config: Config | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Verified:
    """Reads all of a committed checkpoint, and compares each block with its checksum.

    The bytes pass through memory of at most ``memory_budget``. Of a checkpoint of torch's own
    writers, which has no checksums, it is seen that all bytes are there.

    Args:
        checkpoint_id: ``s3://bucket/path`` or another location.
        config: Options.
        progress: Called with the bytes that were read and those that there are, by any thread.

    Raises:
        CheckpointNotFoundError: If there is no committed checkpoint.
        CheckpointCorruptError: If anything of it is missing, or not as it was written; its
            ``damages`` are all that were found.
        StoreError: If the store refuses or stays unreachable.
    """
    uri = CheckpointURI.parse(checkpoint_id)
    config = config if config is not None else Config()
    sources: list[StoredBytes] = []
    has_checksums = True
    for part in parts(uri, config):
        has_checksums = has_checksums and part.has_checksums
        sources += part.sources()
    total, lock, done = sum(source.nbytes for source in sources), threading.Lock(), 0

    def seen(count: int) -> None:
        nonlocal done
        with lock:
            done += count
        progress(done, total)

    found = find_damages(open_store(uri, config), uri, sources, config, seen)
    if found:
        raise one_error(found) from found[0].__cause__
    return Verified(items=len(sources), nbytes=total, has_checksums=has_checksums)


def find_damages(
    store: RangeReader,
    uri: CheckpointURI,
    sources: Sequence[StoredBytes],
    config: Config,
    seen: Callable[[int], None] = lambda count: None,
) -> list[CheckpointCorruptError]:
    """Reads items, and tells what of them is missing, or not as it was written.

    Args:
        store: The store of the checkpoint.
        uri: The checkpoint.
        sources: The items.
        config: Options.
        seen: Called with the bytes that were found right since the last call, by any thread.
    """
    found: list[CheckpointCorruptError] = []
    sink = _Discarded(seen)
    wanted = [Wanted(source, 0, source.nbytes, sink, True) for source in sources]
    config = dataclasses.replace(config, verify=True)
    download(store, wanted, config, TransferStats(str(uri)), damaged=found.append)
    return sorted(found, key=lambda error: _places(error.damages))


def _places(damages: Sequence[Damage]) -> list[tuple[str, int, str]]:
    return [(damage.object, damage.start or 0, damage.item) for damage in damages]


def one_error(found: Sequence[CheckpointCorruptError]) -> CheckpointCorruptError:
    """An error that tells of all that is damaged; its message has the first."""
    first = found[0]
    damages = tuple(dict.fromkeys(damage for error in found for damage in error.damages))
    more = len(damages) - len(first.damages)
    others = f" | {more} other places are damaged, too" if more else ""
    return CheckpointCorruptError(
        first.message + others,
        uri=first.uri,
        item=first.item,
        cause=first.cause,
        damages=damages,
    )


class _Discarded(Sink):
    """Takes bytes that were verified, and keeps none."""

    __slots__ = ("_seen",)

    def __init__(self, seen: Callable[[int], None]) -> None:
        super().__init__(None)
        self._seen = seen

    def deliver(self, start: int, data: torch.Tensor) -> None:
        self._seen(data.numel())
