"""Reads that a store redirects to a signed URL of another host.

The URL is all that the other host needs: neither credentials nor other headers are sent to it. Each
read asks the store for a new URL. As the store ignores the preconditions of such reads, this module
compares the versions.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from urllib.parse import urljoin, urlsplit

from urllib3 import HTTPHeaderDict

from cloudckpt.errors import (
    ConnectionLostError,
    InvalidRequestError,
    PreconditionFailedError,
    ServerError,
    StoreError,
    TransientStoreError,
)
from cloudckpt.stores.base import ObjectInfo
from cloudckpt.stores.http.bodies import Reply
from cloudckpt.stores.http.client import HttpClient
from cloudckpt.stores.redaction import conceal, told
from cloudckpt.stores.refusals import Meaning, refusal
from cloudckpt.stores.rest import SUCCESS, RestStore

__all__ = ["Redirects"]

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_ANSWERS = SUCCESS | _REDIRECTS
# only the store itself can report a missing object
_NOT_THERE = (
    Meaning("404|410", ServerError, "the object that the store redirected to does not exist (yet)"),
)


_HASH = re.compile('"[0-9a-f]{32,128}"')  # of the content; other ETags might not be unique
_MOST_KNOWN = 10_000  # objects


class Redirects:
    """Reads the objects of a bucket whose store redirects. Safe to use from many threads.

    An object's version is determined by a HEAD request. A read without a given version sends the
    HEAD first. A read of a given version sends it after the store's redirect: if the object is
    still that version, the redirected URL leads to that version's bytes. The ETag that the other
    host gives these bytes is then remembered, so that later reads can verify the version without a
    HEAD.
    """

    def __init__(
        self, store: RestStore, http: HttpClient, head: Callable[[str], ObjectInfo]
    ) -> None:
        """Prepares reads; nothing is sent yet.

        Args:
            store: The store that redirects.
            http: The client for requests to other hosts.
            head: Sends a HEAD request to the store for an object.
        """
        self._store = store
        self._http = http
        self._head = head
        # by key: the version, and the other host's ETag of it
        self._known: dict[str, tuple[str, str]] = {}

    @contextlib.contextmanager
    def read(self, key: str, if_version: str | None, headers: Mapping[str, str]) -> Iterator[Reply]:
        """Reads an object, following a redirect; yields the response, with the store's own ETag.

        Raises:
            PreconditionFailedError: If the object is not the given version.
            InvalidRequestError: If the redirect leads to a URL that must not be read from.
            StoreError: As in any read.
        """
        uri, url = self._store.uri(key), self._store.object_url(key)
        version, tag = self._known.get(key, ("", ""))
        is_known = version != "" and if_version in (None, version)
        unseen = None
        if not is_known:
            version, tag = if_version or "", ""
        if not version:
            try:
                version = self._head(key).version
            except TransientStoreError:
                raise
            except StoreError as error:  # a HEAD response has no body with the reason
                unseen = error
        with self._store.exchange("GET", url, headers, key=key, successes=_ANSWERS) as reply:
            if reply.status in SUCCESS:
                _check(if_version, reply.headers.get("ETag", ""), uri)
                yield reply
                return
            if unseen is not None:
                raise unseen
            target = _checked(reply.headers.get("Location", ""), url, uri)
            reply.close()
            if if_version is not None and not is_known:
                _check(if_version, self._head(key).version, uri)
            try:
                # no header but Range
                span = {name: value for name, value in headers.items() if name == "Range"}
                with self._http.send("GET", target, span) as answer:
                    self._note(key, (version, tag), answer, target, proven=if_version is not None)
                    headers = HTTPHeaderDict(answer.headers)  # case-insensitive names
                    headers["ETag"] = version
                    answer.headers = headers
                    yield answer
            except StoreError as error:
                conceal(error, (urlsplit(target).query,))
                raise

    def _note(
        self, key: str, known: tuple[str, str], answer: Reply, target: str, *, proven: bool
    ) -> None:
        """Compares the ETag of redirected bytes with the remembered one, or remembers it."""
        uri = self._store.uri(key)
        if answer.status not in (200, 206):
            action = (
                f"GET from {told(urlsplit(target).hostname or '')}, to which the store redirected"
            )
            raise refusal(_NOT_THERE, answer.status, "", [], action, uri, answer.headers)
        version, tag = known
        there = answer.headers.get("ETag", "")
        there = there if _HASH.fullmatch(there) else ""
        if tag and there != tag:
            self._known.pop(key, None)
            raise ConnectionLostError(
                "the object may have been replaced: it is read again", uri=uri
            )
        if proven and there and not tag:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = version, there


def _check(pinned: str | None, version: str, uri: str) -> None:
    if pinned is not None and version != pinned:
        raise PreconditionFailedError("the object was replaced", uri=uri, certain=True)


def _checked(location: str, origin: str, uri: str) -> str:
    """Returns the URL of a redirect from `origin`, if it may be read from.

    Raises:
        InvalidRequestError: If the URL is invalid, or has no TLS although `origin` has.
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
