"""Cloud Storage in a thread: the parts of its documented protocol that emulators lack.

::

    with GcsStub("bucket") as stub:
        stub.state.mutation_interval = 1.0
        ...  # requests to stub.url
        assert stub.state.keys("bucket") == ["a"]

Paths of the JSON API are served as such, and all other paths are ``/bucket/key`` of the XML API.
What is documented and what is not, the modules say: ``gcs_json``, ``gcs_xml``, ``gcs_state`` and
``gcs_answers``. Only what cloudckpt asks for is there, and everybody is let in.
"""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl

from . import gcs_json, gcs_xml
from .gcs_answers import Answer, Call, Request
from .gcs_state import State


class GcsStub(http.server.ThreadingHTTPServer):
    """The server; a context manager.

    Attributes:
        state: What it holds and how it behaves.
        failures: Mistakes of the stub's own; the first of them is raised in the end.
    """

    daemon_threads = True  # they are joined below, after their connections are broken
    request_queue_size = 128

    def __init__(self, *buckets: str, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.state = State(*buckets)
        self.failures: list[Exception] = []
        self._busy: dict[threading.Thread, socket.socket] = {}
        self._busy_lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The endpoint, without a slash at its end."""
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, call: Call) -> Answer | None:
        """The answer to a request; None: none."""
        injection = self.state.injected(call.request)
        if injection is None:
            return self._own_answer(call)
        if injection.carry_out:
            self._own_answer(call)
        return injection.answer

    def _own_answer(self, call: Call) -> Answer:
        api = gcs_json if gcs_json.is_json_api(call.request.path) else gcs_xml
        return api.answer(self.state, call)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        with self._busy_lock:
            self._busy[threading.current_thread()] = request
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._busy_lock:
                del self._busy[threading.current_thread()]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is part of a test."""

    def __enter__(self) -> GcsStub:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the server and its connections."""
        self.shutdown()
        self._thread.join()
        with self._busy_lock:
            busy = dict(self._busy)
        for connection in busy.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in busy:
            thread.join()
        self.server_close()
        if self.failures:
            raise self.failures[0]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: GcsStub

    def _serve(self) -> None:
        call = self._call()
        try:
            answer = self.server.answer(call)
        except Exception as error:  # noqa: BLE001 - it is raised in the end
            self.server.failures.append(error)
            answer = Answer(500, [("Content-Type", "text/plain")], repr(error).encode())
        if answer is None:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response(answer.status)
        for name, value in answer.headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def __getattr__(self, name: str) -> Callable[[], None]:
        if name.startswith("do_"):
            return self._serve
        raise AttributeError(name)

    def _call(self) -> Call:
        path, _, query = self.path.partition("?")
        headers = {name.lower(): value for name, value in self.headers.items()}
        size = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(size)
        if len(body) < size:
            raise ConnectionResetError("the body ended early")
        parameters = dict(parse_qsl(query, keep_blank_values=True))
        return Call(Request(self.command, path, parameters, headers), body)

    def log_message(self, *arguments: object) -> None:
        """Nothing is printed."""
