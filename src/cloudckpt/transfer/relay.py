"""Copies objects from one store to another, through bounded memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from cloudckpt.checksum import ChecksumAlgorithm
from cloudckpt.config import MIB, Config
from cloudckpt.errors import CheckpointCorruptError, Damage
from cloudckpt.stores.base import ObjectStore
from cloudckpt.transfer.group import TaskGroup
from cloudckpt.transfer.memory import bytes_of
from cloudckpt.transfer.parts import Piece, choose_part_size
from cloudckpt.transfer.receiving import Receiver
from cloudckpt.transfer.retry import Retrier
from cloudckpt.transfer.staging import ScratchPool
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.upload import ObjectUpload, creates_only

__all__ = ["MismatchError", "Passage", "relay"]

_PART = 8 * MIB  # bytes of a part: eight are under way in 64 MiB


@dataclass(frozen=True, slots=True)
class Passage:
    """An object that is to be copied.

    Attributes:
        source: Its key.
        target: The key that it will have, which nobody else writes to.
        size: Its bytes.
        checksum: That of its bytes; None if nobody knows it.
        algorithm: Of the checksum.
    """

    source: str
    target: str
    size: int
    checksum: int | None
    algorithm: ChecksumAlgorithm


class MismatchError(CheckpointCorruptError):
    """What was received of an object is not what was written: it, or the way, is damaged."""


def relay(
    source: ObjectStore,
    target: ObjectStore,
    passages: Sequence[Passage],
    config: Config,
    stats: TransferStats,
    *,
    moved: Callable[[int], None],
    arrived: Callable[[Passage], None],
) -> None:
    """Copies objects; at its return all of them are there, and as they were.

    Each part is received into memory, and sent from there, by one thread; several at a time, in
    ``memory_budget`` bytes, or two parts if these are more. What was received is compared with the
    checksum of the object before the object is complete. What fails leaves none of the objects
    that were under way.

    Args:
        source: Where they are.
        target: Where they are copied to.
        passages: The objects.
        config: Options.
        stats: Counts.
        moved: Called with the bytes that were received since the last call, by any thread.
        arrived: Called with each object that is there, by any thread.

    Raises:
        CheckpointCorruptError: If an object is gone, or was replaced.
        MismatchError: If what was received of it does not match its checksum.
        StoreError: If a store refuses or stays unreachable.
    """
    _Relay(source, target, config, stats, moved, arrived).run(passages)


class _Relay:
    def __init__(
        self,
        source: ObjectStore,
        target: ObjectStore,
        config: Config,
        stats: TransferStats,
        moved: Callable[[int], None],
        arrived: Callable[[Passage], None],
    ) -> None:
        self._source = source
        self._target = target
        self._config = config
        self._stats = stats
        self._moved = moved
        self._arrived = arrived
        self._group = TaskGroup(
            config.connections, name="cloudckpt-copy", interrupt=self._interrupt
        )
        cancellation = self._group.cancellation
        self._retrier = Retrier(config.retry, cancellation, on_retry=stats.add_retry)
        self._receiver = Receiver(source, self._retrier, lambda count: cancellation.check())
        self._create_only = creates_only(target, config)

    def _interrupt(self, threads: Collection[int]) -> None:
        self._source.interrupt(threads)
        self._target.interrupt(threads)

    def run(self, passages: Sequence[Passage]) -> None:
        sizes = {one: self._part_size(one.size) for one in passages}
        most = max((min(sizes[one], one.size) for one in passages), default=0)
        # two parts at least: the first of an upload waits for the second
        budget = max(self._config.memory_budget, 2 * most)
        self._pool = ScratchPool(budget, self._group.cancellation)
        under_way: dict[Passage, _Sending] = {}

        def produce() -> None:
            for passage in passages:
                sending = under_way[passage] = self._begin(passage, sizes[passage])
                for start in range(0, passage.size, sizes[passage]):
                    self._send(sending, start, min(sizes[passage], passage.size - start))
                sending.upload.close()

        try:
            self._group.run(produce)
        except BaseException:
            for passage, sending in under_way.items():
                if sending.upload.info is None:
                    sending.upload.abandon()
                else:
                    self._arrived(passage)
            raise
        for passage in under_way:
            self._arrived(passage)

    def _part_size(self, size: int) -> int:
        wanted = self._config.part_size or max(_PART, size // 9_000)
        limits = self._target.capabilities
        return choose_part_size(size, wanted, limits, connections=self._config.connections)

    def _begin(self, passage: Passage, part_size: int) -> _Sending:
        upload = ObjectUpload(
            self._target,
            passage.target,
            part_size,
            self._group,
            self._retrier,
            self._stats,
            create_only=self._create_only,
        )
        return _Sending(upload, _Comparison(self._source, passage, upload.algorithm))

    def _send(self, sending: _Sending, start: int, nbytes: int) -> None:
        loan = _Loan(self._pool, nbytes)
        key, size = sending.comparison.passage.source, sending.comparison.passage.size
        uri = self._source.uri(key)

        def receive() -> None:
            self._receiver.receive(key, start, [loan.view], size=size, item=uri)
            self._moved(nbytes)

        sending.upload.write(
            Piece(loan.view, sending.comparison, start, loan, ready=receive, item=uri)
        )


@dataclass(frozen=True)
class _Sending:
    upload: ObjectUpload
    comparison: _Comparison


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

    def __init__(self, source: ObjectStore, passage: Passage, algorithm: ChecksumAlgorithm) -> None:
        self.passage = passage
        self._uri = source.uri(passage.source)
        self._sent = algorithm
        self._lock = threading.Lock()
        self._parts: dict[int, tuple[int, int]] = {}
        self._left = passage.size

    def add(self, start: int, view: memoryview) -> int:
        """Takes the object's bytes from ``start``; returns the checksum that is sent with them.

        Raises:
            MismatchError: If they are the last, and the object is not as it should be.
        """
        sent = self._sent.of(view)
        if self.passage.checksum is None:
            return sent
        own = self.passage.algorithm
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
        if self.passage.algorithm.combine(parts) != self.passage.checksum:
            what = "does not match its checksum"
            raise MismatchError(
                f"what was received of the object {what}",
                uri=self._uri,
                damages=[Damage(self._uri, "", what)],
            )
