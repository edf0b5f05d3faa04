"""The accept loop: one thread a connection, one request after another."""

from __future__ import annotations

import json
import resource
import socket
import struct
import threading
import time
from dataclasses import asdict

from benchmarks.server import s3
from benchmarks.server.answers import error
from benchmarks.server.message import (
    Answer,
    Body,
    Request,
    read_request,
    send_blobs,
    send_head,
)
from benchmarks.server.objects import Buckets
from benchmarks.server.shaping import Fault, Link, Shape
from benchmarks.server.statistics import LogEntry, Statistics
from benchmarks.server.wire import Wire

CONTROL = "__control__"
"""The path of the control endpoint: PUT a JSON of settings, GET statistics, DELETE resets them."""

_SHAPED_BUFFER = 256 * 1024
_LOGGED = ("PutObject", "UploadPart", "GetObject")


class Server:
    """Owns the listening socket and everything that connections share."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._buckets = Buckets()
        self._link = Link()
        self._statistics = Statistics()
        self._listener = socket.create_server((host, port), backlog=1024)
        _allow_many_files()

    @property
    def port(self) -> int:
        """The port that clients connect to."""
        return int(self._listener.getsockname()[1])

    def serve_forever(self) -> None:
        """Accepts connections until the process ends."""
        while True:
            sock, _ = self._listener.accept()
            threading.Thread(target=self._serve_connection, args=(sock,), daemon=True).start()

    def _serve_connection(self, sock: socket.socket) -> None:
        self._statistics.connection_opened()
        try:
            with sock:
                wire = Wire(sock)
                pacers = self._link.pacers()
                if pacers:
                    # A large receive buffer would take bytes in faster than the paced link.
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SHAPED_BUFFER)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SHAPED_BUFFER)
                wire.pace(pacers)
                while self._serve_request(sock, wire):
                    pass
        except (OSError, ValueError):
            pass  # The client went away, or spoke no HTTP: either way this connection is over.
        finally:
            self._statistics.connection_closed()

    def _serve_request(self, sock: socket.socket, wire: Wire) -> bool:
        """Answers one request; returns whether the connection may serve another."""
        request = read_request(wire)
        body = Body(wire, request.headers)
        if request.bucket == CONTROL:
            send_head(wire, self._control(request, body), head=False)
            return request.keep_alive
        call = s3.call_of(request)
        fault = self._link.next_fault(call.operation)
        if fault is not None and fault.kind != "503" and request.method in ("PUT", "POST"):
            body.skip_half()
            return _break(sock, fault)
        answer = call.handler(self._buckets, call.request, body)
        if fault is not None and fault.kind == "503":
            answer = error(503, "SlowDown", "Please reduce your request rate.")
        if self._link.shape.latency_ms:
            time.sleep(self._link.shape.latency_ms / 1000)
        head = request.method == "HEAD"
        send_head(wire, answer, head=head)
        sent = 0 if head else answer.content_length
        if answer.blobs and not head:
            if fault is not None:
                send_blobs(wire, answer, sent // 2)
                return _break(sock, fault)
            send_blobs(wire, answer, sent)
        self._count(call.operation, call.request, answer, sent)
        return request.keep_alive

    def _count(self, operation: str, request: Request, answer: Answer, sent: int) -> None:
        headers = request.headers
        received = int(
            headers.get("x-amz-decoded-content-length", headers.get("content-length", 0))
        )
        self._statistics.count(operation, answer.status, received, sent)
        if operation in _LOGGED:
            self._statistics.record(
                LogEntry(operation, request.bucket, request.key, answer.start, sent or received)
            )

    def _control(self, request: Request, body: Body) -> Answer:
        text = body.read()
        if request.method == "PUT":
            settings = json.loads(text)
            if "faults" in settings:
                self._link.inject([Fault(**fault) for fault in settings.pop("faults")])
            if "record" in settings:
                self._statistics.recording = bool(settings.pop("record"))
            if "clear" in settings:
                self._buckets.clear(settings.pop("clear") or None)
            if settings:
                self._link.reshape(Shape(**{**asdict(self._link.shape), **settings}))
        elif request.method == "DELETE":
            self._statistics.reset()
        snapshot = json.dumps(self._statistics.snapshot()).encode()
        return Answer(200, {"Content-Type": "application/json"}, snapshot)


def _break(sock: socket.socket, fault: Fault) -> bool:
    if fault.kind == "stall":
        time.sleep(fault.stall_s)
    if fault.kind == "reset":
        # Linger of zero makes close send RST instead of FIN.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return False


def _allow_many_files() -> None:
    # Each kept part is an open memory file.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
