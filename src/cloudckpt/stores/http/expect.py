"""``Expect: 100-continue``: sends a request's body only after the server has agreed to receive it.

A store that throttles may refuse a part from its headers alone, but still read and discard the body
(nginx, Envoy and most proxies do): every attempt would send megabytes for nothing. So while a store
throttles, the server is asked first, which costs a round trip per part. If the server stays silent,
the body is sent after a short wait, as RFC 9110 (section 10.1.1) demands.
"""

from __future__ import annotations

import http.client
import io
import socket

__all__ = ["EXPECT", "Response", "early_response"]

EXPECT = {"Expect": "100-continue"}
"""The header that asks whether the server takes the request, before the body is sent."""

_PATIENCE = 1.0  # seconds; curl waits as long
_INTERIM = (b"HTTP/1.1 1", b"HTTP/1.0 1")


class _Head:
    """Reads the lines before a response's body; raises an error if the connection ends amid them.

    http.client takes the end of the connection for the end of the headers, and half a header for a
    whole one: with half an ETag, the completion of an upload would not find the part.
    """

    def __init__(self, fp: io.BufferedReader) -> None:
        self._fp, self.close = fp, fp.close

    def readline(self, limit: int) -> bytes:
        line = self._fp.readline(limit)
        if not line.endswith(b"\n") and len(line) < limit:
            raise http.client.RemoteDisconnected("the connection was closed amid the headers")
        return line


class Response(http.client.HTTPResponse):
    """An HTTP response that skips all interim ones (1xx), and fails if its headers end early.

    http.client skips only the interim status 100.
    """

    def begin(self) -> None:
        fp = self.fp
        self.fp = _Head(fp)  # type: ignore[assignment]
        try:
            super().begin()
            while self.status < 200:
                self.headers = self.msg = None  # type: ignore[assignment]  # begin() reads on
                super().begin()
        finally:
            self.fp = self.fp and fp  # None if begin() has closed it


def early_response(sock: socket.socket) -> tuple[Response | None, bool]:
    """Waits up to a second for the server's response to headers whose body was not sent yet.

    Returns:
        The response, which must be read from this object, as its buffer has the first bytes, or
        None if no response has begun; and whether it certainly is the final one, so that the body
        must not be sent.
    """
    response = Response(sock)
    # not the overridden settimeout, which does nothing on a watched socket
    socket.socket.settimeout(sock, _PATIENCE)
    try:
        beginning = response.fp.peek()
    except OSError:  # timed out, or the connection broke: sending the body will raise the reason
        beginning = b""
    finally:
        socket.socket.settimeout(sock, None)
    if not beginning:
        response.close()
        return None, False
    # the first bytes may arrive alone
    seen = beginning[: len(_INTERIM[0])]
    return response, not any(interim.startswith(seen) for interim in _INTERIM)
