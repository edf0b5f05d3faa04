"""Downloads ranges of many objects in parallel, verifies them, and delivers them to their sinks."""

from __future__ import annotations

import contextlib
import functools
import logging
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
from cloudckpt.transfer.landing import ScatterPlan, Segment, Wanted
from cloudckpt.transfer.parts import even_share
from cloudckpt.transfer.retry import Retrier
from cloudckpt.transfer.staging import StagingPool
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

_GRAIN = MIB  # bytes; unverified data may be cut at multiples of it

MERGE_GAP = MIB
"""Gaps of up to this many unneeded bytes are read rather than beginning another request.

It must be the same on all ranks of a job, so that they divide shared reads into the same requests.
"""


_REASONS = {
    ObjectNotFoundError: "an object of the checkpoint is gone",
    PreconditionFailedError: "an object was replaced while it was read",
    RangeNotSatisfiableError: "an object is shorter than when it was written",
}


def raise_it(error: CheckpointCorruptError) -> None:
    """Raises the error; the default handler of damage."""
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
    """Downloads and delivers all wanted ranges, except those reported to ``damaged``.

    Blocks with checksums are verified before they are delivered, unless ``config.verify`` is False.

    Args:
        store: The store of the objects.
        wanted: The ranges, with their sinks.
        config: Options.
        stats: Transfer counters.
        damaged: Called with the error of each request with damaged bytes, from any thread. If it
            does not raise, that request is not delivered, but the others are.
        shared: Fetches the ranges that other ranks need as well; it was created with the segments
            of ``wanted``. None if this rank fetches all of them itself.
        request_size: Most bytes of a request, unless a range that can't be divided is larger; None
            to derive it from ``wanted``.

    Raises:
        CheckpointCorruptError: With the default ``damaged``: if bytes are missing, were replaced,
            or do not match their checksum even when fetched again. With ``shared``, and any
            ``damaged``: if an object to be shared is missing or was replaced.
        StoreError: If the store refuses a request or stays unreachable.
        TransferCancelledError: With ``shared``: if another rank failed.
        ProcessGroupError: With ``shared``: if another rank ended, or the connection to it broke.
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
    """Fetches, together with other ranks, the bytes that several ranks need."""

    def carry_out(self, download: Download) -> Sequence[Segment]:
        """Delivers the bytes that this and other ranks need; returns the segments left to fetch."""


def segments_for(wanted: Sequence[Wanted], config: Config) -> list[Segment]:
    """Returns the segments to request, one for each nonempty ``Wanted``.

    Segments are extended to whole rows (:attr:`Wanted.row`), and to whole blocks if checksums are
    verified.
    """
    with paused_gc():
        return [_segment(want, config.verify) for want in wanted if want.stop > want.start]


def _segment(want: Wanted, verify: bool) -> Segment:
    source = want.source
    start = want.start // want.row * want.row
    stop, grain = aligned(want.stop, want.row), _GRAIN
    if verify and source.blocks is not None:
        grain = source.blocks.size
        start, stop = start // grain * grain, aligned(stop, grain)
    first, end = source.offset + start, source.offset + min(stop, source.nbytes)
    return Segment(want, first, end, grain if want.divisible else 0)


class Receiver:
    """Fills memory with ranges of objects; all ranges of an object are of the same version.

    Safe to use from many threads.
    """

    def __init__(self, store: RangeReader, retrier: Retrier, progress: Progress) -> None:
        """Prepares a receiver.

        Args:
            store: The store of the objects.
            retrier: Retries a range, which continues where the connection broke.
            progress: See :data:`~cloudckpt.stores.base.Progress`.
        """
        self._store = store
        self._retrier = retrier
        self._progress = progress
        self._seen: dict[str, str] = {}  # the version of each object
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
        """Fills `views`, view by view, with the object's bytes from `start`.

        Args:
            key: The key of the object.
            start: The offset of the first byte.
            views: Writable byte views, not empty in total.
            size: The expected size of the object; None if unknown.
            item: The name of the item that is read, for messages.
            version: The expected version of the object; None if unknown.

        Raises:
            CheckpointCorruptError: If the object is missing or ends too early, was replaced since
                its first range was read, or has another version or size than expected.
            StoreError: If the store refuses a request or stays unreachable.
            TransferCancelledError: If the transfer was cancelled.
        """
        at, rest = start, list(views)
        with self._lock:
            version = self._seen.get(key, version)

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
            raise self._changed(_REASONS[type(error)], key, item, error) from error
        with self._lock:
            first = self._seen.setdefault(key, version or info.version)
        if size not in (None, info.size):
            what = f"the object has {info.size} bytes instead of {size}"
            raise self._changed(what, key, item)
        if first != info.version:  # some stores ignore the condition
            raise self._changed("the object was replaced while it was read", key, item)

    def _changed(
        self, what: str, key: str, item: str, cause: Exception | None = None
    ) -> CheckpointCorruptError:
        uri = self._store.uri(key)
        return CheckpointCorruptError(
            f"{what}: the checkpoint is damaged, or was deleted or overwritten meanwhile; use "
            "another checkpoint",
            uri=uri,
            item=item,
            cause=cause,
            damages=[Damage(uri, item, what)],
        )


class Download:
    """Fetches requests on its threads, verifies and delivers them; the first failure stops all.

    Most callers need only :func:`download`; this class is for callers that get some bytes in
    another way. Its ``run``, ``submit``, ``fail`` and ``cancellation`` are those of its
    :class:`TaskGroup`. Call its other methods in tasks of this group, or within ``run``.
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
        self._group = transfer_group(store, config, "in")
        self.run = self._group.run
        self.submit = self._group.submit
        self.fail = self._group.fail
        self.cancellation = cancellation = self._group.cancellation
        self._retrier = Retrier(config.retry, cancellation, on_retry=stats.add_retry)
        self._scratch = StagingPool(config.memory_budget, cancellation)

        # not a method: a reference cycle would keep the tensors alive
        def progress(count: int) -> None:
            cancellation.check()
            stats.add_bytes(count)

        self._receiver = Receiver(store, self._retrier, progress)

    def requests(
        self, segments: Sequence[Segment], request_size: int | None = None
    ) -> list[list[Segment]]:
        """Groups segments into requests; `request_size` as in :func:`download`."""
        limit = request_size or self._even_share(segments)
        return list(pack_requests(segments, limit=limit, merge_gap=MERGE_GAP))

    def _even_share(self, segments: Sequence[Segment]) -> int:
        """Returns a request size: 16 to 64 MiB, or 16 MiB if any sink needs scratch memory."""
        wanted = [segment.want for segment in segments]
        if any(want.sink.memory is None for want in wanted):
            return even_share(0, self._config.most_connections)
        total = sum(want.stop - want.start for want in wanted)
        return even_share(total, self._config.most_connections)

    def fetch(self, request: Sequence[Segment]) -> None:
        """Fetches the bytes of a request from the store, verifies and delivers them.

        Damage is not raised, but reported to the handler ``damaged`` of this download, which may
        raise it.

        Raises:
            StoreError: If the store refuses a request or stays unreachable.
            TransferCancelledError: If the transfer was cancelled.
        """
        self._land(request, functools.partial(self._receive, request))

    def read(self, request: Sequence[Segment], into: memoryview) -> None:
        """Fetches the bytes of a request, also those between its segments, without verifying them.

        Args:
            request: The segments.
            into: The memory for the bytes from the start of the first segment to the end of the
                last.

        Raises:
            CheckpointCorruptError: If the object is missing, was replaced, or has another size.
            StoreError: If the store refuses a request or stays unreachable.
            TransferCancelledError: If the transfer was cancelled.
        """
        self._receive(request, [into])

    def land(self, request: Sequence[Segment], data: memoryview) -> None:
        """Verifies and delivers a request whose bytes are in `data`; refetches it if damaged.

        Remaining damage is reported as by :meth:`fetch`.

        Raises:
            StoreError: If the store refuses the second request or stays unreachable.
            TransferCancelledError: If the transfer was cancelled.
        """
        self._land(request, functools.partial(_copy, data))

    def _land(
        self, request: Sequence[Segment], receive: Callable[[Sequence[memoryview]], None]
    ) -> None:
        with paused_gc():
            plan = ScatterPlan(request)
        nbytes = aligned(plan.scratch_bytes, MIB)
        with (
            self._scratch.take(nbytes, pinned=plan.pinned) if nbytes else contextlib.nullcontext()
        ) as scratch:
            views = plan.place(scratch)
            try:
                receive(views)
                self._make_right(request, plan, views)
            except CheckpointCorruptError as error:
                self._damaged(error)
            else:
                plan.deliver()

    def _make_right(
        self, request: Sequence[Segment], plan: ScatterPlan, views: Sequence[memoryview]
    ) -> None:
        """Verifies the received bytes; fetches the request once more if a checksum does not match.

        Raises:
            CheckpointCorruptError: If a checksum does not match again, or bytes are missing.
        """
        if not (bad := self._verify(plan)):
            return
        uri = bad[0].object
        logger.warning("%s: the checksum of %s did not match; reading it again", uri, bad[0].item)
        self._receive(request, views)
        if bad := self._verify(plan):
            first, others = bad[0], f" (the first of {len(bad)} damaged blocks)" if bad[1:] else ""
            raise CheckpointCorruptError(
                f"bytes {first.start} to {first.stop} of the object{others} did not match their "
                "checksums, also when read again: the object is damaged; use another checkpoint, "
                "or put an intact copy of the object in its place",
                uri=uri,
                item=first.item,
                damages=bad,
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

    def _verify(self, plan: ScatterPlan) -> list[Damage]:
        if not self._config.verify:
            return []
        began = time.perf_counter()
        try:
            return plan.damages(self._store.uri)
        finally:
            self._stats.add_verified(plan.size, time.perf_counter() - began)


def _copy(data: memoryview, views: Sequence[memoryview]) -> None:
    """Fills `views`, view by view, with `data`."""
    position = 0
    for view in views:
        view[:] = data[position : position + view.nbytes]
        position += view.nbytes


def pack_requests(
    segments: Sequence[Segment], *, limit: int, merge_gap: int
) -> Iterator[list[Segment]]:
    """Groups segments into requests, each for one object, in the order of their bytes.

    The objects have the order of their first segments.

    Args:
        segments: The segments.
        limit: Most bytes of a request; only a segment that can't be cut may exceed it.
        merge_gap: Segments of an object share a request if at most so many bytes are between them.
    """
    by_key: dict[str, list[Segment]] = {}
    for segment in segments:
        by_key.setdefault(segment.want.source.key, []).append(segment)
    for of_object in by_key.values():
        yield from _pack(of_object, limit=limit, merge_gap=merge_gap)


def _pack(segments: Sequence[Segment], *, limit: int, merge_gap: int) -> Iterator[list[Segment]]:
    """Groups the segments of one object into requests.

    Neighbours at most `merge_gap` bytes apart share a request of up to `limit` bytes; a segment
    that crosses the limit is cut at or before it. Bytes where segments overlap are read for each of
    them. A single segment that can't be cut may exceed the limit.
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
