"""Reads that a store sends on to a signed URL of another host.

The URL is all that the other host wants: neither credentials nor headers of ours go there. Each
read asks the store for it. As the store ignores the conditions of such reads, the version is
compared here.
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
# only the store itself can say that there is no such object
_NOT_THERE = (
    Meaning("404|410", ServerError, "the object that the store redirected to does not exist (yet)"),
)


_HASH = re.compile('"[0-9a-f]{32,128}"')  # of bytes: another ETag might be that of others, too
_MOST_KNOWN = 10_000  # objects


class Redirects:
    """The reads of one bucket's objects. Safe to use from many threads.

    The version of an object is what HEAD says: of a read that names no version before it, of one
    that names it after the store has said where the bytes are. In the latter case the bytes are
    those of the version, which was known before and is there afterwards; so the ETag that their
    host gives them is noted, and tells of later reads, without HEAD, what they are of.
    """

    def __init__(
        self, store: RestStore, http: HttpClient, head: Callable[[str], ObjectInfo]
    ) -> None:
        """
        Args:
            store: The store that is asked first.
            http: Sends what goes to other hosts.
            head: Asks the store for an object, by HEAD.
        """
        self._store = store
        self._http = http
        self._head = head
        self._known: dict[str, tuple[str, str]] = {}  # by key: the version, and the ETag there

    @contextlib.contextmanager
    def read(self, key: str, if_version: str | None, headers: Mapping[str, str]) -> Iterator[Reply]:
        """The answer to the GET of an object, by whoever has it; with the store's own ETag.

        Raises:
            PreconditionFailedError: If the object is not the given version.
            InvalidRequestError: If the target is one that bytes must not come from.
            StoreError: As of any read.
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
            except StoreError as error:  # the answer to HEAD has no body to tell the reason
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
                # the range, and nothing else
                span = {name: value for name, value in headers.items() if name == "Range"}
                with self._http.send("GET", target, span) as answer:
                    self._note(key, (version, tag), answer, target, proven=if_version is not None)
                    headers = HTTPHeaderDict(answer.headers)  # whose names ignore case
                    headers["ETag"] = version
                    answer.headers = headers
                    yield answer
            except StoreError as error:
                conceal(error, (urlsplit(target).query,))
                raise

    def _note(
        self, key: str, known: tuple[str, str], answer: Reply, target: str, *, proven: bool
    ) -> None:
        """Compares the ETag of the bytes with the one that is known, or notes it."""
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
    """The target that an answer of ``origin`` names, if it may be read from.

    Raises:
        InvalidRequestError: If TLS would end there, or it is no address on the web.
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
