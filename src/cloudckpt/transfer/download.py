"""Fetches ranges of many objects at once, verifies them, and hands them to their sinks."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence

from cloudckpt.config import Config
from cloudckpt.errors import (
    CheckpointCorruptError,
    ConnectionLostError,
    ObjectNotFoundError,
    PreconditionFailedError,
    RangeNotSatisfiableError,
)
from cloudckpt.gc_pause import paused_gc
from cloudckpt.stores.base import ObjectInfo, RangeReader, nbytes, skip
from cloudckpt.transfer.boxes import aligned
from cloudckpt.transfer.group import TaskGroup
from cloudckpt.transfer.landing import Bad, Landing, Segment, StoredBytes, Wanted
from cloudckpt.transfer.parts import even_share
from cloudckpt.transfer.retry import Retrier
from cloudckpt.transfer.staging import ScratchPool
from cloudckpt.transfer.stats import TransferStats

__all__ = ["download", "pack_requests"]

logger = logging.getLogger("cloudckpt")

_GRAIN = 1024 * 1024  # where unverified data may be cut


def download(
    store: RangeReader,
    wanted: Sequence[Wanted],
    config: Config,
    stats: TransferStats,
) -> None:
    """Delivers all that is wanted; at its return every byte has arrived and was verified.

    Raises:
        CheckpointCorruptError: If bytes are missing, were replaced, or do not match their
            checksum when they are fetched a second time.
        StoreError: If the store refuses or stays unreachable.
    """
    _Download(store, wanted, config, stats).run()


class _Download:
    def __init__(
        self,
        store: RangeReader,
        wanted: Sequence[Wanted],
        config: Config,
        stats: TransferStats,
    ) -> None:
        self._store = store
        self._wanted = wanted
        self._config = config
        self._stats = stats
        self._group = TaskGroup(
            config.connections,
            name="cloudckpt-load",
            most_waiting=math.inf,
            interrupt=store.interrupt,
        )
        self._retrier = Retrier(config.retry, self._group.cancellation, on_retry=stats.add_retry)
        self._scratch = ScratchPool(config.memory_budget, self._group.cancellation)
        self._seen: dict[str, ObjectInfo] = {}
        self._lock = threading.Lock()

    def run(self) -> None:
        with paused_gc():
            requests = self._requests()

        def produce() -> None:
            for request in requests:
                self._group.submit(functools.partial(self._fetch, request))

        self._group.run(produce)

    def _requests(self) -> list[list[Segment]]:
        config = self._config
        limit = config.request_size or self._even_share()
        by_key: dict[str, list[Segment]] = {}
        for want in self._wanted:
            if want.stop > want.start:
                by_key.setdefault(want.source.key, []).append(self._whole_blocks(want))
        return [
            request
            for segments in by_key.values()
            for request in pack_requests(segments, limit=limit, merge_gap=config.merge_gap)
        ]

    def _even_share(self) -> int:
        """The size of requests; small if they need scratch memory, of which there is little."""
        if any(want.sink.memory is None for want in self._wanted):
            return even_share(0, self._config.connections)
        total = sum(want.stop - want.start for want in self._wanted)
        return even_share(total, self._config.connections)

    def _whole_blocks(self, want: Wanted) -> Segment:
        """The bytes to ask for: whole blocks, if they can be verified."""
        source = want.source
        start, stop, grain = want.start, want.stop, _GRAIN
        if self._config.verify and source.blocks is not None:
            grain = source.blocks.size
            start = start // grain * grain
            stop = min(aligned(stop, grain), source.nbytes)
        origin = source.offset
        return Segment(want, origin + start, origin + stop, grain if want.divisible else 0)

    def _fetch(self, request: Sequence[Segment]) -> None:
        key = request[0].want.source.key
        with paused_gc():
            landing = Landing(request)
        with self._scratch.borrowed(landing.scratch_bytes, pinned=landing.pinned) as scratch:
            views = landing.place(scratch)
            self._receive(request[0], views)
            bad = self._first_bad(landing)
            if bad is not None:
                logger.warning("%s: fetched again after a wrong checksum of %s", key, bad.item)
                self._receive(request[0], views)
                if (bad := self._first_bad(landing)) is not None:
                    raise CheckpointCorruptError(
                        f"bytes {bad.start} to {bad.stop} of the object do not match their "
                        "checksum, twice: the object is damaged; restore it or load an older "
                        "checkpoint",
                        uri=self._store.uri(key),
                        item=bad.item,
                    )
            landing.deliver()

    def _receive(self, first: Segment, views: Sequence[memoryview]) -> None:
        """The range from ``first`` on; a retry goes on where the connection broke."""
        start, rest = first.start, list(views)
        source = first.want.source
        key = source.key
        with self._lock:
            seen = self._seen.get(key)
        version = seen.version if seen is not None else None

        def once() -> ObjectInfo:
            nonlocal start, rest, version
            try:
                return self._store.get_range(
                    key,
                    start,
                    rest,
                    if_version=version,
                    progress=self._progress,
                )
            except ConnectionLostError as error:
                if error.received < nbytes(rest):
                    version = version or error.version
                    start, rest = start + error.received, skip(rest, error.received)
                raise

        try:
            info = self._retrier.call(once)
        except (ObjectNotFoundError, PreconditionFailedError, RangeNotSatisfiableError) as error:
            what = {
                ObjectNotFoundError: "an object of the checkpoint is gone",
                PreconditionFailedError: "an object was replaced while it was read",
                RangeNotSatisfiableError: "an object is shorter than it was written",
            }[type(error)]
            raise CheckpointCorruptError(
                f"{what}: was the checkpoint deleted or overwritten meanwhile? Load another one",
                uri=self._store.uri(key),
                item=source.item,
                cause=error,
            ) from error
        self._stats.add_requests(1)
        self._compare(info, source)

    def _compare(self, info: ObjectInfo, source: StoredBytes) -> None:
        with self._lock:
            first = self._seen.setdefault(source.key, info)
        if first.version != info.version or source.object_size not in (None, info.size):
            raise CheckpointCorruptError(
                f"the object has {info.size} bytes instead of {source.object_size}, or was "
                "replaced while it was read; load another checkpoint",
                uri=self._store.uri(source.key),
                item=source.item,
            )

    def _progress(self, count: int) -> None:
        self._group.cancellation.check()
        self._stats.add_bytes(count)

    def _first_bad(self, landing: Landing) -> Bad | None:
        if not self._config.verify:
            return None
        began = time.perf_counter()
        try:
            return landing.first_bad()
        finally:
            self._stats.add_verified(landing.size, time.perf_counter() - began)


def pack_requests(
    segments: Sequence[Segment], *, limit: int, merge_gap: int
) -> Iterator[list[Segment]]:
    """Groups the segments of one object into requests, in the order of their bytes.

    Neighbours at most ``merge_gap`` bytes apart share a request until it has ``limit`` bytes; a
    segment that crosses the limit is cut there. Segments that overlap are read twice. A single one
    that can't be cut may exceed the limit.
    """
    request: list[Segment] = []
    waiting = sorted(segments, key=lambda segment: (segment.start, segment.stop), reverse=True)
    while waiting:
        segment = waiting.pop()
        begin = request[0].start if request else segment.start
        if request and not 0 <= segment.start - request[-1].stop <= merge_gap:
            yield request
            request, begin = [], segment.start
        if segment.stop - begin > limit:
            parts = segment.cut(begin + limit)
            if parts is not None:
                head, rest = parts
                yield [*request, head]
                request = []
                waiting.append(rest)
                continue
            if request:
                yield request
                request = []
                waiting.append(segment)
                continue
        request.append(segment)
    if request:
        yield request
