"""The reference's socket under TLS: OpenSSL called from C, a part at a time."""

from __future__ import annotations

import ctypes
import shutil
import socket
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("reference_tls.c")


def build(folder: Path) -> Path:
    """Compiles the library into `folder`.

    Raises:
        RuntimeError: If there is no C compiler, or no headers of OpenSSL.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        raise RuntimeError("no C compiler: there is no reference for https")
    built = folder / "reference_tls.so"
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", built, _SOURCE, "-lssl", "-lcrypto"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the reference for https can't be compiled: {done.stderr}")
    return built


class TlsSocket:
    """What the reference needs of a socket, each call one of C without the GIL."""

    def __init__(self, sock: socket.socket, library: str, bundle: str) -> None:
        sock.settimeout(None)
        self._sock = sock
        self._c = ctypes.CDLL(library)
        self._c.tls_open.restype = ctypes.c_void_p
        self._c.tls_receive.restype = ctypes.c_size_t
        opened = self._c.tls_open(sock.fileno(), bundle.encode())
        if not opened:
            raise ConnectionError("no TLS connection to the server")
        self._tls = ctypes.c_void_p(opened)

    def sendall(self, data: bytes | memoryview) -> None:
        """Sends all of `data`."""
        if not len(data):
            return
        if isinstance(data, memoryview):
            first: object = ctypes.byref(ctypes.c_char.from_buffer(data))
        else:
            first = data
        if self._c.tls_send(self._tls, first, ctypes.c_size_t(len(data))) != 1:
            raise ConnectionError("the server closed the connection")

    def recv(self, size: int) -> bytes:
        """Receives what comes first, at most `size` bytes."""
        data = bytearray(size)
        return bytes(data[: self._receive(memoryview(data), 1)])

    def recv_into(self, view: memoryview) -> int:
        """Fills `view`."""
        return self._receive(view, len(view))

    def close(self) -> None:
        """Frees the connection and closes its socket."""
        self._c.tls_close(self._tls)
        self._sock.close()

    def _receive(self, view: memoryview, least: int) -> int:
        first = ctypes.byref(ctypes.c_char.from_buffer(view))
        size = ctypes.c_size_t(len(view))
        count: int = self._c.tls_receive(self._tls, first, size, ctypes.c_size_t(least))
        return count
