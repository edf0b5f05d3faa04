"""A server in the place of every host: it answers what comes through a proxy, and keeps it.

Clients find it by ``HTTPS_PROXY`` and believe its certificates by ``REQUESTS_CA_BUNDLE`` and
``AWS_CA_BUNDLE``. So they speak to the clouds' own host names, by TLS and with default options, as
they do for users; an endpoint of an emulator's would turn some of that off.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from support.authority import Authority

__all__ = ["Answer", "Answering", "Recorded", "Recorder", "recording"]


@dataclass(frozen=True)
class Recorded:
    """A request as it arrived.

    Attributes:
        host: The host that the client meant.
        method: The HTTP method.
        target: Path and query, as they stand in the request line.
        headers: Names and values, in order.
        body: All of it.
    """

    host: str
    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> str:
        """The value of a header; empty if there is none."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), "")


@dataclass(frozen=True)
class Answer:
    """What a request is answered with."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


Answering = Callable[[Recorded], Answer]


class Recorder(http.server.ThreadingHTTPServer):
    """Listens on a free port of the loopback interface, from construction to :meth:`close`.

    Attributes:
        requests: What arrived; to be emptied by whoever looks at it.
        answering: How requests are answered.
    """

    def __init__(self, authority: Authority) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.clients: set[socket.socket] = set()
        self.requests: list[Recorded] = []
        self.answering: Answering = lambda request: Answer(500)
        self._authority = authority
        self._contexts: dict[str, ssl.SSLContext] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def variables(self) -> dict[str, str]:
        """What leads a client here."""
        return {
            "HTTPS_PROXY": f"http://127.0.0.1:{self.server_port}",
            "REQUESTS_CA_BUNDLE": self._authority.bundle,
            "AWS_CA_BUNDLE": self._authority.bundle,
        }

    def secure(self, host: str) -> ssl.SSLContext:
        """The side of a server that shows a certificate of ``host``."""
        with self._lock:
            if host not in self._contexts:
                certificate = self._authority.issue(host=host)
                self._contexts[host] = self._authority.server(certificate)
            return self._contexts[host]

    def close(self) -> None:
        self.shutdown()
        for client in list(self.clients):
            with contextlib.suppress(OSError):
                # not SSLSocket.shutdown, which would drop its state under the reader
                socket.socket.shutdown(client, socket.SHUT_RDWR)
        self.server_close()  # waits for the connections' threads
        self._thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # as of a client that goes away
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 60  # seconds in which a client that is silent may keep the recorder from its end
    server: Recorder
    _host = ""

    def setup(self) -> None:
        super().setup()
        self.server.clients.add(self.connection)

    def finish(self) -> None:
        self.server.clients.discard(self.connection)
        super().finish()
        self.connection.close()

    def do_CONNECT(self) -> None:
        self._host = self.path.rpartition(":")[0]
        self.send_response_only(200)
        self.end_headers()
        self.rfile.close()
        self.wfile.close()
        self.server.clients.discard(self.connection)
        context = self.server.secure(self._host)
        self.connection = context.wrap_socket(
            self.connection, server_side=True, do_handshake_on_connect=False
        )
        self.server.clients.add(self.connection)
        self.rfile = self.connection.makefile("rb")
        self.wfile = self.connection.makefile("wb", 0)
        self.close_connection = False

    def _any(self) -> None:
        request = Recorded(
            self._host,
            self.command,
            self.requestline.split(" ")[1],  # self.path is no longer what was sent
            tuple(self.headers.items()),
            self._body(),
        )
        self.server.requests.append(request)
        answer = self.server.answering(request)
        self.send_response(answer.status)
        size = {"Content-Length": str(len(answer.body))} if answer.status != 204 else {}
        for name, value in {**size, **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def __getattr__(self, name: str) -> Callable[[], None]:
        if name.startswith("do_"):
            return self._any
        raise AttributeError(name)

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            return b"".join(self._chunks())
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _chunks(self) -> Iterator[bytes]:
        """Yields the payload of ``Transfer-Encoding: chunked``, without its trailers."""
        while size := int(self.rfile.readline().partition(b";")[0].strip() or b"0", 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass

    def log_message(self, *arguments: object) -> None:
        """Nothing is printed."""


_OTHERS = ("AWS_", "AZURE_", "GOOGLE_", "GCLOUD_", "STORAGE_", "CLOUDCKPT_", "CLOUDSDK_")


@contextlib.contextmanager
def recording(folder: Path) -> Iterator[Recorder]:
    """Runs a recorder that is all that clients of this process reach."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OTHERS) and not name.lower().endswith(("_proxy", "_ca_bundle"))
    }
    recorder = Recorder(Authority(folder))
    try:
        with mock.patch.dict(os.environ, {**kept, **recorder.variables}, clear=True):
            yield recorder
    finally:
        recorder.close()
