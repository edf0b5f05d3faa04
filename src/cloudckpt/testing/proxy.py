"""A proxy that breaks things: what a checkpoint does when the network or the store misbehaves.

It stands between a client and an S3 emulator, and does to chosen requests what a fault says::

    from cloudckpt.testing.proxy import FaultyProxy
    from cloudckpt.testing.wire_faults import Reset, slow_down

    with FaultyProxy("http://127.0.0.1:5000") as proxy:
        proxy.inject(Reset("answer"), operation="UploadPart", times=2)
        proxy.inject(slow_down(), probability=0.1)
        s3 = S3Options(endpoint_url=proxy.url, addressing_style="path")
        cloudckpt.save(state_dict, checkpoint_id="s3://bucket/step-1", config=Config(s3=s3))
        assert len(proxy.requests(operation="CompleteMultipartUpload")) == 1

The proxy speaks HTTP/1.1 without TLS, on loopback, in threads of this process. Whole bodies pass
through its memory. A request whose body breaks off is never forwarded, as no store would accept it.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import http.client
import itertools
import random
import select
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import BinaryIO, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

__all__ = ["Answer", "Exchange", "Fault", "FaultyProxy", "Headers", "Hop", "Request", "Rule"]

Headers = tuple[tuple[str, str], ...]
"""Names and values, in order."""

_Self = TypeVar("_Self", bound="FaultyProxy")

_NOT_FORWARDED = {"connection", "content-length", "expect", "keep-alive", "transfer-encoding"}
_UPSTREAM_TIMEOUT = 120.0
_LONGEST_LINE = 65536
_LEFT: int = getattr(select, "POLLRDHUP", 0)  # Linux: the peer has sent its FIN
_PATIENCE = 2.0  # seconds that a client which does not read can delay a reset


@dataclass(frozen=True)
class Request:
    """What the client asks for.

    Attributes:
        number: Its place in the order of arrival at the proxy, from 1.
        method: The HTTP method.
        target: Path and query, as they stand in the request line.
        headers: Names and values, as they were sent.
    """

    number: int
    method: str
    target: str
    headers: Headers

    @property
    def path(self) -> str:
        """The path, percent-decoded: ``/bucket/key`` with path-style addressing."""
        return unquote(urlsplit(self.target).path)

    @property
    def query(self) -> dict[str, str]:
        """The parameters behind the question mark."""
        return dict(parse_qsl(urlsplit(self.target).query, keep_blank_values=True))

    def header(self, name: str) -> str | None:
        """The value of a header, if there is one."""
        found = (value for key, value in self.headers if key.lower() == name.lower())
        return next(found, None)

    @property
    def byte_range(self) -> tuple[int, int] | None:
        """The first byte that ``Range`` asks for and the one behind the last, if it does."""
        unit, _, span = (self.header("Range") or "").partition("=")
        first, _, last = span.partition("-")
        if unit != "bytes" or not first.isdigit() or not last.isdigit():
            return None
        return int(first), int(last) + 1

    @property
    def operation(self) -> str:
        """The name of the S3 operation, if addressing is path-style; otherwise the method."""
        query, keyed = self.query, "/" in self.path.strip("/")
        known: list[tuple[str, bool, str]] = [
            ("PUT", keyed and "partNumber" in query, "UploadPart"),
            ("PUT", keyed, "PutObject"),
            ("POST", "uploads" in query, "CreateMultipartUpload"),
            ("POST", "uploadId" in query, "CompleteMultipartUpload"),
            ("POST", "delete" in query, "DeleteObjects"),
            ("GET", "uploads" in query, "ListMultipartUploads"),
            ("GET", keyed and "uploadId" in query, "ListParts"),
            ("GET", keyed, "GetObject"),
            ("GET", "list-type" in query, "ListObjectsV2"),
            ("HEAD", keyed, "HeadObject"),
            ("DELETE", keyed and "uploadId" in query, "AbortMultipartUpload"),
            ("DELETE", keyed, "DeleteObject"),
        ]
        for method, fits, name in known:
            if method == self.method and fits:
                return name
        return self.method


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
        answered: The status that the client was sent, or None.
    """

    request: Request
    fault: Fault | None = None
    carried_out: int | None = None
    answered: int | None = None


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
        self._chunked = "chunked" in (self.request.header("Transfer-Encoding") or "").lower()
        self._invited = False

    def take(self, count: int) -> None:
        """Reads on in the request's body, to its byte ``count`` or to its end."""
        if not self._invited and (self.request.header("Expect") or "").lower() == "100-continue":
            self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._invited = True
        if self._chunked:
            self._received += b"".join(_chunks(self._stream))
            self._length, self._chunked = len(self._received), False
        missing = min(count, self._length) - len(self._received)
        if missing > 0:
            self._received += _exactly(self._stream, missing)

    def body(self) -> bytes:
        """The whole body of the request."""
        self.take(self._length)
        return bytes(self._received)

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
        self._exchange.answered = answer.status
        self._write(self.head(answer) + self.payload(answer)[:stop])

    def drip(self, data: bytes, interval: float) -> None:
        """Sends the client one byte every ``interval`` seconds."""
        for position in range(len(data)):
            self._write(data[position : position + 1])
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
        while view.nbytes:
            [(_, event)] = poll.poll()
            if event & ~select.POLLOUT:
                raise ConnectionError("the client left in the middle of its answer")
            with contextlib.suppress(BlockingIOError):
                view = view[self._client.send(view, socket.MSG_DONTWAIT) :]

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

    Those for common troubles are in :mod:`cloudckpt.testing.wire_faults`.
    """

    def inflict(self, hop: Hop) -> None:
        """Does it, in the thread of the connection."""
        hop.send(hop.forward())


@dataclass
class Rule:
    """Which requests a fault befalls; made by :meth:`FaultyProxy.inject`.

    Attributes:
        fault: The fault.
        seen: Requests that it was meant for, so far.
        injected: Those that it befell.
    """

    fault: Fault
    operation: str
    path: str
    where: Callable[[Request], bool]
    skip: int
    times: int | None
    probability: float
    random: random.Random
    seen: int = field(default=0, init=False)
    injected: int = field(default=0, init=False)

    def strikes(self, request: Request) -> bool:
        """Whether the fault befalls this request, which counts from now on."""
        if not _fits(request, self.operation, self.path) or not self.where(request):
            return False
        self.seen += 1
        if self.seen <= self.skip or (self.times is not None and self.injected >= self.times):
            return False
        if self.probability < 1.0 and self.random.random() >= self.probability:
            return False
        self.injected += 1
        return True


class FaultyProxy:
    """Listens on a free port of the loopback interface from its construction to :meth:`close`.

    Attributes:
        url: The endpoint to give to the client.
    """

    def __init__(self, upstream: str, *, seed: int = 0) -> None:
        """
        Args:
            upstream: ``http://host:port`` of the server.
            seed: What the draws of ``probability`` start from.

        Raises:
            ValueError: If ``upstream`` is no plain HTTP endpoint.
        """
        parts = urlsplit(upstream)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"{upstream!r} is no http://host:port")
        self._upstream = (parts.hostname, parts.port or 80)
        self._seed = seed
        self._numbers = itertools.count(1)
        self._rules: list[Rule] = []
        self._log: list[Exchange] = []
        self._changed = threading.Condition()  # guards all below
        self._under_way: dict[int, Request] = {}
        self._clients: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._listener.settimeout(0.1)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept, "faulty-proxy")

    def inject(
        self,
        fault: Fault,
        *,
        operation: str = "*",
        path: str = "*",
        where: Callable[[Request], bool] = lambda request: True,
        skip: int = 0,
        times: int | None = None,
        probability: float = 1.0,
    ) -> Rule:
        """From now on, does something to some requests; of several rules the first one that fits.

        Args:
            fault: What to do.
            operation: S3 operations, as a pattern like ``UploadPart`` or ``*Multipart*``.
            path: Paths, as a pattern like ``*/.metadata``.
            where: What else must be true of a request.
            skip: Requests of this kind that pass before.
            times: How many requests the fault befalls; None for all.
            probability: How likely it befalls each of them.
        """
        with self._changed:
            seeded = random.Random(f"{self._seed}/{len(self._rules)}")
            rule = Rule(fault, operation, path, where, skip, times, probability, seeded)
            self._rules.append(rule)
        return rule

    def clear(self) -> None:
        """Forgets all rules and the log; what stalls goes on stalling."""
        with self._changed:
            self._rules.clear()
            self._log.clear()

    @property
    def exchanges(self) -> list[Exchange]:
        """The log, in the order of arrival."""
        with self._changed:
            return list(self._log)

    def requests(self, operation: str = "*", path: str = "*") -> list[Request]:
        """The requests in the log that fit two patterns; see :meth:`inject`."""
        logged = (exchange.request for exchange in self.exchanges)
        return [request for request in logged if _fits(request, operation, path)]

    @property
    def under_way(self) -> list[Request]:
        """The requests that are neither dealt with nor stalled."""
        with self._changed:
            return list(self._under_way.values())

    def wait_idle(self, seconds: float = 10.0) -> bool:
        """Waits until every request is dealt with or stalls; whether that came true in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._under_way, seconds)

    def close(self) -> None:
        """Ends all connections and threads."""
        self._closing.set()
        with self._changed:
            clients, threads = list(self._clients), list(self._threads)
        for client in clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(10)
        self._listener.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self, target: Callable[..., None], name: str, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        self._threads = [known for known in self._threads if known.is_alive()]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(TimeoutError):
                client, _ = self._listener.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._changed:
                    self._clients.add(client)
                    self._start(self._serve, "faulty-proxy-connection", client)

    def _serve(self, client: socket.socket) -> None:
        """One connection, request after request."""
        stream = client.makefile("rb")
        try:
            # a peer that leaves ends its own connection and nothing else
            with contextlib.suppress(OSError, http.client.HTTPException):
                while self._pass_on(client, stream):
                    pass
        finally:
            stream.close()
            client.close()
            with self._changed:
                self._clients.discard(client)

    def _pass_on(self, client: socket.socket, stream: BinaryIO) -> bool:
        """One request; returns whether another one may follow."""
        exchange = self._next(stream)
        if exchange is None:
            return False
        hop = Hop(exchange, client, stream, self._upstream, self._closing, self._settle)
        try:
            (exchange.fault or Fault()).inflict(hop)
        finally:
            if hop.over:
                stream.close()
                client.close()
            self._settle(exchange)
        return not hop.over

    def _settle(self, exchange: Exchange) -> None:
        with self._changed:
            self._under_way.pop(exchange.request.number, None)
            self._changed.notify_all()

    def _next(self, stream: BinaryIO) -> Exchange | None:
        """Reads the head of a request and decides its fate."""
        line = _line(stream)
        if not line:
            return None
        method, target, _ = line.split(" ", 2)
        headers: list[tuple[str, str]] = []
        while text := _line(stream):
            name, _, value = text.partition(":")
            headers.append((name.strip(), value.strip()))
        with self._changed:
            request = Request(next(self._numbers), method, target, tuple(headers))
            struck = (rule.fault for rule in self._rules if rule.strikes(request))
            exchange = Exchange(request, next(struck, None))
            self._log.append(exchange)
            self._under_way[request.number] = request
        return exchange


def _fits(request: Request, operation: str, path: str) -> bool:
    return fnmatch.fnmatchcase(request.operation, operation) and fnmatch.fnmatchcase(
        request.path, path
    )


def _unacknowledged(sock: socket.socket) -> int:
    """Bytes that were sent and have not arrived."""
    answer = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
    count: int = struct.unpack("i", answer)[0]
    return count


def _line(stream: BinaryIO) -> str:
    return stream.readline(_LONGEST_LINE).rstrip(b"\r\n").decode("latin-1")


def _exactly(stream: BinaryIO, count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise ConnectionError("the client left in the middle of its request")
    return data


def _chunks(stream: BinaryIO) -> Iterator[bytes]:
    """The payload of ``Transfer-Encoding: chunked``, without its trailers."""
    while size := int(_line(stream).partition(";")[0] or "0", 16):
        yield _exactly(stream, size)
        _line(stream)
    while _line(stream):
        pass
