"""A proxy that breaks things: what a checkpoint does when the network or the store misbehaves.

It stands between a client and an emulator, and does to chosen requests what a fault says::

    from support.wire.proxy import FaultyProxy
    from support.wire.faults import Reset, s3_error

    with FaultyProxy("http://127.0.0.1:5000") as proxy:
        proxy.inject(Reset("answer"), operation="UploadPart", times=2)
        proxy.inject(s3_error(503, "SlowDown"), probability=0.1)
        s3 = S3Options(endpoint_url=proxy.url, addressing_style="path")
        cloudckpt.save(state_dict, checkpoint_id="s3://bucket/step-1", config=Config(s3=s3))
        assert len(proxy.requests(operation="CompleteMultipartUpload")) == 1

Operations are called by S3's names in every dialect; an emulator of Google's or Azure's store needs
``naming=google_naming`` or ``azure_naming``, see :mod:`wire.naming`.

The proxy speaks HTTP/1.1 on loopback, in threads of this process; with TLS if it is given a context
with a certificate for 127.0.0.1, and without to the emulator. Whole bodies pass through its memory.
A request whose body breaks off is never forwarded, as no store would accept it.
"""

from __future__ import annotations

import contextlib
import fnmatch
import http.client
import itertools
import random
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import BinaryIO, TypeVar
from urllib.parse import urlsplit

from support.wire.hop import Exchange, Fault, Hop
from support.wire.naming import Naming, s3_naming
from support.wire.request import Request, read_head

_Self = TypeVar("_Self", bound="FaultyProxy")


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

    def __init__(
        self,
        upstream: str,
        *,
        seed: int = 0,
        naming: Naming = s3_naming,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """
        Args:
            upstream: ``http://host:port`` of the server.
            seed: What the draws of ``probability`` start from.
            naming: How the server's requests are named.
            tls: Of the server's side; None to speak plain HTTP.

        Raises:
            ValueError: If ``upstream`` is no plain HTTP endpoint.
        """
        parts = urlsplit(upstream)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"{upstream!r} is no http://host:port")
        self._upstream = (parts.hostname, parts.port or 80)
        self._seed = seed
        self._naming = naming
        self._tls = tls
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
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._listener.getsockname()[1]}"
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
            operation: Operations by S3's names, as a pattern: ``UploadPart``, ``*Multipart*``.
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
        """Forgets all rules, the log and what is under way; what stalls goes on stalling."""
        with self._changed:
            self._rules.clear()
            self._log.clear()
            self._under_way.clear()
            self._changed.notify_all()

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

    def wait_idle(self, seconds: float = 60.0) -> bool:
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
                # not SSLSocket.shutdown, which would drop its state under the reader
                socket.socket.shutdown(client, socket.SHUT_RDWR)
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
                if self._tls is not None:  # the handshake comes with the first byte that is read
                    client = self._tls.wrap_socket(
                        client, server_side=True, do_handshake_on_connect=False
                    )
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
        head = read_head(stream)
        if head is None:
            return None
        with self._changed:
            request = Request(next(self._numbers), *head, self._naming)
            struck = (rule.fault for rule in self._rules if rule.strikes(request))
            exchange = Exchange(request, next(struck, None))
            self._log.append(exchange)
            self._under_way[request.number] = request
        return exchange


def _fits(request: Request, operation: str, path: str) -> bool:
    return fnmatch.fnmatchcase(request.operation, operation) and fnmatch.fnmatchcase(
        request.path, path
    )
