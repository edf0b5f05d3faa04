"""Reads that a store sends on to a signed URL of another host.

The URL is all that the other host wants: neither credentials nor headers of ours go there. It is
kept until it expires. As the store ignores the conditions of such reads, a version is pinned here.
"""

from __future__ import annotations

import base64
import calendar
import contextlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urljoin, urlsplit

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

__all__ = ["Redirects", "end_of"]

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_SPENT = frozenset({400, 401, 403, 404, 410})  # what a URL may be answered that is valid no more
_NOT_THERE = dict.fromkeys(
    (404, 410), (ServerError, "what the store has is not there; it may be behind")
)  # only the store itself can say that there is no such object
_UNKNOWN = 60.0  # seconds that a URL is kept that does not say when it expires
_MARGIN = 5.0  # seconds before its end, for the request to arrive
_MOST = 4096  # URLs of a kilobyte


@dataclass(frozen=True)
class _Target:
    """A signed URL, when it expires (seconds since 1970), and whose version it is."""

    url: str = field(repr=False)
    ends: float
    version: str


class Redirects:
    """The targets of one bucket's objects. Safe to use from many threads."""

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
        self._kept: OrderedDict[str, _Target] = OrderedDict()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def read(self, request: Request, used: Authorized, uri: str) -> Iterator[Reply]:
        """The answer to the GET of an object, by whoever has it; with the store's own ETag.

        Of a pinned version, the target is kept. Otherwise the store is asked each time, and the
        version is that from before: if another write comes between, a condition on it fails.

        Raises:
            PreconditionFailedError: If the object is not the pinned version.
            InvalidRequestError: If the target is one that bytes must not come from.
            StoreError: As of any read.
        """
        pinned = request.headers.get("If-Match")
        for is_last in (False, True):
            with contextlib.ExitStack() as stack:
                target = self._find(request.key, pinned)
                if target is None:
                    found = self._ask(stack, request, used, pinned, uri)
                    if isinstance(found, Reply):
                        yield found
                        return
                    target = found
                try:
                    reply = stack.enter_context(self._open(target, request))
                    if reply.status in (200, 206):
                        headers = HTTPHeaderDict(reply.headers)  # whose names ignore case
                        headers["ETag"] = target.version
                        reply.headers = headers
                        yield reply
                        return
                    self._drop(request.key, target)
                    if is_last or reply.status not in _SPENT:
                        host = told(urlsplit(target.url).hostname or "")
                        action = f"GET from {host}, where the store sent"
                        raise refusal(
                            reply.status, "", [], action, uri, reply.headers, own=_NOT_THERE
                        )
                except StoreError as error:
                    conceal(error, (urlsplit(target.url).query,))
                    raise

    def _ask(
        self,
        stack: contextlib.ExitStack,
        request: Request,
        used: Authorized,
        pinned: str | None,
        uri: str,
    ) -> _Target | Reply:
        """Where the store sends this read to; or its answer, if it answers itself."""
        version, unseen = pinned, None
        if version is None:
            try:
                version = self._version_of(request.key)
            except TransientStoreError:
                raise
            except StoreError as error:  # the answer to HEAD has no body to tell the reason
                unseen = error
        with contextlib.ExitStack() as here:
            reply = here.enter_context(self._http.send("GET", used.url, used.headers))
            if reply.status not in _REDIRECTS:
                if reply.status not in (200, 206):
                    answer = reply.read_refusal()
                    raise self._failure(reply.status, reply.headers, answer, "GET", uri)
                _check(pinned, reply.headers.get("ETag", ""), uri)
                stack.push(here.pop_all())
                return reply
            location = reply.headers.get("Location", "")
        if unseen is not None or version is None:
            raise unseen or AssertionError
        url = _checked(location, used.url, uri)
        if pinned is not None:
            _check(pinned, self._version_of(request.key), uri)
        target = _Target(url, end_of(url), version)
        if pinned is not None:
            self._keep(request.key, target)
        return target

    def _open(self, target: _Target, request: Request) -> contextlib.AbstractContextManager[Reply]:
        """Sends the read to the target: the range, and nothing else."""
        span = {name: value for name, value in request.headers.items() if name == "Range"}
        return self._http.send("GET", target.url, span)

    def _find(self, key: str, pinned: str | None) -> _Target | None:
        with self._lock:
            target = self._kept.get(key)
        if target is None or target.version != pinned or target.ends - _MARGIN < time.time():
            return None
        return target

    def _keep(self, key: str, target: _Target) -> None:
        with self._lock:
            self._kept[key] = target
            self._kept.move_to_end(key)
            while len(self._kept) > _MOST:
                self._kept.popitem(last=False)

    def _drop(self, key: str, target: _Target) -> None:
        with self._lock:
            if self._kept.get(key) == target:
                del self._kept[key]


def _check(pinned: str | None, version: str, uri: str) -> None:
    if pinned is not None and version != pinned:
        raise PreconditionFailedError("the object was replaced", uri=uri, certain=True)


def _checked(location: str, origin: str, uri: str) -> str:
    """The target that an answer of ``origin`` names, if it may be read from.

    Raises:
        InvalidRequestError: If TLS would end there, or it is no address on the web.
    """
    problem: str | None = "no address that can be read from"
    with contextlib.suppress(ValueError):
        url = urljoin(origin, location)
        parts = urlsplit(url)
        if parts.scheme == "http" and urlsplit(origin).scheme == "https":
            problem = "an address without TLS"
        elif parts.scheme in ("http", "https") and parts.hostname and parts.username is None:
            problem = None
    if problem is not None:
        raise InvalidRequestError(f"the store sends the read on to {problem}", uri=uri)
    return url.partition("#")[0]


def end_of(url: str) -> float:
    """When a signed URL expires, in seconds since 1970, as AWS, CloudFront or Google write that."""
    with contextlib.suppress(Exception):  # whatever it is that a URL says
        query = {name.lower(): values[0] for name, values in parse_qs(urlsplit(url).query).items()}
        for cloud in ("amz", "goog"):
            if f"x-{cloud}-expires" in query and f"x-{cloud}-date" in query:
                began = time.strptime(query[f"x-{cloud}-date"], "%Y%m%dT%H%M%SZ")
                return calendar.timegm(began) + float(query[f"x-{cloud}-expires"])
        if "expires" in query:
            return float(query["expires"])
        text = query["policy"].translate(str.maketrans("-_~", "+=/"))
        [statement] = json.loads(base64.b64decode(text))["Statement"]
        return float(statement["Condition"]["DateLessThan"]["AWS:EpochTime"])
    return time.time() + _UNKNOWN
