"""The base class of stores reached over HTTP: signed requests, errors, downloads, listings."""

from __future__ import annotations

import contextlib
import functools
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlencode

from cloudckpt.errors import (
    BucketNotFoundError,
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
    TLSError,
    TransientStoreError,
)
from cloudckpt.stores.base import (
    ATTEMPT,
    MOST_READ,
    Body,
    CopySource,
    ObjectInfo,
    ObjectStore,
    Progress,
    Retry,
    once,
)
from cloudckpt.stores.credentials import Access, Origin
from cloudckpt.stores.http.client import HttpClient, Reply, StoppedError, whole_number
from cloudckpt.stores.http.expect import EXPECT
from cloudckpt.stores.redaction import conceal, raise_without_context, reason
from cloudckpt.waiting import current

__all__ = [
    "SUCCESS",
    "UNRESERVED",
    "Marks",
    "Page",
    "RestStore",
    "Signed",
    "encode_query",
    "http_date",
    "iso_date",
    "reading",
]

P = TypeVar("P")

UNRESERVED = "/-._~"
"""The characters of a key that, like letters and digits, stay as they are in a URL's path."""

SUCCESS = frozenset({200, 201, 202, 204, 206})

Marks = tuple[str, ...]
"""The position where a page of a listing begins, in the store's terms; empty for the first page."""

Page = tuple[Sequence[ObjectInfo], Sequence[str]]
"""A page of a listing: its objects, and the full prefixes of its folders, such as ``a/b/``."""

_MOST_SKEW = 120.0  # seconds of clock difference; stores tolerate five to fifteen minutes
_BUSY = 60.0  # seconds after a 429 or 503 during which the store is taken for throttling
_LARGE = 1024**2  # bytes of a body from which an extra round trip pays off
_NO_EXPECTATIONS = 417
# what nginx, Go's servers and Apache answer to a request without TLS
_ONLY_TLS = re.compile(b"HTTP request (was sent )?to (an )?HTTPS|HTTP to an SSL-enabled server")
_EMPTY = re.compile("=(?=&|$)")  # after a parameter without a value


class Signed(NamedTuple):
    """A signed request: the final URL, all headers, and the source and secrets that signed it."""

    url: str
    headers: Mapping[str, str]
    source: Any
    secrets: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Signed({self.url.partition('?')[0]!r})"  # the rest may hold credentials


class RestStore(ObjectStore):
    """A store whose objects are read with GET, HEAD and Range requests.

    A request refused for its credentials is sent a second time if a new lookup in the environment,
    files and services yields other credentials. If it does not, but an earlier request succeeded,
    the refusal is raised as a transient error: the new credentials may not have arrived yet.

    Attributes:
        access: The endpoint and credentials of the bucket.
        metadata_prefix: The prefix of the headers that carry an object's metadata.
        version_header: The header that carries an object's version.
        copy_headers: The headers of a copy, without `write_headers` and those that name the source.
        renewable: The error classes after which other credentials may help.
        public_secrets: How many of the secrets, from the first, may appear in messages, as they are
            public identifiers.
    """

    access: Access
    metadata_prefix: str
    version_header = "ETag"
    copy_headers: Mapping[str, str]
    renewable: tuple[type[StoreError], ...] = (CredentialsError,)
    public_secrets = 0

    def __init__(self, root: str, access: Access) -> None:
        self.root = root
        self.access = access
        self._http = HttpClient(access.http_options)
        self._busy_until = 0.0  # by the monotonic clock
        self._knows_expect = True
        self._sends_versions = False

    @abstractmethod
    def failure(
        self, status: int, headers: Mapping[str, str], body: bytes, action: str, uri: str
    ) -> StoreError:
        """Returns the exception for an error response.

        Args:
            status: The HTTP status.
            headers: The headers of the response; they must accept lower-case names.
            body: The body, or its beginning; empty for HEAD.
            action: The operation that failed, for the message.
            uri: The object or bucket of the request.
        """

    @contextlib.contextmanager
    def _naming_source(self, source: CopySource) -> Iterator[None]:
        """Adds the source's URI to the errors of a copy."""
        try:
            yield
        except StoreError as error:
            error.message += f" (in a copy from {source.store.uri(source.info.key)})"
            raise

    @abstractmethod
    def object_url(self, key: str, query: Mapping[str, str] | None = None) -> str:
        """Returns the URL of an object's content, with a query string if `query` is given."""

    def _read(
        self, key: str, if_version: str | None, headers: Mapping[str, str]
    ) -> contextlib.AbstractContextManager[Reply]:
        """Sends a GET for an object's content; yields the response.

        If `if_version` is neither None nor empty, the store refuses another version of the object.
        """
        if if_version:
            headers = {**headers, "If-Match": if_version}
        return self.exchange("GET", self.object_url(key), headers, key=key)

    def write_headers(self, attempt: str, if_version: str | None = None) -> dict[str, str]:
        """Returns the headers that carry a write's `attempt` and `if_version`, see `put`."""
        named = {self.metadata_prefix + ATTEMPT: attempt} if attempt else {}
        if if_version is None:
            return named
        return named | ({"If-Match": if_version} if if_version else {"If-None-Match": "*"})

    def tag_of(self, tag: str | None, key: str) -> str:
        """Returns `tag`, the version in a response; raises an error if it is None or empty.

        Raises:
            ConnectionLostError: If this response has no version, although others of this store had
                one: the response may not come from the store.
            StoreError: If no response has had a version: the store never sends it, or a proxy
                removes it.
        """
        if tag:
            self._sends_versions = True
            return tag
        uri, missing = self.uri(key), "the response has no ETag or generation"
        if self._sends_versions:
            why = f"{missing}, unlike other responses of this store; check the proxy"
            raise ConnectionLostError(why, uri=uri)
        raise StoreError(
            f"{missing}, without which a replaced checkpoint can't be detected: use a store that "
            "sends it, or configure the proxy on the way not to remove it",
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
        final error is certain only if the errors of all attempts are.

        Args:
            method: The HTTP method.
            url: The URL without a signature.
            headers: The headers without a signature.
            body: The bytes to send.
            progress: Called with the bytes sent, see :data:`~cloudckpt.stores.base.Progress`.
            key: The key of the object, or the prefix of a listing, for messages; refused if it has
                a segment ``.`` or ``..``.
            is_long: Whether the response may take 15 times ``read_timeout`` to begin.
            successes: The HTTP statuses with which the response is yielded.

        Raises:
            StoreError: For any other status, if no response comes, or if the block can't parse it.
        """
        uri, waiting = f"{self.root}/{key}", current()
        was_certain, seen = True, set[type[StoreError]]()
        signed: Signed | None = None
        reply: Reply | None = None
        try:
            with contextlib.ExitStack() as stack:
                while reply is None:
                    signed = None
                    try:
                        signed = self._signed(method, url, headers, body, key)
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
                self.access.credentials.have_worked = True
                with reading(uri):
                    yield reply
        except CloudCheckpointError as error:
            if isinstance(error, StoreError):
                error.certain = error.certain and was_certain
            if error.uri is None:
                error.uri = uri
            conceal(error, signed.secrets[self.public_secrets :] if signed else ())
            may_be_renewed = self.access.credentials.have_worked and signed and signed.secrets
            if may_be_renewed and type(error) is CredentialsError and error.status:
                late = ExpiredCredentialsError(
                    error.message, uri=error.uri, cause=error.cause, certain=error.certain
                )
                late.status = error.status
                raise late from error
            raise

    def _refusal(self, reply: Reply, method: str, uri: str) -> StoreError:
        """Returns the exception for an error response; remembers if the store throttles."""
        with reading(uri):
            answer = reply.read_refusal() if method != "HEAD" else b""
            error = self.failure(reply.status, reply.headers, answer, method, uri)
        is_moved = reply.headers.get("Location", "").startswith("https:")
        if self.access.url.startswith("http:") and (is_moved or _ONLY_TLS.search(answer)):
            text = "the server accepts TLS only: begin the URL of the endpoint with https://"
            return TLSError(text, uri=uri, cause=error.cause, certain=True)
        if isinstance(error, BucketNotFoundError):
            error.message += f": {self.access.url}"
        if isinstance(error, ThrottledError):
            self._busy_until = time.monotonic() + _BUSY
        return error

    def _signed(
        self, method: str, url: str, headers: Mapping[str, str], body: Body, key: str
    ) -> Signed:
        """Signs a request, after fetching credentials if necessary.

        Raises:
            StoreError: If there are no usable credentials, or the key has a segment ``.`` or
                ``..``; ``certain``, as nothing was sent.
        """
        if not {".", ".."}.isdisjoint(key.split("/")):
            raise InvalidRequestError(
                "a name can't contain the segments '.' and '..': choose another", certain=True
            )
        size, given = sum(map(len, body)), dict(headers)
        if body or method in ("PUT", "POST"):
            given = {"Content-Length": str(size), **given}
        issued = self.access.credentials.get()
        try:
            url, headers = self.access.authorize(method, url, given, body, issued)
        except StoreError as error:
            error.certain = True  # nothing was sent
            raise
        except Exception as exc:  # noqa: BLE001 - such as a credential that can't be encoded
            text = "the store's credentials can't be used; correct or renew them"
            raise_without_context(CredentialsError(text, cause=type(exc).__name__, certain=True))
        # the body is then sent only after the server's 100 Continue, see http.expect
        if self._knows_expect and size >= _LARGE and time.monotonic() < self._busy_until:
            headers = {**headers, **EXPECT}  # not signed: proxies may drop it
        return Signed(url, headers, *issued)

    def recover(self, refused: StoreError, signed: Signed | None) -> bool:
        """Returns whether a refused request may succeed if it is signed and sent again.

        It may succeed with other credentials, which are looked up here; without the Expect header,
        if the server does not support that; or with a new signature, if the old one expired before
        the request arrived.

        Args:
            refused: The refusal.
            signed: The request as it was sent; None if it was not sent.

        Raises:
            TransientStoreError: If other credentials can't be fetched for the moment.
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
        return self.access.credentials.renew(signed.source, signed.secrets)

    def list(self, prefix: str, retry: Retry = once) -> Iterator[ObjectInfo]:
        for objects, _ in self._pages(prefix, "", retry):
            yield from objects

    def list_level(self, prefix: str, retry: Retry = once) -> Iterator[ObjectInfo | str]:
        for objects, folders in self._pages(prefix, "/", retry):
            yield from objects
            yield from (folder.removeprefix(prefix).rstrip("/") for folder in folders)

    def _pages(self, prefix: str, delimiter: str, retry: Retry) -> Iterator[Page]:
        """Yields the pages of the keys under `prefix`.

        Keys with `delimiter` after the prefix are grouped into folders, unless it is empty.
        """
        return self._all_pages(prefix, functools.partial(self._page, prefix, delimiter), retry)

    @abstractmethod
    def _page(self, prefix: str, delimiter: str, marks: Marks) -> tuple[Page, Marks | None]:
        """Requests a page of a listing; `marks` is the position where it begins.

        `prefix` and `delimiter` are as in `_pages`.

        Returns:
            The page, and the position of the next page, which is None after the last page.
        """

    def _all_pages(
        self, prefix: str, ask: Callable[[Marks], tuple[P, Marks | None]], retry: Retry
    ) -> Iterator[P]:
        """Yields the pages of a listing, each requested when needed and retried by itself.

        A store whose page says that more follows, but without a marker or with the marker of an
        earlier page, would be asked forever. Such a page must not be taken for the last one either:
        the objects left out would be taken for missing.

        Args:
            prefix: The prefix that is listed, for messages.
            ask: Requests the page that begins at a position, which is empty for the first page.
                Returns the page, and the position of the next page, None after the last page.
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
                named = "an earlier page as the next one" if any(marks) else "no next page"
                raise ServerError(
                    "the listing can't be completed: the store says that more entries follow, but "
                    f"names {named}; check the endpoint and the store",
                    uri=self.uri(prefix),
                )
            yield page

    def new_object_headers(self, checksum: int) -> dict[str, str]:
        """Returns the headers of a `put` except `write_headers`; `checksum` is that of the body."""
        raise NotImplementedError

    def put(
        self,
        key: str,
        body: Body,
        *,
        checksum: int,
        attempt: str = "",
        if_version: str | None = None,
        progress: Progress | None = None,
    ) -> ObjectInfo:
        headers = {**self.new_object_headers(checksum), **self.write_headers(attempt, if_version)}
        try:
            with self.exchange(
                "PUT", self.object_url(key), headers, body, progress, key=key
            ) as reply:
                return self._described(reply, key, sum(map(len, body)))
        except ObjectNotFoundError as error:
            if not if_version:
                raise
            raise PreconditionFailedError(
                "another writer has deleted the object that was to be replaced, so nothing was "
                "written; check what deletes objects here, then write again",
                uri=self.uri(key),
                cause=error,
                certain=error.certain,
            ) from error

    def copy(
        self, source: CopySource, key: str, *, attempt: str = "", if_version: str | None = None
    ) -> ObjectInfo:
        headers = {**self.copy_headers, **self.write_headers(attempt, if_version)}
        tag, checksum = self._copied(source, key, self.object_url(key), headers)
        return ObjectInfo(key, source.info.size, self.tag_of(tag, key), checksum)

    def _copied(
        self, source: CopySource, key: str, url: str, headers: Mapping[str, str]
    ) -> tuple[str | None, int | None]:
        """Sends a PUT to `url` that copies an object, or the range of it that `headers` name.

        Returns:
            The copy's ETag, which is None or empty if the response has none; and its checksum, None
            if the response has none.
        """
        raise NotImplementedError

    def get(self, key: str, *, limit: int = MOST_READ) -> tuple[bytearray, ObjectInfo]:
        with self._read(key, None, {}) as reply:
            info = self._described(reply, key, whole_number(reply.headers.get("Content-Length")))
            self.check_size(key, info.size, limit)
            data = bytearray(info.size)
            reply.read_into([memoryview(data)])
            return data, info

    def get_range(
        self,
        key: str,
        start: int,
        into: Sequence[memoryview],
        *,
        if_version: str | None = None,
        progress: Progress | None = None,
    ) -> ObjectInfo:
        size = sum(map(len, into))
        wanted = {"Range": f"bytes={start}-{start + size - 1}"}
        with self._read(key, if_version, wanted) as reply:
            info = self._described(reply, key, reply.check_range(start, size))
            try:
                reply.read_into(into, progress)
            except ConnectionLostError as error:
                error.version = info.version
                raise
            return info

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
            return self._described(reply, key, whole_number(reply.headers.get("Content-Length")))

    def _described(self, reply: Reply, key: str, size: int) -> ObjectInfo:
        """Returns the ObjectInfo of an object of `size` bytes from a response's headers."""
        return ObjectInfo(
            key,
            size,
            self.tag_of(reply.headers.get(self.version_header), key),
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
            # so that a store which ignores the condition deletes nothing that was replaced earlier
            try:
                found = self.head(key)
            except ObjectNotFoundError:
                return
            if found.version != if_version:
                raise PreconditionFailedError(
                    "another writer has replaced the object, so it was not deleted; check the new "
                    "object, and delete it if it is unneeded",
                    uri=self.uri(key),
                    certain=True,
                )
        self._delete(key, if_version)

    @abstractmethod
    def _delete(self, key: str, if_version: str | None) -> None:
        """Deletes an object; a missing object is not an error.

        `if_version` may be ignored unless ``capabilities.conditional_deletes`` is True.
        """

    def origin(self) -> Origin:
        """Returns where the credentials come from, after fetching them if necessary.

        Raises:
            StoreError: If they can't be fetched.
        """
        return self.access.credentials.get().source.origin()

    def interrupt(self, threads: Collection[int]) -> None:
        self._http.interrupt(threads)

    def moved(self, threads: Collection[int]) -> Sequence[int] | None:
        return self._http.moved(threads)

    def close(self) -> None:
        self._http.close()


def encode_query(query: Mapping[str, str]) -> str:
    """Returns the query string of a URL; empty values are written without an equals sign."""
    return _EMPTY.sub("", urlencode(query, quote_via=quote))


@contextlib.contextmanager
def reading(uri: str) -> Iterator[None]:
    """Converts whatever the block raises while it parses a response to a retryable ServerError.

    All parsing of received data happens within such a block, so parsers may raise anything for a
    malformed response. Errors of cloudckpt, exceptions of ``progress`` and MemoryErrors pass
    unchanged.
    """
    try:
        yield
    except (CloudCheckpointError, StoppedError, MemoryError):
        raise
    except Exception as exc:
        why = "the store's response can't be understood; check the endpoint and the proxy"
        raise ServerError(why, uri=uri, cause=reason(exc)) from exc


def iso_date(text: str) -> float | None:
    """Converts an ISO 8601 time to seconds since 1970; None if it can't be parsed.

    A time without an offset or ``Z`` is taken for local time.
    """
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return None


def http_date(text: str) -> float | None:
    """Converts the date of an HTTP header to seconds since 1970; None if it can't be parsed.

    A date without a time zone is taken for UTC.
    """
    try:
        date = parsedate_to_datetime(text)
        return (date if date.tzinfo else date.replace(tzinfo=timezone.utc)).timestamp()
    except (TypeError, ValueError, LookupError, OverflowError):
        return None
