"""Reads that a store sends on to a signed URL of another host.

The URL is all that the other host wants: neither credentials nor headers of ours go there. Each
read asks the store for it. As the store ignores the conditions of such reads, the version is
compared here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from urllib.parse import urljoin, urlsplit

from urllib3 import HTTPHeaderDict

from cloudckpt.errors import (
    InvalidRequestError,
    PreconditionFailedError,
    ServerError,
    StoreError,
    TransientStoreError,
)
from cloudckpt.stores.http.bodies import Reply
from cloudckpt.stores.http.client import HttpClient
from cloudckpt.stores.redaction import conceal, told
from cloudckpt.stores.refusals import refusal
from cloudckpt.stores.rest import Authorized, Request

__all__ = ["Redirects"]

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_NOT_THERE = dict.fromkeys(
    (404, 410), (ServerError, "the redirect target does not exist (yet)")
)  # only the store itself can say that there is no such object


class Redirects:
    """The reads of one bucket's objects. Safe to use from many threads."""

    def __init__(
        self,
        http: HttpClient,
        version_of: Callable[[str], str],
        failure: Callable[[int, Mapping[str, str], bytes, str, str], StoreError],
    ) -> None:
        """
        Args:
            http: Sends the requests.
            version_of: Asks the store for the version of a key, by HEAD.
            failure: The error for an answer of the store that is no success.
        """
        self._http = http
        self._version_of = version_of
        self._failure = failure

    @contextlib.contextmanager
    def read(self, request: Request, used: Authorized, uri: str) -> Iterator[Reply]:
        """The answer to the GET of an object, by whoever has it; with the store's own ETag.

        The version is that from before the read: if another write comes between, a condition on it
        fails. If one is given, it is compared after the store has said where the bytes are.

        Raises:
            PreconditionFailedError: If the object is not the given version.
            InvalidRequestError: If the target is one that bytes must not come from.
            StoreError: As of any read.
        """
        wanted, unseen = request.headers.get("If-Match"), None
        version = wanted or ""
        if wanted is None:
            try:
                version = self._version_of(request.key)
            except TransientStoreError:
                raise
            except StoreError as error:  # the answer to HEAD has no body to tell the reason
                unseen = error
        with self._http.send("GET", used.url, used.headers) as reply:
            if reply.status in (200, 206):
                _check(wanted, reply.headers.get("ETag", ""), uri)
                yield reply
                return
            if reply.status not in _REDIRECTS:
                answer = reply.read_refusal()
                raise self._failure(reply.status, reply.headers, answer, "GET", uri)
            location = reply.headers.get("Location", "")
        if unseen is not None:
            raise unseen
        target = _checked(location, used.url, uri)
        if wanted is not None:
            _check(wanted, self._version_of(request.key), uri)
        # the range, and nothing else
        span = {name: value for name, value in request.headers.items() if name == "Range"}
        try:
            with self._http.send("GET", target, span) as reply:
                if reply.status not in (200, 206):
                    host = told(urlsplit(target).hostname or "")
                    action = f"GET from {host}, where the store sent"
                    raise refusal(reply.status, "", [], action, uri, reply.headers, own=_NOT_THERE)
                headers = HTTPHeaderDict(reply.headers)  # whose names ignore case
                headers["ETag"] = version
                reply.headers = headers
                yield reply
        except StoreError as error:
            conceal(error, (urlsplit(target).query,))
            raise


def _check(pinned: str | None, version: str, uri: str) -> None:
    if pinned is not None and version != pinned:
        raise PreconditionFailedError("the object was replaced", uri=uri, certain=True)


def _checked(location: str, origin: str, uri: str) -> str:
    """The target that an answer of ``origin`` names, if it may be read from.

    Raises:
        InvalidRequestError: If TLS would end there, or it is no address on the web.
    """
    problem: str | None = "an unusable URL"
    with contextlib.suppress(ValueError):
        url = urljoin(origin, location)
        parts = urlsplit(url)
        if parts.scheme == "http" and urlsplit(origin).scheme == "https":
            problem = "a URL without TLS"
        elif parts.scheme in ("http", "https") and parts.hostname and parts.username is None:
            problem = None
    if problem is not None:
        raise InvalidRequestError(f"the store redirected the read to {problem}", uri=uri)
    return url.partition("#")[0]
