"""Holds the credentials of a store, and looks them up again when the store refuses them."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

from cloudckpt import waiting
from cloudckpt.errors import (
    CloudCheckpointError,
    ConnectionLostError,
    CredentialsError,
    StoreError,
    TransientStoreError,
)
from cloudckpt.stores.base import Body
from cloudckpt.stores.http.failures import lasting_tls_failure
from cloudckpt.stores.http.options import HttpOptions
from cloudckpt.stores.redaction import raise_without_context, reason

__all__ = [
    "Access",
    "Credentials",
    "Errors",
    "Issued",
    "NoCredentials",
    "Origin",
    "SharedCall",
    "Source",
    "fetch_error",
    "take_over",
    "variables",
]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where credentials come from; contains no secrets.

    Attributes:
        source: The origin, such as ``an account key (AZURE_STORAGE_KEY)``.
        identity: The owner: an account, or the end of an access key's id; empty if unknown.
        ends: The expiry, in seconds since 1970; None if there is none or it is unknown.
    """

    source: str
    identity: str = ""
    ends: float | None = None


class Source(Protocol):
    """The credentials that one lookup in the environment, files and services has returned."""

    def secrets(self) -> tuple[str, ...]:
        """Returns the secrets that authorize requests now; fetches or renews them if due.

        The result is empty if requests are sent without credentials.

        Raises:
            Exception: The SDK's or cloudckpt's, if they can't be used, or can't be fetched now;
                :class:`Credentials` converts it.
        """

    def origin(self) -> Origin:
        """Returns where the credentials come from; call it after `secrets`."""


class NoCredentials:
    """The source for requests without credentials."""

    def secrets(self) -> tuple[str, ...]:
        return ()

    def origin(self) -> Origin:
        return Origin(source="none are sent: anonymous=True, or an emulator or http endpoint")


class Issued(NamedTuple):
    """A source of credentials, and the secrets that it has issued for a request."""

    source: Source
    secrets: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Issued({self.source!r})"


T = TypeVar("T")

Errors = Callable[[Exception], CloudCheckpointError]
"""Converts an exception of a vendor's SDK to one of cloudckpt's, see :func:`fetch_error`."""

_LONGEST_WAIT = 120.0  # seconds to wait for another thread that looks credentials up


class SharedCall(Generic[T]):
    """A call that one thread at a time makes; threads that ask meanwhile share its outcome.

    The sources of credentials are slow, and refuse too many requests at a time. If each thread
    asked in turn, the last one would wait far beyond the deadline of its request. A call that takes
    long is logged once (:mod:`cloudckpt.waiting`).
    """

    def __init__(self, call: Callable[[], T], errors: Errors) -> None:
        self._call = call
        self._errors = errors
        self._lock = threading.Lock()
        self._ended = 0.0
        self._outcome: Any = None

    def __call__(self) -> T:
        """Makes the call, or waits for that of another thread; returns its result.

        Raises:
            CloudCheckpointError: The converted error of the call, a copy for each thread.
            ConnectionLostError: If another thread's call takes more than `_LONGEST_WAIT` seconds.
        """
        asked = time.monotonic()
        if not self._lock.acquire(timeout=_LONGEST_WAIT):
            text = f"no credentials came in {_LONGEST_WAIT:g} s; check the service that issues them"
            raise ConnectionLostError(text, certain=True)
        try:
            if self._ended <= asked:
                late = threading.Timer(waiting.FIRST_LINE, _tell, [waiting.current()])
                late.daemon = True
                with contextlib.suppress(RuntimeError):  # the interpreter shuts down: no log line
                    late.start()
                try:
                    self._outcome = self._call()
                except Exception as exc:  # noqa: BLE001 - SDKs raise whatever their sources do
                    self._outcome = self._errors(exc)
                finally:
                    late.cancel()
                self._ended = time.monotonic()
            if isinstance(self._outcome, CloudCheckpointError):
                raise_without_context(copy.copy(self._outcome))
            return cast(T, self._outcome)
        finally:
            self._lock.release()


def _tell(operation: waiting.Waiting | None) -> None:
    """Logs that an operation waits for credentials: a program that issues them may never end."""
    if operation is not None:
        operation.sends("the credentials")
        operation.is_silent(waiting.FIRST_LINE)


class Credentials:
    """The credentials of a store, which are looked up again when the store refuses them.

    A job may outlive the credentials that its environment and files held when the store was opened;
    without another lookup, every later request of the store would be refused.

    Attributes:
        current: The source that authorizes requests.
        have_worked: Whether a request has succeeded with credentials of this store. If later ones
            are refused, the credentials were probably replaced, and this process does not have the
            new ones yet.
    """

    def __init__(self, find: Callable[[], Source], errors: Errors) -> None:
        """Looks up credentials.

        Args:
            find: Returns a source from the current environment and files.
            errors: Converts the exceptions of `find` and of the source.

        Raises:
            CloudCheckpointError: The converted exception of `find`.
        """

        def fetch() -> Issued:
            found = find()
            return Issued(found, found.secrets())

        self._errors = errors
        self._fetch_again = SharedCall(fetch, errors)
        self._has_failed = False
        self._were_issued = False
        self.have_worked = False
        self.current: Source = SharedCall(find, errors)()

    def get(self) -> Issued:
        """Returns the source for the next request, and its secrets; renews them if they are due.

        Credentials that could not be fetched before are looked up again. Once a source has issued
        credentials, it may do so again: a CredentialsError is then raised as a transient error, so
        that the request is retried until its deadline. Before that, a CredentialsError is final:
        the job is misconfigured.

        Raises:
            CloudCheckpointError: If there are no credentials now; a StoreError is ``certain``, as
                the request was not sent.
        """
        try:
            if self._has_failed:
                self.current, _ = self._fetch_again()
                self._has_failed = False
            source = self.current
            secrets = source.secrets()
            self._were_issued = True
            return Issued(source, secrets)
        except Exception as exc:  # noqa: BLE001 - SDKs raise whatever their sources do
            error = self._errors(exc)
        if isinstance(error, StoreError):
            error.certain = True
        if isinstance(error, CredentialsError):
            self._has_failed = True
            if self._were_issued:
                text = "the credentials can't be renewed now; check the service that issues them"
                error = ConnectionLostError(text, uri=error.uri, cause=error, certain=True)
        raise error

    def renew(self, refused: Source, secrets: tuple[str, ...]) -> bool:
        """Looks refused credentials up again; returns whether this store now uses others.

        It returns True without a lookup if another thread has replaced the source already, and
        False if the lookup yields the same secrets or fails for a lasting reason.

        Args:
            refused: The source of the refused credentials.
            secrets: Its secrets when the request was signed.

        Raises:
            TransientStoreError: If new credentials can't be fetched for the moment.
        """
        if self.current is not refused:
            return True
        try:
            found, issued = self._fetch_again()
        except TransientStoreError:
            raise
        except CloudCheckpointError:
            return False  # the store's refusal explains more
        if issued == secrets:
            return False
        self.current = found
        return True


def fetch_error(
    exc: Exception,
    whose: str,
    uri: str | None,
    *,
    is_transient: Callable[[Exception], bool],
    text_of: Callable[[Exception], str] = reason,
) -> CloudCheckpointError:
    """Converts an exception of an SDK's credentials lookup or refresh to cloudckpt's error.

    Args:
        exc: The exception; cloudckpt's own errors are returned unchanged.
        whose: The vendor's name, for messages.
        uri: The URI of the bucket that the credentials are for; None to name none.
        is_transient: Returns whether an exception means that a service does not respond or is
            overloaded.
        text_of: Returns an exception's message without credentials.

    Returns:
        A TLSError if the TLS connection to the service fails for a lasting reason; a
        ConnectionLostError if the service does not respond or is overloaded; else a
        CredentialsError.
    """
    if isinstance(exc, CloudCheckpointError):
        return exc
    error: StoreError | None = lasting_tls_failure(exc, "the credentials service")
    if error is not None:
        error.uri, error.cause = uri, text_of(exc)
        return error
    if is_transient(exc):
        text = f"the {whose} credentials can't be fetched now; check the service that issues them"
        return ConnectionLostError(text, uri=uri, cause=text_of(exc), certain=True)
    text = f"the {whose} credentials can't be used; see the cause, and correct or renew them"
    return CredentialsError(text, uri=uri, cause=text_of(exc), certain=True)


class Access(ABC):
    """The endpoint and credentials of one bucket.

    Attributes:
        url: The URL of the bucket.
        region: The region that requests are signed for; empty where the cloud has none.
        http_options: The options of connections to the endpoint.
        credentials: The credentials that authorize requests.
    """

    url: str
    region: str = ""
    http_options: HttpOptions
    credentials: Credentials

    @abstractmethod
    def authorize(
        self, method: str, url: str, headers: dict[str, str], body: Body, issued: Issued
    ) -> tuple[str, Mapping[str, str]]:
        """Signs a request; returns the URL and all headers to send.

        Args:
            method: The HTTP method.
            url: The URL without a signature.
            headers: The headers without a signature; the dict may be changed.
            body: The bytes to send.
            issued: The credentials to sign with.
        """


_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_")


def variables() -> dict[str, str]:
    """Returns the environment variables whose names begin with AWS_, AZURE_ or GOOGLE_."""
    return {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}


def take_over(given: Mapping[str, str]) -> None:
    """Replaces all AWS_, AZURE_ and GOOGLE_ environment variables of this process by `given`."""
    for name in variables().keys() - given.keys():
        del os.environ[name]
    os.environ.update(given)
