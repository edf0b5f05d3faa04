"""Google's access tokens: fetched and renewed by google-auth, whose errors are put in our words."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from cloudckpt._version import __version__
from cloudckpt.errors import (
    ConnectionLostError,
    CredentialsError,
    MissingDependencyError,
    StoreError,
)
from cloudckpt.stores.credentials import check_credential, masked, raise_alone, reason

try:
    import google.auth
    import google.auth.credentials
    import google.auth.exceptions
    import google.auth.transport.requests
    import requests
except ImportError as exc:
    raise MissingDependencyError(
        "gs:// needs google-auth; install it with: pip install 'cloudckpt[gcs]'", cause=exc
    ) from exc

__all__ = ["Renewals", "Token", "Transport", "in_our_words"]

logger = logging.getLogger("cloudckpt")

_LONGEST_WAIT = 120.0  # seconds for a token that another thread is fetching
_LONGEST_PAUSE = 30.0  # seconds between renewals that fail while the old token holds
_LONGEST_REASON = 300  # characters; it may be a proxy's page

_State = google.auth.credentials.TokenState


class Transport(google.auth.transport.requests.Request):
    """How google-auth asks token endpoints and metadata servers: with our limits and our name.

    It remembers how they answered. For several kinds of credentials google-auth says no more than
    that a token was refused, also where the service was only overloaded.
    """

    def __init__(self, timeout: tuple[float, float]) -> None:
        """``timeout``: seconds to connect, and to wait for an answer."""
        session = requests.Session()
        session.headers["User-Agent"] = f"cloudckpt/{__version__} {session.headers['User-Agent']}"
        super().__init__(session)
        self._timeout = timeout
        self._heard = threading.local()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("timeout") is None:  # for ever
            kwargs["timeout"] = self._timeout
        self._heard.status = None
        response = super().__call__(*args, **kwargs)
        self._heard.status = response.status
        return response

    def __deepcopy__(self, memo: object) -> Transport:
        """Another one, as google-auth makes it for what it does in the background."""
        return Transport(self._timeout)

    def forget(self) -> None:
        """Begins anew to remember what this thread is answered."""
        self._heard.status = None

    def was_put_off(self) -> bool:
        """Whether the last answer that this thread got asks to come again later."""
        status = getattr(self._heard, "status", None)
        return isinstance(status, int) and _is_later(status)


class Renewals:
    """What all tokens of a store know of each other, as long as it lives.

    Attributes:
        lock: Held by the one thread that fetches a token.
        rejected: The token that the store has refused last, which is of no use any more.
        newest: The credentials that were renewed last.
        failure: Why the last renewal failed, if it did.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.rejected: str | None = None
        self.newest: google.auth.credentials.Credentials | None = None
        self.failure: StoreError | None = None
        self._failed_at = 0.0
        self._failures = 0
        self._not_before = 0.0
        self._reported: str | None = None  # the token of which was said that it can't be renewed

    def state(self, credentials: google.auth.credentials.Credentials) -> _State:
        """What google-auth says of a token, unless the store has refused it."""
        if credentials.token is not None and credentials.token == self.rejected:
            return _State.INVALID
        state: _State = credentials.token_state
        return state

    def is_due(self) -> bool:
        """Whether the last failure is long enough ago."""
        return time.monotonic() >= self._not_before

    def failure_since(self, asked: float) -> StoreError | None:
        """Why another thread failed while this one, who asked at that time, waited for it."""
        if self.failure is None or self._failed_at < asked:
            return None
        return _anew(self.failure)

    def passing_failure(self) -> ConnectionLostError | None:
        """Why the last renewal failed, if another try may help."""
        return _anew(self.failure) if isinstance(self.failure, ConnectionLostError) else None

    def succeeded(self, credentials: google.auth.credentials.Credentials) -> None:
        """Notes what was renewed.

        A metadata server gives out the same token until shortly before its end. If the store has
        refused that, there is no other one to wait for: it is sent, and the store decides.
        """
        if credentials.token == self.rejected:
            self.rejected = None
        self.newest, self.failure, self._failures = credentials, None, 0

    def failed(self, error: StoreError, still_valid: str | None) -> None:
        """Notes a failure and the token that is used on, if one is; of each it is logged once.

        The first two may be hiccups. From the third on a renewal waits ever longer for its turn, as
        the request that tries it waits for the service.
        """
        self._failures += 1
        pause = min(2.0 ** (self._failures - 3), _LONGEST_PAUSE) if self._failures > 2 else 0.0
        self._failed_at = time.monotonic()
        self._not_before = self._failed_at + pause
        self.failure = error
        if still_valid is not None and self._reported != still_valid:
            self._reported = still_valid
            logger.warning("the access token, still valid, could not be renewed: %s", error)


E = TypeVar("E", bound=StoreError)


def _anew(error: E) -> E:
    """The error for another thread: whoever gets one adds to its message."""
    return type(error)(error.message, cause=error.cause, certain=True)


class Token:
    """An access token that is always valid: renewed ahead of its expiry, by one thread at a time.

    google-auth calls a token stale some minutes before it expires. While one thread renews it, the
    others go on with the old one; they wait only if that has expired, or the store has refused it.
    """

    def __init__(
        self,
        credentials: google.auth.credentials.Credentials,
        transport: Transport,
        renewals: Renewals,
    ) -> None:
        self._credentials = credentials
        self._transport = transport
        self._renewals = renewals

    def headers(self, method: str, url: str) -> dict[str, str]:
        """What google-auth wants a request to carry: the token, and what else it knows of.

        ``before_request`` is its hook for that. It finds out in the background where the account
        may be used from (regional access boundaries), and says so in a header. A token that is not
        fresh it would renew at once, on every thread.
        """
        if self._state() is not _State.FRESH:
            self._renew()
        check_credential(self._credentials.token or "", "the access token of Google")
        headers: dict[str, str] = {}
        with in_our_words(self._transport):
            if self._state() is _State.FRESH:
                self._credentials.before_request(self._transport, method, url, headers)
            else:
                self._credentials.apply(headers)
        return headers

    def secrets(self) -> tuple[str, ...]:
        if self._state() is _State.INVALID:
            self._renew()
        return (str(self._credentials.token),)

    def _state(self) -> _State:
        return self._renewals.state(self._credentials)

    def _renew(self) -> None:
        renewals = self._renewals
        is_of_use = self._state() is not _State.INVALID
        if is_of_use and not renewals.is_due():
            return
        asked = time.monotonic()
        if not renewals.lock.acquire(timeout=0.0 if is_of_use else _LONGEST_WAIT):
            if self._state() is _State.INVALID:
                raise ConnectionLostError("the access token was not renewed in time", certain=True)
            return
        try:
            self._renew_alone(asked)
        finally:
            renewals.lock.release()

    def _renew_alone(self, asked: float) -> None:
        renewals = self._renewals
        newest = renewals.newest
        if newest is not None and renewals.state(newest) is _State.FRESH:
            self._credentials = newest  # the first of many threads that were refused fetched it
        if self._state() is _State.FRESH:
            return
        if self._state() is _State.INVALID and (error := renewals.failure_since(asked)):
            raise error
        try:
            with in_our_words(self._transport):
                self._credentials.refresh(self._transport)
        except (ConnectionLostError, CredentialsError) as error:
            is_of_use = self._state() is not _State.INVALID
            renewals.failed(error, self._credentials.token if is_of_use else None)
            if not is_of_use:
                raise
        else:
            renewals.succeeded(self._credentials)


@contextlib.contextmanager
def in_our_words(transport: Transport, uri: str | None = None) -> Iterator[None]:
    """Raises google-auth's errors as cloudckpt's, without what they hold of a token's answer.

    They are certain: no request was sent to the store.
    """
    transport.forget()
    try:
        yield
    except (google.auth.exceptions.GoogleAuthError, ValueError, OSError) as exc:
        error: StoreError = CredentialsError(
            "the Google credentials can't be used: they are expired, revoked, incomplete, or may "
            "not act as the service account; sign in again, or check its roles",
            uri=uri,
            cause=told(exc),
            certain=True,
        )
        if _is_passing(exc) or transport.was_put_off():
            error = ConnectionLostError(
                "the access token could not be fetched for the moment",
                uri=uri,
                cause=told(exc),
                certain=True,
            )
        raise_alone(error)


def _is_passing(exc: Exception) -> bool:
    """Whether trying again may help."""
    if getattr(exc, "retryable", False):
        return True
    first = exc.args[0] if exc.args else None
    if isinstance(first, ValueError):  # a header or URL that requests does not send
        return False
    inner = first if isinstance(first, google.auth.exceptions.GoogleAuthError) else exc
    if not isinstance(inner, _NO_ANSWER):
        return False
    answer = inner.args[1] if len(inner.args) > 1 else None
    status = getattr(answer, "status", None)
    return not isinstance(status, int) or _is_later(status)


_NO_ANSWER = (
    google.auth.exceptions.TransportError,
    google.auth.exceptions.TimeoutError,
    google.auth.exceptions.ResponseError,
)


def _is_later(status: int) -> bool:
    return status in (408, 429) or status >= 500


def told(exc: Exception) -> str:
    """What a token endpoint says of its refusal; the rest of its answer may hold secrets."""
    if not isinstance(exc, google.auth.exceptions.GoogleAuthError):
        # others may quote what they can't read, such as a private key
        return reason(exc) if isinstance(exc, OSError) else type(exc).__name__
    first = masked(str(exc.args[0])) if exc.args else ""  # whole: what is cut is not recognized
    texts = [first.partition("\n")[0][:_LONGEST_REASON]] if first else []
    answer = exc.args[1] if len(exc.args) > 1 else None
    if isinstance(answer, Exception):
        texts.append(told(answer))
    if isinstance(answer, str):
        with contextlib.suppress(ValueError):
            answer = json.loads(answer)
    if isinstance(answer, Mapping):
        error = answer.get("error")
        message = (
            error.get("message") if isinstance(error, Mapping) else answer.get("error_description")
        )
        texts += [str(message)] if message else []
    return masked(f"{type(exc).__name__}: {': '.join(texts)}")
