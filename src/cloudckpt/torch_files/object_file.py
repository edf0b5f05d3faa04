"""Reads one version of an object like a file, by ranges over parallel connections."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import torch

from cloudckpt.checksum import Blocks
from cloudckpt.config import MIB, Config
from cloudckpt.errors import CheckpointCorruptError, InvalidURIError
from cloudckpt.stores.base import ObjectInfo, ObjectStore
from cloudckpt.transfer.boxes import aligned
from cloudckpt.transfer.download import download
from cloudckpt.transfer.landing import StoredBytes, TensorSink, Wanted
from cloudckpt.transfer.memory import bytes_of
from cloudckpt.transfer.retry import Retrier, check_unchanged, open_store
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.uri import CheckpointURI

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["ObjectFile", "object_at"]

_FIRST_WINDOW = 64 * 1024
_LARGEST_WINDOW = 32 * MIB
_GROWTH = 8
_REQUEST = 4 * MIB
_REQUESTS = 64  # reads of more than so many such requests use larger ones, on all connections


def object_at(uri: CheckpointURI, config: Config) -> tuple[ObjectStore, str]:
    """Opens the store of a file; returns the store and the file's key.

    Raises:
        InvalidURIError: If the location is a bucket, or the root of the file system.
    """
    if not uri.prefix or uri.prefix == "/":
        raise InvalidURIError(
            f"{uri} does not name a file: write for example {uri.join('model.pt')}"
        )
    return open_store(uri, config), uri.prefix


class ObjectFile(io.RawIOBase):
    """A seekable binary file that reads one version of an object.

    Once the object is replaced, a read that needs a request raises an error. Reads of 32 MiB and
    more go over parallel connections directly into the caller's memory. Smaller reads are served
    from a window, which grows from 64 KiB to 32 MiB while reads are sequential. The old and the new
    window use at most 64 MiB of memory; both limits are lower if ``memory_budget`` is below 64 MiB.

    Attributes:
        info: The size and version of the object when the file was opened.
        failure: The first error or interrupt of a read; None before. Callers written in C++ replace
            the raised error with their own, so the error is kept here.
    """

    def __init__(
        self,
        store: ObjectStore,
        key: str,
        config: Config,
        stats: TransferStats,
        blocks: Blocks | None = None,
    ) -> None:
        """
        Args:
            store: The store.
            key: The key of the object.
            config: Options.
            stats: Counts the bytes received.
            blocks: The expected checksums of the object's blocks; if given, each read is verified,
                unless ``config.verify`` is False.

        Raises:
            ObjectNotFoundError: If the object does not exist.
            StoreError: If the store refuses or stays unreachable.
        """
        super().__init__()
        self._store, self._config, self._stats = store, config, stats
        # the blocks that are read whole, to verify their checksums
        self._grain = 1 if blocks is None or not config.verify else blocks.size
        retrier = Retrier(config.retry, on_retry=stats.add_retry)
        self.info: ObjectInfo = retrier.call(lambda: store.head(key))
        self._size = size = self.info.size
        self._whole = StoredBytes(key, 0, size, blocks, size, key, self.info.version)
        self.failure: BaseException | None = None
        self._at = 0
        self._largest = min(_LARGEST_WINDOW, config.memory_budget // 2)
        self._first, self._window = 0, torch.empty(0, dtype=torch.uint8, device="cpu")

    def read_at(self, start: int, room: torch.Tensor) -> None:
        """Fills a byte tensor with the object's bytes from ``start``, over parallel connections.

        Raises:
            CheckpointCorruptError: If bytes do not match their checksums.
            CheckpointReplacedError: If the object was replaced or deleted since it was opened.
            StoreError: If the store refuses or stays unreachable.
        """
        sink = TensorSink(room, torch.uint8)
        wanted = Wanted(self._whole, start, start + room.nbytes, sink, True)
        # small requests, so that all connections are used
        request_size = _REQUEST if room.nbytes < _REQUESTS * _REQUEST else None
        try:
            download(self._store, [wanted], self._config, self._stats, request_size=request_size)
        except CheckpointCorruptError as error:
            uri = self._store.uri(self.info.key)
            check_unchanged(self._store, self.info, uri, self._config.retry, error)
            raise

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError(f"can't seek to {base + offset}, before the beginning of the file")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fills ``buffer``, or as much of it as is left of the object.

        Returns:
            The number of bytes read; 0 at the end of the object.

        Raises:
            CloudCheckpointError: The errors of :meth:`read_at`, also that of an earlier read.
        """
        if self.failure is not None:
            raise self.failure
        view = memoryview(buffer).cast("B")
        view = view[: max(self._size - self._at, 0)]
        if view.nbytes:
            try:
                self._fill(view)
            except BaseException as error:
                self.failure = error
                raise
        self._at += view.nbytes
        return view.nbytes

    def _fill(self, view: memoryview) -> None:
        if view.nbytes >= self._largest:
            self.read_at(self._at, torch.frombuffer(view, dtype=torch.uint8))
            return
        stop = self._at + view.nbytes
        if self._at < self._first or stop > self._first + self._window.nbytes:
            self._read_window(view.nbytes)
        view[:] = bytes_of(self._window)[self._at - self._first : stop - self._first]

    def _read_window(self, count: int) -> None:
        """Reads a new window that has the next ``count`` bytes."""
        end = self._first + self._window.nbytes
        follows = self._first <= self._at <= end + _FIRST_WINDOW
        ahead = min(self._window.nbytes * _GROWTH, self._largest) if follows else 0
        size = min(max(count, ahead, _FIRST_WINDOW), self._size)
        first = min(self._at, self._size - size)  # a window at the end begins earlier
        stop = min(aligned(first + size, self._grain), self._size)
        first = first // self._grain * self._grain
        window = torch.empty(stop - first, dtype=torch.uint8, device="cpu")
        self.read_at(first, window)
        self._first, self._window = first, window
