"""``Expect: 100-continue``: a request whose body is sent when the server has said to go on.

A store that throttles may answer a part by its headers alone, but read on and throw away what comes
(nginx, Envoy and most proxies do): each try would send all of its megabytes for nothing. So the
server is asked first while a store throttles, at the price of a round trip for each part. A server
that says nothing gets the body after a short wait, as RFC 9110 (section 10.1.1) wants it.
"""

from __future__ import annotations

import io
import re
import socket
import time
from typing import TYPE_CHECKING, Any

from cloudckpt.stores.http.native_tls import BodyReader

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["EXPECT", "Resumed", "early_answer", "resumed"]

EXPECT = {"Expect": "100-continue"}
"""The header of such a request."""

_PATIENCE = 1.0  # seconds, as curl has
_INTERIM = re.compile(rb"HTTP/1\.[01] 1\d\d[ \r\n]")
_GO_ON = re.compile(rb"HTTP/1\.[01] 100[ \r\n]")


def early_answer(sock: socket.socket) -> tuple[bool, bytes]:
    """Waits for the server's word on a request whose body was not sent yet.

    Returns:
        Whether the server has answered already, so that the body is not to be sent; and what has
        come of an answer, which :func:`resumed` gives back to who reads it.
    """
    seen, end = bytearray(), time.monotonic() + _PATIENCE
    try:
        while (left := end - time.monotonic()) > 0:
            # not the socket's own, which does nothing once a watch limits it
            socket.socket.settimeout(sock, left)
            byte = sock.recv(1)  # no more than the interim answer: the next one has its own reader
            if not byte:
                break  # who sends the body finds out why
            seen += byte
            if byte != b"\n":
                continue
            if not _INTERIM.match(seen):
                return True, bytes(seen)
            if seen.endswith(b"\r\n\r\n"):
                if _GO_ON.match(seen):
                    return False, b""
                seen.clear()
    except OSError:  # late, or broken
        pass
    finally:
        socket.socket.settimeout(sock, None)
    return False, bytes(seen)


class Resumed(io.RawIOBase):
    """A connection's bytes, after those that were read ahead of its reader."""

    def __init__(self, begun: bytes, raw: Any) -> None:
        super().__init__()
        self._begun = memoryview(begun)
        self._raw = raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        """As that of the connection's own file."""
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
    """A reader of an answer that begins with ``begun``; nothing was read by ``reader`` yet."""
    kind = BodyReader if isinstance(reader, BodyReader) else io.BufferedReader
    return kind(Resumed(begun, reader.detach()))
