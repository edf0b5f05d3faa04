"""A request taken apart into named fields, so that two can be compared one by one.

What is made anew for each request (dates, signatures, boundaries) is put in a form that does not
change, and the length of the body, if it is told rightly, is not compared.
"""

from __future__ import annotations

import email
import hashlib
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from .recorder import Recorded
from .shared_key import is_signed

__all__ = ["fields"]

_DATE = re.compile(
    r"\d{8}T\d{6}Z"  # AWS
    r"|(Mon|Tue|Wed|Thu|Fri|Sat|Sun), \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT"  # RFC 9110
    r"|\d{4}-\d\d-\d\dT\d\d(:|%3A)\d\d(:|%3A)\d\dZ"  # of an Azure signature
)
_AWS = re.compile(r"(\S+) Credential=([^/]+)/\d{8}/(\S+), SignedHeaders=(\S+), Signature=\w{64}")
_DATES = {"date", "x-amz-date", "x-ms-date"}


def fields(request: Recorded) -> dict[str, str]:
    """The fields of a request by their names.

    ``method``, ``host``, ``path``, ``query <name>``, ``header <name>``, ``signed <name>`` for a
    header that the signature covers, and those of the body: ``body``, or ``body <path>`` for what
    has a structure.
    """
    found = {"host": request.host}
    kind = request.header("Content-Type")
    for name, value in [*_head(request), *_body(request.body, kind, "body")]:
        if name in found:
            raise AssertionError(f"{name} is there twice: {found[name]!r} and {value!r}")
        found[name] = value
    return found


def _head(request: Recorded) -> Iterator[tuple[str, str]]:
    path, _, query = request.target.partition("?")
    yield "method", request.method
    yield "path", path
    for pair in filter(None, query.split("&")):
        name, equals, value = pair.partition("=")
        yield f"query {unquote(name)}", _query_value(name, equals + value)
    for name, value in request.headers:
        yield from _header(name.lower(), value, request)


def _query_value(name: str, value: str) -> str:
    if name == "sig":
        return "=(a signature)"
    return f"={_dated(value[1:])}" if value else "(no value)"


def _dated(value: str) -> str:
    return "(a date)" if _DATE.fullmatch(value) else value


def _header(name: str, value: str, request: Recorded) -> Iterator[tuple[str, str]]:
    boundary = _boundary(request.header("Content-Type"))
    if name == "content-length" and value == str(len(request.body)):
        value = "(that of the body)"
    elif name in _DATES:
        value = _dated(value)
    elif name == "authorization" and (match := _AWS.fullmatch(value)):
        value = f"{match[1]} {match[2]}/(a date)/{match[3]}"
        for signed in match[4].split(";"):
            yield f"signed {signed}", "yes"
    elif name == "authorization" and value.startswith("SharedKey "):
        headers = {known.lower(): text for known, text in request.headers}
        if is_signed(request.method, request.target, headers):
            value = "SharedKey, of all this"
    elif boundary:
        value = value.replace(boundary, "(a boundary)").replace('"(a boundary)"', "(a boundary)")
    yield f"header {name}", value


def _boundary(content_type: str) -> str:
    match = re.search(r'boundary="?([^";]+)', content_type)
    return match[1] if match else ""


def _body(body: bytes, content_type: str, name: str) -> Iterator[tuple[str, str]]:
    """The fields of a body, whose own names begin with ``name``."""
    if boundary := _boundary(content_type):
        found = _parts(body, boundary)
    elif body.lstrip().startswith(b"<"):
        found = _xml(body)
    elif body.startswith(b"{"):
        found = _json("", json.loads(body))
    elif body:
        short = len(body) < 100 and body.isascii()
        yield name, body.decode() if short else f"SHA-256 {hashlib.sha256(body).hexdigest()}"
        return
    else:
        return
    for inner, value in found:
        yield f"{name} {inner}", value


def _parts(body: bytes, boundary: str) -> Iterator[tuple[str, str]]:
    """Those of a multipart body; what ends its lines is told once."""
    yield "line ends", "CRLF" if b"\r\n" in body else "LF"
    edge = b"--" + boundary.encode()
    first, *pieces, last = body.replace(b"\r\n", b"\n").split(edge)
    if first or last.strip() != b"--":
        yield "around the parts", repr((first, last))
    for number, piece in enumerate(pieces, 1):
        head, _, content = piece.removeprefix(b"\n").removesuffix(b"\n").partition(b"\n\n")
        headers = email.message_from_bytes(head + b"\n\n")
        for name, value in headers.items():
            yield f"part {number} {name.lower()}", value
        yield from _body(content, headers.get("Content-Type", ""), f"part {number}")


def _xml(body: bytes) -> Iterator[tuple[str, str]]:
    root = ElementTree.fromstring(body)
    match = re.match(r"\{(.*)\}", root.tag)
    if match:
        yield "xmlns", match[1]
    if declaration := re.match(rb"\s*<\?xml.*?\?>", body):
        yield "xml declaration", declaration[0].decode().replace('"', "'").lower()
    yield from _elements(f"/{root.tag.rpartition('}')[2]}", root)


def _elements(path: str, element: ElementTree.Element) -> Iterator[tuple[str, str]]:
    """Those of what is at ``path``; of several with one name each has its number."""
    for name, value in element.attrib.items():
        yield f"{path}@{name}", value
    if not len(element):
        yield path, element.text or ""
    names = [child.tag.rpartition("}")[2] for child in element]
    for number, (name, child) in enumerate(zip(names, element, strict=True)):
        place = f"[{names[: number + 1].count(name)}]" if names.count(name) > 1 else ""
        yield from _elements(f"{path}/{name}{place}", child)


def _json(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _json(f"{path}.{name}".lstrip("."), inner)
    elif isinstance(value, list):
        for number, inner in enumerate(value, 1):
            yield from _json(f"{path}[{number}]", inner)
    else:
        yield path, json.dumps(value)
