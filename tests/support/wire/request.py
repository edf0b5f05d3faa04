"""A request as it arrives at the proxy: its head, its meaning, and its body."""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO
from urllib.parse import parse_qsl, urlsplit

from support.wire.naming import Naming, s3_naming

Headers = tuple[tuple[str, str], ...]
"""Names and values, in order."""

_LONGEST_LINE = 65536


@dataclass(frozen=True)
class Request:
    """What the client asks for.

    Attributes:
        number: Its place in the order of arrival at the proxy, from 1.
        method: The HTTP method.
        target: Path and query, as they stand in the request line.
        headers: Names and values, as they were sent.
        naming: Who knows what is asked for.
    """

    number: int
    method: str
    target: str
    headers: Headers
    naming: Naming = s3_naming

    @property
    def operation(self) -> str:
        """What is asked for, by S3's name for it; the method if that is not known."""
        return self.naming(self.method, self.target)[0]

    @property
    def path(self) -> str:
        """``/bucket/key``, or ``/bucket``."""
        return self.naming(self.method, self.target)[1]

    @property
    def query(self) -> dict[str, str]:
        """The parameters behind the question mark."""
        return dict(parse_qsl(urlsplit(self.target).query, keep_blank_values=True))

    def header(self, name: str) -> str | None:
        """The value of a header, if there is one."""
        found = (value for key, value in self.headers if key.lower() == name.lower())
        return next(found, None)

    @property
    def byte_range(self) -> tuple[int, int] | None:
        """The first byte that ``Range`` asks for and the one behind the last, if it does."""
        unit, _, span = (self.header("Range") or "").partition("=")
        first, _, last = span.partition("-")
        if unit != "bytes" or not first.isdigit() or not last.isdigit():
            return None
        return int(first), int(last) + 1


def read_head(stream: BinaryIO) -> tuple[str, str, Headers] | None:
    """Method, target and headers of the next request; None if there is none."""
    line = _line(stream)
    if not line:
        return None
    method, target, _ = line.split(" ", 2)
    headers: list[tuple[str, str]] = []
    while text := _line(stream):
        name, _, value = text.partition(":")
        headers.append((name.strip(), value.strip()))
    return method, target, tuple(headers)


def read_exactly(stream: BinaryIO, count: int) -> bytes:
    """The next bytes of a body."""
    data = stream.read(count)
    if len(data) < count:
        raise ConnectionError("the client left in the middle of its request")
    return data


def _line(stream: BinaryIO) -> str:
    return stream.readline(_LONGEST_LINE).rstrip(b"\r\n").decode("latin-1")
