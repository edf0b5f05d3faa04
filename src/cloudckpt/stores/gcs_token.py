"""Google's access tokens: fetched and renewed by google-auth, whose errors are put in our words."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from cloudckpt._version import __version__
from cloudckpt.errors import (
    ConnectionLostError,
    CredentialsError,
    MissingDependencyError,
    StoreError,
)
from cloudckpt.stores.credentials import (
    Renewal,
    Validity,
    check_credential,
    masked,
    raise_alone,
    reason,
)

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

__all__ = ["Token", "Transport", "in_our_words"]

_LONGEST_PAUSE = 30.0  # seconds between renewals that fail while the old token holds
_LONGEST_REASON = 300  # characters; it may be a proxy's page

_VALIDITY = {
    google.auth.credentials.TokenState.FRESH: Validity.GOOD,
    google.auth.credentials.TokenState.STALE: Validity.DUE,
    google.auth.credentials.TokenState.INVALID: Validity.ENDED,
}


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


class Token:
    """An access token that is always valid: see :class:`~cloudckpt.stores.credentials.Renewal`.

    google-auth calls a token stale some minutes before it ends.
    """

    def __init__(
        self, credentials: google.auth.credentials.Credentials, transport: Transport
    ) -> None:
        self._credentials = credentials
        self._transport = transport
        self._renewal = Renewal(self._validity, self._renew, _pause)

    def headers(self, method: str, url: str) -> dict[str, str]:
        """What google-auth wants a request to carry: the token, and what else it knows of.

        ``before_request`` is its hook for that. It finds out in the background where the account
        may be used from (regional access boundaries), and says so in a header. A token that is not
        fresh it would renew at once, on every thread.
        """
        self._renewal.ensure()
        check_credential(self._credentials.token or "", "the access token of Google")
        headers: dict[str, str] = {}
        with in_our_words(self._transport):
            if self._validity() is Validity.GOOD:
                self._credentials.before_request(self._transport, method, url, headers)
            else:
                self._credentials.apply(headers)
        return headers

    def secrets(self) -> tuple[str, ...]:
        if self._validity() is Validity.ENDED:
            self._renewal.ensure()
        return (str(self._credentials.token),)

    def _validity(self) -> Validity:
        return _VALIDITY[self._credentials.token_state]

    def _renew(self) -> None:
        with in_our_words(self._transport):
            self._credentials.refresh(self._transport)


def _pause(failures: int) -> float:
    """The first two failures may be hiccups; from the third on, pauses grow."""
    return min(2.0 ** (failures - 3), _LONGEST_PAUSE) if failures > 2 else 0.0


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
