"""Fetches ranges of many objects at once, verifies them, and delivers them to their sinks."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from cloudckpt.config import MIB, Config
from cloudckpt.errors import (
    CheckpointCorruptError,
    ConnectionLostError,
    Damage,
    ObjectNotFoundError,
    PreconditionFailedError,
    RangeNotSatisfiableError,
)
from cloudckpt.gc_pause import paused_gc
from cloudckpt.stores.base import ObjectInfo, Progress, RangeReader, nbytes, skip
from cloudckpt.transfer.boxes import aligned
from cloudckpt.transfer.connections import transfer_group
from cloudckpt.transfer.landing import Bad, ScatterPlan, Segment, Wanted
from cloudckpt.transfer.parts import even_share
from cloudckpt.transfer.retry import Retrier
from cloudckpt.transfer.staging import ScratchPool
from cloudckpt.transfer.stats import TransferStats

__all__ = [
    "MERGE_GAP",
    "Download",
    "Receiver",
    "Shared",
    "download",
    "pack_requests",
    "raise_it",
    "segments_for",
]

logger = logging.getLogger("cloudckpt")

_GRAIN = MIB  # where unverified data may be cut

MERGE_GAP = MIB
"""Unneeded bytes that are rather read than skipped by another request. All ranks of a job have the
same: they must cut shared reads alike."""


_REASONS = {
    ObjectNotFoundError: "an object of the checkpoint is gone",
    PreconditionFailedError: "an object was replaced while it was read",
    RangeNotSatisfiableError: "an object is shorter than it was written",
}


def raise_it(error: CheckpointCorruptError) -> None:
    """The default handler for damage."""
    raise error


def download(
    store: RangeReader,
    wanted: Sequence[Wanted],
    config: Config,
    stats: TransferStats,
    *,
    damaged: Callable[[CheckpointCorruptError], None] = raise_it,
    shared: Shared | None = None,
    request_size: int | None = None,
) -> None:
    """Delivers everything wanted; when it returns, every byte has arrived and was verified.

    Args:
        store: The store that holds it.
        wanted: What is wanted.
        config: Options.
        stats: Transfer counters.
        damaged: Called with each damage, from any thread. If it does not raise, the rest is still
            read, but the damaged bytes, and others in the same request, are not delivered.
        shared: Fetches what other ranks also want; it has the segments of ``wanted``.
        request_size: Most bytes of a request; by default it follows from what is wanted.

    Raises:
        CheckpointCorruptError: If bytes are missing, were replaced, or still do not match their
            checksum when fetched a second time.
        StoreError: If the store refuses or stays unreachable.
    """
    work = Download(store, config, stats, damaged)

    def produce() -> None:
        segments = segments_for(wanted, config) if shared is None else shared.carry_out(work)
        with paused_gc():
            requests = work.requests(segments, request_size)
        for request in requests:
            work.submit(functools.partial(work.fetch, request))

    work.run(produce)


class Shared(Protocol):
    """Fetches bytes that other ranks also want."""

    def carry_out(self, download: Download) -> Sequence[Segment]:
        """Delivers what other ranks also want; returns what is left to fetch."""


def segments_for(wanted: Sequence[Wanted], config: Config) -> list[Segment]:
    """The segments to request, for each nonempty ``Wanted``."""
    with paused_gc():
        return [
            _whole_blocks(want, verify=config.verify) for want in wanted if want.stop > want.start
        ]


def _whole_blocks(want: Wanted, *, verify: bool) -> Segment:
    """The bytes to request: whole rows, and whole blocks if they can be verified."""
    source = want.source
    start = want.start // want.row * want.row
    stop, grain = min(aligned(want.stop, want.row), source.nbytes), _GRAIN
    if verify and source.blocks is not None:
        grain = source.blocks.size
        start = start // grain * grain
        stop = min(aligned(stop, grain), source.nbytes)
    origin = source.offset
    return Segment(want, origin + start, origin + stop, grain if want.divisible else 0)


class Receiver:
    """Fills memory with ranges of objects; all ranges of an object are of the same version of it.

    Safe to use from many threads.
    """

    def __init__(self, store: RangeReader, retrier: Retrier, progress: Progress) -> None:
        """
        Args:
            store: Where the objects are.
            retrier: Tries a range again; it goes on where the connection broke.
            progress: See :data:`~cloudckpt.stores.base.Progress`.
        """
        self._store = store
        self._retrier = retrier
        self._progress = progress
        self._seen: dict[str, ObjectInfo] = {}
        self._lock = threading.Lock()

    def receive(
        self,
        key: str,
        start: int,
        views: Sequence[memoryview],
        *,
        size: int | None,
        item: str,
        version: str | None = None,
    ) -> None:
        """Fills ``views``, one after the other, with the object's bytes from ``start``.

        Args:
            key: The object.
            start: The first byte.
            views: Writable byte views, not empty in total.
            size: What the object's size must be, or None if that is unknown.
            item: What is read, for messages.
            version: What the object's version must be, or None if that is unknown.

        Raises:
            CheckpointCorruptError: If the object is gone, was replaced since its first range was
                read, or has another size.
            StoreError: If the store refuses or stays unreachable.
        """
        at, rest = start, list(views)
        with self._lock:
            seen = self._seen.get(key)
        version = seen.version if seen is not None else version

        def once() -> ObjectInfo:
            nonlocal at, rest, version
            try:
                return self._store.get_range(
                    key, at, rest, if_version=version, progress=self._progress
                )
            except ConnectionLostError as error:
                if error.received < nbytes(rest):
                    version = version or error.version
                    at, rest = at + error.received, skip(rest, error.received)
                raise

        try:
            info = self._retrier.call(once)
        except tuple(_REASONS) as error:
            uri, what = self._store.uri(key), _REASONS[type(error)]
            raise CheckpointCorruptError(
                f"{what}: was the checkpoint deleted or overwritten meanwhile? Load another one",
                uri=uri,
                item=item,
                cause=error,
                damages=[Damage(uri, item, what)],
            ) from error
        with self._lock:
            first = self._seen.setdefault(key, info)
        if first.version != info.version or size not in (None, info.size):
            uri = self._store.uri(key)
            what = f"the object has {info.size} bytes instead of {size}"
            if size in (None, info.size):
                what = "the object was replaced while it was read"
            raise CheckpointCorruptError(
                f"{what}; load another checkpoint",
                uri=uri,
                item=item,
                damages=[Damage(uri, item, what)],
            )


class Download:
    """Fetches requests on its threads, verifies and delivers them; the first failure stops all.

    Mostly :func:`download` is enough; this is for callers that get some bytes by other means.
    """

    def __init__(
        self,
        store: RangeReader,
        config: Config,
        stats: TransferStats,
        damaged: Callable[[CheckpointCorruptError], None] = raise_it,
    ) -> None:
        self._damaged = damaged
        self._store = store
        self._config = config
        self._stats = stats
        self._group = transfer_group(
            store, config, "in", name="cloudckpt-load", most_waiting=math.inf
        )
        self.run = self._group.run
        self.submit = self._group.submit
        self.fail = self._group.fail
        self.cancellation = cancellation = self._group.cancellation
        self._retrier = Retrier(config.retry, cancellation, on_retry=stats.add_retry)
        self._scratch = ScratchPool(config.memory_budget, cancellation)

        def progress(count: int) -> None:  # no method: a cycle would keep the tensors alive
            cancellation.check()
            stats.add_bytes(count)

        self._receiver = Receiver(store, self._retrier, progress)

    def requests(
        self, segments: Sequence[Segment], request_size: int | None = None
    ) -> list[list[Segment]]:
        """Groups segments into requests; ``request_size`` as for :func:`download`."""
        limit = request_size or self._even_share(segments)
        return list(pack_requests(segments, limit=limit, merge_gap=MERGE_GAP))

    def _even_share(self, segments: Sequence[Segment]) -> int:
        """The size of requests; small if they need scratch memory, which is scarce."""
        wanted = [segment.want for segment in segments]
        if any(want.sink.memory is None for want in wanted):
            return even_share(0, self._config.most_connections)
        total = sum(want.stop - want.start for want in wanted)
        return even_share(total, self._config.most_connections)

    def fetch(self, request: Sequence[Segment]) -> None:
        """Fetches a request and delivers it."""
        self._land(request, functools.partial(self._receive, request))

    def read(self, request: Sequence[Segment], into: memoryview) -> None:
        """Only fetches the bytes of a request, from first to last."""
        self._receive(request, [into])

    def land(self, request: Sequence[Segment], data: memoryview) -> None:
        """Delivers a request whose bytes have arrived; damaged ones are read from the store."""
        self._land(request, functools.partial(_copy, data))

    def _land(
        self, request: Sequence[Segment], receive: Callable[[Sequence[memoryview]], None]
    ) -> None:
        with paused_gc():
            landing = ScatterPlan(request)
        with self._scratch.borrowed(landing.scratch_bytes, pinned=landing.pinned) as scratch:
            views = landing.place(scratch)
            try:
                receive(views)
                self._make_right(request, landing, views)
            except CheckpointCorruptError as error:
                self._damaged(error)
            else:
                landing.deliver()

    def _make_right(
        self, request: Sequence[Segment], landing: ScatterPlan, views: Sequence[memoryview]
    ) -> None:
        """Fetches a request once more if a checksum is wrong.

        Raises:
            CheckpointCorruptError: If it is wrong again, or the bytes are missing.
        """
        if not (bad := self._bad(landing)):
            return
        uri = self._store.uri(request[0].want.source.key)
        logger.warning("%s: read again, because the checksum of %s did not match", uri, bad[0].item)
        self._receive(request, views)
        if bad := self._bad(landing):
            first, others = bad[0], f" (and of {len(bad) - 1} more)" if bad[1:] else ""
            raise CheckpointCorruptError(
                f"bytes {first.start} to {first.stop} of the object{others} do not match their "
                "checksum, twice: the object is damaged; restore it, or load an older "
                "checkpoint",
                uri=uri,
                item=first.item,
                damages=[
                    Damage(uri, one.item, "does not match its checksum", one.start, one.stop)
                    for one in bad
                ],
            )

    def _receive(self, request: Sequence[Segment], views: Sequence[memoryview]) -> None:
        source = request[0].want.source
        self._receiver.receive(
            source.key,
            request[0].start,
            views,
            size=source.object_size,
            item=source.item,
            version=source.version,
        )
        self._stats.add_requests(1)

    def _bad(self, landing: ScatterPlan) -> list[Bad]:
        if not self._config.verify:
            return []
        began = time.perf_counter()
        try:
            return landing.bad()
        finally:
            self._stats.add_verified(landing.size, time.perf_counter() - began)


def _copy(data: memoryview, views: Sequence[memoryview]) -> None:
    """Fills the views, one after the other."""
    position = 0
    for view in views:
        view[:] = data[position : position + view.nbytes]
        position += view.nbytes


def pack_requests(
    segments: Sequence[Segment], *, limit: int, merge_gap: int
) -> Iterator[list[Segment]]:
    """Groups segments into requests, each of one object, in the order of their bytes.

    The objects follow each other as in ``segments``.
    """
    by_key: dict[str, list[Segment]] = {}
    for segment in segments:
        by_key.setdefault(segment.want.source.key, []).append(segment)
    for of_object in by_key.values():
        yield from _pack(of_object, limit=limit, merge_gap=merge_gap)


def _pack(segments: Sequence[Segment], *, limit: int, merge_gap: int) -> Iterator[list[Segment]]:
    """Groups the segments of one object.

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
