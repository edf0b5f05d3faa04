"""A file that others write at their pace, and that is sent while they do."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from cloudckpt.config import Config
from cloudckpt.errors import TransferCancelledError
from cloudckpt.stores.base import ObjectStore
from cloudckpt.stores.listings import forget_listings
from cloudckpt.torch_files.torch_save import UploadStream, upload_stream
from cloudckpt.transfer.parts import Checks
from cloudckpt.transfer.stats import TransferStats

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["WrittenFile"]


class WrittenFile(io.BufferedIOBase):
    """An object that appears, or is replaced, when this is closed.

    A thread sends what is written, in parallel parts, out of at most ``memory_budget`` of memory.
    Behind an error in a ``with`` block, and where it is dropped without being closed, nothing
    changes at the key. For one writer: it is not safe to use from several threads.
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
        """Arguments are those of :func:`~cloudckpt.torch_files.torch_save.upload_stream`."""
        self._at = 0
        self._sending = _Sending(store, key, config, expected, checks, lasts)
        self._thread = threading.Thread(
            target=self._sending.run, name="cloudckpt-file", daemon=True
        )
        self._thread.start()

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
        self._sending.give(view)
        self._at += view.nbytes
        return view.nbytes

    def close(self) -> None:
        """Completes the object.

        Raises:
            StoreError: If the store refuses or stays unreachable.
        """
        if not self.closed:
            self._end(is_complete=True)
            self._sending.check()

    def discard(self) -> None:
        """Ends it; nothing changes at the key."""
        if not self.closed:
            self._end(is_complete=False)

    def _end(self, *, is_complete: bool) -> None:
        self._sending.end(is_complete=is_complete)
        self._thread.join()
        super().close()

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
        if hasattr(self, "_thread"):  # else it was never made
            self.discard()


class _Sending:
    """The thread's side, which knows nothing of the file, so that a dropped file is noticed.

    One view at a time is given to the thread; the writer waits until its bytes were copied.
    """

    def __init__(
        self,
        store: ObjectStore,
        key: str,
        config: Config,
        expected: int,
        checks: Checks | None,
        lasts: Callable[[memoryview], bool],
    ) -> None:
        self._store = store
        self._key = key
        self._config = config
        self._expected = expected
        self._checks = checks
        self._lasts = lasts
        self._changed = threading.Condition()
        self._given: memoryview | None = None
        self._is_complete: bool | None = None
        self._has_ended = False
        self._failure: BaseException | None = None

    def give(self, view: memoryview) -> None:
        with self._changed:
            self._given = view
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._given is None or self._has_ended)
        self.check()

    def end(self, *, is_complete: bool) -> None:
        with self._changed:
            self._is_complete = is_complete
            self._changed.notify_all()

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def run(self) -> None:
        stats = TransferStats(self._store.uri(self._key))
        try:
            upload_stream(
                self._store,
                self._key,
                self._pass_on,
                self._config,
                stats,
                expected=self._expected,
                checks=self._checks,
                lasts=self._lasts,
            )
        except BaseException as error:  # noqa: BLE001 - it is the writer's to hear of
            self._failure = error
        finally:
            forget_listings()
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def _pass_on(self, stream: UploadStream) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._given is not None or self._is_complete is not None
                )
                view = self._given
            if view is None:
                break
            stream.write(view)
            with self._changed:
                self._given = None
                self._changed.notify_all()
        if not self._is_complete:
            raise TransferCancelledError(
                "the file was not completed", uri=self._store.uri(self._key)
            )
