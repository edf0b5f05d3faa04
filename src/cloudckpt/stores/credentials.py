"""Credentials: rejected when malformed, looked up again when refused, and never shown.

A transport's or SDK's error message may quote what it was about to send: http.client puts a
header's value into its ValueError, urllib3 the URL with its signature, requests a proxy's URL with
its password. Every rank raises and logs that text, so it passes through here first.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, NoReturn, Protocol, TypeVar
from urllib.parse import quote, unquote

from cloudckpt.errors import (
    CloudCheckpointError,
    ConnectionLostError,
    CredentialsError,
    StoreError,
    TransientStoreError,
)
from cloudckpt.stores.origins import Origin
from cloudckpt.stores.tls import lasting_failure

__all__ = [
    "Credentials",
    "Source",
    "alone",
    "check_credential",
    "conceal",
    "fetching",
    "masked",
    "raise_alone",
    "reason",
    "take_over",
    "variables",
]

_LONGEST_WAIT = 120.0  # seconds for credentials that another thread is fetching


class Source(Protocol):
    """The result of one lookup in the environment, files and services."""

    def secrets(self) -> tuple[str, ...]:
        """What requests are authorized with; fetches it if it was not yet.

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
    """

    def __init__(self, look: Callable[[], S]) -> None:
        """``look`` makes a source of what is there at the moment."""
        self._look = look
        self._lock = threading.Lock()
        self._looked_at = 0.0
        self._failed = self._held = False
        self._failure: tuple[float, StoreError] | None = None  # of the last look, and its end
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

    def used(self) -> tuple[str, ...]:
        """What a request was authorized with just now."""
        secrets = self.current.secrets()
        self._held = True
        return secrets

    def failed(self, error: CredentialsError) -> StoreError:
        """The error for a request without credentials; the next request looks them up again.

        If there were credentials before, they may return: the error is transient, and the request's
        retries look until their deadline. Otherwise it is final: the job is set up wrongly.
        """
        self._failed = True
        if not self._held:
            return error
        text = "the credentials can't be refreshed for now"
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
        problem = "holds a line break or another control character: copy it anew"
    elif header and not value.isascii():
        problem = "holds characters that are not ASCII: copy it anew"
    if problem is not None:
        raise CredentialsError(f"{name} {problem}", uri=uri)


_MASK = "***"
_SHORTEST = 6  # characters; what is shorter is a word of an emulator, not a secret

_PATTERNS = (
    # http.client and requests quote a header that they refuse
    (r"(header value:?\s*)b?(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")", rf"\1{_MASK}"),
    # cryptography quotes a line of a key that it takes for a header
    (r"(\bInvalidHeader\().*", rf"\1{_MASK}"),
    (r"(\b(?:https?|socks\w*)://)[^\s'\"<>]*@", rf"\1{_MASK}@"),
    (r"\bAWS4-[A-Z0-9-]+[\s,][^\n]*", _MASK),
    (r"\b(Bearer|Basic|SharedKey)\s+[\w.~+/=:-]{16,}", rf"\1 {_MASK}"),
    (
        r"(\b(?:sig|signature|x-(?:amz|goog)-(?:signature|security-token|s3session-token|credential)|AccountKey"
        r"|SharedAccessSignature|\w*secret\w*|\w*(?:session|security|access|refresh|id|subject)_?"
        r"token|client_assertion|assertion|private_key|password)[\"']?\s*(?:=|%3D|:)\s*[\"']?)"
        r"[^\s&;,\"'<>]+",
        rf"\1{_MASK}",
    ),
    (r"\beyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]*)?", _MASK),  # JSON web tokens
    (r"\bya29\.[\w.-]+", _MASK),  # Google's access tokens
    (r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", _MASK),
)
_COMPILED = [(re.compile(p, re.IGNORECASE | re.DOTALL), new) for p, new in _PATTERNS]

_VARIABLES = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN"),
    *("AWS_CONTAINER_AUTHORIZATION_TOKEN", "AWS_BEARER_TOKEN"),
    *("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN"),
    *("AZURE_STORAGE_CONNECTION_STRING", "AZURE_CLIENT_SECRET", "AZURE_PASSWORD"),
    *("AZURE_CLIENT_CERTIFICATE_PASSWORD",),
)


def masked(text: str, secrets: Iterable[str] = ()) -> str:
    """A foreign text, without the credentials that it may quote."""
    for user in _proxy_users():
        text = text.replace(f"{user}@", f"{_MASK}@")
    known = {value for name in _VARIABLES if (value := os.environ.get(name))} | set(secrets)
    for form in sorted({form for value in known for form in _forms(value)}, key=len, reverse=True):
        text = text.replace(form, _MASK)
    for pattern, new in _COMPILED:
        text = pattern.sub(new, text)
    return text


def _proxy_users() -> Iterator[str]:
    """Users and passwords of the proxies that the environment names."""
    for name, value in os.environ.items():
        user, at, _ = value.rpartition("@")
        if at and name.lower().endswith("_proxy"):
            yield user.rpartition("//")[2]


def _forms(value: str) -> Iterator[str]:
    """How a secret, or the secret part of it, may be written in a message."""
    parts = re.findall(r"\b(?:sig|AccountKey)=([^&;\s]+)", value)
    for one in (value, value.strip(), *parts, *map(unquote, parts)):
        quoted = (quote(one, safe, errors="surrogatepass") for safe in ("/", ""))
        for form in (one, repr(one)[1:-1], ascii(one)[1:-1], *quoted):
            if len(form) >= _SHORTEST:
                yield form


def reason(exc: BaseException, secrets: Iterable[str] = ()) -> str:
    """The class of an exception and what it says, without credentials."""
    return f"{type(exc).__name__}: {masked(str(exc), secrets)}"


def conceal(error: CloudCheckpointError, secrets: Iterable[str] = ()) -> None:
    """Takes credentials out of an error, and cuts off what is beneath it if that shows any."""
    secrets = tuple(secrets)
    error.message = masked(error.message, secrets)
    error.args = (error.message, *error.args[1:])
    if error.cause is not None:
        error.cause = masked(error.cause, secrets)
    texts = (text for inner in _beneath(error) for text in (str(inner), repr(inner)))
    if any(masked(text, secrets) != text for text in texts):
        error.__cause__ = error.__context__ = None


def _beneath(error: BaseException) -> Iterator[BaseException]:
    seen = {id(error)}
    waiting = [error.__cause__, error.__context__]
    while waiting:
        inner = waiting.pop()
        if inner is not None and id(inner) not in seen:
            seen.add(id(inner))
            yield inner
            waiting += [inner.__cause__, inner.__context__]


def raise_alone(error: BaseException) -> NoReturn:
    """Raises an error that does not lead to the exception that is being handled.

    ``raise … from None`` only hides that one: it stays in ``__context__``, for every logger and
    debugger that looks there.
    """
    try:
        raise error
    finally:
        error.__context__ = None


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
        error: StoreError | None = lasting_failure(exc, "the service that gives credentials")
        if error is not None:
            error.uri, error.cause = uri, said(exc)
        elif is_passing(exc):
            text = f"the {whose} credentials can't be fetched for now"
            error = ConnectionLostError(text, uri=uri, cause=said(exc), certain=True)
        else:
            text = f"the {whose} credentials can't be used; correct or renew them"
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
        raise ConnectionLostError("the credentials were not fetched in time", uri=uri, certain=True)
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
