"""Validates credentials, and looks them up again when the store refuses them."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

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
    "Origin",
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

    def __init__(self, look: Callable[[], S]) -> None:
        """Looks up credentials; `look` returns a source from the current environment and files."""
        self._look = look
        self._lock = threading.Lock()
        self._looked_at = 0.0
        self._failed = False
        # of the last lookup, with the time when it ended
        self._failure: tuple[float, StoreError] | None = None
        self.have_worked = False
        self.current = look()

    def source(self) -> S:
        """Returns the credentials for the next request, after another lookup if they were missing.

        If many threads need the lookup at the same time, one makes it and the others share its
        result.

        Raises:
            StoreError: If there are no credentials now; ``certain``, as the request was not sent.
        """
        if self._failed:
            asked = time.monotonic()
            with self._lock:
                if self._failed and self._failure is not None and self._failure[0] > asked:
                    raise copy.copy(self._failure[1])
                if self._failed:
                    try:
                        self.current = self._look()
                    except StoreError as error:
                        error.certain = True  # nothing was sent
                        self._failure = time.monotonic(), copy.copy(error)
                        raise
                    self._failed = False
        return self.current

    def failed(self, error: CredentialsError) -> StoreError:
        """Returns the error for a request without credentials; the next request looks them up.

        If credentials have worked before, they may come back: the error is transient, so that the
        request is retried until its deadline, each time with a lookup. Otherwise the error is
        final: the job is misconfigured.
        """
        self._failed = True
        if not self.have_worked:
            return error
        text = "the credentials can't be refreshed at the moment; it is tried again"
        return ConnectionLostError(text, uri=error.uri, cause=error, certain=True)

    def renew(self, refused: S, secrets: Iterable[str]) -> bool:
        """Looks refused credentials up again; returns whether the store now has different ones.

        If many threads are refused at the same time, one makes the lookup and the others share its
        result.

        Args:
            refused: The source of the refused credentials.
            secrets: Its secrets when the request was signed.

        Raises:
            TransientStoreError: If new credentials can't be fetched for the moment.
        """
        asked = time.monotonic()
        with self._lock:
            if self.current is not refused:
                return True
            if self._looked_at > asked:
                return False
            try:
                found = self._look()
                if found.secrets() == tuple(secrets):
                    return False
            except TransientStoreError:
                raise
            except CloudCheckpointError:
                return False  # the store's refusal explains more
            finally:
                self._looked_at = time.monotonic()
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
