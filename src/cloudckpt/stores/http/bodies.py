"""Sends request bodies from memory and receives response bodies into memory, in few system calls.

:func:`reading` guards all code that parses a response, whatever a faulty server may have sent.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

import urllib3

from cloudckpt.errors import (
    CloudCheckpointError,
    ConnectionLostError,
    RangeNotSatisfiableError,
    ServerError,
)
from cloudckpt.stores.base import Body, Progress
from cloudckpt.stores.http.stalls import Counter, LateError, Watch
from cloudckpt.stores.redaction import reason, told

__all__ = [
    "STEP",
    "Reply",
    "StoppedError",
    "http_date",
    "iso_date",
    "reading",
    "steps",
    "whole_number",
]

_PIECE = 64 * 1024
_MOST_ERROR_BYTES = 64 * 1024
_MOST_CONTROL_BYTES = 16 * 1024 * 1024  # bytes; a page of 1,000 keys of 1 KiB each has about 2 MiB

# Each call releases the GIL and waits for it: a request of 16 MiB should be one call. Only on Linux
# can the watch see progress in the middle of a call; elsewhere a call must end in time.
STEP = (16 if sys.platform == "linux" else 4) * 1024 * 1024
"""The most bytes that one blocking call sends or receives."""

_SMALL = 64 * 1024
_GATHER = 256 * 1024


# http.client raises the last two for invalid chunk sizes
_BROKEN = (OSError, http.client.HTTPException, ValueError, OverflowError)


class StoppedError(Exception):
    """Carries an exception of ``progress`` through code that would take it for a network error."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _report(progress: Progress | None, count: int) -> None:
    """Calls `progress`; wraps its exceptions in StoppedError, to tell them from network errors."""
    if progress is not None:
        try:
            progress(count)
        except BaseException as error:
            raise StoppedError(error) from error


_WHOLE = re.compile("[0-9]{1,18}")


def whole_number(text: str | None) -> int | None:
    """Parses a size in bytes from a header; None unless it is a number of up to 18 digits."""
    return int(text) if text is not None and _WHOLE.fullmatch(text) else None


def steps(body: Body, progress: Progress | None) -> Iterator[memoryview | bytes]:
    """Yields a body in pieces to send: large views are split into steps, small ones are joined.

    Each piece costs a system call. `progress` is called after a piece was sent.
    """
    gathered: list[memoryview] = []
    waiting = 0
    for view in body:
        if view.nbytes < _SMALL:
            gathered.append(view)
            waiting += view.nbytes
            if waiting < _GATHER:
                continue
        if waiting:
            yield b"".join(gathered)
            _report(progress, waiting)
            gathered, waiting = [], 0
        if view.nbytes >= _SMALL:
            for start in range(0, view.nbytes, STEP):
                piece = view[start : start + STEP]
                yield piece
                _report(progress, piece.nbytes)
    if waiting:
        yield b"".join(gathered)
        _report(progress, waiting)


class Reply:
    """A response whose body has not been read yet."""

    def __init__(
        self,
        response: urllib3.response.BaseHTTPResponse,
        raw: http.client.HTTPResponse,
        sock: socket.socket | None,
        watch: Watch,
        longest: float,
        *,
        is_last: bool = False,
    ) -> None:
        """Wraps a response of urllib3.

        Args:
            response: The response of urllib3.
            raw: The response of the standard library, from which the body is read.
            sock: The connection's socket; None if there is none to watch.
            watch: Breaks the connection when it stalls.
            longest: Seconds that `read_all` may take for a chunked response.
            is_last: Whether the connection can't be used for another request.
        """
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers
        self._response = response
        self._raw = raw
        self._sock = sock
        self._watch = watch
        self._longest = longest
        self._is_last = is_last
        self._is_stalled = False

    @property
    def length(self) -> int | None:
        """The size of the body in bytes according to Content-Length; None if missing or invalid."""
        return whole_number(self.headers.get("Content-Length"))

    def check_range(self, start: int, size: int, uri: str) -> int:
        """Checks that the response holds the requested range; returns the size of the whole object.

        Args:
            start: The first byte of the range.
            size: Bytes in the range.
            uri: The object, for messages.

        Raises:
            RangeNotSatisfiableError: If the object ends before the range does.
            StoreError: If the response holds another range, or does not say which.
        """
        if self.status == 200:  # some stores ignore Range now and then
            if start != 0 or self.length != size:
                raise ServerError(
                    f"the store ignored the Range header: it offered {self.length} bytes for "
                    f"the range {start}-{start + size - 1}",
                    uri=uri,
                )
            return size
        unit, _, span = self.headers.get("Content-Range", "").partition(" ")
        extent, _, total = span.partition("/")
        whole = whole_number(total)
        is_wanted = unit == "bytes" and extent == f"{start}-{start + size - 1}"
        if is_wanted and whole is not None and whole >= start + size:
            return whole
        span, extent = told(span), told(extent)
        if unit != "bytes" or whole is None:
            raise ConnectionLostError(
                "the response has no valid Content-Range", uri=uri, cause=span
            )
        if whole < start + size:
            raise RangeNotSatisfiableError(
                f"the object ends before the requested range: the store offered bytes {extent} "
                f"of {total} for {start}-{start + size - 1}",
                uri=uri,
            )
        raise ServerError(
            f"the store offered bytes {extent} of {total} for the range "
            f"{start}-{start + size - 1}; check the endpoint and the proxy",
            uri=uri,
        )

    def read_into(self, views: Sequence[memoryview], progress: Progress | None = None) -> None:
        """Receives the body into `views`, filling all of them.

        Raises:
            ConnectionLostError: If the body ends early or stalls; ``received`` is the number of
                bytes that arrived.
        """
        received = 0
        for view in views:
            done = 0
            while done < view.nbytes:
                try:
                    count = self._step(view[done : done + STEP])
                except _BROKEN as exc:
                    raise ConnectionLostError(
                        f"the connection broke after {received} bytes", received=received, cause=exc
                    ) from exc
                if count == 0:
                    raise ConnectionLostError(
                        f"the response ended too early, after {received} bytes", received=received
                    )
                done += count
                received += count
                _report(progress, count)

    def read(self, limit: int = _MOST_ERROR_BYTES) -> bytes:
        """Returns as much of a short response's body as arrives, at most `limit` bytes."""
        data = bytearray()
        with contextlib.suppress(*_BROKEN):
            self._receive(data, limit)
        return bytes(data)

    def read_refusal(self) -> bytes:
        """Returns the body of an error response, as much of it as arrives, at most 64 KiB.

        The body of a 404 must arrive intact: it tells whether the store itself reports a missing
        object. No store sends an error of 64 KiB.

        Raises:
            ConnectionLostError: If the body of a 404 ends early or stalls.
        """
        if self.status != 404:
            return self.read()
        return self.read_all(_MOST_ERROR_BYTES, is_beginning=True)

    def read_all(self, limit: int = _MOST_CONTROL_BYTES, *, is_beginning: bool = False) -> bytes:
        """Returns the whole body of a response of moderate size, such as a page of a listing.

        Args:
            limit: The most bytes that the body may have.
            is_beginning: Whether to return the first `limit` bytes of a longer body, instead of an
                error.

        Raises:
            ConnectionLostError: If the body ends early, stalls, or is longer than `limit`.
        """
        data = bytearray()
        receive = self._receive_chunks if self._raw.chunked else self._receive
        try:
            receive(data, limit)
        except _BROKEN as exc:
            raise ConnectionLostError(
                f"the connection broke after {len(data)} bytes", cause=exc
            ) from exc
        if is_beginning and len(data) == limit:
            return bytes(data)
        if not self._raw.isclosed() or (self.length or 0) > len(data):
            raise ConnectionLostError(
                f"the response is incomplete or too long, after {len(data)} bytes"
            )
        return bytes(data)

    def _receive(self, data: bytearray, limit: int) -> None:
        """Appends the body's bytes to `data`, until it ends or `data` has `limit` bytes."""
        if self._raw.length == 0:
            self._raw.read()  # lets the response notice its end
            return
        left = self._raw.length  # None: unknown
        piece = memoryview(bytearray(min(limit, _PIECE if left is None else left)))
        while len(data) < limit:
            count = self._step(piece[: limit - len(data)])
            if count == 0:
                return
            data += piece[:count]

    def _receive_chunks(self, data: bytearray, limit: int) -> None:
        """Appends the body's chunks to `data`, like `_receive`; each chunk counts as progress.

        S3 sends white space while it assembles an object from its parts.
        """
        end = time.monotonic() + self._longest
        while len(data) < limit:
            with self._watch.step(self._sock, counter=Counter.RECEIVED):
                piece = self._raw.read1(limit - len(data))
            if not piece:
                return
            if time.monotonic() > end:
                raise TimeoutError(f"the response was not complete within {self._longest:.0f} s")
            data += piece

    def _step(self, view: memoryview) -> int:
        """Receives into `view` by one call; a stall after some bytes is raised by the next call."""
        if self._is_stalled:
            raise LateError(self._watch.stalled)
        count = 0
        try:
            with self._watch.step(self._sock, counter=Counter.RECEIVED):
                count = self._raw.readinto(view)
        except LateError:
            if not count:
                raise
            self._is_stalled = True
        return count

    def close(self) -> None:
        """Returns the connection to the pool if the body was read, or almost; else closes it."""
        # None: unknown; 0 also after HEAD, and for responses without a body
        left = self._raw.length
        try:
            if left == 0:
                with contextlib.suppress(*_BROKEN):
                    self._raw.read()  # lets the response notice its end
            elif left is not None and left <= _MOST_ERROR_BYTES:
                self.read()
        finally:
            if self._raw.isclosed() and not self._is_last:
                self._response.release_conn()
            else:
                self._response.close()


def iso_date(text: str) -> float | None:
    """Converts an RFC 3339 time to seconds since 1970; None if it is not one."""
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return None


def http_date(text: str) -> float | None:
    """Converts the time of an HTTP header to seconds since 1970; None if it is not one."""
    try:
        date = parsedate_to_datetime(text)
        return (date if date.tzinfo else date.replace(tzinfo=timezone.utc)).timestamp()
    except (TypeError, ValueError, LookupError, OverflowError):
        return None


@contextlib.contextmanager
def reading(uri: str) -> Iterator[None]:
    """Converts whatever the block raises while it parses a response to a retryable ServerError.

    All parsing of received data happens within such a block, so parsers need no checks for
    malformed responses. Errors of cloudckpt and exceptions of ``progress`` pass unchanged.
    """
    try:
        yield
    except (CloudCheckpointError, StoppedError, MemoryError):
        raise
    except Exception as exc:
        raise ServerError(
            "the store's response can't be understood; check the endpoint and the proxy",
            uri=uri,
            cause=reason(exc),
        ) from exc
