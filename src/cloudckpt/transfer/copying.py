"""Copies objects: within the store where it supports that, else through bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from cloudckpt.checksum import ChecksumAlgorithm
from cloudckpt.config import MIB, Config
from cloudckpt.errors import CheckpointCorruptError, Damage
from cloudckpt.stores.base import CopySource, ObjectInfo, ObjectStore, Upload, random_suffix
from cloudckpt.stores.capabilities import Capabilities
from cloudckpt.transfer.download import Receiver
from cloudckpt.transfer.group import TaskGroup
from cloudckpt.transfer.parts import Piece, choose_part_size
from cloudckpt.transfer.pool import MemoryPool
from cloudckpt.transfer.retry import Retrier
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.upload import ObjectUpload

__all__ = [
    "CopyTask",
    "MismatchError",
    "ObjectCopy",
    "copies_within",
    "relay",
]

_COPIED_PART = 256 * MIB  # bytes; a store copies some hundred MiB/s per request
_SENT_PART = 8 * MIB  # bytes; eight parts under way take 64 MiB


@dataclass(frozen=True, slots=True)
class CopyTask:
    """An object to be copied.

    Attributes:
        source: The key of the source.
        target: The key of the copy; no other writer may use it.
        size: The size in bytes.
        checksum: The checksum of the content; None if unknown.
        algorithm: The algorithm of the checksum.
        info: The source store's description of the object, if the target store copies it by itself;
            None if the bytes pass through this process.
    """

    source: str
    target: str
    size: int
    checksum: int | None
    algorithm: ChecksumAlgorithm
    info: ObjectInfo | None = None


class MismatchError(CheckpointCorruptError):
    """The received bytes of an object, or a store's copy of it, do not match its checksum.

    The object is damaged, or was damaged during the transfer.
    """


def relay(
    source: ObjectStore,
    target: ObjectStore,
    tasks: Sequence[CopyTask],
    config: Config,
    stats: TransferStats,
    *,
    moved: Callable[[int], None],
    arrived: Callable[[CopyTask], None],
) -> None:
    """Copies objects from one store to another, and verifies those whose checksum is known.

    On return, all copies are complete. Each part is received into memory and sent from there by one
    thread; several threads share `memory_budget` bytes, or the size of two parts if that is more.
    The received bytes are compared with the object's checksum before the copy is completed. If the
    target store makes a copy by itself, the checksum that it reports, if any, is compared.
    A failure removes the copies that are incomplete or do not match.

    Args:
        source: The store of the sources.
        target: The store of the copies.
        tasks: The objects.
        config: Options.
        stats: Transfer counters.
        moved: Called with the number of bytes copied since the last call, from any thread.
        arrived: Called, after the transfer, with the task of each copy that is complete and matches
            its known checksum, even if other copies failed.

    Raises:
        CheckpointCorruptError: If an object that is streamed is missing, was replaced, or has
            another size than its task.
        MismatchError: If the received bytes of an object, or a copy that the store has made, do not
            match the checksum.
        StoreError: If a store refuses a request or stays unreachable; also if an object that the
            target store copies by itself is missing or was replaced.
    """

    def interrupt(threads: Collection[int]) -> None:
        source.interrupt(threads)
        target.interrupt(threads)

    group = TaskGroup(config.requests_at_once, name="cloudckpt-copy", interrupt=interrupt)
    retrier = Retrier(config.retry, group.cancellation, on_retry=stats.add_retry)
    receiver = Receiver(source, retrier, lambda count: group.cancellation.check())
    sizes = {task: _part_size(task, target.capabilities, config) for task in tasks}
    most = max((min(sizes[one], one.size) for one in tasks if one.info is None), default=0)
    # two parts at least: the first part of an upload waits for the second
    pool = MemoryPool(max(config.memory_budget, 2 * most), group.cancellation)
    begun: dict[CopyTask, ObjectUpload] = {}

    def receive(task: CopyTask, start: int, view: memoryview) -> None:
        item = source.uri(task.source)
        receiver.receive(task.source, start, [view], size=task.size, item=item)
        moved(view.nbytes)

    def stream(task: CopyTask) -> None:
        upload = ObjectUpload(target, task.target, sizes[task], group, config, stats)
        begun[task], uri = upload, source.uri(task.source)
        comparison = _Comparison(uri, task, upload.algorithm)
        for start in range(0, task.size, sizes[task]):
            nbytes = min(sizes[task], task.size - start)
            lease = pool.take(nbytes)
            view = lease.view[:nbytes]
            ready = partial(receive, task, start, view)
            upload.write(Piece(view, comparison, start, lease, ready=ready, item=uri))
        upload.close()

    def produce() -> None:
        for task in tasks:
            if task.info is None:
                stream(task)
            else:
                copy = ObjectCopy(target, task.target, sizes[task], group, config, stats)
                begun[task] = copy
                copy.start(CopySource(source, task.info), moved)

    try:
        group.run(produce)
    finally:
        right = {task for task, upload in begun.items() if _is_correct(task, upload)}
        for task, upload in begun.items():
            if task in right:
                arrived(task)
            else:
                upload.abandon()
    for task in tasks:
        if task not in right:
            raise _mismatch(source.uri(task.source))


def _part_size(task: CopyTask, limits: Capabilities, config: Config) -> int:
    wanted = _COPIED_PART if task.info is not None else config.part_size or _SENT_PART
    return choose_part_size(task.size, wanted, limits, connections=config.requests_at_once)


def _is_correct(task: CopyTask, upload: ObjectUpload) -> bool:
    """Returns whether the copy is complete and, if the store reports checksums, correct."""
    source, made = task.info, upload.info
    if source is None or made is None:
        return made is not None  # streams were compared as they were received
    expected = source.checksum
    if task.algorithm == upload.algorithm and task.checksum is not None:
        expected = task.checksum
    is_known = expected is not None and upload.checksum is not None
    return made.size == task.size and (expected == upload.checksum or not is_known)


def copies_within(source: ObjectStore, target: ObjectStore, size: int) -> bool:
    """Returns whether `target` can itself copy an object of `size` bytes from `source`."""
    limits = target.capabilities
    return target.copies_from(source) and (size <= limits.max_copy_size or limits.copies_parts)


class ObjectCopy(ObjectUpload):
    """One object that the store copies from another bucket or key.

    It works like an :class:`~cloudckpt.transfer.upload.ObjectUpload`: on the group's threads, with
    retries, whole or not at all; :meth:`start` replaces writing and closing. As the bytes do not
    pass through this process, compare ``checksum``, if the store reported it, with the source's to
    verify the copy. ``abandon`` deletes the object at the key, which no other writer may use.
    """

    def start(self, source: CopySource, moved: Callable[[int], None]) -> None:
        """Begins the copy.

        Args:
            source: The object to copy.
            moved: Called with the number of bytes copied since the last call, from any thread.

        Raises:
            StoreError: If a multipart upload for the copy can't be begun.
            TransferCancelledError: If a task of the group has failed.
        """
        limits, size = self._store.capabilities, source.info.size
        self.position, self._moved = size, moved
        # parts are also used for speed: each is copied as fast as a whole object
        if not limits.copies_parts or size <= min(self._part_size, limits.max_copy_size):
            self._group.submit(lambda: self._copy(source))
            return
        starts = range(0, size, self._part_size)
        self._expected = len(starts)
        self._upload = self._create()
        for number, start in enumerate(starts, 1):
            self._group.submit(partial(self._copy_part, source, self._upload, number, start))

    def _copy_part(self, source: CopySource, upload: Upload, number: int, start: int) -> None:
        stop = min(start + self._part_size, source.info.size)
        part = self._retrier.call(
            lambda: self._store.copy_part(source, upload, number, start, stop)
        )
        self._moved(part.size)
        self._took(part)

    def _copy(self, source: CopySource) -> None:
        attempt = random_suffix()
        self.info = self._retrier.call(
            lambda: self._store.copy(source, self.key, attempt=attempt, if_version=self._condition),
            made=lambda error: self._look(attempt, source.info.checksum),
        )
        self.checksum = self.info.checksum
        self._stats.add_requests(1)
        self._moved(source.info.size)


class _Comparison:
    """Compares an object's bytes, added part by part, with the object's checksum."""

    def __init__(self, uri: str, task: CopyTask, algorithm: ChecksumAlgorithm) -> None:
        self._task = task
        self._uri = uri
        self._sent = algorithm
        self._lock = threading.Lock()
        self._parts: dict[int, tuple[int, int]] = {}
        self._left = task.size

    def add(self, start: int, view: memoryview) -> int:
        """Adds the object's bytes from `start`; returns their checksum, which is sent along.

        Raises:
            MismatchError: If these bytes were the last, and the object's checksum does not match.
        """
        sent = self._sent.of(view)
        if self._task.checksum is None:
            return sent
        own = self._task.algorithm
        checksum = sent if own == self._sent else own.of(view)
        with self._lock:
            self._parts[start] = checksum, view.nbytes
            self._left -= view.nbytes
            is_whole = self._left == 0
        if is_whole:
            self._compare()
        return sent

    def _compare(self) -> None:
        parts = [self._parts[start] for start in sorted(self._parts)]
        if self._task.algorithm.combine(parts) != self._task.checksum:
            raise _mismatch(self._uri)


def _mismatch(uri: str) -> MismatchError:
    what = "does not match its checksum"
    return MismatchError(
        f"the object {what}, so its copy was discarded: check the source with cloudckpt verify",
        uri=uri,
        damages=[Damage(uri, "", what)],
    )
