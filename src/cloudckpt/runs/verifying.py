"""Verifies a checkpoint: reads all of its bytes, and compares them with their checksums."""

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
    """The result of verifying an intact checkpoint.

    Attributes:
        items: The number of items, that is of chunks of tensors and of pickled values.
        nbytes: The bytes of the items, without envelopes.
        has_checksums: Whether the bytes were compared with checksums; if not, it is only known that
            no byte is missing.
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
    """Reads a committed checkpoint completely, and compares each object with its checksum.

    If it returns, each byte is as it was written, including envelopes and the metadata for other
    readers. If an object differs, its blocks are compared to find the damaged items. All damage is
    reported, not only the first; for an object whose index is damaged, only the index is reported.
    Of objects that an incremental checkpoint shares with others, only its own items are read. At
    most ``memory_budget`` bytes of memory are used. A checkpoint of torch's own writers has no
    checksums: only the presence of all bytes is checked.

    Args:
        uri: The location of the checkpoint, for example ``s3://bucket/path``.
        config: Options.
        process_group: The ranks that divide the objects among themselves; all of them must call
            this function.
        progress: Called with the bytes that this rank has read so far and the bytes that it will
            read in all, envelopes included, from any thread.

    Raises:
        CheckpointNotFoundError: If the location has no committed checkpoint.
        CheckpointCorruptError: If any bytes are missing or differ from what was written; its
            ``damages`` list all damage.
        CheckpointReplacedError: If the checkpoint was replaced meanwhile, again and again.
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
    """A unit of reading: a whole data object with its items, or one item of a shared object.

    Attributes:
        whole: The bytes to read.
        algorithm: The algorithm of ``checksum``; None if the bytes have no checksum as a whole.
        checksum: The checksum of all the bytes.
        items: The items in the object.
    """

    whole: StoredBytes
    algorithm: ChecksumAlgorithm | None = None
    checksum: int = 0
    items: Sequence[StoredBytes] = ()


@dataclass(frozen=True)
class _Content:
    """The content of a checkpoint that is to be verified.

    Attributes:
        objects: The units to read: the checkpoint's own data objects, if they have checksums, and
            single items in objects of other checkpoints or of other writers.
        items: The number of all items.
        nbytes: The bytes of all items, without envelopes.
        commit: The commit object that was read.
        has_checksums: Whether the checkpoint has checksums.
        damaged: The damage that was detected in the commit object and in the indexes.
    """

    objects: Sequence[_Object]
    items: int
    nbytes: int
    commit: ObjectInfo
    has_checksums: bool
    damaged: Sequence[CheckpointCorruptError]

    @classmethod
    def of(cls, uri: CheckpointURI, config: Config) -> _Content:
        """Reads the commit object and the indexes of a checkpoint."""
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
        """Returns the units that this rank reads, by key and offset; ranks get similar sizes."""
        largest_first = sorted(self.objects, key=lambda one: -one.whole.nbytes)
        own = largest_first[meeting.rank :: meeting.size]
        return sorted(own, key=lambda one: (one.whole.key, one.whole.offset))


def check(uri: CheckpointURI, config: Config, *, only: str) -> None:
    """Verifies one object of a checkpoint, and the checkpoint's metadata, in this process alone.

    Args:
        uri: The location of the checkpoint.
        config: Options.
        only: The URI of the object.

    Raises:
        CheckpointCorruptError: If the object is damaged or missing, or the metadata is damaged.
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
    """Verifies a checkpoint once; :func:`verify` calls it again if it was replaced meanwhile."""
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
    """Reads a rank's share of the objects, and returns an error for each damaged item."""
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
    """Computes checksums of the bytes that arrive, and discards the bytes."""

    __slots__ = ("_algorithm", "_key", "_seen", "_sums")

    def __init__(
        self, one: _Object, sums: list[_Sum], seen: Callable[[int], None] = lambda count: None
    ) -> None:
        """
        Args:
            one: The unit that is read.
            sums: The list to which the checksums are added, if the unit has a checksum.
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
        """Computes the checksum of bytes that have arrived at offset ``start``."""
        if self._algorithm is not None:
            checksum = self._algorithm.of(bytes_of(data))
            self._sums.append((self._key, start, data.numel(), checksum))
        self._seen(data.numel())


def _unlike(objects: Sequence[_Object], sums: Iterable[_Sum]) -> Iterator[_Object]:
    """Yields the objects that were read completely and have a wrong checksum."""
    by_key: dict[str, list[tuple[int, int]]] = {}
    for key, _, nbytes, checksum in sorted(sums):
        by_key.setdefault(key, []).append((checksum, nbytes))
    for one in objects:
        pieces = by_key.get(one.whole.key, [])
        # an object that was not read completely is reported by the download
        is_whole = sum(nbytes for _, nbytes in pieces) == one.whole.nbytes
        if one.algorithm and is_whole and one.algorithm.combine(pieces) != one.checksum:
            yield one


def _damages_of(
    one: _Object, store: RangeReader, uri: CheckpointURI, config: Config
) -> list[CheckpointCorruptError]:
    """Reads an object again, and returns its damage: the damaged items, or the bytes between them.

    Returns an empty list if the object has the right checksum this time.
    """
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
    """Counts the bytes that threads have read or copied, and reports them to a callback.

    Attributes:
        total: The bytes that will be read or copied in all.
    """

    def __init__(self, tell: Callable[[int, int], None]) -> None:
        self.total = 0
        self._tell = tell
        self._lock = threading.Lock()
        self._done = 0

    def add(self, count: int) -> None:
        """Adds to the count, and reports the sum so far and the total."""
        with self._lock:
            self._done += count
            self.total = max(self.total, self._done)
            done, total = self._done, self.total
        self._tell(done, total)


def _find_damages(
    store: RangeReader, uri: CheckpointURI, wanted: Sequence[Wanted], config: Config
) -> list[CheckpointCorruptError]:
    """Reads items, and returns an error for each that is missing or damaged, in order.

    Raises:
        StoreError: If the store refuses or stays unreachable.
    """
    found: list[CheckpointCorruptError] = []
    download(store, wanted, config, TransferStats(str(uri)), damaged=found.append)
    return sorted(found, key=lambda error: _places(error.damages))


def _places(damages: Sequence[Damage]) -> list[tuple[str, int, str]]:
    """Returns a sort key: object, first byte and item of each damage."""
    return [(damage.object, damage.start or 0, damage.item) for damage in damages]


def one_error(found: Sequence[CheckpointCorruptError]) -> CheckpointCorruptError:
    """Makes one error that lists all damage; its message describes the first."""
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
