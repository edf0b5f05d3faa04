"""Checks that all of a checkpoint is as it was written."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from cloudckpt.checksum import ChecksumAlgorithm
from cloudckpt.config import MIB, Config, config_or_default
from cloudckpt.dcp.arrivals import collective
from cloudckpt.dcp.meeting import Meeting, RankStatus
from cloudckpt.errors import CheckpointCorruptError, Damage, ObjectNotFoundError
from cloudckpt.runs.contents import ReadContent, read_content
from cloudckpt.stores.base import ObjectInfo, ObjectStore, RangeReader
from cloudckpt.transfer.download import download
from cloudckpt.transfer.landing import Sink, StoredBytes, Wanted
from cloudckpt.transfer.memory import bytes_of
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
class _Object:
    """A data object, which is read whole: its bytes, their checksum, and the items in it."""

    whole: StoredBytes
    algorithm: ChecksumAlgorithm
    checksum: int
    items: Sequence[StoredBytes]


@dataclass(frozen=True)
class _Content:
    """What is to be read.

    Attributes:
        objects: The checkpoint's own data objects, if they have checksums.
        others: Items in other objects: those of other checkpoints, or of other writers.
        items: The number of all items.
        nbytes: Their bytes.
        commits: The commit objects that were read.
        has_checksums: Whether all of them have checksums.
        damaged: The damage found so far.
    """

    objects: Sequence[_Object]
    others: Sequence[StoredBytes]
    items: int
    nbytes: int
    commits: Sequence[ObjectInfo]
    has_checksums: bool
    damaged: Sequence[CheckpointCorruptError]

    @classmethod
    def of(cls, uri: CheckpointURI, config: Config) -> _Content:
        part = read_content(uri, config)
        store, retrier = open_store(uri, config), Retrier(config.retry)
        damaged: list[CheckpointCorruptError] = []
        try:
            part.said.check_pickle(store, retrier)
        except CheckpointCorruptError as error:
            damaged.append(error)
        items = part.sources(store, config, damaged.append)
        damaged += _gone(part, items, store, retrier)
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
        others = [item for of_object in by_key.values() for item in of_object]
        nbytes = sum(item.nbytes for item in items)
        commits = [part.commit]
        return cls(objects, others, len(items), nbytes, commits, part.has_checksums, damaged)

    @property
    def sources(self) -> list[StoredBytes]:
        """Everything to be read, in the order of the objects' bytes."""
        sources = [*(one.whole for one in self.objects), *self.others]
        return sorted(sources, key=lambda source: (source.key, source.offset))


def _gone(
    part: ReadContent, items: Sequence[StoredBytes], store: ObjectStore, retrier: Retrier
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
    algorithms = {one.whole.key: one.algorithm for one in content.objects}
    sums: list[_Sum] = []
    wanted = []
    for source, start, stop in mine:
        sink = _Read(source, start, algorithms.get(source.key), sums, seen)
        wanted.append(Wanted(source, start, stop, sink, True))
    store = open_store(uri, config)
    found = meeting.begin(lambda: find_damages(store, uri, wanted, config))

    def examine(sums_of_all: Sequence[Sequence[_Sum]]) -> None:
        unlike = list(_unlike(content.objects, itertools.chain.from_iterable(sums_of_all)))
        for one in unlike[rank::ranks]:
            found.extend(_damages_of(one, store, uri, config))

    meeting.begin(partial(examine, meeting.gathered(sums)))
    damaged = [*content.damaged, *(error for each in meeting.gathered(found) for error in each)]
    if damaged:
        meeting.broadcast_from_first(lambda: _refuse_replaced(uri, config, content, damaged[0]))
        raise one_error(damaged) from damaged[0].__cause__
    return Verified(items=content.items, nbytes=content.nbytes, has_checksums=content.has_checksums)


_Sum = tuple[str, int, int, int]
"""The checksum of a piece of an object: its key, its first byte, its length, the checksum."""


class _Read(Sink):
    """Keeps the checksums of what is read, and no bytes."""

    __slots__ = ("_algorithm", "_key", "_seen", "_start", "_sums")

    def __init__(
        self,
        source: StoredBytes,
        start: int,
        algorithm: ChecksumAlgorithm | None,
        sums: list[_Sum],
        seen: Callable[[int], None] = lambda count: None,
    ) -> None:
        """
        Args:
            source: What is read.
            start: From which byte of it on.
            algorithm: Of the checksums; None if none are needed.
            sums: What takes them.
            seen: Called with the number of bytes that have arrived, from any thread.
        """
        super().__init__(None)
        self._key, self._start, self._algorithm = source.key, start, algorithm
        self._sums, self._seen = sums, seen

    def deliver(self, start: int, data: torch.Tensor) -> None:
        if self._algorithm is not None:
            checksum = self._algorithm.of(bytes_of(data))
            self._sums.append((self._key, self._start + start, data.numel(), checksum))
        self._seen(data.numel())


def _unlike(objects: Sequence[_Object], sums: Iterable[_Sum]) -> Iterator[_Object]:
    """The objects that were read whole, and have another checksum than was written."""
    by_key: dict[str, list[tuple[int, int]]] = {}
    for key, _, nbytes, checksum in sorted(sums):
        by_key.setdefault(key, []).append((checksum, nbytes))
    for one in objects:
        pieces = by_key.get(one.whole.key, [])
        is_whole = sum(nbytes for _, nbytes in pieces) == one.whole.nbytes  # else it is reported
        if is_whole and one.algorithm.combine(pieces) != one.checksum:
            yield one


def _damages_of(
    one: _Object, store: RangeReader, uri: CheckpointURI, config: Config
) -> list[CheckpointCorruptError]:
    """What is damaged in an object: items, or else what lies around them; read once more."""
    sums: list[_Sum] = []
    items = [Wanted(item, 0, item.nbytes, _Read(item, 0, None, sums), True) for item in one.items]
    sink = _Read(one.whole, 0, one.algorithm, sums)
    whole = Wanted(one.whole, 0, one.whole.nbytes, sink, True)
    found = find_damages(store, uri, items, config) or find_damages(store, uri, [whole], config)
    if found or not list(_unlike([one], sums)):
        return found
    where = store.uri(one.whole.key)
    what = "what lies around its items, which other readers need, does not match the checksum"
    damage = Damage(where, one.whole.item, what, 0, one.whole.nbytes)
    return [CheckpointCorruptError(what, uri=where, item=one.whole.item, damages=[damage])]


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


class _Seen:
    """Counts the bytes that were read."""

    def __init__(self, total: int, progress: Callable[[int, int], None]) -> None:
        self._lock = threading.Lock()
        self._done, self._total = 0, total
        self._progress = progress

    def __call__(self, count: int) -> None:
        with self._lock:
            self._done += count
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
