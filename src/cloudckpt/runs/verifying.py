"""Checks that all of a checkpoint is as it was written."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from cloudckpt.checkpoint.agreement import contradictions
from cloudckpt.checkpoint.committed import CommitObject
from cloudckpt.config import MIB, Config, config_or_default
from cloudckpt.dcp.arrivals import collective
from cloudckpt.dcp.meeting import Meeting, RankStatus
from cloudckpt.errors import CheckpointCorruptError, Damage, ObjectNotFoundError
from cloudckpt.runs.contents import CheckpointPart, parts
from cloudckpt.stores.base import ObjectInfo, ObjectStore, RangeReader
from cloudckpt.transfer.download import download
from cloudckpt.transfer.landing import Sink, StoredBytes, Wanted
from cloudckpt.transfer.retry import Retrier, check_unchanged, open_store, retry_if_replaced
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["Verified", "find_damages", "one_error", "verify"]

_LOTS_EACH = 16  # per rank, so that all end at about the same time
_SMALLEST_LOT, _LARGEST_LOT = 16 * MIB, 1024 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What was read and is as it was written.

    Attributes:
        items: The number of pieces of entries.
        nbytes: Their bytes, without envelopes.
        has_checksums: Whether each block was compared with its checksum; if not, it is only known
            that all bytes are there.
    """

    items: int
    nbytes: int
    has_checksums: bool


@collective("cloudckpt.verify")
def verify(
    uri: URILike,
    *,
    config: Config | None = None,
    process_group: dist.ProcessGroup | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Verified:
    """Reads all of a committed checkpoint, and compares each block with its checksum.

    The envelopes around tensors, which readers other than cloudckpt need, are compared too. The
    bytes pass through memory of at most ``memory_budget``. A
    checkpoint of torch's own writers has no checksums; here only the presence of all bytes is
    checked. All damage is reported, not only the first; of an object whose index is damaged, only
    that it is.

    A checkpoint of cloudckpt says three times where each item lies and what it is: in columns that
    our readers use, in the pickle that torch's use, and in the index of each data object. Any
    contradiction between two of them is damage, too, whatever their checksums.

    Args:
        uri: ``s3://bucket/path`` or another location.
        config: Options.
        process_group: Ranks that divide the bytes among themselves, if all of them call this.
        progress: Called with the bytes that this rank has read so far and will read in all,
            envelopes included, from any thread.

    Raises:
        CheckpointNotFoundError: If there is no committed checkpoint.
        CheckpointCorruptError: If any part is missing, or not as it was written; its ``damages``
            are all that were found.
        CheckpointReplacedError: If it was replaced meanwhile, again and again.
        StoreError: If the store refuses or stays unreachable.
    """
    meeting = Meeting(process_group)

    def prepare() -> tuple[CheckpointURI, Config]:
        options = config_or_default(config)
        return CheckpointURI.parse(uri), dataclasses.replace(options, verify=True)

    location, options = meeting.begin(prepare, lambda made: RankStatus(location=str(made[0])))
    return retry_if_replaced(partial(_verify, location, options, meeting, progress))


@dataclass(frozen=True)
class _Content:
    """What is to be read.

    Attributes:
        items: The items' own bytes.
        between: The bytes around them that have checksums.
        commits: The commit objects that were read.
        has_checksums: Whether all of them have checksums.
        damaged: The damage found so far.
    """

    items: Sequence[StoredBytes]
    between: Sequence[StoredBytes]
    commits: Sequence[ObjectInfo]
    has_checksums: bool
    damaged: Sequence[CheckpointCorruptError]

    @classmethod
    def of(cls, uri: CheckpointURI, config: Config) -> _Content:
        found = list(parts(uri, config))
        store, retrier = open_store(uri, config), Retrier(config.retry)
        items: list[StoredBytes] = []
        between: list[StoredBytes] = []
        damaged: list[CheckpointCorruptError] = []
        for part in found:
            damaged += _contradictions(part.said, store, retrier)
            own, around = part.sources(store, config, damaged.append)
            damaged += _gone(part, own, store, retrier)
            items += own
            between += around
        commits = [part.commit for part in found]
        return cls(items, between, commits, all(part.has_checksums for part in found), damaged)

    @property
    def sources(self) -> list[StoredBytes]:
        """Everything to be read, in the order of the objects' bytes."""
        return sorted([*self.items, *self.between], key=lambda source: (source.key, source.offset))


def _contradictions(
    said: CommitObject, store: ObjectStore, retrier: Retrier
) -> list[CheckpointCorruptError]:
    """Contradictions in a commit object, and damage to its part for other readers."""
    if said.record is None:  # another writer's says everything only once
        return []
    try:
        found = contradictions(said.record, said.pickled(store, retrier))
    except CheckpointCorruptError as error:
        return [error]
    uri = store.uri(said.info.key)
    return [
        CheckpointCorruptError(
            f"the metadata contradict themselves: {what}",
            uri=uri,
            item=name or None,
            damages=[Damage(uri, name, what)],
        )
        for name, what in found.items()
    ]


def _gone(
    part: CheckpointPart, items: Sequence[StoredBytes], store: ObjectStore, retrier: Retrier
) -> Iterator[CheckpointCorruptError]:
    """Objects that are not there, and of which nothing is read: all their items are empty.

    Our objects have an index, which was read; those of torch may be empty files.
    """
    if part.has_checksums:
        return
    read = {item.key for item in items if item.nbytes}
    for key, item in {item.key: item.item for item in items if item.key not in read}.items():
        try:
            retrier.call(partial(store.head, key))
        except ObjectNotFoundError as error:
            uri = store.uri(key)
            yield CheckpointCorruptError(
                "the object is gone",
                uri=uri,
                item=item,
                cause=error,
                damages=[Damage(uri, item, "is gone")],
            )


def _verify(
    uri: CheckpointURI,
    config: Config,
    meeting: Meeting,
    progress: Callable[[int, int], None],
) -> Verified:
    content = meeting.broadcast_from_first(lambda: _Content.of(uri, config))
    rank, ranks = meeting.rank, meeting.size
    sources = content.sources
    nbytes = sum(source.nbytes for source in sources)
    size = min(max(nbytes // (_LOTS_EACH * ranks), _SMALLEST_LOT), _LARGEST_LOT)
    mine = [each for lot in [*cut(sources, size)][rank::ranks] for each in lot]
    seen = _Seen(sum(stop - start for _, start, stop in mine), progress)
    wanted = [Wanted(source, start, stop, seen, True) for source, start, stop in mine]
    found = meeting.begin(lambda: find_damages(open_store(uri, config), uri, wanted, config))
    damaged = [*content.damaged, *(error for each in meeting.gathered(found) for error in each)]
    if damaged:
        meeting.broadcast_from_first(lambda: _refuse_replaced(uri, config, content, damaged[0]))
        raise one_error(damaged) from damaged[0].__cause__
    return Verified(
        items=len(content.items),
        nbytes=sum(source.nbytes for source in content.items),
        has_checksums=content.has_checksums,
    )


def _refuse_replaced(
    uri: CheckpointURI, config: Config, content: _Content, error: CheckpointCorruptError
) -> None:
    """Raises CheckpointReplacedError if the checkpoint was replaced while it was read."""
    for commit in content.commits:
        check_unchanged(open_store(uri, config), commit, str(uri), config.retry, error)


def cut(
    sources: Sequence[StoredBytes], size: int
) -> Iterator[Sequence[tuple[StoredBytes, int, int]]]:
    """Divides items into lots of about ``size`` bytes: ranges of items, from one byte to another.

    An item is cut only between its blocks, so that no block is read twice.
    """
    lot: list[tuple[StoredBytes, int, int]] = []
    room = size
    for source in sources:
        grain = source.blocks.size if source.blocks is not None else MIB
        start = 0
        while start < source.nbytes:
            stop = min(start + max(room // grain, 1) * grain, source.nbytes)
            lot.append((source, start, stop))
            room -= stop - start
            start = stop
            if room <= 0:
                yield lot
                lot, room = [], size
    if lot:
        yield lot


class _Seen(Sink):
    """Counts the bytes that were read, and keeps none."""

    __slots__ = ("_done", "_lock", "_progress", "_total")

    def __init__(self, total: int, progress: Callable[[int, int], None]) -> None:
        super().__init__(None)
        self._lock = threading.Lock()
        self._done, self._total = 0, total
        self._progress = progress

    def deliver(self, start: int, data: torch.Tensor) -> None:
        with self._lock:
            self._done += data.numel()
            done = self._done
        self._progress(done, self._total)


def find_damages(
    store: RangeReader, uri: CheckpointURI, wanted: Sequence[Wanted], config: Config
) -> list[CheckpointCorruptError]:
    """Reads items, and reports those that are missing, or not as they were written.

    Raises:
        StoreError: If the store refuses or stays unreachable.
    """
    found: list[CheckpointCorruptError] = []
    download(store, wanted, config, TransferStats(str(uri)), damaged=found.append)
    return sorted(found, key=lambda error: _places(error.damages))


def _places(damages: Sequence[Damage]) -> list[tuple[str, int, str]]:
    return [(damage.object, damage.start or 0, damage.item) for damage in damages]


def one_error(found: Sequence[CheckpointCorruptError]) -> CheckpointCorruptError:
    """An error that lists all damage; its message describes the first."""
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
