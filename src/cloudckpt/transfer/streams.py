"""Objects as files: one that is read by ranges, one that is sent while it is written."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, cast

import torch

from cloudckpt.config import MIB, Config
from cloudckpt.errors import InvalidRequestError
from cloudckpt.stores.base import ObjectInfo, ObjectStore, Progress
from cloudckpt.transfer.download import Source, Wanted, download
from cloudckpt.transfer.group import TaskGroup
from cloudckpt.transfer.memory import bytes_of
from cloudckpt.transfer.parts import Piece, choose_part_size
from cloudckpt.transfer.retry import Retrier
from cloudckpt.transfer.staging import Slab, StagingPool
from cloudckpt.transfer.stats import Transferred, TransferStats
from cloudckpt.transfer.upload import ObjectUpload

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = ["ObjectFile", "PinnedObject", "UploadStream", "sending"]

logger = logging.getLogger("cloudckpt")

_FIRST_WINDOW = 64 * 1024
_LARGEST_WINDOW = 32 * MIB
_WINDOW_REQUEST = 4 * MIB
_WINDOWS = 2
_GROWTH = 8
_SLABS = 16  # as many as a staging pool has
_PARTS_IN_BUDGET = 6  # see choose_part_size


class PinnedObject:
    """One version of an object: whatever is read of it belongs together.

    Attributes:
        info: Its size and version, at the time it was opened.
    """

    def __init__(self, store: ObjectStore, key: str, config: Config) -> None:
        """
        Raises:
            ObjectNotFoundError: If there is no such object.
        """
        self.key = key
        self._store = store
        self._config = config
        self._stats = TransferStats()
        self.info: ObjectInfo = Retrier(config.retry).call(lambda: store.head(key))

    @property
    def transferred(self) -> Transferred:
        """What was received until now."""
        return self._stats.snapshot()

    def source(self, offset: int, nbytes: int, item: str) -> Source:
        """``nbytes`` bytes from ``offset``; ``item`` is their name in messages."""
        return Source(self.key, offset, nbytes, 0, (), self.info.size, item)

    def fetch(self, wanted: Sequence[Wanted], *, request_size: int | None = None) -> None:
        """Delivers what is wanted, over parallel connections; see :func:`download`.

        Raises:
            CheckpointCorruptError: If the object was replaced or deleted since it was opened.
            StoreError: If the store refuses or stays unreachable.
        """
        config = self._config
        if request_size is not None and config.request_size is None:
            config = dataclasses.replace(config, request_size=request_size)
        # the download only reads, by the methods below
        download(cast(ObjectStore, self), wanted, config, self._stats)

    def read(
        self, ranges: Sequence[tuple[int, memoryview]], *, request_size: int | None = None
    ) -> None:
        """Fills each view with the bytes from a position on."""
        wanted = [
            Wanted(self.source(start, view.nbytes, self.key), 0, view.nbytes, _ViewSink(view), True)
            for start, view in ranges
        ]
        self.fetch(wanted, request_size=request_size)

    def get_range(
        self,
        key: str,
        start: int,
        into: Sequence[memoryview],
        *,
        if_version: str | None = None,
        progress: Progress | None = None,
    ) -> ObjectInfo:
        """As the store's, of the pinned version only."""
        version = if_version or self.info.version
        return self._store.get_range(key, start, into, if_version=version, progress=progress)

    def interrupt(self, threads: Collection[int]) -> None:
        """As the store's."""
        self._store.interrupt(threads)

    def uri(self, key: str) -> str:
        """As the store's."""
        return self._store.uri(key)


class _ViewSink:
    """Receives into memory of the caller."""

    pinned = False
    plain = True

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def direct(self, start: int, stop: int) -> memoryview | None:
        return self._view[start:stop]

    def deliver(self, start: int, data: torch.Tensor) -> None:
        view = bytes_of(data)
        self._view[start : start + view.nbytes] = view


class ObjectFile(io.RawIOBase):
    """A seekable file over the ranges of an object.

    Reads of 32 MiB and more go over parallel connections straight into the reader's memory. Smaller
    ones are served from windows, which grow from 64 KiB to 32 MiB as long as reads follow each
    other; the two last windows are kept. The memory in use is at most 64 MiB, or ``memory_budget``
    if that is less.

    Attributes:
        failure: The first error of a read. Readers written in C++ replace it by one of their own.
    """

    def __init__(self, pinned: PinnedObject, config: Config) -> None:
        super().__init__()
        self.failure: Exception | None = None
        self._object = pinned
        self._size = pinned.info.size
        self._at = 0
        self._largest = min(_LARGEST_WINDOW, config.memory_budget // _WINDOWS)
        self._ahead = _FIRST_WINDOW
        self._windows: list[tuple[int, memoryview]] = []

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError(f"seek to {base + offset}: before the beginning of the file")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fills ``buffer``; less only at the end of the object."""
        if self.failure is not None:
            raise self.failure
        view = memoryview(buffer).cast("B")
        view = view[: max(self._size - self._at, 0)]
        if view.nbytes:
            try:
                self._fill(view)
            except Exception as error:
                self.failure = error
                raise
        self._at += view.nbytes
        return view.nbytes

    def _fill(self, view: memoryview) -> None:
        start, stop = self._at, self._at + view.nbytes
        if view.nbytes >= self._largest:
            self._object.read([(start, view)])
            return
        for first, window in self._windows:
            if first <= start and stop <= first + window.nbytes:
                view[:] = window[start - first : stop - first]
                return
        first, window = self._look(start, view.nbytes)
        view[:] = window[start - first : stop - first]

    def _look(self, start: int, count: int) -> tuple[int, memoryview]:
        """A new window with ``count`` bytes from ``start``, and more that may follow."""
        follows = any(
            first <= start <= first + window.nbytes + _FIRST_WINDOW
            for first, window in self._windows
        )
        self._ahead = min(self._ahead * _GROWTH, self._largest) if follows else _FIRST_WINDOW
        size = min(max(count, self._ahead), self._size)
        first = min(start, self._size - size)  # at the end of the object: what stands before
        del self._windows[: len(self._windows) - _WINDOWS + 1]
        window = memoryview(bytearray(size))
        self._object.read([(first, window)], request_size=_WINDOW_REQUEST)
        self._windows.append((first, window))
        return first, window


class _NamedUpload(ObjectUpload):
    """An upload to a key that its user has chosen: what else is at that key is not touched."""

    def abandon(self) -> None:
        if self._upload is not None and self.info is None:
            self._abort(self._upload)
        self._abort_twins()

    def _abort_twins(self) -> None:
        if self._may_have_twin:
            # unlike one with a random key, it can't be told from an upload of somebody else
            logger.warning(
                "%s: an empty multipart upload may have been left behind",
                self._store.uri(self.key),
            )


class UploadStream(io.RawIOBase):
    """A file that is sent while it is written; what is written is copied, so it may change after.

    Attributes:
        failure: The first error of a write. Writers written in C++ replace it by one of their own.
    """

    def __init__(self, upload: ObjectUpload, pool: StagingPool, slab_bytes: int, most: int) -> None:
        super().__init__()
        self.failure: Exception | None = None
        self._upload = upload
        self._pool = pool
        self._slab_bytes = slab_bytes
        self._most = most
        self._at = 0
        self._slab: Slab | None = None
        self._filled = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def write(self, data: ReadableBuffer) -> int:
        """Takes all of ``data``; blocks while the network is behind."""
        if self.failure is not None:
            raise self.failure
        view = memoryview(data).cast("B")
        count = view.nbytes
        try:
            self._copy(view)
        except Exception as error:
            self.failure = error
            raise
        self._at += count
        return count

    def _copy(self, view: memoryview) -> None:
        if self._at + view.nbytes > self._most:
            raise InvalidRequestError(
                f"the object exceeds {self._most} bytes, the most that parts of this size add up "
                "to: raise Config(memory_budget=...), on which the size of parts depends"
            )
        while view.nbytes:
            if self._slab is None:
                self._slab, _ = self._pool.reserve(self._slab_bytes)
                self._filled = 0
            count = min(view.nbytes, self._slab_bytes - self._filled)
            self._slab.view[self._filled : self._filled + count] = view[:count]
            self._filled += count
            view = view[count:]
            if self._filled == self._slab_bytes:
                self._pass_on()

    def _pass_on(self) -> None:
        if self._slab is not None:
            slab, self._slab = self._slab, None
            self._upload.write(Piece(slab.view[: self._filled], lease=slab))

    def finish(self) -> None:
        """Says that nothing follows."""
        self._pass_on()
        self._pool.close()
        self._upload.close()


@contextlib.contextmanager
def sending(
    store: ObjectStore, key: str, config: Config, stats: TransferStats, *, expected: int
) -> Iterator[UploadStream]:
    """A stream into the object ``key``, which appears, or replaces another, when the block ends.

    If the block raises, nothing changes at the key, and no parts are left in the store. The memory
    in use is ``memory_budget``; for objects of more than about 100 GiB, whose parts must be larger,
    it is 1/1500 of ``expected``.

    Args:
        store: The store.
        key: The key.
        config: Options.
        stats: Counts what is sent.
        expected: About how many bytes will be written; too few limit how many can be.

    Raises:
        StoreError: If the store refuses or stays unreachable; the block sees the same error, or
            TransferCancelledError, from its next write.
    """
    limits = store.capabilities
    least = expected // (limits.max_parts * 9 // 10)
    wanted = config.part_size and max(config.part_size, least)
    budget = max(config.memory_budget, _PARTS_IN_BUDGET * least)
    group = TaskGroup(config.connections, name="cloudckpt-save", interrupt=store.interrupt)
    retrier = Retrier(config.retry, group.cancellation, on_retry=stats.add_retry)
    pool = StagingPool(budget, group.cancellation)
    part_size = choose_part_size(
        expected, wanted, limits, connections=config.connections, copied=budget
    )
    upload = _NamedUpload(store, key, part_size, group, retrier, stats)
    slab_bytes = budget // _SLABS // 64 * 64
    stream = UploadStream(upload, pool, slab_bytes, part_size * limits.max_parts)
    try:
        with group:
            try:
                yield stream
            except Exception as error:
                if stream.failure is not None and stream.failure is not error:
                    raise stream.failure from error
                raise
            stream.finish()
    except BaseException:
        upload.abandon()
        raise
