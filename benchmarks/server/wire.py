"""How bytes move between one accepted socket and the server, paced when asked."""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections.abc import Iterable
from typing import Protocol

from benchmarks.server.shaping import Pacer

IDLE_TIMEOUT = 300
"""Seconds a connection may say nothing before the server drops it."""

_HEADER_BUFFER = 64 * 1024
_MAX_CALL = 64 * 1024 * 1024

# MSG_TRUNC makes Linux drop TCP bytes in the kernel, but recv_into still wants a buffer of that
# length: this one is shared by all threads and never touched, so it costs no memory.
_NOWHERE = memoryview(mmap.mmap(-1, _MAX_CALL))


class PeerClosedError(ConnectionError):
    """The client closed the connection in the middle of a request."""


class ByteSource(Protocol):
    """Where a request body is read from: a socket, or a decoder on top of one."""

    def readline(self) -> bytes:
        """Returns one line without its CRLF."""

    def readinto(self, view: memoryview) -> None:
        """Fills `view` or raises `PeerClosedError`."""

    def skip(self, count: int) -> None:
        """Drops `count` bytes."""


class Wire:
    """One connection: buffered lines, whole-part reads in one system call, and paced sends.

    The socket blocks, with the kernel's own timeouts: Python's timeouts would make it
    non-blocking, and then MSG_WAITALL could not take a whole part in one call.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._pacers: tuple[Pacer, ...] = ()
        self._bytes = bytearray(_HEADER_BUFFER)
        self._buffer = memoryview(self._bytes)
        self._start = 0
        self._end = 0
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        timeout = struct.pack("ll", IDLE_TIMEOUT, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)

    def pace(self, pacers: Iterable[Pacer]) -> None:
        """Sends every later byte, both ways, through `pacers`."""
        self._pacers = tuple(pacers)

    def readline(self) -> bytes:
        """Returns one line without its CRLF.

        Raises:
            PeerClosedError: If the connection ends first.
            ValueError: If the line is longer than 64 KiB.
        """
        while True:
            cut = self._bytes.find(b"\n", self._start, self._end)
            if cut >= 0:
                line = bytes(self._buffer[self._start : cut])
                self._start = cut + 1
                return line.rstrip(b"\r")
            pending = bytes(self._buffer[self._start : self._end])
            if len(pending) == _HEADER_BUFFER:
                raise ValueError("header line too long")
            self._buffer[: len(pending)] = pending
            self._start, self._end = 0, len(pending)
            count = self._sock.recv_into(self._buffer[self._end :])
            if count == 0:
                raise PeerClosedError
            self._end += count

    def readinto(self, view: memoryview) -> None:
        """Fills `view`, in as few system calls as the pace allows."""
        done = min(len(view), self._end - self._start)
        view[:done] = self._buffer[self._start : self._start + done]
        self._start += done
        while done < len(view):
            step = self._step(len(view) - done)
            count = self._sock.recv_into(view[done : done + step], step, socket.MSG_WAITALL)
            self._account(count)
            done += count

    def skip(self, count: int) -> None:
        """Drops `count` bytes in the kernel, without copying them."""
        done = min(count, self._end - self._start)
        self._start += done
        flags = socket.MSG_WAITALL | socket.MSG_TRUNC
        while done < count:
            step = self._step(count - done)
            received = self._sock.recv_into(_NOWHERE, step, flags)
            self._account(received)
            done += received

    def send(self, data: bytes) -> None:
        """Sends `data`, unpaced: headers and small bodies."""
        self._sock.sendall(data)

    def sendfile(self, fd: int, offset: int, count: int) -> None:
        """Sends `count` bytes of file `fd` from `offset`, from the page cache to the socket."""
        end = offset + count
        while offset < end:
            step = self._step(end - offset)
            sent = os.sendfile(self._sock.fileno(), fd, offset, step)
            self._account(sent)
            offset += sent

    def _step(self, wanted: int) -> int:
        return min([wanted, _MAX_CALL, *(pacer.quantum for pacer in self._pacers)])

    def _account(self, count: int) -> None:
        if count == 0:
            raise PeerClosedError
        for pacer in self._pacers:
            pacer.take(count)


class Dechunked:
    """The payload of a chunked body, for ``Transfer-Encoding`` and ``aws-chunked`` alike.

    Both write ``<hex size>[;extension]CRLF <data> CRLF``, then a chunk of size 0, then trailers
    and an empty line, so one decoder serves both, and stacks when a client sends one in the other.
    """

    def __init__(self, inner: ByteSource) -> None:
        self._inner = inner
        self._left = 0
        self._first = True
        self._ended = False

    def readline(self) -> bytes:
        """Returns one line of the payload: the framing of an inner decoder, read byte by byte."""
        line = bytearray()
        one = memoryview(bytearray(1))
        while not line.endswith(b"\n"):
            self.readinto(one)
            line += one
        return bytes(line).rstrip(b"\r\n")

    def readinto(self, view: memoryview) -> None:
        """Fills `view` from as many chunks as it takes."""
        done = 0
        while done < len(view):
            step = min(len(view) - done, self._available())
            if step == 0:
                raise PeerClosedError("body shorter than announced")
            self._inner.readinto(view[done : done + step])
            self._left -= step
            done += step

    def skip(self, count: int) -> None:
        """Drops `count` bytes of payload."""
        while count:
            step = min(count, self._available())
            if step == 0:
                raise PeerClosedError("body shorter than announced")
            self._inner.skip(step)
            self._left -= step
            count -= step

    def read_all(self) -> bytes:
        """Returns the rest of the payload, for bodies that announce no length."""
        body = bytearray()
        while step := self._available():
            chunk = bytearray(step)
            self._inner.readinto(memoryview(chunk))
            self._left = 0
            body += chunk
        return bytes(body)

    def finish(self) -> None:
        """Reads the last chunk and the trailers, so that the next request starts clean."""
        while self._available():
            self.skip(self._left)

    def _available(self) -> int:
        if self._left or self._ended:
            return self._left
        if not self._first:
            self._inner.readline()
        self._first = False
        self._left = int(self._inner.readline().split(b";")[0], 16)
        if self._left == 0:
            self._ended = True
            while self._inner.readline():
                pass
        return self._left
