"""A proxy as companies have them: it connects to what ``CONNECT`` names, and passes bytes on."""

import contextlib
import re
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_CHUNK = 16 * 1024
_CALM = 0.02  # seconds between two looks at whether it is over


class ForwardProxy:
    """Speaks TLS with its clients if it is given a context.

    Attributes:
        url: What goes into ``HTTPS_PROXY``.
        tunnels: The ``host:port`` that it was asked for.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.tunnels: list[str] = []
        self._tls = tls
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._listener.settimeout(_CALM)
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.port}"
        self._start(self._accept)

    @property
    def port(self) -> int:
        return self._listener.getsockname()[1]

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                client, _ = self._listener.accept()
                self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            stack.enter_context(client)
            client.settimeout(30)
            if self._tls is not None:
                client = stack.enter_context(self._tls.wrap_socket(client, server_side=True))
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += client.recv(1)
            [target] = re.findall(rb"^CONNECT (\S+) ", head)
            host, _, port = target.decode().rpartition(":")
            self.tunnels.append(f"{host}:{port}")
            server = stack.enter_context(socket.create_connection((host, int(port))))
            client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            self._pass_on(client, server)

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        """One thread for both directions: a TLS connection is no thing for two."""
        others = {client: server, server: client}
        while not self._over.is_set():
            waiting = [
                sock for sock in others if isinstance(sock, ssl.SSLSocket) and sock.pending()
            ]
            for sock in waiting or select.select([*others], [], [], _CALM)[0]:
                data = sock.recv(_CHUNK)
                if not data:
                    return
                others[sock].sendall(data)


@contextmanager
def forward_proxy(tls: ssl.SSLContext | None = None) -> Iterator[ForwardProxy]:
    proxy = ForwardProxy(tls)
    try:
        yield proxy
    finally:
        proxy.close()
