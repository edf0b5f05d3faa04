"""The base class of stores reached over HTTP: signed requests, errors, downloads, listings."""

from __future__ import annotations

import contextlib
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from cloudckpt.errors import (
    ClockError,
    CloudCheckpointError,
    ConnectionLostError,
    CredentialsError,
    ExpiredCredentialsError,
    InvalidRequestError,
    ObjectNotFoundError,
    PreconditionFailedError,
    RangeNotSatisfiableError,
    ServerError,
    StoreError,
    ThrottledError,
    TransientStoreError,
)
from cloudckpt.stores.base import (
    ATTEMPT,
    MOST_READ,
    Body,
    ObjectInfo,
    ObjectStore,
    Progress,
    Retry,
    nbytes,
    once,
)
from cloudckpt.stores.credentials import Credentials, Origin, fetching
from cloudckpt.stores.http.bodies import Reply, http_date, reading
from cloudckpt.stores.http.client import HttpClient
from cloudckpt.stores.http.expect import EXPECT
from cloudckpt.stores.http.options import HttpOptions, Route
from cloudckpt.stores.redaction import conceal
from cloudckpt.waiting import current

__all__ = [
    "SUCCESS",
    "UNRESERVED",
    "Access",
    "Marks",
    "Page",
    "Request",
    "RestStore",
    "Signed",
    "encode_query",
]

P = TypeVar("P")

UNRESERVED = "/-._~"
"""The characters of a key that are not percent-encoded in the path of a URL."""

SUCCESS = frozenset({200, 201, 202, 204, 206})

Marks = tuple[str, ...]
"""The position where a page of a listing begins, in the store's terms; empty for the first page."""

Page = tuple[Sequence[ObjectInfo], Sequence[str]]
"""A page of a listing: its objects, and its folders by their full prefixes."""

_MOST_SKEW = 120.0  # seconds of clock difference; stores tolerate five to fifteen minutes
_BUSY = 60.0  # seconds after a 429 or 503 during which the store is taken for throttling
_LARGE = 1024**2  # bytes of a body from which an extra round trip pays off
_NO_EXPECTATIONS = 417


@dataclass(frozen=True, repr=False)  # repr: headers may hold credentials for a copy's source
class Request:
    """A request before it is signed, without Content-Length and Authorization.

    Attributes:
        method: The HTTP method.
        url: The URL.
        headers: Header names and values.
        body: The bytes to send.
        progress: See :data:`~cloudckpt.stores.base.Progress`.
        key: The key that the request is about, for messages.
        is_long: Whether the response may take as long as that to a completion.
    """

    method: str
    url: str
    headers: Mapping[str, str]
    body: Body = ()
    progress: Progress | None = None
    key: str = ""
    is_long: bool = False


@dataclass(frozen=True, repr=False)
class Signed:
    """A signed request: the final URL, all headers, and the credentials that signed it."""

    url: str
    headers: Mapping[str, str]
    source: Any
    secrets: tuple[str, ...]


class Access(ABC):
    """The endpoint and credentials of one bucket.

    Attributes:
        url: The URL of the bucket.
        endpoint_from: The setting that supplied the endpoint.
        http_options: The options of connections to it.
        credentials: The credentials that authorize requests.
    """

    url: str
    endpoint_from: str
    http_options: HttpOptions
    credentials: Credentials[Any]

    @abstractmethod
    def authorize(
        self, request: Request, headers: dict[str, str], source: Any, secrets: tuple[str, ...]
    ) -> tuple[str, Mapping[str, str]]:
        """Signs a request by a source of credentials, whose secrets are given.

        Returns:
            The URL and all headers to send, given the other headers.
        """

    def route(self) -> Route:
        """Returns the bucket's URL, and the settings that it comes from."""
        return Route(url=self.url, endpoint_from=self.endpoint_from, http=self.http_options)


class RestStore(ObjectStore):
    """A store whose objects are read with GET, HEAD and Range requests.

    A request refused for its credentials is sent a second time if a new lookup in the environment,
    files and services yields other credentials: an exception to "one attempt". If the lookup yields
    the same ones, but the store accepted them before, the refusal is raised as a transient error.

    Attributes:
        metadata_prefix: The prefix of the headers that carry an object's metadata.
        version_header: The header that carries an object's version.
        renewable: The error classes after which other credentials may help.
        shown: The number of leading secrets that are public identifiers and may appear in messages.
    """

    metadata_prefix: str
    version_header = "ETag"
    renewable: tuple[type[StoreError], ...] = (CredentialsError,)
    shown = 0

    def __init__(self, root: str, access: Access) -> None:
        self.root = root
        self.route = access.route
        self._http = HttpClient(access.http_options)
        self._credentials = access.credentials
        self._authorize = access.authorize
        self._busy_until = 0.0  # by the monotonic clock
        self._knows_expect = True
        self._sends_versions = False

    @abstractmethod
    def failure(
        self, status: int, headers: Mapping[str, str], body: bytes, action: str, uri: str
    ) -> StoreError:
        """Returns the exception for an error response; `headers` are asked in lower case."""

    def belated(self, headers: Mapping[str, str], body: bytes, action: str, uri: str) -> StoreError:
        """Returns the exception for an error in the body of a 200, sent before the work ended."""
        error = self.failure(200, headers, body, action, uri)
        # throttled in the middle of the work, whose outcome is unknown
        if isinstance(error, ThrottledError):
            error.certain = False
        return error

    @contextlib.contextmanager
    def _copying(self, source: ObjectStore, found: ObjectInfo) -> Iterator[None]:
        """Adds the source's URI to the errors of a copy."""
        try:
            yield
        except StoreError as error:
            error.message += f" (while it was copied from {source.uri(found.key)})"
            raise

    @abstractmethod
    def object_url(self, key: str, query: Mapping[str, str] | None = None) -> str:
        """Returns the URL of an object's content."""

    @abstractmethod
    def _read(
        self, key: str, if_version: str | None, headers: Mapping[str, str]
    ) -> contextlib.AbstractContextManager[Reply]:
        """Sends a GET for an object's content, of `if_version` if given; yields the response."""

    def _version(self, reply: Reply, key: str) -> str:
        """Returns the object's version according to a response."""
        return self.tag_of(reply.headers.get(self.version_header), key)

    def _length(self, reply: Reply, key: str) -> int:
        """Returns the object's size, from the response to a HEAD or a GET of the whole object."""
        if reply.length is None:
            raise ConnectionLostError("the response has no length", uri=self.uri(key))
        return reply.length

    def naming(self, attempt: str) -> dict[str, str]:
        """Returns the metadata header that stores the write's name; empty if `attempt` is."""
        return {self.metadata_prefix + ATTEMPT: attempt} if attempt else {}

    def tag_of(self, tag: str | None, key: str) -> str:
        """Returns an object's version, given by the `version_header` of a response, or in its body.

        Raises:
            ConnectionLostError: If this response has none, although others of this store have: what
                it confirms may be something else's.
            StoreError: If no response has had one: this store, or a proxy, never sends it.
        """
        if tag:
            self._sends_versions = True
            return tag
        uri, missing = self.uri(key), "the response has no ETag or generation"
        if self._sends_versions:
            raise ConnectionLostError(missing, uri=uri)
        raise StoreError(
            f"{missing}, by which a checkpoint is told from one that replaced it: use a store "
            "that sends it, or configure the proxy on the way not to remove it",
            uri=uri,
        )

    @contextlib.contextmanager
    def exchange(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: Body = (),
        progress: Progress | None = None,
        *,
        key: str,
        is_long: bool = False,
        successes: Collection[int] = SUCCESS,
    ) -> Iterator[Reply]:
        """Signs and sends a request; yields the response if its status is one of `successes`.

        The request is sent once more for each class of refusal that `recover` can resolve. The
        final error is certain only if those of all attempts are.

        Raises:
            StoreError: For any other status, or if the block can't parse the response.
        """
        request = Request(method, url, headers, body, progress, key, is_long)
        uri, waiting = self.uri(key), current()
        was_certain, seen = True, set[type[StoreError]]()
        signed: Signed | None = None
        reply: Reply | None = None
        try:
            with contextlib.ExitStack() as stack:
                while reply is None:
                    signed = None
                    try:
                        signed = self._signed(request)
                        if waiting is not None:
                            waiting.sends(f"{method} {uri}")
                        answer = stack.enter_context(
                            self._http.send(
                                method, signed.url, signed.headers, body, progress, is_long=is_long
                            )
                        )
                        if answer.status not in successes:
                            raise self._refusal(answer, method, uri)
                        reply = answer
                    except StoreError as refused:
                        was_certain = was_certain and refused.certain
                        if type(refused) in seen or not self.recover(refused, signed):
                            raise
                        stack.close()
                        seen.add(type(refused))
                self._credentials.have_worked = True
                with reading(uri):
                    yield reply
        except CloudCheckpointError as error:
            if isinstance(error, StoreError):
                error.certain = error.certain and was_certain
            if error.uri is None:
                error.uri = uri
            conceal(error, signed.secrets[self.shown :] if signed else ())
            may_be_renewed = self._credentials.have_worked and signed and signed.secrets
            if may_be_renewed and type(error) is CredentialsError and error.status:
                raise _expired(error) from error
            raise

    def _refusal(self, reply: Reply, method: str, uri: str) -> StoreError:
        """Returns the exception for an error response; remembers if the store throttles."""
        with reading(uri):
            answer = reply.read_refusal() if method != "HEAD" else b""
            error = self.failure(reply.status, reply.headers, answer, method, uri)
        if isinstance(error, ThrottledError):
            self._busy_until = time.monotonic() + _BUSY
        return error

    def _signed(self, request: Request) -> Signed:
        """Signs a request, after fetching credentials if necessary.

        Raises:
            StoreError: As :meth:`Credentials.get`; certain, as nothing was sent.
        """
        if not {".", ".."}.isdisjoint(request.key.split("/")):
            raise InvalidRequestError(
                "a key can't contain the segments '.' and '..': choose another name", certain=True
            )
        size, given = nbytes(request.body), dict(request.headers)
        if request.body or request.method in ("PUT", "POST"):
            given = {"Content-Length": str(size), **given}
        source, secrets = self._credentials.get()
        try:
            with fetching("store's", None, is_passing=lambda exc: False, said=_class_of):
                url, headers = self._authorize(request, given, source, secrets)
        except StoreError as error:
            error.certain = True  # nothing was sent
            raise
        # the body is then sent only after the server's 100 Continue, see http.expect
        if self._knows_expect and size >= _LARGE and time.monotonic() < self._busy_until:
            headers = {**headers, **EXPECT}  # not signed: proxies may drop it
        return Signed(url, headers, source, secrets)

    def recover(self, refused: StoreError, signed: Signed | None) -> bool:
        """Returns whether a refused request may succeed if it is signed and sent again.

        It may with other credentials; without the Expect header, if the server does not support it;
        or with a new signature, if the request was delayed until the old signature had expired.

        Args:
            refused: The refusal.
            signed: The request as it was sent; None if it was not sent.
        """
        if isinstance(refused, ClockError):  # the clocks agree, so the request was delayed
            return abs(refused.ahead or 0.0) < _MOST_SKEW
        if signed is None:
            return False
        if refused.status == _NO_EXPECTATIONS and EXPECT.keys() & signed.headers:
            self._knows_expect = False
            return True
        if not signed.secrets or not isinstance(refused, self.renewable):
            return False
        return self._credentials.renew(signed.source, signed.secrets)

    def list(self, prefix: str, retry: Retry = once) -> Iterator[ObjectInfo]:
        for objects, _ in self._listed(prefix, retry, ""):
            yield from objects

    def list_level(self, prefix: str, retry: Retry = once) -> Iterator[ObjectInfo | str]:
        for objects, folders in self._listed(prefix, retry, "/"):
            yield from objects
            yield from (folder.removeprefix(prefix).rstrip("/") for folder in folders)

    @abstractmethod
    def _listed(self, prefix: str, retry: Retry, delimiter: str) -> Iterator[Page]:
        """Yields the pages of a listing; keys beyond `delimiter` are grouped into folders."""

    def _all_pages(
        self, prefix: str, ask: Callable[[Marks], tuple[P, Marks | None]], retry: Retry
    ) -> Iterator[P]:
        """Yields the pages of a listing, each requested when needed and retried by itself.

        A store whose page says that more follows, but without a marker or with the marker of an
        earlier page, would be asked forever. It must not be taken for the end either: the objects
        left out would be taken for missing.

        Args:
            prefix: The prefix that is listed, for messages.
            ask: Requests the page at some marks, empty for the first. Returns the page and the
                marks of the next page, None after the last.
            retry: Retries the request of a page.

        Raises:
            ServerError: If the listing would not end.
        """
        begun = set[Marks]()
        marks: Marks | None = ()
        while marks is not None:
            begun.add(marks)
            page, marks = retry(functools.partial(ask, marks))
            if marks is not None and (not any(marks) or marks in begun):
                where = "an earlier page" if any(marks) else "no page"
                raise ServerError(
                    "the listing would not end: the store says that more entries follow, but "
                    f"names {where} as the next one; check the endpoint and the store",
                    uri=self.uri(prefix),
                )
            yield page

    def new_object_headers(self, checksum: int) -> dict[str, str]:
        """Returns the headers of a request that writes an object; its conditions are added."""
        raise NotImplementedError

    def put(
        self,
        key: str,
        body: Body,
        *,
        checksum: int,
        attempt: str = "",
        if_absent: bool = False,
        if_version: str | None = None,
        progress: Progress | None = None,
    ) -> ObjectInfo:
        headers = {**self.new_object_headers(checksum), **self.naming(attempt)}
        if if_absent:
            headers["If-None-Match"] = "*"
        if if_version is not None:
            headers["If-Match"] = if_version
        try:
            with self.exchange(
                "PUT", self.object_url(key), headers, body, progress, key=key
            ) as reply:
                return ObjectInfo(key, nbytes(body), self._version(reply, key))
        except ObjectNotFoundError as error:
            if if_version is None:
                raise
            raise PreconditionFailedError(
                "the object that was to be replaced no longer exists",
                uri=self.uri(key),
                cause=error,
                certain=error.certain,
            ) from error

    def get(self, key: str, *, limit: int = MOST_READ) -> tuple[bytearray, ObjectInfo]:
        with self._read(key, None, {}) as reply:
            size = self._length(reply, key)
            self.check_size(key, size, limit)
            data = bytearray(size)
            reply.read_into([memoryview(data)])
            return data, ObjectInfo(key, len(data), self._version(reply, key))

    def get_range(
        self,
        key: str,
        start: int,
        into: Sequence[memoryview],
        *,
        if_version: str | None = None,
        progress: Progress | None = None,
    ) -> ObjectInfo:
        size = nbytes(into)
        wanted = {"Range": f"bytes={start}-{start + size - 1}"}
        with self._read(key, if_version, wanted) as reply:
            total = reply.check_range(start, size, self.uri(key))
            version = self._version(reply, key)
            try:
                reply.read_into(into, progress)
            except ConnectionLostError as error:
                error.version = version
                raise
            return self._described(reply, key, total)

    def head(self, key: str) -> ObjectInfo:
        try:
            return self._head(key)
        except StoreError as error:
            if isinstance(error, TransientStoreError) or error.status is None:
                raise
            # the response to HEAD has no body: a GET's body tells the reason of a refusal
            try:
                return self.get_range(key, 0, [memoryview(bytearray(1))])
            except RangeNotSatisfiableError:  # the failure has passed, and the object is empty
                return self._head(key)

    def _head(self, key: str) -> ObjectInfo:
        with self.exchange("HEAD", self.object_url(key), {}, key=key) as reply:
            return self._described(reply, key, self._length(reply, key))

    def _described(self, reply: Reply, key: str, size: int) -> ObjectInfo:
        """Returns the ObjectInfo that a response's headers describe."""
        return ObjectInfo(
            key,
            size,
            self._version(reply, key),
            attempt=reply.headers.get(self.metadata_prefix + ATTEMPT, ""),
            modified=http_date(reply.headers.get("Last-Modified", "")),
            answered=http_date(reply.headers.get("Date", "")),
        )

    def _removed(self, key: str, url: str, headers: Mapping[str, str]) -> None:
        """Sends a DELETE to a URL; a missing object is not an error."""
        with (
            contextlib.suppress(ObjectNotFoundError),
            self.exchange("DELETE", url, headers, key=key),
        ):
            pass

    def delete(self, key: str, *, if_version: str | None = None) -> None:
        if if_version is not None and not self.capabilities.conditional_deletes:
            # a store that ignores the condition does not delete what was replaced before this
            try:
                found = self.head(key)
            except ObjectNotFoundError:
                return
            if found.version != if_version:
                raise PreconditionFailedError(
                    "the object was replaced after its version was read",
                    uri=self.uri(key),
                    certain=True,
                )
        self._delete(key, if_version)

    @abstractmethod
    def _delete(self, key: str, if_version: str | None) -> None:
        """Deletes an object; a missing object is not an error. The store may ignore the version."""

    def origin(self) -> Origin:
        """Returns where the credentials come from, after fetching them if necessary.

        Raises:
            StoreError: If they can't be fetched.
        """
        source, _ = self._credentials.get()
        origin: Origin = source.origin()
        return origin

    def interrupt(self, threads: Collection[int]) -> None:
        self._http.interrupt(threads)

    def moved(self, threads: Collection[int]) -> Sequence[int] | None:
        return self._http.moved(threads)

    def close(self) -> None:
        self._http.close()


def _class_of(exc: Exception) -> str:
    """Returns an exception's class: its text may quote a credential that can't be encoded."""
    return type(exc).__name__


def _expired(refused: CredentialsError) -> ExpiredCredentialsError:
    """Returns a refusal of previously accepted credentials as a transient error."""
    error = ExpiredCredentialsError(
        refused.message, uri=refused.uri, cause=refused.cause, certain=refused.certain
    )
    error.status = refused.status
    return error


def encode_query(query: Mapping[str, str]) -> str:
    """Returns the query string of a URL; empty values are written without an equals sign."""
    return "&".join(
        urlencode({name: value}, quote_via=quote) if value else quote(name)
        for name, value in query.items()
    )
