"""Verifies a checkpoint: reads all of its bytes, and compares them with their checksums."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from cloudckpt.checksum import ChecksumAlgorithm
from cloudckpt.config import Config, config_or_default
from cloudckpt.dcp.meeting import Meeting, RankStatus, collective
from cloudckpt.errors import CheckpointCorruptError, Damage
from cloudckpt.runs.contents import read_content
from cloudckpt.stores.base import ObjectInfo
from cloudckpt.transfer.download import download
from cloudckpt.transfer.landing import Sink, StoredBytes, Wanted
from cloudckpt.transfer.memory import bytes_of
from cloudckpt.transfer.retry import Retrier, check_unchanged, open_store, retry_if_replaced
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["Progress", "Verified", "merged_error", "verify"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The result of verifying an intact checkpoint.

    Attributes:
        items: The number of items, that is of chunks of tensors and of pickled values.
        nbytes: The bytes of the items, without torch's format around each tensor.
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

    If this returns, each byte is unchanged, including torch's format around each tensor and the
    metadata for other readers. If an object differs, its blocks are compared to find the damaged
    items. All damage is reported, not only the first; but if an object's list of block checksums
    (its index) is damaged, only that list is reported. Of objects that an incremental checkpoint
    shares with others, only its own items are read. At most ``memory_budget`` bytes of memory are
    used. A checkpoint of torch's own writers has no checksums: only the presence of all bytes is
    checked.

    Args:
        uri: The location of the checkpoint, for example ``s3://bucket/path``.
        config: Options; None reads them from the environment.
        process_group: The ranks that divide the objects among themselves; all of them must call
            this function. None: this process reads alone.
        progress: Called with the bytes that this rank has read so far and the bytes that it will
            read in all, from any thread.

    Returns:
        How much was verified, and whether the checkpoint has checksums.

    Raises:
        InvalidURIError: If ``uri`` is not a valid location.
        ConfigError: If an option is invalid.
        DifferentCheckpointsError: If the ranks were given different locations.
        CheckpointNotFoundError: If the location has no committed checkpoint.
        CheckpointCorruptError: If any bytes are missing or differ from what was written; its
            ``damages`` list all damage.
        CheckpointReplacedError: If the checkpoint was replaced meanwhile, again and again.
        CheckpointError: If the metadata can't be read for another reason: it names code that is not
            on the allow-list, for example.
        StoreError: If the store refuses or stays unreachable.
        RanksFailedError: If ranks failed for different reasons, or outside of cloudckpt.
        ProcessGroupError: If a rank died or the ranks lost each other.
    """
    meeting = Meeting(process_group)

    def prepare() -> tuple[CheckpointURI, Config]:
        options = config_or_default(config)
        return CheckpointURI.parse(uri), dataclasses.replace(options, verify=True)

    location, options = meeting.begin(prepare, lambda made: RankStatus(location=str(made[0])))
    return retry_if_replaced(partial(_verify, location, options, meeting, progress))


@dataclass(frozen=True)
class _Object:
    """A unit of reading: a whole data object with its items, or one item of any other object.

    Attributes:
        whole: Where the bytes to read are stored.
        algorithm: The algorithm of ``checksum``; None if there is no checksum of all these bytes.
        checksum: The checksum of all these bytes; 0 without an ``algorithm``.
        items: The items in a whole object; empty for a single item.
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
        commit: The commit object that was read.
        damaged: The damage that was detected in the commit object and in the indexes.
        if_intact: The result if nothing else is damaged.
    """

    objects: Sequence[_Object]
    commit: ObjectInfo
    damaged: Sequence[CheckpointCorruptError]
    if_intact: Verified

    @classmethod
    def of(cls, uri: CheckpointURI, config: Config) -> _Content:
        """Reads the commit object and the indexes of a checkpoint."""
        part = read_content(uri, config)
        store, damaged = open_store(uri, config), list[CheckpointCorruptError]()
        try:
            part.commit.check_pickle(store, Retrier(config.retry))
        except CheckpointCorruptError as error:
            damaged.append(error)
        names = part.metadata.state_dict_metadata
        indices = [index for name in names for index in part.indices(name)]
        items = part.places.sources(indices, store, config, damaged.append)
        reported = {error.uri for error in damaged}
        by_key: dict[str, list[StoredBytes]] = {}
        for item in items:
            by_key.setdefault(item.key, []).append(item)
        objects = []
        for stored in part.commit.objects:
            own = [] if stored.folder else by_key.pop(key := uri.key(stored.name), [])
            if not stored.folder and store.uri(key) not in reported:
                what = f"a part of {stored.name}"
                whole = StoredBytes(key, 0, stored.size, None, stored.size, what)
                objects.append(_Object(whole, part.commit.checksum, stored.checksum, own))
        objects += [_Object(item) for of_object in by_key.values() for item in of_object]
        nbytes, has_checksums = sum(item.nbytes for item in items), part.has_checksums
        result = Verified(items=len(items), nbytes=nbytes, has_checksums=has_checksums)
        return cls(objects, part.commit.info, damaged, result)


def _verify(
    uri: CheckpointURI,
    config: Config,
    meeting: Meeting,
    progress: Callable[[int, int], None],
) -> Verified:
    """Verifies a checkpoint once; :func:`verify` calls it again if it was replaced meanwhile."""
    content = meeting.broadcast_from_first(lambda: _Content.of(uri, config))
    largest_first = sorted(content.objects, key=lambda unit: -unit.whole.nbytes)
    share = largest_first[meeting.rank :: meeting.size]  # so ranks get similar sizes
    share.sort(key=lambda unit: (unit.whole.key, unit.whole.offset))
    of_all = meeting.gathered(lambda: _damages(uri, config, share, progress))
    damaged = [*content.damaged, *(error for of_rank in of_all for error in of_rank)]
    if damaged:
        meeting.broadcast_from_first(
            lambda: check_unchanged(
                open_store(uri, config), content.commit, str(uri), config.retry, damaged[0]
            )
        )
        raise merged_error(damaged) from damaged[0].__cause__
    return content.if_intact


def _damages(
    uri: CheckpointURI,
    config: Config,
    share: Sequence[_Object],
    progress: Callable[[int, int], None],
) -> list[CheckpointCorruptError]:
    """Reads the objects of this rank's share, and returns an error for each damaged item.

    The items of an object with a wrong checksum are read again, to find the damaged ones. If all of
    them are intact, the whole object is read again; if its checksum is still wrong, the returned
    error is about the bytes between the items.
    """
    seen = Progress(progress)
    seen.total = sum(unit.whole.nbytes for unit in share)
    reads = [_Read(unit, seen.add) for unit in share]
    errors = _read(uri, config, reads)
    for unit in [read.unit for read in reads if read.differs]:
        again = _Read(unit)
        items = _read(uri, config, [_Read(_Object(item)) for item in unit.items])
        items = items or _read(uri, config, [again])
        errors += items
        if not items and again.differs:
            where = open_store(uri, config).uri(unit.whole.key)
            what = (
                "the bytes between the items, which other readers need, do not match the checksum"
            )
            item = unit.whole.item
            damages = [Damage(where, item, what, 0, unit.whole.nbytes)]
            text = f"{what}: cloudckpt can still load the checkpoint, so load it and save it again"
            errors.append(CheckpointCorruptError(text, uri=where, item=item, damages=damages))
    return errors


class _Read(Sink):
    """Computes the checksum of an object from the bytes that arrive, and discards the bytes."""

    __slots__ = ("_parts", "_seen", "unit")

    def __init__(self, unit: _Object, seen: Callable[[int], None] = lambda count: None) -> None:
        """
        Args:
            unit: The object.
            seen: Called with the number of bytes that have arrived, from any thread.
        """
        super().__init__(None)
        self.unit, self._seen = unit, seen
        self._parts: list[tuple[int, int, int]] = []  # first byte, checksum, length

    def deliver(self, start: int, data: torch.Tensor) -> None:
        """Computes the checksum of bytes that have arrived at offset ``start``."""
        if self.unit.algorithm is not None:
            self._parts.append((start, self.unit.algorithm.of(bytes_of(data)), data.numel()))
        self._seen(data.numel())

    @property
    def differs(self) -> bool:
        """Whether the object has a checksum, was read completely, and does not match it."""
        parts = [(checksum, nbytes) for _, checksum, nbytes in sorted(self._parts)]
        if self.unit.algorithm is None or sum(n for _, n in parts) != self.unit.whole.nbytes:
            return False  # an object that was not read completely is reported by the download
        return self.unit.algorithm.combine(parts) != self.unit.checksum


def _read(
    uri: CheckpointURI, config: Config, reads: Sequence[_Read]
) -> list[CheckpointCorruptError]:
    """Reads objects, and returns an error for each item that is missing or damaged, in order.

    Raises:
        StoreError: If the store refuses or stays unreachable.
    """
    errors: list[CheckpointCorruptError] = []
    wanted = [Wanted(read.unit.whole, 0, read.unit.whole.nbytes, read, True) for read in reads]
    store, stats = open_store(uri, config), TransferStats(str(uri))
    download(store, wanted, config, stats, damaged=errors.append)
    return sorted(
        errors,
        key=lambda error: [(one.object, one.start or 0, one.item) for one in error.damages],
    )


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
        """Adds ``count`` bytes, and calls the callback with the bytes so far and the total."""
        with self._lock:
            self._done += count
            self.total = max(self.total, self._done)
            done, total = self._done, self.total
        self._tell(done, total)


def merged_error(errors: Sequence[CheckpointCorruptError]) -> CheckpointCorruptError:
    """Makes one error that lists all damage; its message describes the first."""
    first = errors[0]
    damages = tuple(dict.fromkeys(damage for error in errors for damage in error.damages))
    more = len(damages) - len(first.damages)
    others = f" | other damaged ranges: {more}" if more else ""
    return CheckpointCorruptError(
        first.message + others,
        uri=first.uri,
        item=first.item,
        cause=first.cause,
        damages=damages,
    )
