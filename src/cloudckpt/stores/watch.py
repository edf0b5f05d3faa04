"""Ends connections that no longer make progress."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator

__all__ = ["Watch", "break_connection"]


def break_connection(sock: socket.socket) -> None:
    """Ends a connection that another thread may be reading from or writing to."""
    with contextlib.suppress(OSError):
        # not SSLSocket.shutdown, which would drop its state under the reader
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


class Watch:
    """Ends connections whose current step takes too long.

    A socket's timeout only limits the wait for the *next* bytes: a peer that drips one byte a
    second would hold a transfer forever. One thread looks at all transfers once a second.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._steps: dict[int, tuple[float, socket.socket]] = {}
        self._expired: set[int] = set()
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._closed = False

    def close(self) -> None:
        """Ends the thread."""
        with self._lock:
            self._closed = True
            self._wake.notify()

    @contextlib.contextmanager
    def step(
        self, sock: socket.socket | None, late: str, limit: float | None = None
    ) -> Iterator[None]:
        """Ends the connection if the block takes longer than ``limit`` seconds, or the usual time.

        Raises:
            TimeoutError: With the message ``late``, if it did; whatever the block made of the end.
        """
        if sock is None:
            yield
            return
        self._begin(sock, time.monotonic() + (self._limit if limit is None else limit))
        try:
            yield
        except (OSError, http.client.HTTPException) as exc:
            if self._end(sock):
                raise
            raise TimeoutError(late) from exc
        except BaseException:
            self._end(sock)
            raise
        if not self._end(sock):
            raise TimeoutError(late)

    def _begin(self, sock: socket.socket, deadline: float) -> None:
        with self._lock:
            self._steps[id(sock)] = (deadline, sock)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._look, name="cloudckpt-watch", daemon=True
                )
                self._thread.start()
            elif len(self._steps) == 1:
                self._wake.notify()

    def _end(self, sock: socket.socket) -> bool:
        """Whether the step ended in time."""
        with self._lock:
            self._steps.pop(id(sock), None)
            late = id(sock) in self._expired
            self._expired.discard(id(sock))
        return not late

    def _look(self) -> None:
        while True:
            with self._lock:
                while not self._steps and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                now = time.monotonic()
                late = [key for key, (deadline, _) in self._steps.items() if now > deadline]
                for key in late:
                    _, sock = self._steps.pop(key)
                    self._expired.add(key)
                    break_connection(sock)
            time.sleep(min(1.0, self._limit / 4))
