"""Bodies on the wire: sent from memory and received into it, in few calls to the socket.

And the guard of all that reads an answer, whatever an odd peer may have sent.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import ssl
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

import urllib3
from urllib3.util.ssltransport import SSLTransport

from cloudckpt.errors import (
    CloudCheckpointError,
    ConnectionLostError,
    RangeNotSatisfiableError,
    ServerError,
)
from cloudckpt.stores.base import Body, Progress
from cloudckpt.stores.http.native_tls import TLSSocket
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
_MOST_CONTROL_BYTES = 16 * 1024 * 1024  # a page of 1,000 keys of 1 KiB has some 2 MiB

# Each call releases the GIL and waits for it: a request of 16 MiB should be one call. Except on
# Linux the watch can't see progress in the middle of a call, which must therefore end in time.
STEP = (16 if sys.platform == "linux" else 4) * 1024 * 1024
"""Bytes that one blocking call moves."""

_SMALL = 64 * 1024
_GATHER = 256 * 1024


# the last two are what http.client makes of sizes of chunks that are none
_BROKEN = (OSError, http.client.HTTPException, ValueError, OverflowError)


class StoppedError(Exception):
    """Carries what ``progress`` raised past who would take it for an error of their own."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _report(progress: Progress | None, count: int) -> None:
    """Calls ``progress``; what it raises is told from what a connection or an answer raises."""
    if progress is not None:
        try:
            progress(count)
        except BaseException as error:
            raise StoppedError(error) from error


_WHOLE = re.compile("[0-9]{1,18}")


def whole_number(text: str | None) -> int | None:
    """A size in bytes as an answer spells it; None if it is none that an object can have."""
    return int(text) if text is not None and _WHOLE.fullmatch(text) else None


def steps(body: Body, progress: Progress | None) -> Iterator[memoryview | bytes]:
    """Cuts large views into steps and gathers small ones, which would cost a call each."""
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
    """An answer whose body has not been read yet."""

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
        """
        Args:
            response: Of urllib3.
            raw: Of the standard library.
            sock: That it comes by.
            watch: Ends it when it stalls.
            longest: Seconds that a chunked answer about objects may take as a whole.
            is_last: Whether the connection can't be used again.
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
        """The announced size of the body in bytes."""
        return whole_number(self.headers.get("Content-Length"))

    @property
    def tls(self) -> tuple[str, str] | None:
        """Protocol and cipher of the connection; None if it has no TLS."""
        if not isinstance(self._sock, (ssl.SSLSocket, SSLTransport)):
            return None
        cipher = self._sock.cipher()
        return self._sock.version() or "", cipher[0] if cipher else ""

    @property
    def obstacle(self) -> str | None:
        """Why bodies by this TLS connection are read record by record; None if they are not."""
        if isinstance(self._sock, TLSSocket):
            return self._sock.obstacle
        return "TLS inside the TLS of a proxy"

    def check_range(self, start: int, size: int, uri: str) -> int:
        """The size of the object, if the answer is the range of it that was asked for.

        Raises:
            RangeNotSatisfiableError: If the object ends before the range does.
            StoreError: If it is anything else.
        """
        if self.status == 200:  # a store that ignores Range, if only now and then
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
            raise ConnectionLostError("the answer has no valid Content-Range", uri=uri, cause=span)
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
        """Receives exactly the bytes of ``views``.

        Raises:
            ConnectionLostError: If the body ends early or stalls; ``received`` says what arrived.
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
                        f"the answer ended too early, after {received} bytes", received=received
                    )
                done += count
                received += count
                _report(progress, count)

    def read(self, limit: int = _MOST_ERROR_BYTES) -> bytes:
        """What arrives of the body of a short answer, at most ``limit`` bytes."""
        data = bytearray()
        with contextlib.suppress(*_BROKEN):
            self._receive(data, limit)
        return bytes(data)

    def read_refusal(self) -> bytes:
        """What arrives of the body of an answer that is no success, at most 64 KiB.

        That of a 404 tells whether the store itself says that an object is not there: it must not
        have been cut off on its way. No store's is as long as 64 KiB.

        Raises:
            ConnectionLostError: If that of a 404 ends early or stalls.
        """
        if self.status != 404:
            return self.read()
        return self.read_all(_MOST_ERROR_BYTES, is_beginning=True)

    def read_all(self, limit: int = _MOST_CONTROL_BYTES, *, is_beginning: bool = False) -> bytes:
        """The whole body of an answer about objects, such as a page of a listing.

        Args:
            limit: The most bytes that it may have.
            is_beginning: Whether the first ``limit`` bytes of a longer one are returned.

        Raises:
            ConnectionLostError: If the body ends early, stalls, or is no such answer by its size.
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
                f"the answer is incomplete or too long, after {len(data)} bytes"
            )
        return bytes(data)

    def _receive(self, data: bytearray, limit: int) -> None:
        """Appends what comes, up to ``limit`` bytes."""
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
        """The same, but every piece is progress, however small.

        S3 sends white space while it puts the parts of an object together.
        """
        end = time.monotonic() + self._longest
        while len(data) < limit:
            with self._watch.step(self._sock, counter=Counter.RECEIVED):
                piece = self._raw.read1(limit - len(data))
            if not piece:
                return
            if time.monotonic() > end:
                raise TimeoutError(f"the answer was not complete within {self._longest:.0f} s")
            data += piece

    def _step(self, view: memoryview) -> int:
        """What one call receives; a stall is told only when there is nothing else to tell of."""
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
        """Gives the connection back if the body was read, or nearly so; else closes it."""
        left = self._raw.length  # None: unknown; 0 also after HEAD, and for answers without a body
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
    """Seconds since 1970 of a time as RFC 3339 writes it; None for anything else."""
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return None


def http_date(text: str) -> float | None:
    """Seconds since 1970 of a time as headers write it; None for anything else."""
    try:
        date = parsedate_to_datetime(text)
        return (date if date.tzinfo else date.replace(tzinfo=timezone.utc)).timestamp()
    except (TypeError, ValueError, LookupError, OverflowError):
        return None


@contextlib.contextmanager
def reading(uri: str) -> Iterator[None]:
    """Around all that reads an answer: whatever an odd one raises is an error of the server.

    Nothing that comes from the wire is read elsewhere, so readers need no checks of their own for
    what no store answers. What may be tried again is; what ``progress`` raises passes.
    """
    try:
        yield
    except (CloudCheckpointError, StoppedError, MemoryError):
        raise
    except Exception as exc:
        raise ServerError(
            "the store's answer can't be understood; check the endpoint and the proxy",
            uri=uri,
            cause=reason(exc),
        ) from exc
