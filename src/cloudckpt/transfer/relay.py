"""Copies objects from one store to another, through bounded memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from cloudckpt.checksum import ChecksumAlgorithm
from cloudckpt.config import MIB, Config
from cloudckpt.errors import CheckpointCorruptError, Damage
from cloudckpt.stores.base import ObjectInfo, ObjectStore
from cloudckpt.transfer.copying import ObjectCopy, copies_within, copy_part_size
from cloudckpt.transfer.group import TaskGroup
from cloudckpt.transfer.memory import bytes_of
from cloudckpt.transfer.parts import Piece, choose_part_size
from cloudckpt.transfer.receiving import Receiver
from cloudckpt.transfer.retry import Retrier
from cloudckpt.transfer.staging import ScratchPool
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.upload import ObjectUpload, creates_only

__all__ = ["MismatchError", "CopyTask", "copy_objects", "relay"]

_PART = 8 * MIB  # bytes of a part: eight are under way in 64 MiB


@dataclass(frozen=True, slots=True)
class CopyTask:
    """An object that is to be copied.

    Attributes:
        source: Its key.
        target: The key that it will have, which nobody else writes to.
        size: Its bytes.
        checksum: That of its bytes; None if nobody knows it.
        algorithm: Of the checksum.
        found: What the source has, if the target is to copy it by itself.
    """

    source: str
    target: str
    size: int
    checksum: int | None
    algorithm: ChecksumAlgorithm
    found: ObjectInfo | None = None


class MismatchError(CheckpointCorruptError):
    """What was received of an object is not what was written: it, or the way, is damaged."""


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
    """Copies objects; at its return all of them are there, and as they were.

    Each part is received into memory, and sent from there, by one thread; several at a time, in
    ``memory_budget`` bytes, or two parts if these are more. What was received is compared with the
    checksum of the object before the object is complete. What the target copies by itself does not
    pass through here, and is compared with what the store tells of it, if it does. What fails
    leaves none of the objects that were under way.

    Args:
        source: Where they are.
        target: Where they are copied to.
        tasks: The objects.
        config: Options.
        stats: Counts.
        moved: Called with the bytes that were copied since the last call, by any thread.
        arrived: Called with each object that is there, by any thread.

    Raises:
        CheckpointCorruptError: If an object is gone, or was replaced.
        MismatchError: If what was received of it does not match its checksum.
        StoreError: If a store refuses or stays unreachable.
    """
    _Relay(source, target, config, stats, moved, arrived).run(tasks)


def copy_objects(
    source: ObjectStore, target: ObjectStore, pairs: Iterable[tuple[str, str]], config: Config
) -> None:
    """Copies objects given their keys, by the store itself where it can; see :func:`relay`.

    Args:
        source: Where they are.
        target: Where they are copied to; nobody else writes to these keys.
        pairs: From where, and to where.
        config: Options.

    Raises:
        CheckpointCorruptError: If an object is gone, or was replaced.
        StoreError: If a store refuses or stays unreachable.
    """
    retrier, tasks = Retrier(config.retry), []
    for key, copy in pairs:
        found = retrier.call(partial(source.head, key))
        within = found if copies_within(source, target, found.size) else None
        kind = source.capabilities.checksum
        tasks.append(CopyTask(key, copy, found.size, found.checksum, kind, within))
    if tasks:
        stats = TransferStats(target.uri(tasks[0].target))
        nothing: Callable[[object], None] = lambda _: None  # noqa: E731
        relay(source, target, tasks, config, stats, moved=nothing, arrived=nothing)


class _Relay:
    def __init__(
        self,
        source: ObjectStore,
        target: ObjectStore,
        config: Config,
        stats: TransferStats,
        moved: Callable[[int], None],
        arrived: Callable[[CopyTask], None],
    ) -> None:
        self._source = source
        self._target = target
        self._config = config
        self._stats = stats
        self._moved = moved
        self._arrived = arrived
        self._group = TaskGroup(
            config.requests_at_once, name="cloudckpt-copy", interrupt=self._interrupt
        )
        cancellation = self._group.cancellation
        self._retrier = Retrier(config.retry, cancellation, on_retry=stats.add_retry)
        self._receiver = Receiver(source, self._retrier, lambda count: cancellation.check())
        self._create_only = creates_only(target, config)

    def _interrupt(self, threads: Collection[int]) -> None:
        self._source.interrupt(threads)
        self._target.interrupt(threads)

    def run(self, tasks: Sequence[CopyTask]) -> None:
        sizes = {one: self._part_size(one.size) for one in tasks if one.found is None}
        most = max((min(size, one.size) for one, size in sizes.items()), default=0)
        # two parts at least: the first of an upload waits for the second
        budget = max(self._config.memory_budget, 2 * most)
        self._pool = ScratchPool(budget, self._group.cancellation)
        under_way: dict[CopyTask, ObjectUpload] = {}

        def produce() -> None:
            for task in tasks:
                if task.found is not None:
                    made = under_way[task] = self._copy(task)
                    made.start(self._source, task.found)
                else:
                    upload = under_way[task] = self._upload(task, sizes[task])
                    self._stream(task, upload, sizes[task])

        there: set[CopyTask] = set()
        try:
            self._group.run(produce)
        finally:
            for task, upload in under_way.items():
                if self._is_right(task, upload):
                    there.add(task)
                    self._arrived(task)
                else:
                    upload.abandon()
        for task in tasks:
            if task not in there:
                raise _mismatch(self._source.uri(task.source))

    def _part_size(self, size: int) -> int:
        wanted = self._config.part_size or max(_PART, size // 9_000)
        limits = self._target.capabilities
        return choose_part_size(size, wanted, limits, connections=self._config.requests_at_once)

    def _upload(self, task: CopyTask, part_size: int) -> ObjectUpload:
        return ObjectUpload(
            self._target,
            task.target,
            part_size,
            self._group,
            self._retrier,
            self._stats,
            create_only=self._create_only,
        )

    def _copy(self, task: CopyTask) -> ObjectCopy:
        return ObjectCopy(
            self._target,
            task.target,
            copy_part_size(task.size, self._target.capabilities),
            self._group,
            self._retrier,
            _Counted(self._moved),
            create_only=self._create_only,
        )

    def _stream(self, task: CopyTask, upload: ObjectUpload, part_size: int) -> None:
        uri = self._source.uri(task.source)
        comparison = _Comparison(uri, task, upload.algorithm)
        for start in range(0, task.size, part_size):
            loan = _Loan(self._pool, min(part_size, task.size - start))
            receive = partial(self._receive, task, start, loan.view, uri)
            upload.write(Piece(loan.view, comparison, start, loan, ready=receive, item=uri))
        upload.close()

    def _receive(self, task: CopyTask, start: int, view: memoryview, uri: str) -> None:
        self._receiver.receive(task.source, start, [view], size=task.size, item=uri)
        self._moved(view.nbytes)

    def _is_right(self, task: CopyTask, upload: ObjectUpload) -> bool:
        """Whether it is there, and if the store has copied it, as far as that tells, as it was."""
        found, made = task.found, upload.info
        if found is None or made is None:
            return made is not None  # streams were compared on the way
        expected = found.checksum
        if task.algorithm == upload.algorithm and task.checksum is not None:
            expected = task.checksum
        is_known = expected is not None and made.checksum is not None
        return made.size == task.size and (expected == made.checksum or not is_known)


class _Counted(TransferStats):
    """Tells of bytes that a store has copied by itself."""

    def __init__(self, moved: Callable[[int], None]) -> None:
        super().__init__()
        self._moved = moved

    def add_bytes(self, count: int) -> None:
        self._moved(count)


class _Loan:
    """Scratch memory of one part, which goes back when the part was sent."""

    def __init__(self, pool: ScratchPool, nbytes: int) -> None:
        self._stack = contextlib.ExitStack()
        self._memory = self._stack.enter_context(pool.borrowed(nbytes, pinned=False))
        self.view = bytes_of(self._memory)[:nbytes]

    def retain(self) -> None:
        raise AssertionError("a part is one piece")

    def release(self) -> None:
        self._stack.close()


class _Comparison:
    """Compares an object's bytes with its checksum, part by part, while they are in memory."""

    def __init__(self, uri: str, task: CopyTask, algorithm: ChecksumAlgorithm) -> None:
        self._passage = task
        self._uri = uri
        self._sent = algorithm
        self._lock = threading.Lock()
        self._parts: dict[int, tuple[int, int]] = {}
        self._left = task.size

    def add(self, start: int, view: memoryview) -> int:
        """Takes the object's bytes from ``start``; returns the checksum that is sent with them.

        Raises:
            MismatchError: If they are the last, and the object is not as it should be.
        """
        sent = self._sent.of(view)
        if self._passage.checksum is None:
            return sent
        own = self._passage.algorithm
        found = sent if own == self._sent else own.of(view)
        with self._lock:
            self._parts[start] = found, view.nbytes
            self._left -= view.nbytes
            is_whole = self._left == 0
        if is_whole:
            self._compare()
        return sent

    def _compare(self) -> None:
        parts = [self._parts[start] for start in sorted(self._parts)]
        if self._passage.algorithm.combine(parts) != self._passage.checksum:
            raise _mismatch(self._uri)


def _mismatch(uri: str) -> MismatchError:
    what = "does not match its checksum"
    return MismatchError(
        f"what was received of the object {what}", uri=uri, damages=[Damage(uri, "", what)]
    )
