"""Handles reads that a store answers with a redirect to a signed URL of another host.

The other host needs only the URL and the range: no credentials and none of the read's other headers
are sent to it. Each read asks the store for a new URL. As the store ignores the preconditions of
such reads, this module asks for the object's version by a HEAD request, and compares it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from urllib.parse import urljoin, urlsplit

from urllib3 import HTTPHeaderDict

from cloudckpt.errors import (
    InvalidRequestError,
    ObjectNotFoundError,
    PreconditionFailedError,
    ServerError,
    StoreError,
    TransientStoreError,
)
from cloudckpt.stores.base import ObjectInfo
from cloudckpt.stores.http.client import HttpClient, Reply
from cloudckpt.stores.redaction import conceal, excerpt
from cloudckpt.stores.refusals import Meaning, Refusal, refusal
from cloudckpt.stores.rest import SUCCESS, RestStore

__all__ = ["redirected_read"]

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_ANSWERS = SUCCESS | _REDIRECTS
# only the store itself can report a missing object
_NOT_THERE = (
    Meaning("404|410", ServerError, "the store redirected to a missing object; try again later"),
)


@contextlib.contextmanager
def redirected_read(
    store: RestStore,
    http: HttpClient,
    head: Callable[[str], ObjectInfo],
    key: str,
    if_version: str | None,
    headers: Mapping[str, str],
) -> Iterator[Reply]:
    """Sends a GET for an object, follows a redirect and yields the response, with the store's ETag.

    The object's version is determined by a HEAD request: after the store's redirect if `if_version`
    is given, else before the read. If the object has the given version after the redirect, the
    redirected URL leads to that version's bytes.

    Args:
        store: The store that redirects.
        http: The client for requests to other hosts.
        head: Sends a HEAD request to the store for an object.
        key: The key.
        if_version: The version to read; None for the current version.
        headers: The headers of the read.

    Raises:
        PreconditionFailedError: If the object is not the given version.
        InvalidRequestError: If the redirect leads to an invalid URL, or drops TLS.
        StoreError: As in any read.
    """
    uri, url = store.uri(key), store.object_url(key)
    version, unseen = if_version or "", None
    if not version:
        try:
            version = head(key).version
        except TransientStoreError:
            raise
        except StoreError as error:  # a HEAD response has no body with the reason
            unseen = error
    with store.exchange("GET", url, headers, key=key, successes=_ANSWERS) as reply:
        if reply.status in SUCCESS:
            _check(if_version, reply.headers.get("ETag", ""), uri)
            yield reply
            return
        if unseen is not None:  # now with the credentials that the GET was accepted with
            with contextlib.suppress(ObjectNotFoundError):
                head(key)
            text = "the store permits reading this object, but denied a HEAD request: read it again"
            raise ServerError(text, cause=unseen)
        target = _checked(reply.headers.get("Location", ""), url, uri)
        reply.close()
        if if_version is not None:
            _check(if_version, head(key).version, uri)
        try:
            # no header but Range
            span = {name: value for name, value in headers.items() if name == "Range"}
            with http.send("GET", target, span) as answer:
                if answer.status not in (200, 206):
                    host = excerpt(urlsplit(target).hostname or "")
                    action = f"GET from {host}, to which the store redirected"
                    raise refusal(
                        _NOT_THERE, Refusal(""), answer.status, answer.headers, action, uri
                    )
                headers = HTTPHeaderDict(answer.headers)  # case-insensitive names
                headers["ETag"] = version
                answer.headers = headers
                yield answer
        except StoreError as error:
            conceal(error, (urlsplit(target).query,))
            raise


def _check(pinned: str | None, version: str, uri: str) -> None:
    if pinned is not None and version != pinned:
        why = "another writer has replaced the object; read it again"
        raise PreconditionFailedError(why, uri=uri, certain=True)


def _checked(location: str, origin: str, uri: str) -> str:
    """Returns the absolute URL of a redirect; `location` may be relative to the URL `origin`.

    Raises:
        InvalidRequestError: If the URL is invalid or has a user name, or has no TLS although
            `origin` has.
    """
    problem: str | None = "an invalid URL"
    with contextlib.suppress(ValueError):
        url = urljoin(origin, location)
        parts = urlsplit(url)
        if parts.scheme == "http" and urlsplit(origin).scheme == "https":
            problem = "a URL without TLS"
        elif parts.scheme in ("http", "https") and parts.hostname and parts.username is None:
            problem = None
    if problem is not None:
        raise InvalidRequestError(
            f"the store redirected the read to {problem}: check the endpoint and the proxy", uri=uri
        )
    return url.partition("#")[0]
