"""The texts of HTTP: URLs and times as requests and answers have them, and the guard of reading."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from urllib.parse import quote, urlencode

from cloudckpt.errors import CloudCheckpointError, ServerError
from cloudckpt.stores.http.bodies import StoppedError
from cloudckpt.stores.redaction import reason

__all__ = ["encode_key", "encode_query", "http_date", "iso_date", "reading"]


def encode_key(key: str) -> str:
    """A key as the path of a URL, its slashes kept."""
    return quote(key, safe="/-._~")


def encode_query(query: Mapping[str, str]) -> str:
    """The query of a URL; empty values are written without an equals sign."""
    return "&".join(
        urlencode({name: value}, quote_via=quote) if value else quote(name)
        for name, value in query.items()
    )


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
            "the answer is not what it should be; check the endpoint and the proxy",
            uri=uri,
            cause=reason(exc),
        ) from exc
