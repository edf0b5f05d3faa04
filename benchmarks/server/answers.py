"""The pieces that S3's answers are made of: XML, errors, stored headers, conditional commits."""

from __future__ import annotations

import time
from collections.abc import Mapping
from xml.sax.saxutils import escape

from benchmarks.server.message import Answer, Request
from benchmarks.server.objects import SINK_PREFIX, Buckets, PreconditionError, StoredObject

NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
_KEPT_HEADERS = ("content-type", "content-encoding", "cache-control", "x-amz-storage-class")


def error(status: int, code: str, message: str = "") -> Answer:
    """Returns S3's XML error."""
    text = f"<Error><Code>{code}</Code><Message>{escape(message or code)}</Message></Error>"
    return xml(text, status)


def xml(text: str, status: int = 200) -> Answer:
    """Returns an answer with an XML document as its body."""
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode()
    return Answer(status, {"Content-Type": "application/xml"}, body)


def element(name: str, inner: str) -> str:
    """Returns an element in S3's namespace."""
    return f"<{name} {NAMESPACE}>{inner}</{name}>"


def checksums(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns the checksum headers among `headers`."""
    # S3 repeats the checksum it was given; clients compare the two.
    wanted = ("x-amz-checksum-crc", "x-amz-checksum-sha")
    return {name: value for name, value in headers.items() if name.startswith(wanted)}


def kept_headers(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Returns the headers that S3 stores with an object."""
    return tuple(
        (name, value)
        for name, value in headers.items()
        if name.startswith("x-amz-meta-") or (name in _KEPT_HEADERS and value != "aws-chunked")
    )


def sinks(bucket: str) -> bool:
    """Returns whether the bucket drops large bodies."""
    return bucket.startswith(SINK_PREFIX)


def commit(buckets: Buckets, request: Request, stored: StoredObject) -> Answer | None:
    """Stores an object under the request's conditions; returns the refusal if one does not hold."""
    try:
        buckets.put(
            request.bucket,
            stored,
            request.headers.get("if-match"),
            request.headers.get("if-none-match"),
        )
    except PreconditionError:
        return error(412, "PreconditionFailed", "A condition you specified did not hold")
    except KeyError:
        return error(404, "NoSuchKey")
    return None


def iso_time(timestamp: float) -> str:
    """Formats seconds since the epoch as S3's XML does."""
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(timestamp))
