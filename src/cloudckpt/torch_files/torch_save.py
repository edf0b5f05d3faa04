"""``torch.save`` to a store: whole or not at all."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import IO, TYPE_CHECKING, Any, cast

import torch

from cloudckpt.config import Config
from cloudckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CloudCheckpointError,
    InvalidRequestError,
    InvalidURIError,
    ObjectNotFoundError,
)
from cloudckpt.events import Span, Transferred
from cloudckpt.stores.base import ObjectInfo, ObjectStore
from cloudckpt.stores.listings import forget_listings
from cloudckpt.torch_files.torch_file import object_at
from cloudckpt.transfer.group import TaskGroup
from cloudckpt.transfer.packing import Slab
from cloudckpt.transfer.parts import Checks, Piece, choose_part_size
from cloudckpt.transfer.retry import Retrier
from cloudckpt.transfer.staging import StagingPool
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.upload import ObjectUpload, creates_only
from cloudckpt.uri import CheckpointURI

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = [
    "StreamedObject",
    "UploadStream",
    "check_destination",
    "size_of",
    "upload_stream",
    "write_torch_file",
]

logger = logging.getLogger("cloudckpt")

_PARTS_IN_BUDGET = 6  # see choose_part_size

_UNCOPIED = 64 * 1024  # fewer bytes are cheaper to copy than to send as a piece of their own

_OTHER_FORMATS = {
    ".gguf": "GGUF",
    ".h5": "HDF5",
    ".hdf5": "HDF5",
    ".json": "JSON",
    ".keras": "Keras",
    ".msgpack": "MessagePack",
    ".npy": "NumPy",
    ".npz": "NumPy",
    ".onnx": "ONNX",
    ".pte": "ExecuTorch",
    ".safetensors": "safetensors",
    ".tflite": "LiteRT",
}
"""Names under which other programs expect something other than a ``torch.save`` file."""


def check_destination(uri: CheckpointURI, config: Config) -> tuple[ObjectStore, str]:
    """The store and the key of a file to write.

    Raises:
        InvalidURIError: If the location can't be that of a file, or is named like a file of another
            format, whose readers would expect other contents.
        CheckpointExistsError: If something exists there and ``overwrite`` is off. This checks once:
            it does not keep two writers apart.
    """
    store, key = object_at(uri, config)
    suffix = PurePosixPath(key).suffix.lower()
    if suffix in _OTHER_FORMATS:
        raise InvalidURIError(
            f"{uri} is named like a file of {_OTHER_FORMATS[suffix]}, and what is written here is "
            f"one of torch.save: name it {PurePosixPath(key).stem}.pt, or write the other format "
            "with its own library"
        )
    if uri.scheme == "file" and os.path.isdir(key):
        raise InvalidURIError(f"{uri} is a folder: write for example {uri.join('model.pt')}")
    if not config.overwrite:
        with contextlib.suppress(ObjectNotFoundError):
            Retrier(config.retry).call(lambda: store.head(key))
            raise CheckpointExistsError(
                "a file already exists here and overwrite is off: delete it, or write another one",
                uri=str(uri),
            )
    return store, key


def write_torch_file(
    value: Any, uri: CheckpointURI, config: Config, *, rank: int = 0
) -> Transferred:
    """``torch.save`` to a location: atomic, in parallel parts.

    The file appears, or replaces the existing file, when it is complete. Besides ``value`` it takes
    ``memory_budget``; storages of accelerators pass through host memory one by one.

    Args:
        value: What to write.
        uri: Where to write.
        config: Options.
        rank: The writing rank, for the events.

    Raises:
        CheckpointError: If ``torch.save`` can't write ``value``.
        StoreError: If the store refuses or stays unreachable. As with any failure, nothing changes
            at the location.
    """
    store, key = check_destination(uri, config)
    expected = size_of(value)
    stats = TransferStats(str(uri), rank, expected)

    def dump(stream: UploadStream) -> None:
        try:
            torch.save(value, cast(IO[bytes], stream))
        except (CloudCheckpointError, Warning, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as exc:
            raise CheckpointError(
                "torch.save can't write this state: remove or convert what it names",
                uri=str(uri),
                cause=exc,
            ) from exc

    with Span("upload", str(uri), rank) as span:
        try:
            upload_stream(store, key, dump, config, stats, expected=expected)
        finally:
            span.nbytes = stats.snapshot().nbytes
            forget_listings()
    return stats.snapshot()


class _NamedUpload(ObjectUpload):
    """An upload to a key that the user chose: nothing else at that key is touched."""

    def abandon(self) -> None:
        if self._upload is not None and self.info is None:
            self._abort(self._upload)
        self._abort_twins()

    def _abort_twins(self) -> None:
        if self._may_have_twin:
            # unlike one with a random key, it may be somebody else's upload
            logger.warning(
                "%s: an empty multipart upload may have been left behind",
                self._store.uri(self.key),
            )


class UploadStream(io.RawIOBase):
    """A file that is sent while it is written. Written data is copied, so it may change afterwards,
    unless the caller has said that its memory lasts.

    Attributes:
        failure: The first error of a write, or an interrupt. Writers written in C++ replace it with
            their own error.
    """

    def __init__(
        self,
        upload: ObjectUpload,
        pool: StagingPool,
        most: int,
        uri: str,
        checks: Checks | None = None,
        lasts: Callable[[memoryview], bool] = lambda view: False,
    ) -> None:
        super().__init__()
        self.failure: BaseException | None = None
        self._upload = upload
        self._checks = checks
        self._lasts = lasts
        self._pool = pool
        self._slab_bytes = pool.slab_bytes
        self._most = most
        self._uri = uri
        self._at = 0
        self._slab: Slab | None = None
        self._filled = 0

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer) -> int:
        """Takes all of ``data``; blocks while the network is behind."""
        if self.failure is not None:
            raise self.failure
        view = memoryview(data).cast("B")
        count = view.nbytes
        try:
            if count >= _UNCOPIED and self._lasts(view):
                self._check_room(count)
                self._pass_on()
                self._upload.write(Piece(view, self._checks, self._upload.position))
            else:
                self._copy(view)
        except BaseException as error:
            self.failure = error
            raise
        self._at += count
        return count

    def _check_room(self, count: int) -> None:
        if self._at + count > self._most:
            raise InvalidRequestError(
                f"the object exceeds {self._most} bytes, the most that parts of this size add up "
                "to: raise Config(memory_budget=...), on which the size of parts depends",
                uri=self._uri,
            )

    def _copy(self, view: memoryview) -> None:
        self._check_room(view.nbytes)
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
            start = self._upload.position
            self._upload.write(Piece(slab.view[: self._filled], self._checks, start, slab))

    def finish(self) -> None:
        """Marks the end of the data."""
        self._pass_on()
        self._upload.close()


class StreamedObject:
    """An object that is sent while it is written, and appears, or is replaced, at the end.

    It uses ``memory_budget`` of memory; for objects of more than about 100 GiB, whose parts must be
    larger, 1/1500 of ``expected``. It must be ended by :meth:`end`.

    Attributes:
        stream: What to write to.
    """

    def __init__(
        self,
        store: ObjectStore,
        key: str,
        config: Config,
        stats: TransferStats,
        *,
        expected: int,
        checks: Checks | None = None,
        lasts: Callable[[memoryview], bool] = lambda view: False,
    ) -> None:
        """
        Args:
            store: The store.
            key: The key.
            config: Options.
            stats: Transfer counters.
            expected: Approximate bytes to write.
            checks: Collects the checksums of what is sent; the key must then be random, so that
                nothing else can be there.
            lasts: Says whether memory being written stays unchanged until the end: it is then sent
                without a copy.
        """
        limits = store.capabilities
        least = expected // (limits.max_parts * 9 // 10)
        wanted = config.part_size and max(config.part_size, least)
        budget = max(config.memory_budget, _PARTS_IN_BUDGET * least)
        width = config.requests_at_once
        self._group = group = TaskGroup(width, name="cloudckpt-save", interrupt=store.interrupt)
        retrier = Retrier(config.retry, group.cancellation, on_retry=stats.add_retry)
        self._pool = StagingPool(budget, group.cancellation)
        size = choose_part_size(expected, wanted, limits, connections=width, copied=budget)
        self._upload: ObjectUpload
        if checks is None:
            self._upload = _NamedUpload(store, key, size, group, retrier, stats)
        else:
            only = creates_only(store, config)
            self._upload = ObjectUpload(store, key, size, group, retrier, stats, create_only=only)
        most = size * limits.max_parts
        self.stream = UploadStream(self._upload, self._pool, most, store.uri(key), checks, lasts)

    def end(self, produce: Callable[[], None] = lambda: None) -> ObjectInfo:
        """Waits until the store has the object; it must be the last call.

        Args:
            produce: Called first; writes what is missing.

        Raises:
            StoreError: If the store refuses or stays unreachable. Behind any error, also one of
                ``produce``, nothing changes at the key, and no parts are left in the store; only
                if the answer to the last request was lost may the new object exist, whole.
        """

        def finish() -> None:
            produce()
            self.stream.finish()

        try:
            self._group.run(finish)
        except BaseException:
            self._upload.abandon()
            raise
        finally:
            self._pool.close()
        assert self._upload.info is not None  # the group has ended without an error
        return self._upload.info


def upload_stream(
    store: ObjectStore,
    key: str,
    write: Callable[[UploadStream], None],
    config: Config,
    stats: TransferStats,
    *,
    expected: int,
) -> ObjectInfo:
    """Sends what ``write`` writes to the stream passed to it; see :class:`StreamedObject`.

    Returns:
        The object as the store has written it.

    Raises:
        StoreError: If the store refuses or stays unreachable; ``write`` sees the same error, or
            TransferCancelledError, from its next write.
    """
    made = StreamedObject(store, key, config, stats, expected=expected)

    def produce() -> None:
        try:
            write(made.stream)
        except Exception as error:
            if made.stream.failure is not None and made.stream.failure is not error:
                raise made.stream.failure from error
            raise

    return made.end(produce)


def size_of(value: Any) -> int:
    """About how many bytes ``torch.save`` will write."""
    storages: dict[int, int] = {}
    waiting, seen = [value], set[int]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            with contextlib.suppress(Exception):  # subclasses without a storage
                storage = value.untyped_storage()
                storages[storage._cdata] = max(storage.nbytes(), value.nbytes)
        elif isinstance(value, (Mapping, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            waiting.extend(value.values() if isinstance(value, Mapping) else value)
    return sum(storages.values()) + 1024 * (len(storages) + 1)
