"""Breaks connections that make no progress, and reports long silences to the log."""

from __future__ import annotations

import contextlib
import enum
import functools
import http.client
import logging
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

from urllib3.util.ssltransport import SSLTransport

from cloudckpt.waiting import Waiting, current

__all__ = ["SLOWEST", "Connection", "Counter", "LateError", "Traffic", "Watch", "break_connection"]

logger = logging.getLogger("cloudckpt")

Connection = socket.socket | SSLTransport | http.client.HTTPConnection
"""A connection that the watch can break.

It is a socket with or without TLS; TLS inside a proxy's TLS, which is not a socket; or an HTTP
connection, which stands for its current socket.
"""

SLOWEST = 4096
"""Bytes per second below which a connection counts as stalled.

At this rate a part of 16 MiB takes more than an hour; an ISDN line carries twice as much. The value
is well above what a peer that drips ten bytes a second causes, although TLS expands each byte to
about 30, and TLS inside TLS to about 60.
"""

_IDLE = 10.0  # seconds without a step, after which the watch's thread ends

_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None) if sys.platform == "linux" else None


class LateError(TimeoutError):
    """Raised by a step that the watch ended because it took too long."""


class Counter(enum.Enum):
    """A byte counter of the kernel per connection; its value is an offset in ``tcp_info``."""

    ACKNOWLEDGED = 120
    """Bytes that the peer has acknowledged."""
    RECEIVED = 128
    """Bytes received from the peer."""


def break_connection(connection: Connection) -> None:
    """Shuts a connection down in both directions, while another thread may be using it."""
    sock = _beneath(connection)
    if sock is not None:
        with contextlib.suppress(OSError):
            # not SSLSocket.shutdown, which would drop the TLS state while another thread reads
            socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _beneath(connection: Connection) -> socket.socket | None:
    """Returns the kernel's socket under a connection; None if it is not open."""
    found: Connection | None = connection
    if isinstance(found, http.client.HTTPConnection):
        found = found.sock
    while isinstance(found, SSLTransport):
        found = found.socket
    return found


def _count(connection: Connection, counter: Counter) -> int | None:
    """Returns the current value of a byte counter of the kernel; None if it is not available."""
    info = _counters(_beneath(connection))
    if info is None:
        return None
    count: int = struct.unpack_from("=Q", info, counter.value)[0]
    return count


def _counters(sock: socket.socket | None) -> bytes | None:
    """Returns the kernel's ``tcp_info`` up to the byte counters; None if not available."""
    end = Counter.RECEIVED.value + 8
    if sock is None or _TCP_INFO is None:
        return None
    try:
        info: bytes = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, end)
    except OSError:  # not TCP, or closed
        return None
    return info if len(info) == end else None  # None: Linux before 4.1


class Traffic:
    """Measures the bytes that connections move, even in the middle of a system call."""

    counts = _TCP_INFO is not None
    """Whether the kernel provides the counters; only on Linux."""

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[socket.socket, int] = weakref.WeakKeyDictionary()

    def since(self, connection: Connection) -> int:
        """Returns the bytes moved both ways since the last call for this connection; 0 at first."""
        sock = _beneath(connection)
        info = _counters(sock)
        if sock is None or info is None:
            return 0
        count: int = sum(struct.unpack_from("=Q", info, one.value)[0] for one in Counter)
        before = self._seen.get(sock, count)
        self._seen[sock] = count
        return count - before


@dataclass(eq=False)
class _Step:
    connection: Connection
    limit: float
    counter: Counter | None
    deadline: float
    moved: float
    waiting: Waiting | None
    seen: int | None = None
    counted: int | None = None
    expired: bool = False

    def look(self, now: float) -> None:
        """Extends the deadline if enough bytes moved; breaks the connection if it has passed."""
        count = _count(self.connection, self.counter) if self.counter is not None else None
        if count != self.seen or (count is None and self.counter is not None):
            self.seen, self.moved = count, now
        if count is not None:
            if self.counted is None:
                self.counted = count
            elif count - self.counted >= SLOWEST * self.limit:
                self.counted, self.deadline = count, now + self.limit
        if now > self.deadline:
            self.expired = True
            break_connection(self.connection)


class Watch:
    """Breaks connections whose current step takes too long without moving bytes.

    A socket's timeout can't tell a stall from a slow link. For a receiving call it limits the wait
    for the *next* bytes: a peer that drips one byte a second would hold a transfer forever. For a
    sending call it limits the whole call: 16 MiB at 200 KB/s take more than a minute. So the
    sockets have no timeout, and one thread checks all transfers once a second. It takes the byte
    counts from the kernel, as the transferring thread is in the middle of a call for megabytes.

    A step whose bytes are counted ends when fewer than :data:`SLOWEST` bytes a second have moved
    for ``limit`` seconds. Where the kernel does not count (elsewhere than on Linux), and in a step
    whose bytes are no progress, the whole step has ``limit`` seconds.
    """

    def __init__(self, limit: float) -> None:
        self.stalled = (
            f"stalled: fewer than {SLOWEST:,} bytes a second were transferred for {limit:g} s; "
            "if the link is that slow or pauses that long, raise stall_timeout, or lower "
            "connections so that each has a larger share"
        )
        self._limit = limit
        self._steps: set[_Step] = set()
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._closed = False

    def close(self) -> None:
        """Ends the watch's thread as soon as no step is under way."""
        with self._lock:
            self._closed = True
            self._wake.notify()

    @contextlib.contextmanager
    def step(
        self,
        connection: Connection | None,
        late: str | None = None,
        limit: float | None = None,
        counter: Counter | None = None,
    ) -> Iterator[None]:
        """Breaks the connection if the block makes no progress for ``limit`` seconds.

        Args:
            connection: The connection to watch; None to watch nothing.
            late: The message of the error; by default that of a stall.
            limit: Seconds; by default those of a stall.
            counter: The bytes that count as progress; by default only the end of the block does.

        Raises:
            LateError: If the watch broke the connection, whether or not the block noticed.
        """
        if connection is None:
            yield
            return
        limit = self._limit if limit is None else limit
        now = time.monotonic()
        step = _Step(connection, limit, counter, now + limit, now, current())
        with self._lock:
            self._steps.add(step)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._look, name="cloudckpt-watch", daemon=True
                )
                self._thread.start()
            elif len(self._steps) == 1:
                self._wake.notify()
        try:
            yield
        except (OSError, http.client.HTTPException) as exc:
            if step.expired:
                raise LateError(late or self.stalled) from exc
            raise
        finally:
            with self._lock:
                self._steps.discard(step)
        if step.expired:
            raise LateError(late or self.stalled)

    def _look(self) -> None:
        while True:
            with self._lock:
                self._wake.wait_for(lambda: self._steps or self._closed, _IDLE)
                if not self._steps:
                    self._thread = None  # a later step starts another thread
                    return
                shortest = min(step.limit for step in self._steps)
                now = time.monotonic()
                for step in [*self._steps]:
                    self._look_at(step, now)
                silent = [
                    functools.partial(step.waiting.is_silent, now - step.moved)
                    for step in self._steps
                    if step.waiting is not None
                ]
            while silent:  # without the lock: a log handler may take long
                silent.pop()()
            time.sleep(min(1.0, shortest / 4))

    def _look_at(self, step: _Step, now: float) -> None:
        """Checks one step; a failure ends only this step, so that the others stay watched."""
        try:
            step.look(now)
        except Exception:
            logger.exception("a connection can't be watched for stalls any longer and is closed")
            step.expired = True
            with contextlib.suppress(Exception):
                break_connection(step.connection)
        if step.expired:
            self._steps.discard(step)
