"""HTTP connections that are broken when they make no progress; long silences are logged.

Their sockets therefore need no timeouts, and a long read can fill its buffer in one call.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import http.client
import logging
import socket
import ssl
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import urllib3
import urllib3.connection
from urllib3.util.ssltransport import SSLTransport

from cloudckpt.stores.http.expect import Response, early_response
from cloudckpt.waiting import Waiting, current

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from cloudckpt.stores.http.options import Contexts

__all__ = [
    "LONG",
    "SLOWEST",
    "Call",
    "Connection",
    "Counter",
    "LateError",
    "Traffic",
    "Watch",
    "WatchedConnection",
    "WatchedSocket",
    "break_connection",
    "pool_classes",
]

logger = logging.getLogger("cloudckpt")

Connection = socket.socket | SSLTransport | http.client.HTTPConnection
"""A connection that the watch can break.

It is a socket with or without TLS; TLS inside a proxy's TLS, which is not a socket; or an HTTP
connection, which stands for its current socket.
"""

SLOWEST = 4096
"""Bytes per second below which a connection counts as stalled.

At this rate a part of 16 MiB takes more than an hour; an ISDN line carries twice as much. A peer
that drips ten bytes a second stays well below it, even though TLS expands each byte to about 30,
and TLS inside TLS to about 60.
"""

LONG = 256 * 1024
"""A read of more bytes than this waits until its buffer is full.

Python itself reads up to 128 KiB ahead; such a read must not wait for bytes that may never be sent.
"""

_IDLE = 10.0  # seconds without a step, after which the watch's thread ends

_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None) if sys.platform == "linux" else None


class LateError(TimeoutError):
    """Raised after :class:`Watch` has broken a connection that made too little progress."""


class Counter(enum.Enum):
    """A byte counter of a connection in Linux; its value is its offset in ``tcp_info``."""

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
    """Returns a connection's socket, with or without TLS; None if the connection is not open."""
    found: Connection | None = connection
    if isinstance(found, http.client.HTTPConnection):
        found = found.sock
    while isinstance(found, SSLTransport):
        found = found.socket
    return found


def _count(sock: socket.socket | None, *counters: Counter) -> int | None:
    """Returns the sum of these byte counters of a socket.

    It is None if there is no open TCP socket, or the kernel does not count.
    """
    end = Counter.RECEIVED.value + 8
    if sock is None or _TCP_INFO is None:
        return None
    try:
        info: bytes = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, end)
    except OSError:  # not TCP, or closed
        return None
    if len(info) < end:  # Linux before 4.1
        return None
    return sum(
        int.from_bytes(info[each.value : each.value + 8], sys.byteorder) for each in counters
    )


class Traffic:
    """Measures the bytes that connections move, even in the middle of a system call."""

    counts = _TCP_INFO is not None
    """Whether the kernel provides the counters; only on Linux."""

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[socket.socket, int] = weakref.WeakKeyDictionary()

    def since(self, connection: Connection) -> int:
        """Returns the bytes sent and received since the last call for this connection.

        It is 0 at the first call, and if the connection is not open or its bytes are not counted.
        """
        sock = _beneath(connection)
        count = _count(sock, *Counter)
        if sock is None or count is None:
            return 0
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

    def check(self, now: float) -> None:
        """Extends the deadline if enough bytes moved; breaks the connection after the deadline."""
        sock = _beneath(self.connection)
        count = None if self.counter is None else _count(sock, self.counter)
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
    """Breaks connections whose step, one blocking operation, takes too long without moving bytes.

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
            late: The message of the error; by default the message for a stall.
            limit: Seconds; by default the limit for a stall.
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
                    target=self._run, name="cloudckpt-watch", daemon=True
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

    def _run(self) -> None:
        while True:
            with self._lock:
                self._wake.wait_for(lambda: self._steps or self._closed, _IDLE)
                if not self._steps:
                    self._thread = None  # a later step starts another thread
                    return
                shortest = min(step.limit for step in self._steps)
                now = time.monotonic()
                for step in [*self._steps]:
                    self._check(step, now)
                silent = [
                    functools.partial(step.waiting.is_silent, now - step.moved)
                    for step in self._steps
                    if step.waiting is not None
                ]
            while silent:  # without the lock: a log handler may take long
                silent.pop()()
            time.sleep(min(1.0, shortest / 4))

    def _check(self, step: _Step, now: float) -> None:
        """Checks one step; a failure ends only this step, so that the others stay watched."""
        try:
            step.check(now)
        except Exception:
            logger.exception("a bug (please report it) broke a connection; its request is retried")
            step.expired = True
            with contextlib.suppress(Exception):
                break_connection(step.connection)
        if step.expired:
            self._steps.discard(step)


class WatchedSocket(socket.socket):
    """A socket that has no timeout once it is `watched`; its long reads then fill their buffer.

    Instead of a timeout, :class:`Watch` ends stalls.

    urllib3 sets a timeout before each request and response. Each would be a system call, which
    releases the GIL and waits for it.
    """

    is_watched = False

    fills_buffers = True
    """Whether a long read fills its buffer, unless the data end or the connection fails."""

    has_unread = False
    """Whether received but unread data are held outside of the kernel."""

    @classmethod
    def of(cls, sock: socket.socket) -> WatchedSocket:
        """Returns a socket that takes over the connection of `sock`, which becomes unusable."""
        return cls(sock.family, sock.type, sock.proto, fileno=sock.detach())

    def settimeout(self, value: float | None) -> None:
        """Sets the timeout, but does nothing once the socket is watched."""
        if not self.is_watched:
            super().settimeout(value)

    def watched(self) -> None:
        """Removes the timeout and ignores later ones; the watch takes over."""
        self.settimeout(None)
        self.is_watched = True

    def recv_into(self, buffer: WriteableBuffer, nbytes: int = 0, flags: int = 0) -> int:
        """Receives into `buffer`.

        On a watched socket, a long read returns when the buffer is full or the data ends.
        """
        wanted = nbytes or memoryview(buffer).nbytes
        if wanted > LONG and not flags and self.is_watched:
            flags = socket.MSG_WAITALL
        return super().recv_into(buffer, nbytes, flags)


@dataclass(eq=False)
class Call:
    """The request that a thread has under way.

    Attributes:
        limit: Seconds within which the response must begin.
        option: The option that sets this limit, for messages.
        asks_first: Whether the request waits for the server's ``100 Continue`` before it sends the
            body.
        connection: The connection in use at the moment; None if there is none yet.
    """

    limit: float
    option: str
    asks_first: bool
    connection: Connection | None = None


class WatchedConnection(http.client.HTTPConnection):
    """An HTTP connection under a :class:`Watch`; the base of `_Connecting` and `_Sending`."""

    sock: socket.socket | None
    # set as class attributes by pool_classes:
    calls: Mapping[int, Call]  # by thread identifier
    connect_limit: float  # seconds
    contexts: Contexts
    watch: Watch
    connecting: bool = False
    is_spent: bool = False  # whether the server still waits for a body: no other request can follow
    # the response that has begun while the request waited for 100 Continue
    early: http.client.HTTPResponse | None = None
    raw_response: http.client.HTTPResponse | None = None
    raw_sock: socket.socket | None = None

    def close(self) -> None:
        """Closes the connection, its last response, and one that began while a request was sent.

        http.client hands the socket over to a response that ends with the connection, or whose
        headers the watch cut off; the socket would then stay open with the response.
        """
        super().close()
        early, self.early = self.early, None
        for response in (early, self.raw_response):
            if response is not None:
                response.close()


class _Sending(WatchedConnection):
    """Sends requests and receives responses under the watch, beneath urllib3's connection class.

    It keeps the standard library's response, whose ``readinto`` receives into the caller's memory
    (urllib3's own copies). Its socket has no timeout: the watch ends what takes too long.
    """

    def send(self, data: Any) -> None:
        if self.connecting:  # a CONNECT request to a proxy
            super().send(data)
            return
        if self.sock is None and self.auto_open:
            self.connect()
        call = self.calls[threading.get_ident()]
        if self.sock is not None:
            self.sock.settimeout(None)
            call.connection = self.sock
        try:
            with self.watch.step(self.sock, counter=Counter.ACKNOWLEDGED):
                super().send(data)
        except ssl.SSLEOFError as exc:
            # A server may refuse a large body before it has received all of it. urllib3 then reads
            # the response if send() raised BrokenPipeError, as it does without TLS.
            raise BrokenPipeError(errno.EPIPE, str(exc)) from exc
        if call.asks_first and isinstance(self.sock, WatchedSocket):  # this call sent the headers
            call.asks_first = False
            self.early, self.is_spent = early_response(self.sock)
            if self.is_spent:  # BrokenPipeError makes urllib3 read the response
                raise BrokenPipeError(errno.EPIPE, "the server answered before the body was sent")

    def response_class(  # type: ignore[override]
        self, sock: socket.socket, debuglevel: int = 0, method: str | None = None
    ) -> http.client.HTTPResponse:
        """Returns the object that reads the next response: the one that has begun, or a new one."""
        early, self.early = self.early, None
        return Response(sock, debuglevel, method) if early is None else early

    def getresponse(self) -> http.client.HTTPResponse:
        self.raw_sock = self.sock  # super() drops it if the server closes the connection
        if self.sock is not None:
            self.sock.settimeout(None)  # urllib3 has set a timeout
        call = self.calls[threading.get_ident()]
        late = f"the server did not answer within {call.limit:g} s ({call.option})"
        # the end of the body may still be on its way, which does not count as the server's delay
        with self.watch.step(self.raw_sock, late, call.limit, Counter.ACKNOWLEDGED):
            self.raw_response = super().getresponse()
        return self.raw_response


class _Connecting(WatchedConnection):
    """A mix-in for urllib3's connections: connects with this package's sockets, in limited time.

    The time is watched because a proxy may send its response byte by byte. With TLS, the context
    chooses the socket class, so urllib3 is given a context like the one that it would create by
    itself. TLS inside a proxy's TLS is not a socket and can't be replaced.
    """

    # attributes that urllib3 reads:
    ssl_context: ssl.SSLContext | None
    proxy_config: Any

    def connect(self) -> None:
        late = (
            f"the connection was not made within {self.connect_limit:g} s (4 times connect_timeout)"
        )
        if isinstance(self, urllib3.connection.HTTPSConnection):
            self.ssl_context = self.contexts.get()
            if self.proxy_config is not None:
                self.proxy_config = self.proxy_config._replace(ssl_context=self.ssl_context)
        self.calls[threading.get_ident()].connection = self
        self.connecting, self.is_spent = True, False
        try:
            with self.watch.step(self, late, self.connect_limit):
                super().connect()
        finally:
            self.connecting = False
        if type(self.sock) is socket.socket:
            self.sock = WatchedSocket.of(self.sock)
        if isinstance(self.sock, WatchedSocket):
            self.sock.watched()

    @property
    def is_connected(self) -> bool:
        """Whether the connection can be reused; not if unrequested bytes have arrived on it.

        The next response would begin with these bytes.
        """
        connected: bool = super().is_connected  # type: ignore[misc]  # urllib3's
        return connected and not (isinstance(self.sock, WatchedSocket) and self.sock.has_unread)


def pool_classes(
    calls: Mapping[int, Call], connect_limit: float, contexts: Contexts, watch: Watch
) -> dict[str, type[urllib3.HTTPConnectionPool]]:
    """Returns a class of urllib3 pools for each URL scheme, whose connections are watched."""
    shared = {
        "calls": calls,
        "connect_limit": connect_limit,
        "contexts": contexts,
        "watch": watch,
    }
    plain = type("Plain", (_Connecting, urllib3.connection.HTTPConnection, _Sending), shared)
    secure = type("Secure", (_Connecting, urllib3.connection.HTTPSConnection, _Sending), shared)
    return {
        "http": type("PlainPool", (urllib3.HTTPConnectionPool,), {"ConnectionCls": plain}),
        "https": type("SecurePool", (urllib3.HTTPSConnectionPool,), {"ConnectionCls": secure}),
    }
