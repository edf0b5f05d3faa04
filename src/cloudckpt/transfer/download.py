"""Fetches ranges of many objects at once, verifies them, and hands them to their sinks."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cloudckpt.checksum import first_bad_block
from cloudckpt.config import Config
from cloudckpt.errors import (
    CheckpointCorruptError,
    ConnectionLostError,
    ObjectNotFoundError,
    PreconditionFailedError,
    RangeNotSatisfiableError,
)
from cloudckpt.gc_pause import paused_gc
from cloudckpt.stores.base import ObjectInfo, ObjectStore, nbytes, skip
from cloudckpt.transfer.group import TaskGroup
from cloudckpt.transfer.memory import bytes_of
from cloudckpt.transfer.parts import even_share
from cloudckpt.transfer.ranges import Span, pack_requests
from cloudckpt.transfer.retry import Retrier
from cloudckpt.transfer.scratch import ScratchPool
from cloudckpt.transfer.sinks import Sink
from cloudckpt.transfer.stats import TransferStats

__all__ = ["Source", "Wanted", "download"]

logger = logging.getLogger("cloudckpt")

_DIRECT = 64 * 1024  # fewer bytes are cheaper to copy than to receive in a call of their own
_ALIGNMENT = 64
_GRAIN = 1024 * 1024  # where unverified data may be cut


@dataclass(frozen=True, slots=True)
class Source:
    """Raw data of an item in an object.

    Attributes:
        key: The object.
        offset: The first byte of the raw data in the object.
        nbytes: Its length.
        block_size: Bytes that share a checksum; 0 if there are no checksums.
        crcs: The CRC32C of each block.
        object_size: What the object's size must be, or None if that is unknown.
        item: The item's name, for messages.
    """

    key: str
    offset: int
    nbytes: int
    block_size: int
    crcs: Sequence[int]
    object_size: int | None
    item: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """Bytes ``start`` to ``stop`` of a source's raw data, and who takes them.

    Attributes:
        source: The raw data.
        start: The first byte.
        stop: Behind the last one.
        sink: The taker.
        divisible: Whether the sink accepts the bytes in several deliveries.
    """

    source: Source
    start: int
    stop: int
    sink: Sink
    divisible: bool


def download(
    store: ObjectStore,
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
        store: ObjectStore,
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
        with self._group as group:
            for key, spans in requests:
                group.submit(functools.partial(self._fetch, key, spans))

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
        if self._config.verify and source.block_size:
            grain = source.block_size
            start = start // grain * grain
            stop = min(-(-stop // grain) * grain, source.nbytes)
        origin = source.offset
        return Span(origin + start, origin + stop, grain if want.divisible else 0, origin, index)

    def _fetch(self, key: str, spans: list[Span]) -> None:
        with paused_gc():
            landing = _Landing(spans, self._wanted)
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

    def _first_bad(self, landing: _Landing) -> _Bad | None:
        if not self._config.verify:
            return None
        began = time.perf_counter()
        try:
            return self._search(landing)
        finally:
            self._stats.add_verified(landing.size, time.perf_counter() - began)

    @staticmethod
    def _search(landing: _Landing) -> _Bad | None:
        for segment in landing.segments:
            source = segment.want.source
            if not source.block_size:
                continue
            first = (segment.span.start - source.offset) // source.block_size
            last = -(-(segment.span.stop - source.offset) // source.block_size)
            bad = first_bad_block(segment.views, source.crcs[first:last], source.block_size)
            if bad is not None:
                start = source.offset + (first + bad) * source.block_size
                stop = min(start + source.block_size, source.offset + source.nbytes)
                return _Bad(source.item, start, stop)
        return None


@dataclass(frozen=True)
class _Bad:
    item: str
    start: int
    stop: int


class _Segment:
    """One span of a request: what is wanted of it, and where its bytes land."""

    __slots__ = (
        *("span", "want", "start", "stop", "before", "behind"),
        *("target", "is_direct", "views", "landed"),
    )

    def __init__(self, span: Span, want: Wanted) -> None:
        self.span = span
        self.want = want
        origin = want.source.offset
        self.start = max(want.start, span.start - origin)  # wanted, relative to the raw data
        self.stop = min(want.stop, span.stop - origin)
        self.before = self.start - (span.start - origin)  # bytes read for their block's sake
        self.behind = (span.stop - origin) - self.stop
        begin = self.start - want.start
        self.target = want.sink.direct(begin, begin + self.stop - self.start)
        self.is_direct = self.target is not None and self.target.nbytes >= _DIRECT
        self.views: list[memoryview] = []
        self.landed: torch.Tensor | None = None

    def deliver(self) -> None:
        if self.landed is None:
            return
        if self.target is not None:
            self.target[:] = bytes_of(self.landed)
        else:
            self.want.sink.deliver(self.start - self.want.start, self.landed)


class _Landing:
    """The memory that one request is received into.

    Large plain targets receive their bytes themselves. All else (small targets, targets that need
    a copy, the rest of a block, gaps between spans) lies in one piece of scratch memory, at the
    object's own alignment.
    """

    def __init__(self, spans: Sequence[Span], wanted: Sequence[Wanted]) -> None:
        self.segments = [_Segment(span, wanted[span.owner]) for span in spans]
        self._places: list[tuple[int, int, _Segment | None, memoryview | None]] = []
        self.scratch_bytes = 0
        self._lay_out()

    @property
    def size(self) -> int:
        """Bytes that are received."""
        return sum(segment.span.stop - segment.span.start for segment in self.segments)

    def _lay_out(self) -> None:
        position = self.segments[0].span.start
        for segment in self.segments:
            span = segment.span
            if span.start > position:
                self._scratch(position, span.start - position, None)
            if segment.is_direct:
                self._scratch(span.start, segment.before, segment)
                self._places.append((0, 0, segment, segment.target))
                self._scratch(span.stop - segment.behind, segment.behind, segment)
            else:
                self._scratch(span.start, span.stop - span.start, segment)
            position = span.stop

    def _scratch(self, position: int, count: int, segment: _Segment | None) -> None:
        if count == 0:
            return
        if not self._places or self._places[-1][3] is not None:
            self.scratch_bytes += (position - self.scratch_bytes) % _ALIGNMENT
        self._places.append((self.scratch_bytes, count, segment, None))
        self.scratch_bytes += count

    @property
    def pinned(self) -> bool:
        """Whether page-locked memory helps to deliver."""
        return any(segment.want.sink.pinned for segment in self.segments)

    def place(self, scratch: torch.Tensor) -> list[memoryview]:
        """The views to receive into, those that are neighbours in memory made one."""
        memory = bytes_of(scratch)
        merged: list[memoryview] = []
        run: tuple[int, int] | None = None
        for at, count, segment, target in self._places:
            if target is not None:
                view = target
                if run is not None:
                    merged.append(memory[run[0] : run[1]])
                    run = None
                merged.append(target)
            else:
                view = memory[at : at + count]
                run = (at, at + count) if run is None else (run[0], at + count)
                if segment is not None and not segment.is_direct:
                    first = at + segment.before
                    segment.landed = scratch[first : first + segment.stop - segment.start]
            if segment is not None:
                segment.views.append(view)
        if run is not None:
            merged.append(memory[run[0] : run[1]])
        return merged

    def deliver(self) -> None:
        for segment in self.segments:
            segment.deliver()
