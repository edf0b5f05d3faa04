"""Validates credentials, and looks them up again when the store refuses them."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

from cloudckpt.errors import (
    CloudCheckpointError,
    ConnectionLostError,
    CredentialsError,
    StoreError,
    TransientStoreError,
)
from cloudckpt.stores.http.tls_errors import lasting_failure
from cloudckpt.stores.redaction import raise_alone, reason

__all__ = [
    "Credentials",
    "Errors",
    "Origin",
    "SharedCall",
    "Source",
    "fetching",
    "take_over",
    "variables",
]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where credentials come from; contains no secrets.

    Attributes:
        source: The origin, such as ``the environment (AWS_ACCESS_KEY_ID)``.
        identity: The owner as far as known: an account, or the end of an access key's id.
        ends: The expiry, in seconds since 1970; None if there is none or it is unknown.
    """

    source: str
    identity: str = ""
    ends: float | None = None


class Source(Protocol):
    """The credentials that one lookup in the environment, files and services has returned."""

    def secrets(self) -> tuple[str, ...]:
        """Returns the secrets that authorize requests now; fetches or renews them if due.

        Raises:
            CredentialsError: If the credentials can't be used.
            ConnectionLostError: If they can't be fetched for the moment.
        """

    def origin(self) -> Origin:
        """Returns where the credentials come from; call it after `secrets`."""


S = TypeVar("S", bound=Source)
T = TypeVar("T")

Errors = Callable[[], AbstractContextManager[None]]
"""Makes a context that converts the exceptions of a vendor's SDK, see :func:`fetching`."""

_LONGEST_WAIT = 120.0  # seconds to wait for another thread that looks credentials up


class SharedCall(Generic[T]):
    """A call that one thread makes for all threads that ask meanwhile; they share its outcome.

    The sources of credentials are slow, and refuse many requests at once. If each thread asked in
    turn, the last one would wait far beyond the deadline of its request.
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
            StoreError: The error of the call, a copy for each thread.
        """
        asked = time.monotonic()
        if not self._lock.acquire(timeout=_LONGEST_WAIT):
            text = "fetching the credentials takes too long in another thread"
            raise ConnectionLostError(text, certain=True)
        try:
            if self._ended <= asked:
                try:
                    with self._errors():
                        self._outcome = self._call()
                except StoreError as error:
                    self._outcome = error
                self._ended = time.monotonic()
            if isinstance(self._outcome, StoreError):
                raise_alone(copy.copy(self._outcome))
            return cast(T, self._outcome)
        finally:
            self._lock.release()


class Credentials(Generic[S]):
    """The credentials of a store, which are looked up again when the store refuses them.

    A job may outlive the credentials that its environment and files held when the store was opened;
    without another lookup, every later request of the store would be refused.

    Attributes:
        current: The source that authorizes requests.
        have_worked: Whether a request has succeeded with credentials of this store. If later ones
            are refused, the credentials were probably replaced, and this process does not have the
            new ones yet.
    """

    def __init__(self, look: Callable[[], S], errors: Errors) -> None:
        """Looks up credentials.

        Args:
            look: Returns a source from the current environment and files.
            errors: Converts the exceptions of `look` and of the source.
        """

        def look_again() -> tuple[S, tuple[str, ...]]:
            found = look()
            return found, found.secrets()

        self._errors = errors
        self._look_again = SharedCall(look_again, errors)
        self._has_failed = False
        self._were_issued = False
        self.have_worked = False
        with errors():
            self.current = look()

    def get(self) -> tuple[S, tuple[str, ...]]:
        """Returns the source for the next request, and its secrets; renews them if they are due.

        They are looked up again if they could not be fetched before. Once a source has issued
        credentials, it may do so again: its failures are then transient, so that the request is
        retried until its deadline. Otherwise the job is misconfigured, and the error is final.

        Raises:
            StoreError: If there are no credentials now; ``certain``, as the request was not sent.
        """
        try:
            if self._has_failed:
                self.current, _ = self._look_again()
                self._has_failed = False
            source = self.current
            with self._errors():
                secrets = source.secrets()
            self._were_issued = True
            return source, secrets
        except StoreError as error:
            error.certain = True
            if not isinstance(error, CredentialsError):
                raise
            self._has_failed = True
            if not self._were_issued:
                raise
            text = "the credentials can't be refreshed at the moment; it is tried again"
            later = ConnectionLostError(text, uri=error.uri, cause=error, certain=True)
        raise later

    def renew(self, refused: S, secrets: tuple[str, ...]) -> bool:
        """Looks refused credentials up again; returns whether the store now has different ones.

        Args:
            refused: The source of the refused credentials.
            secrets: Its secrets when the request was signed.

        Raises:
            TransientStoreError: If new credentials can't be fetched for the moment.
        """
        if self.current is not refused:
            return True
        try:
            found, issued = self._look_again()
        except TransientStoreError:
            raise
        except CloudCheckpointError:
            return False  # the store's refusal explains more
        if issued == secrets:
            return False
        self.current = found
        return True


@contextlib.contextmanager
def fetching(
    whose: str,
    uri: str | None,
    *,
    is_passing: Callable[[Exception], bool],
    said: Callable[[Exception], str] = reason,
) -> Iterator[None]:
    """Converts the exceptions of an SDK's credentials lookup or refresh to cloudckpt's errors.

    Args:
        whose: The vendor's name, for messages.
        uri: The bucket that the credentials are for.
        is_passing: Returns whether an exception means that a service does not respond or is
            overloaded.
        said: Returns an exception's message without credentials.

    Raises:
        TLSError: If the TLS connection to the service fails for a lasting reason.
        ConnectionLostError: If the service does not respond or is overloaded.
        CredentialsError: For any other exception of the SDK.
    """
    try:
        yield
    except CloudCheckpointError:
        raise
    except Exception as exc:  # noqa: BLE001 - SDKs raise whatever their sources do
        error: StoreError | None = lasting_failure(exc, "the credentials service")
        if error is not None:
            error.uri, error.cause = uri, said(exc)
        elif is_passing(exc):
            text = f"the {whose} credentials can't be fetched at the moment; it is tried again"
            error = ConnectionLostError(text, uri=uri, cause=said(exc), certain=True)
        else:
            text = (
                f"the {whose} credentials can't be used; see the cause, and correct or renew them"
            )
            error = CredentialsError(text, uri=uri, cause=said(exc), certain=True)
        raise_alone(error)


_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_")


def variables() -> dict[str, str]:
    """Returns the environment variables in which the clouds' own tools look for credentials."""
    return {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}


def take_over(given: Mapping[str, str]) -> None:
    """Replaces the credentials variables of this process's environment with another process's."""
    for name in variables().keys() - given.keys():
        del os.environ[name]
    os.environ.update(given)
