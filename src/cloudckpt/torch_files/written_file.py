"""A file that others write at their pace, and that is sent while they do."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from cloudckpt.config import Config
from cloudckpt.errors import TransferCancelledError
from cloudckpt.stores.base import ObjectStore
from cloudckpt.stores.listings import forget_listings
from cloudckpt.torch_files.torch_save import StreamedObject
from cloudckpt.transfer.parts import Checks
from cloudckpt.transfer.stats import TransferStats

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["WrittenFile"]


class WrittenFile(io.BufferedIOBase):
    """An object that appears, or is replaced, when this is closed.

    What is written is sent in parallel parts, out of at most ``memory_budget`` of memory. Behind an
    error in a ``with`` block, and where it is dropped without being closed, nothing changes at the
    key. For one writer: it is not safe to use from several threads.
    """

    def __init__(
        self,
        store: ObjectStore,
        key: str,
        config: Config,
        *,
        expected: int = 0,
        checks: Checks | None = None,
        lasts: Callable[[memoryview], bool] = lambda view: False,
    ) -> None:
        """Arguments are those of :class:`~cloudckpt.torch_files.torch_save.StreamedObject`."""
        self._at = 0
        self._uri = store.uri(key)
        self._process = os.getpid()
        self._failure: BaseException | None = None
        self._sent: StreamedObject | None = StreamedObject(
            store,
            key,
            config,
            TransferStats(self._uri),
            expected=expected,
            checks=checks,
            lasts=lasts,
        )

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def write(self, data: ReadableBuffer) -> int:
        """Takes all of ``data``; blocks while the network is behind.

        Raises:
            StoreError: Why it can't be sent.
        """
        if self.closed:
            raise ValueError("write to closed file")
        view = memoryview(data).cast("B")
        if self._sent is not None:
            try:
                count = self._sent.stream.write(view)
            except BaseException as error:  # noqa: BLE001 - raised below, or why it was cancelled
                self._end(error)
            else:
                self._at += count
                return count
        assert self._failure is not None  # it has ended before it was closed
        raise self._failure

    def close(self) -> None:
        """Completes the object.

        Raises:
            StoreError: If the store refuses or stays unreachable.
        """
        if not self.closed:
            self._end()
            super().close()
            if self._failure is not None:
                raise self._failure

    def discard(self) -> None:
        """Ends it; nothing changes at the key."""
        if not self.closed:
            self._end(TransferCancelledError("the file was not completed", uri=self._uri))
            super().close()
            failure, self._failure = self._failure, None
            if not isinstance(failure, Exception | None):  # an interrupt
                raise failure

    def _end(self, error: BaseException | None = None) -> None:
        """Completes the object, or, because of an error, leaves all as it was; only once."""
        sent, self._sent = self._sent, None
        if sent is None or self._process != os.getpid():  # a fork has none of its threads
            return

        def produce() -> None:
            if error is not None:
                raise error

        try:
            sent.end(produce)
        except BaseException as failure:  # noqa: BLE001 - it is the writer's to hear of
            self._failure = failure
        finally:
            forget_listings()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.discard()

    def __del__(self) -> None:
        if hasattr(self, "_sent"):  # else it was never made
            self.discard()
