"""``Expect: 100-continue``: sends a request's body only after the server has agreed to receive it.

A store that throttles may refuse a part from its headers alone, but still read and discard the body
(nginx, Envoy and most proxies do): every attempt would send megabytes for nothing. So while a store
throttles, the server is asked first, which costs a round trip per part. If the server stays silent,
the body is sent after a short wait, as RFC 9110 (section 10.1.1) demands.
"""

from __future__ import annotations

import io
import re
import socket
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["EXPECT", "Resumed", "early_answer", "resumed"]

EXPECT = {"Expect": "100-continue"}
"""The header that asks the server before the body is sent."""

_PATIENCE = 1.0  # seconds; curl waits as long
_INTERIM = re.compile(rb"HTTP/1\.[01] 1\d\d[ \r\n]")
_GO_ON = re.compile(rb"HTTP/1\.[01] 100[ \r\n]")


def early_answer(sock: socket.socket) -> tuple[bool, bytes]:
    """Waits up to a second for the server's response to headers whose body was not sent yet.

    Returns:
        Whether a final response has begun, so that the body must not be sent; and the bytes of it
        read so far, which :func:`resumed` passes on to the reader of the response.
    """
    seen, end = bytearray(), time.monotonic() + _PATIENCE
    try:
        while (left := end - time.monotonic()) > 0:
            # not the overridden settimeout, which does nothing on a watched socket
            socket.socket.settimeout(sock, left)
            # byte by byte: what follows the interim response belongs to another reader
            byte = sock.recv(1)
            if not byte:
                break  # sending the body will raise the reason
            seen += byte
            if byte != b"\n":
                continue
            if not _INTERIM.match(seen):
                return True, bytes(seen)
            if seen.endswith(b"\r\n\r\n"):
                if _GO_ON.match(seen):
                    return False, b""
                seen.clear()
    except OSError:  # timed out, or the connection broke
        pass
    finally:
        socket.socket.settimeout(sock, None)
    return False, bytes(seen)


class Resumed(io.RawIOBase):
    """A raw stream that yields bytes read ahead, then the rest of the connection."""

    def __init__(self, begun: bytes, raw: Any) -> None:
        super().__init__()
        self._begun = memoryview(begun)
        self._raw = raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        """Reads the bytes read ahead, then from the connection."""
        if not self._begun:
            count: int | None = self._raw.readinto(buffer)
            return count
        view = memoryview(buffer).cast("B")
        length = min(len(view), len(self._begun))
        view[:length] = self._begun[:length]
        self._begun = self._begun[length:]
        return length

    def close(self) -> None:
        self._raw.close()
        super().close()


def resumed(reader: io.BufferedReader, begun: bytes) -> io.BufferedReader:
    """Returns a reader of a response whose first bytes, `begun`, were already read from the socket.

    `reader` must not have read anything yet; it is detached.
    """
    return io.BufferedReader(Resumed(begun, reader.detach()))
