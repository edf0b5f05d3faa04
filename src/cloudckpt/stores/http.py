"""The zero-copy HTTP layer under the cloud stores.

urllib3 keeps the connections, speaks TLS and finds its way through proxies. This module adds what
a mover of large buffers needs: bodies that are lists of memoryviews, answers received straight into
memoryviews, and a watch that ends a connection which no longer makes progress.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import urllib3
import urllib3.connection
import urllib3.exceptions

from cloudckpt.errors import ConnectionLostError
from cloudckpt.stores.base import Body, Progress
from cloudckpt.stores.watch import Watch, break_connection

__all__ = ["HttpClient", "HttpOptions", "Reply"]

STEP = 4 * 1024 * 1024
"""Bytes that one blocking call moves: few enough to notice a stall. With steps of 1 MiB an upload
took 15 % more CPU."""

_SMALL = 64 * 1024
_GATHER = 256 * 1024
_MOST_ERROR_BYTES = 64 * 1024
_MOST_CONTROL_BYTES = 16 * 1024 * 1024  # a page of 1,000 keys of 1 KiB has some 2 MiB


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """How connections are made: see :class:`cloudckpt.config.Config` for the times (seconds)."""

    connections: int
    connect_timeout: float
    read_timeout: float
    stall_timeout: float
    proxies: tuple[tuple[str, str], ...] = ()
    ca_bundle: str | None = None
    client_cert: str | None = None
    verify_tls: bool = True


class _StoppedError(Exception):
    """Carries what ``progress`` raised past urllib3, which would take an OSError for its own."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Watched(http.client.HTTPConnection):
    """Sits between urllib3's connection and the standard library's.

    It keeps the standard library's response, whose ``readinto`` receives into the caller's memory
    (urllib3's own copies), and gives each send the time of a step.
    """

    sock: socket.socket | None
    # set by the classes that _pool_classes makes:
    step_timeout: float  # seconds
    answer_timeout: float  # seconds
    busy: dict[int, socket.socket]  # by the thread that uses it
    watch: Watch
    raw_response: http.client.HTTPResponse | None = None
    raw_sock: socket.socket | None = None

    def send(self, data: Any) -> None:
        if self.sock is None and self.auto_open:
            self.connect()
        if self.sock is not None:
            self.sock.settimeout(self.step_timeout)
            self.busy[threading.get_ident()] = self.sock
        super().send(data)

    def getresponse(self) -> http.client.HTTPResponse:
        sock = self.raw_sock = self.sock  # dropped below if it is to close
        if sock is None:
            self.raw_response = super().getresponse()
            return self.raw_response
        self.watch.begin(sock, self.answer_timeout)
        try:
            self.raw_response = super().getresponse()
        finally:
            in_time = self.watch.end(sock)
        if not in_time:
            raise TimeoutError("the head of the answer did not arrive in time")
        return self.raw_response


class Reply:
    """An answer whose body has not been read yet."""

    def __init__(
        self,
        response: urllib3.response.BaseHTTPResponse,
        raw: http.client.HTTPResponse,
        sock: socket.socket | None,
        watch: Watch,
    ) -> None:
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers
        self._response = response
        self._raw = raw
        self._sock = sock
        self._watch = watch

    @property
    def length(self) -> int | None:
        """The bytes that the body is said to have."""
        text = self.headers.get("Content-Length")
        return int(text) if text is not None and text.isdigit() else None

    def read_into(self, views: Sequence[memoryview], progress: Progress | None = None) -> None:
        """Receives exactly the bytes of ``views``.

        Raises:
            ConnectionLostError: If the body ends early or stalls; ``received`` says what arrived.
        """
        received = 0
        for view in views:
            position = 0
            while position < view.nbytes:
                try:
                    count = self._step(view[position : position + STEP])
                except (OSError, http.client.HTTPException) as exc:
                    raise ConnectionLostError(
                        f"the connection broke after {received} bytes", received=received, cause=exc
                    ) from exc
                if count == 0:
                    raise ConnectionLostError(
                        f"the answer ended after {received} bytes", received=received
                    )
                position += count
                received += count
                if progress is not None:
                    progress(count)

    def read(self, limit: int = _MOST_ERROR_BYTES) -> bytes:
        """What comes of the body of a short answer, at most ``limit`` bytes of it."""
        data = bytearray()
        with contextlib.suppress(OSError, http.client.HTTPException):
            self._receive(data, limit)
        return bytes(data)

    def read_all(self) -> bytes:
        """The whole body of an answer about objects, such as a page of a listing.

        Raises:
            ConnectionLostError: If the body ends early, stalls, or is no such answer by its size.
        """
        data = bytearray()
        try:
            self._receive(data, _MOST_CONTROL_BYTES)
        except (OSError, http.client.HTTPException) as exc:
            raise ConnectionLostError(
                f"the connection broke after {len(data)} bytes", cause=exc
            ) from exc
        if not self._raw.isclosed() or (self.length or 0) > len(data):
            raise ConnectionLostError(f"the answer did not end after {len(data)} bytes")
        return bytes(data)

    def _receive(self, data: bytearray, limit: int) -> None:
        """Appends what comes, up to ``limit`` bytes."""
        if self._raw.length == 0:
            self._raw.read()  # lets the response notice its end
            return
        left = self._raw.length  # None: unknown
        piece = memoryview(bytearray(min(limit, _SMALL if left is None else left)))
        while len(data) < limit:
            count = self._step(piece[: limit - len(data)])
            if count == 0:
                return
            data += piece[:count]

    def _step(self, view: memoryview) -> int:
        if self._sock is None:
            return self._raw.readinto(view)
        self._watch.begin(self._sock)
        try:
            count = self._raw.readinto(view)
        finally:
            in_time = self._watch.end(self._sock)
        if not in_time:
            raise TimeoutError(f"stalled: {view.nbytes} bytes did not arrive in time")
        return count

    def close(self) -> None:
        """Gives the connection back if the body was read, or nearly so; else closes it."""
        left = self._raw.length  # None: unknown; 0 also after HEAD, and for answers without a body
        if left is not None and left <= _MOST_ERROR_BYTES:
            self.read()
        if self._raw.isclosed():
            self._response.release_conn()
        else:
            self._response.close()


def _pool_classes(
    options: HttpOptions, watch: Watch, busy: dict[int, socket.socket]
) -> dict[str, type[urllib3.HTTPConnectionPool]]:
    """urllib3's pools, of connections that are watched."""
    shared = {
        "step_timeout": options.stall_timeout,
        "answer_timeout": options.read_timeout,
        "busy": busy,
        "watch": watch,
    }
    plain = type("Plain", (urllib3.connection.HTTPConnection, _Watched), shared)
    secure = type("Secure", (urllib3.connection.HTTPSConnection, _Watched), shared)
    return {
        "http": type("PlainPool", (urllib3.HTTPConnectionPool,), {"ConnectionCls": plain}),
        "https": type("SecurePool", (urllib3.HTTPSConnectionPool,), {"ConnectionCls": secure}),
    }


class HttpClient:
    """Keep-alive connections to the endpoints of one store; for one process, many threads."""

    def __init__(self, options: HttpOptions) -> None:
        self._options = options
        self._watch = Watch(options.stall_timeout)
        self._busy: dict[int, socket.socket] = {}
        self._timeout = urllib3.Timeout(connect=options.connect_timeout, read=options.read_timeout)
        self._direct = self._manager(None)
        self._proxied = {scheme: self._manager(proxy) for scheme, proxy in options.proxies}

    def _manager(self, proxy: str | None) -> urllib3.PoolManager:
        options = self._options
        settings: dict[str, Any] = {"maxsize": options.connections, "num_pools": 8}
        settings["cert_reqs"] = "CERT_REQUIRED" if options.verify_tls else "CERT_NONE"
        if options.ca_bundle is not None:
            settings["ca_certs"] = options.ca_bundle
        if options.client_cert is not None:
            settings["cert_file"] = options.client_cert
        if proxy is None:
            manager = urllib3.PoolManager(**settings)
        else:
            user = urllib3.util.parse_url(proxy).auth
            headers = urllib3.make_headers(proxy_basic_auth=unquote(user)) if user else None
            manager = urllib3.ProxyManager(proxy, proxy_headers=headers, **settings)
        manager.pool_classes_by_scheme = _pool_classes(options, self._watch, self._busy)
        return manager

    @contextlib.contextmanager
    def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: Body = (),
        progress: Progress | None = None,
    ) -> Iterator[Reply]:
        """Sends one request and yields its answer, whatever its status.

        ``headers`` must hold Content-Length if there is a body.

        Raises:
            ConnectionLostError: If no answer came.
        """
        try:
            manager = self._proxied.get(url.partition(":")[0], self._direct)
            try:
                response = manager.urlopen(
                    method,
                    url,
                    body=_steps(body, progress) if body else None,
                    headers=headers,
                    timeout=self._timeout,
                    retries=False,
                    redirect=False,
                    preload_content=False,
                    decode_content=False,
                )
            except _StoppedError as stopped:
                raise stopped.error from None
            except (urllib3.exceptions.HTTPError, OSError, http.client.HTTPException) as exc:
                raise ConnectionLostError(f"{method} got no answer", cause=_plain(exc)) from exc
            connection: object = response.connection
            if not isinstance(connection, _Watched) or connection.raw_response is None:
                raise TypeError("urllib3 did not use the connection class it was given")
            reply = Reply(response, connection.raw_response, connection.raw_sock, self._watch)
            try:
                yield reply
            finally:
                reply.close()
        finally:
            self._busy.pop(threading.get_ident(), None)

    def interrupt(self, threads: Collection[int]) -> None:
        """Breaks the connections that these threads are using."""
        for thread in threads:
            if (sock := self._busy.get(thread)) is not None:
                break_connection(sock)

    def close(self) -> None:
        """Closes the idle connections and ends the watch."""
        self._watch.close()
        for manager in (self._direct, *self._proxied.values()):
            manager.clear()


def _steps(body: Body, progress: Progress | None) -> Iterator[memoryview | bytes]:
    """Cuts large views into steps and gathers small ones, which would cost a call each."""

    def moved(count: int) -> None:
        if progress is not None:
            try:
                progress(count)
            except BaseException as error:
                raise _StoppedError(error) from error

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
            moved(waiting)
            gathered, waiting = [], 0
        if view.nbytes >= _SMALL:
            for start in range(0, view.nbytes, STEP):
                piece = view[start : start + STEP]
                yield piece
                moved(piece.nbytes)
    if waiting:
        yield b"".join(gathered)
        moved(waiting)


def _plain(exc: BaseException) -> str:
    """The innermost reason, without urllib3's wrapping and object addresses."""
    reason = getattr(exc, "reason", None)
    inner = reason if isinstance(reason, BaseException) else exc
    text = str(inner).rpartition(">: ")[2] or str(inner)
    return f"{type(inner).__name__}: {text}"
