"""An HTTP client on top of urllib3 that copies no large buffers, for the cloud stores.

urllib3 manages connections, TLS and proxies. This module sends bodies that are lists of memoryviews
and receives responses straight into memoryviews, in few system calls.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import logging
import re
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

import urllib3
import urllib3.exceptions

from cloudckpt._version import __version__
from cloudckpt.errors import (
    ConfigError,
    ConnectionLostError,
    InvalidRequestError,
    RangeNotSatisfiableError,
    ServerError,
)
from cloudckpt.stores.base import Body, Progress
from cloudckpt.stores.http.connections import (
    LONG,
    Call,
    Counter,
    Traffic,
    Watch,
    WatchedConnection,
    WatchedSocket,
    break_connection,
    pool_classes,
)
from cloudckpt.stores.http.expect import EXPECT
from cloudckpt.stores.http.failures import failure
from cloudckpt.stores.http.options import LONGER, Contexts, HttpOptions
from cloudckpt.stores.redaction import excerpt, masked, raise_without_context

__all__ = ["HttpClient", "Reply", "StoppedError", "proxy_url", "whole_number"]

_UNFIT = re.compile(r"[^\t\x20-\x7e\xa0-\xff]")  # characters not allowed in a header's value
_CONNECTING = 4  # times connect_timeout: TCP, TLS to the proxy, its response, TLS to the store
_USER_AGENT = f"cloudckpt/{__version__}"
_MOST_ERROR_BYTES = 64 * 1024
_MOST_CONTROL_BYTES = 16 * 1024 * 1024  # bytes; a page of 1,000 keys of 1 KiB each has about 2 MiB

# Each call releases the GIL and waits for it: a request of 16 MiB should be one call. Only on Linux
# can the watch see progress in the middle of a call; elsewhere a call must end in time.
STEP = (16 if sys.platform == "linux" else 4) * 1024 * 1024
"""The most bytes that one blocking call sends or receives."""

_SMALL = 64 * 1024
_GATHER = 256 * 1024


# http.client raises the last two for invalid chunk sizes
_BROKEN = (OSError, http.client.HTTPException, ValueError, OverflowError)


class StoppedError(Exception):
    """Carries an exception of ``progress`` through code that would take it for a network error."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _report(progress: Progress | None, count: int) -> None:
    """Calls `progress`; wraps its exceptions in StoppedError, to tell them from network errors."""
    if progress is not None:
        try:
            progress(count)
        except BaseException as error:
            raise StoppedError(error) from error


def steps(body: Body, progress: Progress | None) -> Iterator[memoryview | bytes]:
    """Yields a body in pieces to send: large views are split into steps, small ones are joined.

    Each piece costs a system call. `progress` is called after a piece was sent.
    """
    gathered: list[memoryview] = []
    waiting = 0
    for view in body:
        if view.nbytes < _SMALL:
            gathered.append(view)
            waiting += view.nbytes
            if waiting < _GATHER:
                continue
        if waiting:
            yield b"".join(gathered)
            _report(progress, waiting)
            gathered, waiting = [], 0
        if view.nbytes >= _SMALL:
            for start in range(0, view.nbytes, STEP):
                piece = view[start : start + STEP]
                yield piece
                _report(progress, piece.nbytes)
    if waiting:
        yield b"".join(gathered)
        _report(progress, waiting)


class Reply:
    """A response whose body has not been read yet."""

    def __init__(
        self,
        response: urllib3.response.BaseHTTPResponse,
        raw: http.client.HTTPResponse,
        sock: socket.socket | None,
        watch: Watch,
        longest: float,
        *,
        is_last: bool = False,
    ) -> None:
        """Wraps a response of urllib3.

        Args:
            response: The response of urllib3.
            raw: The response of the standard library, from which the body is read.
            sock: The connection's socket; None if there is none to watch.
            watch: Breaks the connection when it stalls.
            longest: Seconds that `read_all` and `read_refusal` may take.
            is_last: Whether the connection can't be used for another request.
        """
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers
        self._response = response
        self._raw = raw
        self._sock = sock
        self._watch = watch
        self._longest = longest
        self._is_last = is_last
        is_sized = not raw.chunked and raw.length is not None
        # whether a long read reports the bytes that arrived before the connection broke
        self._has_long_reads = is_sized and isinstance(sock, WatchedSocket) and sock.fills_buffers

    def check_range(self, start: int, size: int) -> int:
        """Checks that the response holds the requested range; returns the size of the whole object.

        Args:
            start: The first byte of the range.
            size: Bytes in the range.

        Raises:
            RangeNotSatisfiableError: If Content-Range shows that the object ends before the range.
            ServerError: If the response holds other bytes than the range.
            ValueError: If headers of the response are missing or can't be parsed.
        """
        wanted = f"{start}-{start + size - 1}"
        is_range = self.status != 200  # some stores ignore Range now and then
        if is_range:
            unit, _, span = self.headers.get("Content-Range", "").partition(" ")
            extent, _, total = span.partition("/")
            whole = whole_number(total if unit == "bytes" else None)
        else:
            whole = whole_number(self.headers.get("Content-Length"))
            extent = f"0-{whole - 1}"
        if extent == wanted and whole >= start + size:
            return whole
        offered = f"the store offered bytes {excerpt(extent)} of {whole} for the range {wanted}"
        if is_range and whole < start + size:
            raise RangeNotSatisfiableError(f"the object ends before the requested range: {offered}")
        raise ServerError(f"{offered}; check the endpoint and the proxy")

    def read_into(self, views: Sequence[memoryview], progress: Progress | None = None) -> None:
        """Receives the body into `views`, filling all of them.

        Raises:
            ConnectionLostError: If the body ends early or stalls; ``received`` is the number of
                bytes that arrived.
            StoppedError: If `progress` raises; `HttpClient.send` then raises that exception.
        """
        received = 0
        for view in views:
            done = 0
            while done < view.nbytes:
                piece, count = view[done : done + STEP], 0
                try:
                    with self._watch.step(self._sock, counter=Counter.RECEIVED):
                        if self._has_long_reads and piece.nbytes > LONG:
                            left = self._raw.length or 0
                            count = self._raw.fp.readinto1(piece[:left])
                            self._raw.length = left - count
                        else:
                            count = self._raw.readinto(piece)
                except _BROKEN as exc:
                    received += count  # some may have arrived before a stall
                    raise ConnectionLostError(
                        f"the connection broke after {received} bytes; check the network",
                        received=received,
                        cause=exc,
                    ) from exc
                if count == 0:
                    why = f"the response ended too early, after {received} bytes; check the network"
                    raise ConnectionLostError(why, received=received)
                done += count
                received += count
                _report(progress, count)

    def read_refusal(self) -> bytes:
        """Returns the body of an error response, as much of it as arrives, at most 64 KiB.

        The body of a 404 must arrive intact: it tells whether the store itself reports a missing
        object. So must the body of a 400: it tells whether a retry may help. No store sends an
        error of 64 KiB.

        Raises:
            ConnectionLostError: If the body of a 400 or 404 ends early or stalls.
        """
        data, error = self._received(_MOST_ERROR_BYTES)
        if error is not None and self.status in (400, 404) and len(data) < _MOST_ERROR_BYTES:
            raise error
        return data

    def read_all(self) -> bytes:
        """Returns the whole body of a response of moderate size, such as a page of a listing.

        Raises:
            ConnectionLostError: If the body ends early, stalls, takes more than ``longest``
                seconds, or is longer than 16 MiB.
        """
        data, error = self._received(_MOST_CONTROL_BYTES)
        if error is not None:
            raise error
        return data

    def _received(self, limit: int) -> tuple[bytes, ConnectionLostError | None]:
        """Reads at most `limit` bytes of the body.

        Each chunk of a chunked body counts as progress: S3 sends white space while it assembles an
        object from its parts.

        Returns:
            The bytes that arrived; and None if they are the whole body, else an error to raise.
        """
        data = bytearray()
        read = self._raw.read1 if self._raw.chunked else self._raw.read
        end = time.monotonic() + self._longest
        cause: BaseException | None = None
        try:
            while len(data) < limit:
                with self._watch.step(self._sock, counter=Counter.RECEIVED):
                    piece = read(limit - len(data))
                    data += piece  # here: the step may end in an error
                if not piece:
                    break
                if time.monotonic() > end:
                    raise TimeoutError(f"the response took more than {self._longest:.0f} s")
        except _BROKEN as exc:
            cause = exc
        if cause is None and self._raw.isclosed() and not self._raw.length:
            return bytes(data), None
        why = f"the response broke off after {len(data)} bytes; check the network"
        if cause is None and len(data) >= limit:
            why = f"the response is longer than {limit} bytes; check the endpoint and the proxy"
        error = ConnectionLostError(why, cause=cause)
        error.__cause__ = cause
        return bytes(data), error

    def close(self) -> None:
        """Returns the connection to the pool, or closes it if it can't be used again.

        Up to 64 KiB of the body are read for that. If more are unread, or an unknown number, the
        connection is closed.
        """
        # None: unknown; 0 also after HEAD, and for responses without a body
        left = self._raw.length
        try:
            if left == 0:
                with contextlib.suppress(*_BROKEN):
                    self._raw.read()  # lets the response notice its end
            elif left is not None and left <= _MOST_ERROR_BYTES:
                self._received(left)
        finally:
            if self._raw.isclosed() and not self._is_last:
                self._response.release_conn()
            else:
                self._response.close()


class HttpClient:
    """Keep-alive connections to the endpoints of one store, for one process and many threads."""

    def __init__(self, options: HttpOptions) -> None:
        for name in ("urllib3.connection", "urllib3.connectionpool"):
            logging.getLogger(name).addFilter(_hide_signatures)
        self._watch = Watch(options.config.stall_timeout)
        self._calls: dict[int, Call] = {}
        self._traffic = Traffic()
        self._options = options
        self._config = config = options.config
        self._timeout = urllib3.Timeout(connect=config.connect_timeout, read=config.read_timeout)
        # 64 more are kept while idle: listings and other transfers use the store meanwhile
        settings: dict[str, Any] = {"maxsize": config.most_connections + 64, "num_pools": 8}
        settings["socket_options"] = _socket_options()
        settings["cert_reqs"] = "CERT_REQUIRED"
        if options.proxy is None:
            self._manager = urllib3.PoolManager(**settings)
        else:
            proxy = proxy_url(options.proxy)
            headers = None
            if proxy.auth:
                user = base64.b64encode(unquote_to_bytes(proxy.auth)).decode("ascii")
                headers = {"proxy-authorization": f"Basic {user}"}
            self._manager = urllib3.ProxyManager(proxy.url, proxy_headers=headers, **settings)
        limit = _CONNECTING * config.connect_timeout
        self._manager.pool_classes_by_scheme = pool_classes(
            self._calls, limit, Contexts(options), self._watch
        )

    @contextlib.contextmanager
    def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: Body = (),
        progress: Progress | None = None,
        *,
        is_long: bool = False,
    ) -> Iterator[Reply]:
        """Sends one request and yields the response, whatever its status.

        Args:
            method: The HTTP method.
            url: The URL.
            headers: The headers; with ``Content-Length`` if there is a body.
            body: The bytes to send.
            progress: Called with the bytes sent, see :data:`~cloudckpt.stores.base.Progress`.
            is_long: Whether the response may take 15 times ``read_timeout`` to begin.

        Raises:
            ConnectionLostError: If no response came; ``certain`` if no connection was made.
            TLSError: If TLS fails for a lasting reason.
            InvalidRequestError: If a header or the URL is invalid, or the proxy refuses the host.
        """
        for name, value in headers.items():
            if _UNFIT.search(str(value)):  # http.client would quote the value in its error
                raise InvalidRequestError(
                    f"the value of the header {name} contains a line break or another character "
                    "that headers can't contain, so the request was not sent; copy the credentials "
                    "again, or correct the option that gives this value",
                    certain=True,
                )
        headers = {"User-Agent": _USER_AGENT, **headers}
        thread, limit = threading.get_ident(), self._config.read_timeout
        longest, option = LONGER * limit, "read_timeout"
        if is_long:
            limit, option = longest, f"{LONGER} times read_timeout"
        self._calls[thread] = Call(limit, option, asks_first=EXPECT.items() <= headers.items())
        try:
            try:
                response = self._manager.urlopen(
                    method,
                    url,
                    body=steps(body, progress) if body else None,
                    headers=headers,
                    timeout=self._timeout,
                    retries=False,
                    redirect=False,
                    preload_content=False,
                    decode_content=False,
                )
            except StoppedError as stopped:
                raise stopped.error from None
            except (urllib3.exceptions.LocationValueError, http.client.InvalidURL, UnicodeError):
                why = f"the URL of the {method} request is not valid: check the endpoint"
                raise_without_context(InvalidRequestError(why, certain=True))
            except (urllib3.exceptions.HTTPError, OSError, http.client.HTTPException) as exc:
                # the error has the text of its cause; the frames of urllib3 say nothing to users
                raise failure(exc, method, url, self._options.ca_bundle) from None
            connection: object = response.connection
            assert isinstance(connection, WatchedConnection)
            assert connection.raw_response is not None
            reply = Reply(
                response,
                connection.raw_response,
                connection.raw_sock,
                self._watch,
                longest,
                is_last=connection.is_spent,
            )
            try:
                yield reply
            except StoppedError as stopped:
                raise stopped.error from None
            finally:
                reply.close()
        finally:
            self._calls.pop(thread, None)

    def interrupt(self, threads: Collection[int]) -> None:
        """Implements :meth:`~cloudckpt.stores.base.RangeReader.interrupt`."""
        for thread in threads:
            call = self._calls.get(thread)
            if call is not None and call.connection is not None:
                break_connection(call.connection)

    def moved(self, threads: Collection[int]) -> Sequence[int] | None:
        """Implements :meth:`~cloudckpt.stores.base.RangeReader.moved`."""
        if not self._traffic.counts:
            return None
        calls = [self._calls.get(thread) for thread in threads]
        using = [None if call is None else call.connection for call in calls]
        return [0 if one is None else self._traffic.since(one) for one in using]

    def close(self) -> None:
        """Closes the idle connections and ends the thread of :class:`Watch`."""
        self._watch.close()
        self._manager.clear()


def _hide_signatures(record: logging.LogRecord) -> bool:
    """A log filter that removes credentials from urllib3's log records, and drops no record."""
    if isinstance(record.args, tuple):
        record.args = tuple(
            value if isinstance(value, (int, float)) else masked(str(value))
            for value in record.args
        )
    return True


def _socket_options() -> list[tuple[int, int, int]]:
    """Returns the socket options that send small requests at once and turn on TCP keep-alive.

    A response may take minutes. Meanwhile, NAT gateways drop idle connections (AWS's after 350 s,
    Azure's after 4 minutes), and a peer that has vanished would go unnoticed.
    """
    options = [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    ]
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, name):  # seconds idle, seconds between probes, number of probes
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options


def proxy_url(proxy: str) -> urllib3.util.Url:
    """Parses the URL of a proxy; ``http://`` may be omitted, as in other tools.

    Raises:
        ConfigError: If the URL is not usable; the message does not quote it, as it may hold a
            password.
    """
    with contextlib.suppress(urllib3.exceptions.LocationParseError):
        text = proxy if "://" in proxy else f"http://{proxy.removeprefix('//')}"
        url = urllib3.util.parse_url(text)
        if url.scheme in ("http", "https") and url.host:
            return url
    raise ConfigError(
        "HTTPS_PROXY (HTTP_PROXY for an http:// endpoint, or ALL_PROXY instead of them) does "
        "not name a usable proxy; write it as http://host:port or https://host:port (SOCKS is "
        "not supported)"
    )


_WHOLE = re.compile("[0-9]{1,18}")


def whole_number(text: str | None) -> int:
    """Parses a size in bytes from a response; raises ValueError unless it is 1 to 18 digits."""
    if text is None or not _WHOLE.fullmatch(text):
        raise ValueError("a size in the response is missing or invalid")
    return int(text)
