"""Bodies of several parts (RFC 2046), of uploads."""

from __future__ import annotations

import json
import re
from typing import Any

from .gcs_answers import RefusalError


def related(body: bytes, content_type: str) -> tuple[dict[str, Any], str | None, bytes]:
    """The metadata, the type and the bytes in a body of multipart/related."""
    parts = parts_of(body, content_type)
    if len(parts) != 2:
        raise RefusalError(400, "badRequest", "Malformed multipart body.", "InvalidArgument")
    try:
        described = json.loads(parts[0][1])
    except ValueError:
        raise RefusalError(400, "parseError", "Parse Error", "InvalidArgument") from None
    return described, parts[1][0].get("content-type"), parts[1][1]


def parts_of(body: bytes, content_type: str) -> list[tuple[dict[str, str], bytes]]:
    """The headers and the bytes of each part of a multipart body."""
    found = re.search(r"boundary=(?:\"([^\"]+)\"|([^;\s]+))", content_type)
    if not found:
        raise RefusalError(400, "badRequest", "The body has no boundary.", "InvalidArgument")
    delimiter = b"--" + (found[1] or found[2]).encode()
    parts: list[tuple[dict[str, str], bytes]] = []
    # a line break before a delimiter belongs to the delimiter
    for piece in (b"\r\n" + body).split(b"\r\n" + delimiter)[1:]:
        if piece.startswith(b"--"):
            return parts
        head, _, data = piece.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        parts.append((header_lines(head.decode()), data))
    raise RefusalError(400, "badRequest", "The body does not end.", "InvalidArgument")


def header_lines(text: str) -> dict[str, str]:
    lines = [line.partition(":") for line in text.split("\r\n") if ":" in line]
    return {name.strip().lower(): value.strip() for name, _, value in lines}
