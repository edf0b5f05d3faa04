"""Checks that all of a checkpoint is as it was written."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from cloudckpt.checksum import ChecksumAlgorithm
from cloudckpt.config import Config, config_or_default
from cloudckpt.dcp.arrivals import collective
from cloudckpt.dcp.meeting import Meeting, RankStatus
from cloudckpt.errors import CheckpointCorruptError, Damage
from cloudckpt.runs.contents import read_content
from cloudckpt.stores.base import ObjectInfo, RangeReader
from cloudckpt.transfer.download import download
from cloudckpt.transfer.landing import Sink, StoredBytes, Wanted
from cloudckpt.transfer.memory import bytes_of
from cloudckpt.transfer.retry import Retrier, check_unchanged, open_store, retry_if_replaced
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["Progress", "Verified", "check", "one_error", "verify"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What was read and is as it was written.

    Attributes:
        items: The number of pieces of entries.
        nbytes: Their bytes, without envelopes.
        has_checksums: Whether the bytes were compared with their checksums; if not, it is only
            known that all are there.
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
    """Reads all of a committed checkpoint, and compares each object with its checksum.

    So no byte differs from what was written, envelopes and the metadata for other readers included.
    The blocks of an object that differs are compared to name its damaged items. All damage is
    reported, not only the first; of an object whose index is damaged, only that it is. Of what an
    incremental checkpoint shares with others, only its own items are read. The bytes pass through
    memory of at most ``memory_budget``. A checkpoint of torch's own writers has no checksums; here
    only the presence of all bytes is checked.

    Args:
        uri: ``s3://bucket/path`` or another location.
        config: Options.
        process_group: Ranks that divide the objects among themselves, if all of them call this.
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
class _Object:
    """A data object, which is read whole, and the items in it; or an item in another's object.

    Attributes:
        whole: The bytes.
        algorithm: Of their checksum; None if only the blocks of the item have one, if at all.
        checksum: That of all bytes.
        items: What is in the object.
    """

    whole: StoredBytes
    algorithm: ChecksumAlgorithm | None = None
    checksum: int = 0
    items: Sequence[StoredBytes] = ()


@dataclass(frozen=True)
class _Content:
    """What is to be read.

    Attributes:
        objects: The checkpoint's own data objects, if they have checksums, and items in those of
            other checkpoints or of other writers.
        items: The number of all items.
        nbytes: Their bytes.
        commit: The commit object that was read.
        has_checksums: Whether all of them have checksums.
        damaged: The damage found so far.
    """

    objects: Sequence[_Object]
    items: int
    nbytes: int
    commit: ObjectInfo
    has_checksums: bool
    damaged: Sequence[CheckpointCorruptError]

    @classmethod
    def of(cls, uri: CheckpointURI, config: Config) -> _Content:
        part = read_content(uri, config)
        store, damaged = open_store(uri, config), list[CheckpointCorruptError]()
        try:
            part.said.check_pickle(store, Retrier(config.retry))
        except CheckpointCorruptError as error:
            damaged.append(error)
        items = part.sources(store, config, damaged.append)
        reported = {error.uri for error in damaged}
        by_key: dict[str, list[StoredBytes]] = {}
        for item in items:
            by_key.setdefault(item.key, []).append(item)
        objects = []
        for one in part.said.objects:
            own = [] if one.folder else by_key.pop(key := uri.key(one.name), [])
            if not one.folder and store.uri(key) not in reported:
                assert part.said.checksum is not None
                whole = StoredBytes(key, 0, one.size, None, one.size, f"a part of {one.name}")
                objects.append(_Object(whole, part.said.checksum, one.checksum, own))
        objects += [_Object(item) for of_object in by_key.values() for item in of_object]
        nbytes = sum(item.nbytes for item in items)
        return cls(objects, len(items), nbytes, part.commit, part.has_checksums, damaged)

    def share(self, meeting: Meeting) -> list[_Object]:
        """What a rank reads, of about as many bytes as each other, in the order of the bytes."""
        largest_first = sorted(self.objects, key=lambda one: -one.whole.nbytes)
        own = largest_first[meeting.rank :: meeting.size]
        return sorted(own, key=lambda one: (one.whole.key, one.whole.offset))


def check(uri: CheckpointURI, config: Config, *, only: str) -> None:
    """Verifies one object of a checkpoint, by this process alone.

    Args:
        uri: The checkpoint.
        config: Options.
        only: The URI of the object; of others only what the metadata say is checked.

    Raises:
        CheckpointCorruptError: If it is damaged or missing, or the metadata are damaged.
        StoreError: If the store refuses or stays unreachable.
    """
    content, store = _Content.of(uri, config), open_store(uri, config)
    share = [one for one in content.objects if store.uri(one.whole.key) == only]
    found = _damages(uri, config, share, lambda done, total: None)
    if damaged := [*content.damaged, *found]:
        raise one_error(damaged)


def _verify(
    uri: CheckpointURI,
    config: Config,
    meeting: Meeting,
    progress: Callable[[int, int], None],
) -> Verified:
    content = meeting.broadcast_from_first(lambda: _Content.of(uri, config))
    found = meeting.begin(lambda: _damages(uri, config, content.share(meeting), progress))
    damaged = [*content.damaged, *(error for each in meeting.gathered(found) for error in each)]
    if damaged:
        meeting.broadcast_from_first(
            lambda: check_unchanged(
                open_store(uri, config), content.commit, str(uri), config.retry, damaged[0]
            )
        )
        raise one_error(damaged) from damaged[0].__cause__
    return Verified(items=content.items, nbytes=content.nbytes, has_checksums=content.has_checksums)


def _damages(
    uri: CheckpointURI,
    config: Config,
    share: Sequence[_Object],
    progress: Callable[[int, int], None],
) -> list[CheckpointCorruptError]:
    """What is damaged in a rank's share."""
    sums: list[_Sum] = []
    seen = Progress(progress)
    wanted = [
        Wanted(one.whole, 0, one.whole.nbytes, _Read(one, sums, seen.add), True) for one in share
    ]
    seen.total = sum(one.whole.nbytes for one in share)
    store = open_store(uri, config)
    found = _find_damages(store, uri, wanted, config)
    for unlike in _unlike(share, sums):
        found += _damages_of(unlike, store, uri, config)
    return found


_Sum = tuple[str, int, int, int]
"""The checksum of a piece of an object: its key, its first byte, its length, the checksum."""


class _Read(Sink):
    """Keeps the checksums of what is read, and no bytes."""

    __slots__ = ("_algorithm", "_key", "_seen", "_sums")

    def __init__(
        self, one: _Object, sums: list[_Sum], seen: Callable[[int], None] = lambda count: None
    ) -> None:
        """
        Args:
            one: What is read.
            sums: What takes its checksums, if it has one.
            seen: Called with the number of bytes that have arrived, from any thread.
        """
        super().__init__(None)
        self._key, self._algorithm, self._sums, self._seen = (
            one.whole.key,
            one.algorithm,
            sums,
            seen,
        )

    def deliver(self, start: int, data: torch.Tensor) -> None:
        if self._algorithm is not None:
            checksum = self._algorithm.of(bytes_of(data))
            self._sums.append((self._key, start, data.numel(), checksum))
        self._seen(data.numel())


def _unlike(objects: Sequence[_Object], sums: Iterable[_Sum]) -> Iterator[_Object]:
    """The objects that were read whole, and have another checksum than was written."""
    by_key: dict[str, list[tuple[int, int]]] = {}
    for key, _, nbytes, checksum in sorted(sums):
        by_key.setdefault(key, []).append((checksum, nbytes))
    for one in objects:
        pieces = by_key.get(one.whole.key, [])
        is_whole = sum(nbytes for _, nbytes in pieces) == one.whole.nbytes  # else it is reported
        if one.algorithm and is_whole and one.algorithm.combine(pieces) != one.checksum:
            yield one


def _damages_of(
    one: _Object, store: RangeReader, uri: CheckpointURI, config: Config
) -> list[CheckpointCorruptError]:
    """What is damaged in an object: items, or else what lies around them; read once more."""
    sums: list[_Sum] = []
    items = [Wanted(item, 0, item.nbytes, _Read(_Object(item), sums), True) for item in one.items]
    whole = Wanted(one.whole, 0, one.whole.nbytes, _Read(one, sums), True)
    found = _find_damages(store, uri, items, config)
    found = found or _find_damages(store, uri, [whole], config)
    if found or not list(_unlike([one], sums)):
        return found
    where = store.uri(one.whole.key)
    what = "the bytes between the items, which other readers need, do not match the checksum"
    damage = Damage(where, one.whole.item, what, 0, one.whole.nbytes)
    return [CheckpointCorruptError(what, uri=where, item=one.whole.item, damages=[damage])]


class Progress:
    """Adds up the bytes that threads have read or copied.

    Attributes:
        total: The bytes there are in all.
    """

    def __init__(self, tell: Callable[[int, int], None]) -> None:
        self.total = 0
        self._tell = tell
        self._lock = threading.Lock()
        self._done = 0

    def add(self, count: int) -> None:
        """Counts bytes, and reports the sum so far."""
        with self._lock:
            self._done += count
            self.total = max(self.total, self._done)
            done, total = self._done, self.total
        self._tell(done, total)


def _find_damages(
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
    others = f" | {more} more damaged ranges" if more else ""
    return CheckpointCorruptError(
        first.message + others,
        uri=first.uri,
        item=first.item,
        cause=first.cause,
        damages=damages,
    )
