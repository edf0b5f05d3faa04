"""Credentials: rejected when malformed, and looked up again when refused."""

from __future__ import annotations

import contextlib
import copy
import os
import re
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
    "alone",
    "check_credential",
    "fetching",
    "take_over",
    "variables",
]

_LONGEST_WAIT = 120.0  # seconds for credentials that another thread is fetching


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where credentials come from; nothing of it is a secret.

    Attributes:
        source: Such as ``the environment (AWS_ACCESS_KEY_ID)``.
        identity: Whose they are, as far as that is known: an account, or how a key's id ends.
        ends: When they do, in seconds since 1970; None if that is never, or not known.
    """

    source: str
    identity: str = ""
    ends: float | None = None


class Source(Protocol):
    """The result of one lookup in the environment, files and services."""

    def secrets(self) -> tuple[str, ...]:
        """What requests are authorized with now; fetched or renewed if that is due.

        Raises:
            CredentialsError: If it can't be used.
            ConnectionLostError: If it can't be fetched for the moment.
        """

    def origin(self) -> Origin:
        """Where they come from, once they were fetched."""


S = TypeVar("S", bound=Source)


class Credentials(Generic[S]):
    """The credentials of a store, which looks them up again when they are refused.

    A job outlives what its environment and files held when the store was opened; without another
    lookup, a long-lived store would be refused for ever.

    Attributes:
        current: What authorizes requests.
        were_held: Whether there were any once.
        have_worked: Whether a request has succeeded with such credentials: refused later, they
            were replaced, and this side does not have the new ones yet.
    """

    def __init__(self, look: Callable[[], S]) -> None:
        """``look`` makes a source of what is there at the moment."""
        self._look = look
        self._lock = threading.Lock()
        self._looked_at = 0.0
        self._failed = False
        self.were_held = False
        self._failure: tuple[float, StoreError] | None = None  # of the last look, and its end
        self.have_worked = False
        self.current = look()

    def source(self) -> S:
        """What to authorize the next request with.

        Of many threads that wait for a look, one looks; the others share its result.

        Raises:
            StoreError: If there is nothing now; certain, as the request was not sent.
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
        """The error for a request without credentials; the next request looks them up again.

        If there were credentials before, they may return: the error is transient, and the request's
        retries look until their deadline. Otherwise it is final: the job is set up wrongly.
        """
        self._failed = True
        if not self.were_held:
            return error
        text = "the credentials can't be refreshed at the moment; it is tried again"
        return ConnectionLostError(text, uri=error.uri, cause=error, certain=True)

    def renew(self, refused: S, secrets: Iterable[str]) -> bool:
        """Whether there are now credentials other than those of ``refused``, the ``secrets``.

        Of many threads refused at the same time, one looks them up; the others share its result.

        Raises:
            TransientStoreError: If others temporarily can't be fetched.
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
                return False  # what the store said tells more
            finally:
                self._looked_at = time.monotonic()
            self.current = found
            return True


def check_credential(value: str, name: str, uri: str | None = None, *, header: bool = True) -> None:
    """Whether a credential can be what its issuer gave out.

    Args:
        value: The credential.
        name: What to call it; its variable, where it comes from one.
        uri: What it is for.
        header: Whether it travels in a header, which takes ASCII only.

    Raises:
        CredentialsError: If it is surrounded by white space, as what is pasted or read from a file
            often is, or holds what none holds; without its value.
    """
    problem = None
    if value != value.lstrip():
        problem = "begins with white space: remove it"
    elif value != value.rstrip():
        problem = "ends in white space: remove it"
    elif re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", value):
        problem = "contains a line break or another control character: copy it again"
    elif header and not value.isascii():
        problem = "contains characters that are not ASCII: copy it again"
    if problem is not None:
        raise CredentialsError(f"{name} {problem}", uri=uri)


@contextlib.contextmanager
def fetching(
    whose: str,
    uri: str | None,
    *,
    is_passing: Callable[[Exception], bool],
    said: Callable[[Exception], str] = reason,
) -> Iterator[None]:
    """Around an SDK's look for credentials, or its refresh: raises what it says as our errors.

    Args:
        whose: Credentials, for messages.
        uri: What they are for.
        is_passing: Whether an exception says that a service is silent or overloaded.
        said: What an exception says, without credentials.

    Raises:
        TLSError: If the service can't be trusted.
        ConnectionLostError: If it is silent or overloaded.
        CredentialsError: For whatever else the SDK raises.
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


@contextlib.contextmanager
def alone(lock: threading.Lock, uri: str, *, wait: bool = True) -> Iterator[bool]:
    """Around a refresh that one thread does for all; whether it is this one.

    Raises:
        ConnectionLostError: If another thread has not ended in time.
    """
    is_mine = lock.acquire(timeout=_LONGEST_WAIT if wait else 0.0)
    if wait and not is_mine:
        raise ConnectionLostError("fetching the credentials took too long", uri=uri, certain=True)
    try:
        yield is_mine
    finally:
        if is_mine:
            lock.release()


_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_")


def variables() -> dict[str, str]:
    """The environment variables in which the clouds' own tools look for credentials."""
    return {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}


def take_over(given: Mapping[str, str]) -> None:
    """Makes these variables what another process has, whose environment may have changed."""
    for name in variables().keys() - given.keys():
        del os.environ[name]
    os.environ.update(given)
