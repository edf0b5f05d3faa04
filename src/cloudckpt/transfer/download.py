"""Fetches ranges of many objects at once, verifies them, and hands them to their sinks."""

from __future__ import annotations

import functools
import logging
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
from cloudckpt.transfer.group import TaskGroup
from cloudckpt.transfer.landing import Bad, Landing, Source, Span, Wanted
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
            config.connections, name="cloudckpt-load", interrupt=store.interrupt
        )
        self._retrier = Retrier(config.retry, self._group.cancellation, on_retry=stats.add_retry)
        self._scratch = ScratchPool(config.memory_budget, self._group.cancellation)
        self._seen: dict[str, ObjectInfo] = {}
        self._lock = threading.Lock()

    def run(self) -> None:
        with paused_gc():
            requests = self._requests()

        def produce() -> None:
            for key, spans in requests:
                self._group.submit(functools.partial(self._fetch, key, spans))

        self._group.run(produce)

    def _requests(self) -> list[tuple[str, list[Span]]]:
        config = self._config
        limit = config.request_size or self._even_share()
        by_key: dict[str, list[Span]] = {}
        for index, want in enumerate(self._wanted):
            if want.stop > want.start:
                by_key.setdefault(want.source.key, []).append(self._span(index, want))
        return [
            (key, request)
            for key, spans in by_key.items()
            for request in pack_requests(spans, limit=limit, merge_gap=config.merge_gap)
        ]

    def _even_share(self) -> int:
        """The size of requests; small if they need scratch memory, of which there is little."""
        if not all(want.sink.plain for want in self._wanted):
            return even_share(0, self._config.connections)
        total = sum(want.stop - want.start for want in self._wanted)
        return even_share(total, self._config.connections)

    def _span(self, index: int, want: Wanted) -> Span:
        """The bytes to ask for: whole blocks, if they can be verified."""
        source = want.source
        start, stop, grain = want.start, want.stop, _GRAIN
        if self._config.verify and source.blocks is not None:
            grain = source.blocks.size
            start = start // grain * grain
            stop = min(-(-stop // grain) * grain, source.nbytes)
        origin = source.offset
        return Span(origin + start, origin + stop, grain if want.divisible else 0, origin, index)

    def _fetch(self, key: str, spans: list[Span]) -> None:
        with paused_gc():
            landing = Landing(spans, self._wanted)
        with self._scratch.borrowed(landing.scratch_bytes, pinned=landing.pinned) as scratch:
            views = landing.place(scratch)
            self._receive(key, spans, views)
            bad = self._first_bad(landing)
            if bad is not None:
                logger.warning("%s: fetched again after a wrong checksum of %s", key, bad.item)
                self._receive(key, spans, views)
                if (bad := self._first_bad(landing)) is not None:
                    raise CheckpointCorruptError(
                        f"bytes {bad.start} to {bad.stop} of the object do not match their "
                        "checksum, twice: the object is damaged; restore it or load an older "
                        "checkpoint",
                        uri=self._store.uri(key),
                        item=bad.item,
                    )
            landing.deliver()

    def _receive(self, key: str, spans: list[Span], views: Sequence[memoryview]) -> None:
        """One range into ``views``; a retry goes on where the connection broke."""
        start, rest = spans[0].start, list(views)
        source = self._wanted[spans[0].owner].source
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
        self._compare(key, info, source)

    def _compare(self, key: str, info: ObjectInfo, source: Source) -> None:
        with self._lock:
            first = self._seen.setdefault(key, info)
        if first.version != info.version or source.object_size not in (None, info.size):
            raise CheckpointCorruptError(
                f"the object has {info.size} bytes instead of {source.object_size}, or was "
                "replaced while it was read; load another checkpoint",
                uri=self._store.uri(key),
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


def pack_requests(spans: Sequence[Span], *, limit: int, merge_gap: int) -> Iterator[list[Span]]:
    """Groups the spans of one object into requests, in the order of their bytes.

    Neighbours at most ``merge_gap`` bytes apart share a request until it has ``limit`` bytes; a
    span that crosses the limit is cut there. Spans that overlap are read twice. A single span that
    can't be cut may exceed the limit.
    """
    request: list[Span] = []
    waiting = sorted(spans, key=lambda span: (span.start, span.stop), reverse=True)
    while waiting:
        span = waiting.pop()
        begin = request[0].start if request else span.start
        if request and not 0 <= span.start - request[-1].stop <= merge_gap:
            yield request
            request, begin = [], span.start
        if span.stop - begin > limit:
            parts = span.cut(begin + limit)
            if parts is not None:
                head, rest = parts
                yield [*request, head]
                request = []
                waiting.append(rest)
                continue
            if request:
                yield request
                request = []
                waiting.append(span)
                continue
        request.append(span)
    if request:
        yield request
