"""What the stores that are reached over HTTP have in common: requests, errors, downloads, pages."""

from __future__ import annotations

import contextlib
import functools
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
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
from cloudckpt.stores.credentials import Credentials, Origin
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
"""What stays as it is in a key that becomes the path of a URL."""

SUCCESS = frozenset({200, 201, 202, 204, 206})

Marks = tuple[str, ...]
"""Where a page of a listing begins, in the store's words; empty for the first page."""

Page = tuple[Sequence[ObjectInfo], Sequence[str]]
"""The objects, and the folders by their whole names, that a page of a listing has."""

_MOST_SKEW = 120.0  # seconds between clocks; stores allow five to fifteen minutes
_BUSY = 60.0  # seconds after an answer that asks to slow down in which others may come
_LARGE = 1024**2  # bytes of a body for which a round trip pays
_NO_EXPECTATIONS = 417


@dataclass(frozen=True, repr=False)  # its headers may authorize the store to read a copy's source
class Request:
    """What is to be sent, without Content-Length and what authorizes it.

    Attributes:
        method: Of the request.
        url: Where to.
        headers: Names and values.
        body: What to send.
        progress: See :data:`~cloudckpt.stores.base.Progress`.
        key: What the request is about, for messages.
        is_long: Whether the answer may take as long as that to a completion.
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
    """A request as it may be sent: its URL, all its headers, and the credentials in them."""

    url: str
    headers: Mapping[str, str]
    source: Any
    secrets: tuple[str, ...]


class Access(Protocol):
    """How one bucket is reached."""

    credentials: Credentials[Any]
    http_options: HttpOptions

    def authorize(
        self, request: Request, headers: dict[str, str], secrets: tuple[str, ...]
    ) -> tuple[str, Mapping[str, str]]:
        """The URL and headers with which a request may be sent, given its other headers."""


class RestStore(ObjectStore):
    """A store whose objects are read with GET, HEAD and Range.

    A request that is refused for its credentials is sent a second time if the environment, files
    and services that they come from have others by now: an exception to "one attempt". If they
    have none yet, but the store accepted these before, the refusal counts as one that may pass.

    Attributes:
        metadata_prefix: What the headers with an object's metadata begin with.
        renewable: The refusals that other credentials may mend, if there are any.
        shown: How many of the secrets, from the first, are names that a message may show.
    """

    metadata_prefix: str
    renewable: tuple[type[StoreError], ...] = (CredentialsError,)
    shown = 0

    def __init__(self, root: str, access: Access) -> None:
        self.root = root
        self._http = HttpClient(access.http_options)
        self._credentials = access.credentials
        self._authorize = access.authorize
        self._busy_until = 0.0  # by the monotonic clock
        self._knows_expect = True

    @abstractmethod
    def failure(
        self, status: int, headers: Mapping[str, str], body: bytes, action: str, uri: str
    ) -> StoreError:
        """The error for an answer that is no success."""

    def belated(self, headers: Mapping[str, str], body: bytes, action: str, uri: str) -> StoreError:
        """The error in the body of a success, whose status was sent before the work was done."""
        error = self.failure(200, headers, body, action, uri)
        if isinstance(error, ThrottledError):  # amid the work, whose end is not told
            error.certain = False
        return error

    @contextlib.contextmanager
    def _copying(self, source: ObjectStore, found: ObjectInfo) -> Iterator[None]:
        """Around a copy: its errors name the source, too."""
        try:
            yield
        except StoreError as error:
            error.message += f" (while it was copied from {source.uri(found.key)})"
            raise

    @abstractmethod
    def object_url(self, key: str, query: Mapping[str, str] | None = None) -> str:
        """The URL of an object's content."""

    @abstractmethod
    def _read(
        self, key: str, if_version: str | None, headers: Mapping[str, str]
    ) -> contextlib.AbstractContextManager[Reply]:
        """The answer to a GET of an object's content, of that version only if one is given."""

    def _version(self, reply: Reply, key: str) -> str:
        """The version of the object that an answer is about."""
        if tag := reply.headers.get("ETag"):
            return tag
        raise ConnectionLostError("the answer has no ETag", uri=self.uri(key))

    def _length(self, reply: Reply, key: str) -> int:
        """The size of the object whose whole content, or HEAD, was asked for."""
        if reply.length is None:
            raise ConnectionLostError("the answer has no length", uri=self.uri(key))
        return reply.length

    def naming(self, attempt: str) -> dict[str, str]:
        """The header that gives a new object the name of its write; none for no name."""
        return {self.metadata_prefix + ATTEMPT: attempt} if attempt else {}

    def _made(self, key: str, size: int, tag: str | None, attempt: str) -> ObjectInfo:
        """The object that the store says to have written; if it named no ETag, it is looked at.

        Raises:
            ServerError: If there is none, another one, or none to be seen: the request may have
                been carried out all the same.
        """
        if tag:
            return ObjectInfo(key, size, tag)
        problem = "the object does not exist"
        try:
            found = self.head(key)
            if (found.size, found.attempt) == (size, attempt):
                return found
            problem = "another object has its name"
        except ObjectNotFoundError:
            pass
        except StoreError as error:
            problem = f"the object can't be checked: {error}"
        raise ServerError(
            f"the store reported that it wrote an object of {size} bytes, but {problem}",
            uri=self.uri(key),
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
        """Signs a request, sends it, and yields the answer if its status is one of ``successes``.

        It is sent once more for each kind of refusal that `recover` mends. A failure of the last
        try is certain only if those of all others are.

        Raises:
            StoreError: For any other answer, and for what can't be read of this one.
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
                self._advise(error, signed)
            if error.uri is None:
                error.uri = uri
            conceal(error, signed.secrets[self.shown :] if signed else ())
            may_be_renewed = self._credentials.have_worked and signed and signed.secrets
            if may_be_renewed and type(error) is CredentialsError and error.status:
                raise _expired(error) from error
            raise

    def _refusal(self, reply: Reply, method: str, uri: str) -> StoreError:
        """The error for an answer that is no success; remembers that a store throttles."""
        with reading(uri):
            answer = reply.read_refusal() if method != "HEAD" else b""
            error = self.failure(reply.status, reply.headers, answer, method, uri)
        if isinstance(error, ThrottledError):
            self._busy_until = time.monotonic() + _BUSY
        return error

    def _advise(self, error: StoreError, signed: Signed | None) -> None:
        """Adds to an error what this kind of store knows of what was sent, if anything was."""

    def _signed(self, request: Request) -> Signed:
        """A request as it may be sent. Credentials may have to be fetched for it.

        Raises:
            CredentialsError: If there have never been any.
            StoreError: If they can't be refreshed for now. All are certain, as nothing was sent.
        """
        if not {".", ".."}.isdisjoint(request.key.split("/")):
            raise InvalidRequestError(
                "a key can't contain the segments '.' and '..': choose another name", certain=True
            )
        size, given = nbytes(request.body), dict(request.headers)
        if request.body or request.method in ("PUT", "POST"):
            given = {"Content-Length": str(size), **given}
        try:
            source = self._credentials.source()
            secrets = source.secrets()
            url, headers = self._authorize(request, given, secrets)
            self._credentials.were_held = True
        except StoreError as error:
            error.certain = True  # nothing was sent
            if not isinstance(error, CredentialsError):
                raise
            meaning = self._credentials.failed(error)
        else:
            # a body is sent only when the server has said so, see http.expect
            is_busy = self._knows_expect and time.monotonic() < self._busy_until
            if is_busy and size >= _LARGE:
                headers = {**headers, **EXPECT}  # not signed: proxies may drop it
            return Signed(url, headers, source, secrets)
        raise meaning

    def recover(self, refused: StoreError, signed: Signed | None) -> bool:
        """Whether a request that was refused may succeed if it is signed and sent again.

        With other credentials; without a header that the server does not know; or with a new
        signature, if it was held back until the old one was out of date.

        Args:
            refused: The refusal.
            signed: What was sent; None if nothing was.
        """
        if isinstance(refused, ClockError):  # if the clocks agree, the request was held back
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
        """The pages of a listing; keys that go on after a delimiter are folders."""

    def _all_pages(
        self, prefix: str, ask: Callable[[Marks], tuple[P, Marks | None]], retry: Retry
    ) -> Iterator[P]:
        """The pages of a listing, each asked for when it is needed, and again if it is refused.

        A store that says that there is more without saying where, or that leads back to a page that
        was there, would be asked without an end; and if that were taken for the end, what is left
        out would be taken for missing.

        Args:
            prefix: What is listed.
            ask: Asks for the page that begins at some marks, none for the first. Returns it and the
                marks of the next one, or None after the last page.
            retry: Tries the request for a page again.

        Raises:
            ServerError: If they do not end.
        """
        begun = set[Marks]()
        marks: Marks | None = ()
        while marks is not None:
            begun.add(marks)
            page, marks = retry(functools.partial(ask, marks))
            if marks is not None and (not any(marks) or marks in begun):
                where = "back to an earlier page" if any(marks) else "nowhere"
                raise ServerError(
                    f"the listing does not end: its page leads {where}, although it says that "
                    "more follows; check the store",
                    uri=self.uri(prefix),
                )
            yield page

    def _written(
        self,
        key: str,
        headers: Mapping[str, str],
        body: Body,
        attempt: str,
        progress: Progress | None,
    ) -> ObjectInfo:
        """Writes an object by PUT; that it is gone is a failed condition, if there is one."""
        url, size = self.object_url(key), nbytes(body)
        headers = {**headers, **self.naming(attempt)}
        try:
            with self.exchange("PUT", url, headers, body, progress, key=key) as reply:
                tag = reply.headers.get("ETag")
        except ObjectNotFoundError as error:
            if "If-Match" not in headers:
                raise
            raise PreconditionFailedError(
                "the object that was to be replaced no longer exists",
                uri=self.uri(key),
                cause=error,
                certain=error.certain,
            ) from error
        return self._made(key, size, tag, attempt)

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
        except TransientStoreError:
            raise
        except StoreError:
            # the answer to HEAD has no body: ask again in a way that tells the reason
            try:
                return self.get_range(key, 0, [memoryview(bytearray(1))])
            except RangeNotSatisfiableError:  # none that lasts, but an empty object
                return self._head(key)

    def _head(self, key: str) -> ObjectInfo:
        with self.exchange("HEAD", self.object_url(key), {}, key=key) as reply:
            return self._described(reply, key, self._length(reply, key))

    def _described(self, reply: Reply, key: str, size: int) -> ObjectInfo:
        """The object that the headers of an answer describe."""
        return ObjectInfo(
            key,
            size,
            self._version(reply, key),
            attempt=reply.headers.get(self.metadata_prefix + ATTEMPT, ""),
            modified=http_date(reply.headers.get("Last-Modified", "")),
            answered=http_date(reply.headers.get("Date", "")),
        )

    def _removed(self, key: str, url: str, headers: Mapping[str, str]) -> None:
        """Removes what is at a URL; that there is nothing is no error."""
        with (
            contextlib.suppress(ObjectNotFoundError),
            self.exchange("DELETE", url, headers, key=key),
        ):
            pass

    def delete(self, key: str, *, if_version: str | None = None) -> None:
        honoured = self.capabilities.conditional_deletes
        if if_version is not None and not honoured:
            # another write may come between, but none that was there before is deleted
            try:
                found = self.head(key)
            except ObjectNotFoundError:
                return
            if found.version != if_version:
                raise PreconditionFailedError(
                    "the object was replaced", uri=self.uri(key), certain=True
                )
        self._delete(key, None if honoured is False else if_version)

    @abstractmethod
    def _delete(self, key: str, if_version: str | None) -> None:
        """Removes an object; a missing object is not an error. The condition may be ignored."""

    @abstractmethod
    def route(self) -> Route:
        """How the bucket is reached."""

    def origin(self) -> Origin:
        """Where the credentials come from; they are fetched for it, if they were not yet.

        Raises:
            StoreError: If they can't be.
        """
        source = self._credentials.source()
        source.secrets()
        origin: Origin = source.origin()
        return origin

    def interrupt(self, threads: Collection[int]) -> None:
        self._http.interrupt(threads)

    def moved(self, threads: Collection[int]) -> Sequence[int] | None:
        return self._http.moved(threads)

    def close(self) -> None:
        self._http.close()


def _expired(refused: CredentialsError) -> ExpiredCredentialsError:
    """The refusal of credentials that the store accepted before."""
    error = ExpiredCredentialsError(
        refused.message, uri=refused.uri, cause=refused.cause, certain=refused.certain
    )
    error.status = refused.status
    return error


def encode_query(query: Mapping[str, str]) -> str:
    """The query of a URL; empty values are written without an equals sign."""
    return "&".join(
        urlencode({name: value}, quote_via=quote) if value else quote(name)
        for name, value in query.items()
    )
