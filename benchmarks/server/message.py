"""The HTTP of the server: one parsed request, one answer, and how each crosses the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from urllib.parse import parse_qsl, unquote

from benchmarks.server.objects import Blob
from benchmarks.server.wire import ByteSource, Dechunked, Wire

_REASONS = {
    200: "OK",
    201: "Created",
    202: "Accepted",
    204: "No Content",
    206: "Partial Content",
    304: "Not Modified",
    400: "Bad Request",
    404: "Not Found",
    409: "Conflict",
    410: "Gone",
    412: "Precondition Failed",
    416: "Range Not Satisfiable",
    501: "Not Implemented",
    503: "Slow Down",
}


@dataclass(frozen=True)
class Request:
    """A request whose body has not been read yet."""

    method: str
    bucket: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]

    @property
    def keep_alive(self) -> bool:
        """Whether the client wants the connection again."""
        return self.headers.get("connection", "").lower() != "close"


@dataclass(frozen=True)
class Answer:
    """What the server says: a small body, or a stretch of an object's blobs."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    blobs: tuple[Blob, ...] = ()
    """With `start` and `length`: the object's bytes to send in place of `body`."""
    start: int = 0
    length: int = 0

    @property
    def content_length(self) -> int:
        """Bytes of the body."""
        return self.length if self.blobs else len(self.body)


def read_request(wire: Wire) -> Request:
    """Reads the request line and headers, and tells a waiting client to go on.

    Raises:
        PeerClosedError: If the client closed the connection.
    """
    method, target, _ = wire.readline().decode().split(" ", 2)
    headers: dict[str, str] = {}
    while line := wire.readline():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    if target.startswith("http://"):  # what clients send to a proxy, and some to any server
        target = "/" + target.split("/", 3)[3]
    path, _, query = target.partition("?")
    bucket, _, key = unquote(path).lstrip("/").partition("/")
    if headers.get("expect", "").lower() == "100-continue":
        wire.send(b"HTTP/1.1 100 Continue\r\n\r\n")
    return Request(method, bucket, key, dict(parse_qsl(query, keep_blank_values=True)), headers)


class Body:
    """A request's body behind whatever framing the client put around it."""

    def __init__(self, wire: Wire, headers: Mapping[str, str]) -> None:
        self._decoders: list[Dechunked] = []
        source: ByteSource = wire
        length = int(headers.get("content-length", 0))
        known = True
        if "chunked" in headers.get("transfer-encoding", "").lower():
            source = self._decode(source)
            known = False
        streaming = headers.get("x-amz-content-sha256", "").startswith("STREAMING-")
        if streaming or "aws-chunked" in headers.get("content-encoding", "").lower():
            source = self._decode(source)
            known = "x-amz-decoded-content-length" in headers
            length = int(headers.get("x-amz-decoded-content-length", 0))
        self._source = source
        self._length = length if known else None

    def _decode(self, source: ByteSource) -> Dechunked:
        decoder = Dechunked(source)
        self._decoders.append(decoder)
        return decoder

    def read(self) -> bytes:
        """Returns the whole body: for XML and JSON."""
        if self._length is None:
            return self._decoders[-1].read_all()
        data = bytearray(self._length)
        self._source.readinto(memoryview(data))
        self._finish()
        return bytes(data)

    def receive(self, *, sink: bool) -> Blob:
        """Stores or drops the body and returns its blob."""
        if self._length is None:
            data = self.read()
            return Blob(len(data), data=data)
        blob = Blob.receive(self._source, self._length, sink=sink)
        self._finish()
        return blob

    def readline(self) -> bytes:
        """Returns the next line without its CRLF: for bodies with a head of their own.

        Raises:
            ValueError: If the body has no known length, or ends first.
        """
        line = self._source.readline()
        self._take(len(line) + 2)
        return line

    def receive_until(self, tail: int, *, sink: bool) -> Blob:
        """Like `receive` for all but the last `tail` bytes of what is left.

        Raises:
            ValueError: If the body has no known length.
        """
        count = max(0, (self._length or 0) - tail)
        self._take(count)
        return Blob.receive(self._source, count, sink=sink)

    def _take(self, count: int) -> None:
        if self._length is None or count > self._length:
            raise ValueError("the body ends too soon, or does not say where")
        self._length -= count

    def skip_half(self) -> None:
        """Drops about half of the body, for faults that strike in the middle."""
        if self._length is not None:
            self._source.skip(self._length // 2)

    def _finish(self) -> None:
        for decoder in reversed(self._decoders):
            decoder.finish()


def send_head(wire: Wire, answer: Answer, *, head: bool) -> None:
    """Sends the status line and headers, together with a small body unless `head`."""
    lines = [f"HTTP/1.1 {answer.status} {_REASONS.get(answer.status, 'Status')}"]
    headers = {"Date": http_date(None), "Server": "bench", **answer.headers}
    if answer.status not in (204, 304):
        headers.setdefault("Content-Length", str(answer.content_length))
    lines += [f"{name}: {value}" for name, value in headers.items()]
    data = "\r\n".join([*lines, "", ""]).encode("latin-1")
    wire.send(data if head else data + answer.body)


def send_blobs(wire: Wire, answer: Answer, count: int) -> None:
    """Sends the first `count` bytes of the stretch of blobs that `answer` names."""
    position = 0
    start, end = answer.start, answer.start + count
    for blob in answer.blobs:
        low, high = max(start - position, 0), min(end - position, blob.length)
        position += blob.length
        if low >= high:
            continue
        if blob.data is not None:
            wire.send(blob.data[low:high])
        elif blob.fd is not None:
            wire.sendfile(blob.fd, low, high - low)


def http_date(timestamp: float | None) -> str:
    """Formats seconds since the epoch, or now, as HTTP wants it."""
    return _http_date(int(timestamp)) if timestamp is not None else formatdate(usegmt=True)


@lru_cache(maxsize=1024)
def _http_date(timestamp: int) -> str:
    return formatdate(timestamp, usegmt=True)
