"""Writes an object like a file: sends it while it is written, and makes it visible on close."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from cloudckpt.config import Config
from cloudckpt.errors import InvalidRequestError, TransferCancelledError
from cloudckpt.stores.base import ObjectInfo, ObjectStore
from cloudckpt.stores.listings import forget_listings
from cloudckpt.transfer.group import TaskGroup
from cloudckpt.transfer.parts import Checks, Piece, choose_part_size
from cloudckpt.transfer.pool import Lease, MemoryPool
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.upload import NamedUpload, ObjectUpload

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["WrittenFile"]

_PARTS_IN_BUDGET = 6  # see choose_part_size
_UNCOPIED = 64 * 1024  # bytes; smaller writes are copied, which is cheaper than a separate piece


class WrittenFile(io.BufferedIOBase):
    """A writable binary file whose object appears, or is replaced, when the file is closed.

    Written bytes are copied, unless ``is_immutable`` says otherwise, and sent in parallel parts.
    The copies use at most ``memory_budget`` bytes of memory. Objects above about 100 GiB may need
    more, because the number of parts is limited and six parts are in memory: 1/1500 of ``expected``
    if the store allows 10,000 parts.

    If an error occurs, also in a ``with`` block, or the file is dropped without being closed,
    nothing changes at the key, and the sent parts are deleted (a failure to do so is logged). Only
    if the answer to the last request was lost, the complete new object may exist. Not safe for use
    from several threads.

    Attributes:
        info: The store's information on the object; None until the file is closed.
        failure: The first error or interrupt, or a TransferCancelledError if the file was discarded
            without an error; None before. Callers written in C++ replace the raised error with
            their own, so the error is kept here.
    """

    def __init__(
        self,
        store: ObjectStore,
        key: str,
        config: Config,
        *,
        expected: int = 0,
        stats: TransferStats | None = None,
        checks: Checks | None = None,
        is_immutable: Callable[[memoryview], bool] = lambda view: False,
    ) -> None:
        """
        Args:
            store: The store.
            key: The key of the object.
            config: Options.
            expected: The approximate size of the object in bytes; 0 if it is not known.
            stats: Counts the bytes sent; None counts nothing.
            checks: Collects the checksums of the parts sent, if not None; only for random keys, at
                which no other object can exist.
            is_immutable: Returns whether the memory of a write stays unchanged until the file is
                closed; if so, writes of at least 64 KiB are sent without a copy.
        """
        self.info: ObjectInfo | None = None
        self.failure: BaseException | None = None
        self._at = 0
        self._uri = store.uri(key)
        self._process = os.getpid()
        limits, width = store.capabilities, config.requests_at_once
        least = expected // (limits.max_parts * 9 // 10)
        wanted = config.part_size and max(config.part_size, least)
        budget = max(config.memory_budget, _PARTS_IN_BUDGET * least)
        size = choose_part_size(expected, wanted, limits, connections=width, copied=budget)
        self._most = size * limits.max_parts
        self._group = group = TaskGroup(width, name="cloudckpt-save", interrupt=store.interrupt)
        self._pool = MemoryPool(budget, group.cancellation)
        self._slab: Lease | None = None
        self._checks, self._is_immutable = checks, is_immutable
        stats = stats or TransferStats(self._uri)
        upload = NamedUpload if checks is None else ObjectUpload
        self._upload: ObjectUpload | None = upload(store, key, size, group, config, stats)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def write(self, data: ReadableBuffer) -> int:
        """Writes all of ``data``; blocks while the memory is full of bytes that are not sent yet.

        Raises:
            StoreError: If bytes can't be sent, now or in an earlier call.
            ValueError: If the file is closed.
        """
        if self.closed:
            raise ValueError(f"{self._uri} is closed: write all of it before it is closed")
        view = memoryview(data).cast("B")
        if self._upload is not None:
            try:
                self._send(self._upload, view)
                self._at += view.nbytes
                return view.nbytes
            except BaseException as error:  # noqa: BLE001 - raised below, or why it was cancelled
                self._end(error)
        assert self.failure is not None  # it has ended before it was closed
        raise self.failure

    def _send(self, upload: ObjectUpload, view: memoryview) -> None:
        """Sends immutable memory of at least 64 KiB without a copy, and copies all other memory.

        The copies are collected in a block of memory, the slab, and sent when it is full.

        Raises:
            InvalidRequestError: If the object would be too large for its part size.
        """
        if self._at + view.nbytes > self._most:
            raise InvalidRequestError(
                f"the object exceeds {self._most} bytes, the limit with parts of this size: set a "
                "larger Config.part_size, and a memory_budget of at least six times that",
                uri=self._uri,
            )
        if view.nbytes >= _UNCOPIED and self._is_immutable(view):
            self._send_slab(upload)
            upload.write(Piece(view, self._checks, upload.position))
            return
        while view.nbytes:
            if self._slab is None:
                self._slab = self._pool.take(self._pool.slab_bytes)
            slab, first = self._slab, self._slab.used
            slab.used = min(first + view.nbytes, self._pool.slab_bytes)
            copied, view = view[: slab.used - first], view[slab.used - first :]
            slab.view[first : slab.used] = copied
            if slab.used == self._pool.slab_bytes:
                self._send_slab(upload)

    def _send_slab(self, upload: ObjectUpload) -> None:
        """Sends the block of memory that is being filled with copies (slab), if there is one."""
        if self._slab is not None:
            slab, self._slab = self._slab, None
            upload.write(Piece(slab.view[: slab.used], self._checks, upload.position, slab))

    def close(self) -> None:
        """Sends the rest, and makes the object visible; does nothing if the file is closed.

        Raises:
            StoreError: If the store refuses or stays unreachable, now or in an earlier write.
        """
        if not self.closed:
            self._end()
            super().close()
            if self.failure is not None:
                raise self.failure

    def discard(self) -> None:
        """Closes the file without an object: aborts the upload, and leaves the key unchanged."""
        if not self.closed:
            has_ended = self._upload is None
            self._end(
                TransferCancelledError(
                    "the file was not completed, and nothing was stored: write it again",
                    uri=self._uri,
                )
            )
            super().close()
            if not has_ended and not isinstance(self.failure, Exception | None):  # an interrupt
                raise self.failure

    def _end(self, error: BaseException | None = None) -> None:
        """Completes the upload, or aborts it if an error is given.

        Keeps the error in ``failure``. A second call, or a call in a forked child, does nothing.
        """
        upload, self._upload = self._upload, None
        if upload is None or self._process != os.getpid():  # a forked child lacks the threads
            return

        def finish() -> None:
            if error is not None:
                raise error
            self._send_slab(upload)
            upload.close()

        try:
            self._group.run(finish)
            self.info = upload.info
        except BaseException as failure:  # noqa: BLE001 - raised by the caller
            self.failure = failure
            upload.abandon()
        finally:
            self._pool.close()
            forget_listings()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        self.discard()
        is_ours = isinstance(self.failure, TransferCancelledError) or self.failure is error
        if self.failure is not None and not is_ours:  # C++ callers raise another error instead
            raise self.failure from error

    def __del__(self) -> None:
        if hasattr(self, "_upload"):  # missing if __init__ has raised
            self.discard()
