"""A zero-copy HTTP client for the cloud stores, on top of urllib3.

urllib3 manages connections, TLS and proxies. This module adds what large buffers need: bodies that
are lists of memoryviews, responses received straight into memoryviews, and a watch that breaks
connections without progress.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import functools
import http.client
import logging
import re
import socket
import ssl
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

import urllib3
import urllib3.connection
import urllib3.exceptions
import urllib3.util.ssl_

from cloudckpt._version import __version__
from cloudckpt.errors import ConfigError, ConnectionLostError, InvalidRequestError, StoreError
from cloudckpt.stores.base import Body, Progress
from cloudckpt.stores.http.bodies import Reply, StoppedError, steps
from cloudckpt.stores.http.expect import EXPECT, early_answer, resumed
from cloudckpt.stores.http.native_tls import (
    BodyReader,
    LongReadSocket,
    WatchedSocket,
    has_unread,
)
from cloudckpt.stores.http.options import LONGER, Contexts, HttpOptions
from cloudckpt.stores.http.stalls import (
    Connection,
    Counter,
    LateError,
    Traffic,
    Watch,
    break_connection,
)
from cloudckpt.stores.http.tls_errors import causes, lasting_failure
from cloudckpt.stores.redaction import masked, raise_alone, told

__all__ = ["HttpClient", "HttpOptions", "proxy_url"]

_UNFIT = re.compile(r"[^\t\x20-\x7e\xa0-\xff]")  # characters not allowed in a header's value
_CONNECTING = 4  # times connect_timeout: TCP, TLS to the proxy, its response, TLS to the store
_USER_AGENT = f"cloudckpt/{__version__}"
_TUNNEL = re.compile(r"Tunnel connection failed: (4\d\d)\b.*")


@dataclass(eq=False)
class _Call:
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


class _Ours(http.client.HTTPConnection):
    """The attributes that `_Connecting` above urllib3's class and `_Watched` below it share."""

    sock: socket.socket | None
    # set as class attributes by _pool_classes:
    calls: Mapping[int, _Call]  # by thread identifier
    connect_limit: float  # seconds
    contexts: Contexts
    watch: Watch
    connecting: bool = False
    is_spent: bool = False  # whether the server still waits for a body: no other request can follow
    # the beginning of the response, read while the request waited for 100 Continue
    begun: bytes = b""
    raw_response: http.client.HTTPResponse | None = None
    raw_sock: socket.socket | None = None

    def close(self) -> None:
        """Closes the connection, and its last response if there is one.

        Such a response would keep the socket open: the connection forgets its socket if the
        response ends with it, and also if the watch cut the headers off.
        """
        super().close()
        if self.raw_response is not None:
            self.raw_response.close()


class _Watched(_Ours):
    """The connection class below urllib3's: sends requests and receives responses under the watch.

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
        if call.asks_first and isinstance(self.sock, socket.socket):  # this call sent the headers
            call.asks_first = False
            self.is_spent, self.begun = early_answer(self.sock)
            if self.is_spent:  # BrokenPipeError makes urllib3 read the response
                raise BrokenPipeError(errno.EPIPE, "the server answered before the body was sent")

    def getresponse(self) -> http.client.HTTPResponse:
        answer: Any = http.client.HTTPResponse
        if self.begun:
            answer = functools.partial(_ResumedResponse, begun=self.begun)
            self.begun = b""
        self.response_class = answer
        self.raw_sock = self.sock  # super() drops it if the server closes the connection
        if self.sock is not None:
            self.sock.settimeout(None)  # urllib3 has set a timeout
        call = self.calls[threading.get_ident()]
        late = f"the server did not answer within {call.limit:g} s ({call.option})"
        # the end of the body may still be on its way, which does not count as the server's delay
        with self.watch.step(self.raw_sock, late, call.limit, Counter.ACKNOWLEDGED):
            self.raw_response = super().getresponse()
        reader: object = self.raw_response.fp
        if isinstance(reader, BodyReader) and isinstance(self.raw_sock, WatchedSocket):
            reader.has_chunks = self.raw_response.chunked or not self.raw_sock.fills_buffers
        return self.raw_response


class _ResumedResponse(http.client.HTTPResponse):
    """A response whose first bytes were read earlier, while the request waited for 100 Continue."""

    fp: Any

    def __init__(self, *args: Any, begun: bytes, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fp = resumed(self.fp, begun)


class _Connecting(_Ours):
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
        self.connecting, self.is_spent, self.begun = True, False, b""
        try:
            with self.watch.step(self, late, self.connect_limit):
                super().connect()
        finally:
            self.connecting = False
        if type(self.sock) is socket.socket:
            self.sock = LongReadSocket.of(self.sock)
        if isinstance(self.sock, WatchedSocket):
            self.sock.watched()

    @property
    def is_connected(self) -> bool:
        """Whether the connection can be reused; not if unrequested bytes have arrived on it.

        The next response would begin with these bytes.
        """
        connected: bool = super().is_connected  # type: ignore[misc]  # urllib3's
        return connected and not (isinstance(self.sock, ssl.SSLSocket) and has_unread(self.sock))


def _pool_classes(
    options: HttpOptions, watch: Watch, calls: Mapping[int, _Call]
) -> dict[str, type[urllib3.HTTPConnectionPool]]:
    """Returns urllib3's connection pools, with connections that are watched."""
    shared = {
        "calls": calls,
        "connect_limit": _CONNECTING * options.connect_timeout,
        "contexts": Contexts(options),
        "watch": watch,
    }
    plain = type("Plain", (_Connecting, urllib3.connection.HTTPConnection, _Watched), shared)
    secure = type("Secure", (_Connecting, urllib3.connection.HTTPSConnection, _Watched), shared)
    return {
        "http": type("PlainPool", (urllib3.HTTPConnectionPool,), {"ConnectionCls": plain}),
        "https": type("SecurePool", (urllib3.HTTPSConnectionPool,), {"ConnectionCls": secure}),
    }


class HttpClient:
    """Keep-alive connections to the endpoints of one store, for one process and many threads."""

    def __init__(self, options: HttpOptions) -> None:
        for name in ("urllib3.connection", "urllib3.connectionpool"):
            logging.getLogger(name).addFilter(_hide_signatures)
        self._watch = Watch(options.stall_timeout)
        self._calls: dict[int, _Call] = {}
        self._traffic = Traffic()
        self._options = options
        self._timeout = urllib3.Timeout(connect=options.connect_timeout, read=options.read_timeout)
        self._manager = self._new_manager(options)

    def _new_manager(self, options: HttpOptions) -> urllib3.PoolManager:
        settings: dict[str, Any] = {"maxsize": options.connections, "num_pools": 8}
        settings["socket_options"] = _socket_options()
        settings["cert_reqs"] = "CERT_REQUIRED" if options.verify_tls else "CERT_NONE"
        if options.proxy is None:
            manager = urllib3.PoolManager(**settings)
        else:
            proxy = proxy_url(options.proxy)
            headers = None
            if proxy.auth:
                user = base64.b64encode(unquote_to_bytes(proxy.auth)).decode("ascii")
                headers = {"proxy-authorization": f"Basic {user}"}
            manager = urllib3.ProxyManager(proxy.url, proxy_headers=headers, **settings)
        manager.pool_classes_by_scheme = _pool_classes(options, self._watch, self._calls)
        return manager

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
            is_long: Whether the response may begin as late as 15 times ``read_timeout``.

        Raises:
            ConnectionLostError: If no response came; ``certain`` if no connection was made.
            TLSError: If TLS fails for a lasting reason.
            InvalidRequestError: If a header or the URL is invalid, or the proxy refuses the host.
        """
        for name, value in headers.items():
            if _UNFIT.search(str(value)):  # http.client would quote the value in its error
                raise InvalidRequestError(
                    f"the header {name} can't be sent: it contains a line break or another "
                    "character that is not allowed in headers; copy the credentials again, or "
                    "correct the option that it comes from",
                    certain=True,
                )
        headers = {"User-Agent": _USER_AGENT, **headers}
        options, thread = self._options, threading.get_ident()
        limit, option = options.read_timeout, "read_timeout"
        if is_long:
            limit, option = options.completion_timeout, f"{LONGER} times read_timeout"
        self._calls[thread] = _Call(limit, option, asks_first=EXPECT.items() <= headers.items())
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
                raise_alone(
                    InvalidRequestError(
                        f"the URL of the {method} request is not valid: check the endpoint",
                        certain=True,
                    )
                )
            except (urllib3.exceptions.HTTPError, OSError, http.client.HTTPException) as exc:
                host = urlsplit(url).netloc.rpartition("@")[2]
                lasting = _refused_by_proxy(exc, host) or lasting_failure(
                    exc, host, bundle=options.ca_bundle
                )
                if lasting is not None:
                    raise lasting from exc
                unsent = _never_connected(exc)
                why = f"no connection to {host}" if unsent else f"no answer from {host}"
                raise ConnectionLostError(
                    f"{why} to a {method} request: check that the endpoint is right and answers "
                    "(cloudckpt doctor)",
                    cause=_plain(exc),
                    certain=unsent,
                ) from exc
            connection: object = response.connection
            if not isinstance(connection, _Ours) or connection.raw_response is None:
                raise TypeError(
                    "urllib3 did not use the connection class of cloudckpt: install a "
                    "supported version of urllib3"
                )
            reply = Reply(
                response,
                connection.raw_response,
                connection.raw_sock,
                self._watch,
                options.completion_timeout,
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
        """Breaks the connections of these threads (by identifier); their requests fail soon."""
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
        """Closes the idle connections and ends the watch's thread."""
        self._watch.close()
        self._manager.clear()


def _hide_signatures(record: logging.LogRecord) -> bool:
    """A log filter that removes signatures from the URLs in urllib3's log records."""
    if isinstance(record.args, tuple):
        record.args = tuple(
            value if isinstance(value, (int, float)) else masked(str(value))
            for value in record.args
        )
    return True


def _socket_options() -> list[tuple[int, int, int]]:
    """Returns socket options that turn off delays of small requests and turn on TCP keep-alive.

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


def _refused_by_proxy(exc: BaseException, host: str) -> StoreError | None:
    """Returns the error if a proxy refuses the host for good; None if it may accept later."""
    said = _TUNNEL.search(told(str(exc)))
    if said is None or int(said[1]) in (408, 425, 429):
        return None
    advice = (
        "write a user and a password into its URL"
        if said[1] == "407"
        else "configure it to allow this host, use another proxy, or add the host to NO_PROXY"
    )
    return InvalidRequestError(
        f"the proxy that HTTPS_PROXY (or ALL_PROXY) names refuses to connect to {host}: {advice}",
        cause=said[0],
        certain=True,
    )


def _never_connected(exc: BaseException) -> bool:
    """Returns whether the request was never sent because no connection could be made."""
    inner = getattr(exc, "original_error", exc)  # urllib3's ProxyError wraps it
    # also for refused connections and unresolved names
    return isinstance(inner, urllib3.exceptions.ConnectTimeoutError)


def _plain(exc: BaseException) -> str:
    """Returns the innermost cause of an exception, without urllib3's wrapping."""
    for inner in causes(exc):
        if isinstance(inner, LateError):  # urllib3 would only report a timeout
            return str(inner)
    reason = getattr(exc, "reason", None)
    inner = reason if isinstance(reason, BaseException) else exc
    text = re.sub(r"^\w+\(host=.*?\): ", "", str(inner).rpartition(">: ")[2] or str(inner))
    return f"{type(inner).__name__}: {told(text)}"
