"""A request on its way through the proxy, and what a fault can do to it there."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import select
import socket
import ssl
import struct
import termios
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

from support.wire.request import Headers, Request, read_exactly

_NOT_FORWARDED = {"connection", "content-length", "expect", "keep-alive", "transfer-encoding"}
_UPSTREAM_TIMEOUT = 120.0
_LEFT: int = getattr(select, "POLLRDHUP", 0)  # Linux: the peer has sent its FIN
_LITTLE = 16 * 1024  # bytes in a buffer that is to fill soon
_BEAT = 0.05  # seconds between two pieces of what moves slowly
_PATIENCE = 2.0  # seconds that a client which does not read can delay a reset


@dataclass(frozen=True)
class Answer:
    """What the server, or a fault in its place, answers."""

    status: int
    reason: str
    headers: Headers
    body: bytes


@dataclass
class Exchange:
    """A line of the proxy's log.

    Attributes:
        request: The request.
        fault: What was done to it, or None.
        carried_out: The status that the server gave it, or None if it never got there.
    """

    request: Request
    fault: Fault | None = None
    carried_out: int | None = None


class Hop:
    """A request on its way through the proxy, in the hands of a :class:`Fault`."""

    def __init__(
        self,
        exchange: Exchange,
        client: socket.socket,
        stream: BinaryIO,
        upstream: tuple[str, int],
        closing: threading.Event,
        settle: Callable[[Exchange], None],
    ) -> None:
        self.request = exchange.request
        self.over = False  # whether the connection has ended
        self._exchange = exchange
        self._client = client
        self._stream = stream
        self._upstream = upstream
        self._closing = closing
        self._settle = settle
        self._received = bytearray()
        self._length = int(self.request.header("Content-Length") or 0)
        self._invited = False

    def take(self, count: int) -> None:
        """Reads on in the request's body, to its byte ``count`` or to its end."""
        if not self._invited and (self.request.header("Expect") or "").lower() == "100-continue":
            self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._invited = True
        missing = min(count, self._length) - len(self._received)
        if missing > 0:
            self._received += read_exactly(self._stream, missing)

    def body(self) -> bytes:
        """The whole body of the request."""
        self.take(self._length)
        return bytes(self._received)

    def take_slowly(self, rate: float) -> None:
        """Reads the request's body at ``rate`` bytes a second, and buffers little beyond."""
        self._client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LITTLE)
        piece = max(1, round(rate * _BEAT))
        while len(self._received) < self._length and not self._closing.wait(_BEAT):
            self.take(len(self._received) + piece)

    def forward(self, request: Request | None = None, body: bytes | None = None) -> Answer:
        """Has the server carry out the request, or another one in its place."""
        request = self.request if request is None else request
        data = self.body() if body is None else body
        connection = http.client.HTTPConnection(*self._upstream, timeout=_UPSTREAM_TIMEOUT)
        with contextlib.closing(connection):
            connection.putrequest(
                request.method, request.target, skip_host=True, skip_accept_encoding=True
            )
            for name, value in request.headers:
                if name.lower() not in _NOT_FORWARDED:
                    connection.putheader(name, value)
            connection.putheader("Connection", "close")
            if data or request.method in ("PUT", "POST"):
                connection.putheader("Content-Length", str(len(data)))
            connection.endheaders(data or None)
            response = connection.getresponse()
            headers = tuple(response.getheaders())
            answer = Answer(response.status, response.reason, headers, response.read())
        self._exchange.carried_out = answer.status
        return answer

    def send(self, answer: Answer, *, stop: int | None = None) -> None:
        """Answers the client, with the first ``stop`` bytes of the announced body if given."""
        self.body()  # else its rest would be taken for the next request
        self._write(self.head(answer) + self.payload(answer)[:stop])

    def send_slowly(self, answer: Answer, rate: float) -> None:
        """Answers the client, with the body at ``rate`` bytes a second."""
        self.send(answer, stop=0)
        self.drip(self.payload(answer), _BEAT, max(1, round(rate * _BEAT)))

    def drip(self, data: bytes, interval: float, size: int = 1) -> None:
        """Sends the client ``size`` bytes every ``interval`` seconds."""
        for position in range(0, len(data), size):
            self._write(data[position : position + size])
            if self._closing.wait(interval):
                return

    def head(self, answer: Answer) -> bytes:
        """Status line and headers."""
        lines = [f"HTTP/1.1 {answer.status} {answer.reason}"]
        bodiless = self.request.method == "HEAD" or answer.status in (204, 304)
        dropped = {"connection", "keep-alive", "transfer-encoding"}
        dropped |= set() if bodiless else {"content-length"}
        kept = [pair for pair in answer.headers if pair[0].lower() not in dropped]
        lines += [f"{name}: {value}" for name, value in kept]
        if not bodiless:
            lines.append(f"Content-Length: {len(answer.body)}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def payload(self, answer: Answer) -> bytes:
        """The body, if the request is one whose answer has a body."""
        return b"" if self.request.method == "HEAD" else answer.body

    def pause(self, seconds: float) -> None:
        """Waits, whether the client does or not."""
        self._closing.wait(seconds)

    def stall(self) -> None:
        """Does nothing more until the client is seen to leave, or the proxy is closed."""
        self._settle(self._exchange)
        poll = select.poll()
        poll.register(self._client, _LEFT)
        while not self._closing.is_set() and not poll.poll(20):
            pass
        self.over = True

    def _write(self, data: bytes) -> None:
        """Sends to the client; gives up if it leaves, which a blocking send may never notice."""
        view, poll = memoryview(data), select.poll()
        poll.register(self._client, select.POLLOUT | _LEFT)
        self._client.setblocking(False)
        try:
            while view.nbytes:
                [(_, event)] = poll.poll()
                if event & ~select.POLLOUT:
                    raise ConnectionError("the client left in the middle of its answer")
                with contextlib.suppress(BlockingIOError, ssl.SSLWantWriteError):
                    view = view[self._client.send(view) :]
        finally:
            self._client.setblocking(True)

    def hang_up(self) -> None:
        """Ends the connection in an orderly way (FIN)."""
        self.over = True

    def reset(self) -> None:
        """Ends the connection with a RST, once the client's side has what was sent."""
        deadline = time.monotonic() + _PATIENCE
        while _unacknowledged(self._client) and time.monotonic() < deadline:
            time.sleep(0.002)
        self._client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.over = True


class Fault:
    """What happens to a request. This one lets it pass; subclasses override :meth:`inflict`.

    Those for common troubles are in :mod:`wire.faults`.
    """

    def inflict(self, hop: Hop) -> None:
        """Does it, in the thread of the connection."""
        hop.send(hop.forward())


def _unacknowledged(sock: socket.socket) -> int:
    """Bytes that were sent and have not arrived."""
    answer = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
    count: int = struct.unpack("i", answer)[0]
    return count
