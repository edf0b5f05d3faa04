"""How a bucket is reached: endpoint, credentials, and google-auth's errors in our words."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cloudckpt.config import Config, GCSOptions
from cloudckpt.config.options import check_endpoint
from cloudckpt.errors import (
    ConfigError,
    ConnectionLostError,
    CredentialsError,
    MissingDependencyError,
    StoreError,
)
from cloudckpt.stores.credentials import (
    Credentials,
    check_credential,
    masked,
    raise_alone,
    reason,
)
from cloudckpt.stores.http import HttpOptions

try:
    import google.auth
    import google.auth.credentials
    import google.auth.exceptions
    import google.auth.impersonated_credentials
    import requests.utils
    from google.auth.transport.requests import Request
except ImportError as exc:
    raise MissingDependencyError(
        "gs:// needs google-auth; install it with: pip install 'cloudckpt[gcs]'", cause=exc
    ) from exc

__all__ = ["BucketAccess"]

logger = logging.getLogger("cloudckpt")

_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_LONGEST_WAIT = 120.0  # seconds for a token that another thread is fetching
_LONGEST_REASON = 300  # characters; it may be a proxy's page


class BucketAccess:
    """Where requests go, and what authorizes them.

    Attributes:
        endpoint: The URL that paths are appended to.
        is_google: Whether it is Google's own.
        http_options: How to connect to it.
        credentials: What authorizes requests.
    """

    def __init__(self, config: Config, uri: str) -> None:
        self.endpoint, is_trusted = _endpoint(config.gcs)
        host = self.endpoint.split("/")[2].partition(":")[0]
        self.is_google = is_trusted and host.endswith(f".{_universe()}")
        self.http_options = HttpOptions.of(
            config,
            proxy=_proxy(self.endpoint),
            ca_bundle=os.environ.get("REQUESTS_CA_BUNDLE")
            or os.environ.get("CURL_CA_BUNDLE")
            or requests.utils.DEFAULT_CA_BUNDLE_PATH,
        )
        self._payer = config.gcs.user_project
        is_wanted = is_trusted and not config.gcs.anonymous
        if not is_wanted and (config.gcs.credentials_file or config.gcs.impersonate):
            raise ConfigError(
                f"credentials are only sent over https, but the endpoint is {self.endpoint}"
            )
        timeout = (config.connect_timeout, config.read_timeout)
        rejected: list[str] = []

        def look() -> _Token | _NoToken:
            if not is_wanted:
                return _NoToken()
            request = functools.partial(Request(), timeout=timeout)
            return _Token(_credentials(config.gcs, request, uri), request, rejected)

        self.credentials = Credentials(look)

    def headers(self) -> Mapping[str, str]:
        """What authorizes a request, and says who pays for it.

        Raises:
            CredentialsError: If the credentials can't be refreshed.
            ConnectionLostError: If they can't be for the moment.
        """
        headers = self.credentials.current.headers()
        if self._payer is not None:
            headers["x-goog-user-project"] = self._payer
        return headers

    def reject(self) -> None:
        """Says that the store did not accept the token: the next request fetches another one."""
        self.credentials.current.reject()


class _NoToken:
    """What authorizes requests that need nothing."""

    def headers(self) -> dict[str, str]:
        return {}

    def secrets(self) -> tuple[str, ...]:
        return ()

    def reject(self) -> None:
        pass


class _Token:
    """An access token that is always valid: renewed ahead of its expiry, by one thread at a time.

    google-auth calls a token stale some minutes before it expires. While one thread renews it, the
    others go on with the old one; they wait only if that has expired.
    """

    def __init__(
        self,
        credentials: google.auth.credentials.Credentials,
        request: Callable[..., Any],
        rejected: list[str],
    ) -> None:
        """``rejected`` are the tokens that the store does not accept, all of its life."""
        self._credentials = credentials
        self._request = request
        self._renewing = threading.Lock()
        self._rejected = rejected
        self._reported: str | None = None  # the token of which was said that it can't be renewed

    def headers(self) -> dict[str, str]:
        if self._state() is not _State.FRESH:
            self._renew()
        check_credential(self._credentials.token or "", "the access token of Google")
        headers: dict[str, str] = {}
        self._credentials.apply(headers)
        return headers

    def secrets(self) -> tuple[str, ...]:
        if self._state() is _State.INVALID:
            self._renew()
        return (str(self._credentials.token),)

    def reject(self) -> None:
        if self._credentials.token is not None:
            self._rejected[:] = [self._credentials.token]

    def _state(self) -> google.auth.credentials.TokenState:
        if self._credentials.token in self._rejected:
            return _State.INVALID
        state: google.auth.credentials.TokenState = self._credentials.token_state
        return state

    def _renew(self) -> None:
        wait = _LONGEST_WAIT if self._state() is _State.INVALID else 0.0
        if not self._renewing.acquire(timeout=wait):
            if self._state() is _State.INVALID:
                raise ConnectionLostError("the access token was not renewed in time")
            return
        try:
            if self._state() is _State.FRESH:
                return
            with _translated():
                self._credentials.refresh(self._request)
        except (ConnectionLostError, CredentialsError) as error:
            if self._state() is _State.INVALID:
                raise
            # a stale token is still good: the next request tries again
            if self._reported != self._credentials.token:
                self._reported = self._credentials.token
                logger.warning("the access token, still valid, could not be renewed: %s", error)
        finally:
            self._renewing.release()


_State = google.auth.credentials.TokenState


def _universe() -> str:
    return os.environ.get("GOOGLE_CLOUD_UNIVERSE_DOMAIN") or "googleapis.com"


def _endpoint(options: GCSOptions) -> tuple[str, bool]:
    """The endpoint, and whether it is given credentials: no emulator is, nor plain http."""
    if options.endpoint_url is not None:
        url = options.endpoint_url.rstrip("/")
        return url, url.startswith("https://")
    if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
        url = emulator if "://" in emulator else f"http://{emulator}"
        check_endpoint(url, "STORAGE_EMULATOR_HOST")
        return url.rstrip("/"), False
    return f"https://storage.{_universe()}", True


def _proxy(endpoint: str) -> str | None:
    """The proxy of an endpoint, if there is one, as requests finds it."""
    found = requests.utils.get_environ_proxies(endpoint)
    return requests.utils.select_proxy(endpoint, found)


def _credentials(
    options: GCSOptions, request: Callable[..., Any], uri: str
) -> google.auth.credentials.Credentials:
    """The credentials that the options name, or else the application default ones."""
    found: google.auth.credentials.Credentials
    with _translated(uri):
        if options.credentials_file is not None:
            found = _from_file(options.credentials_file, request)
        else:
            found = _default(uri)
        # only now: google-auth asks for the project of external accounts that have a scope
        found = google.auth.credentials.with_scopes_if_required(found, [_SCOPE])
        if options.impersonate is None:
            return found
        return google.auth.impersonated_credentials.Credentials(
            source_credentials=found,
            target_principal=options.impersonate,
            target_scopes=[_SCOPE],
        )


def _default(uri: str) -> google.auth.credentials.Credentials:
    name = "GOOGLE_APPLICATION_CREDENTIALS"
    check_credential(os.environ.get(name, ""), name, uri, header=False)
    try:
        found, _ = google.auth.default()
    except google.auth.exceptions.DefaultCredentialsError as exc:
        raise_alone(
            CredentialsError(
                "no Google credentials were found: neither in the file that "
                "GOOGLE_APPLICATION_CREDENTIALS names, nor in gcloud's "
                "application_default_credentials.json, nor at the metadata server of Google's "
                "machines; run `gcloud auth application-default login`, or name a file",
                uri=uri,
                cause=_reason(exc),
            )
        )
    return found


def _from_file(path: str, request: Callable[..., Any]) -> google.auth.credentials.Credentials:
    found: google.auth.credentials.Credentials
    with warnings.catch_warnings():
        # google-auth warns of files of unknown origin; this one is named by who runs the job
        warnings.simplefilter("ignore", DeprecationWarning)
        found, _ = google.auth.load_credentials_from_file(path, request=request)
    return found


@contextlib.contextmanager
def _translated(uri: str | None = None) -> Iterator[None]:
    """Raises google-auth's errors as cloudckpt's, without what they hold of a token's answer."""
    try:
        yield
    except (google.auth.exceptions.GoogleAuthError, ValueError, OSError) as exc:
        error: StoreError = CredentialsError(
            "the Google credentials can't be used: they are expired, revoked, incomplete, or may "
            "not act as the service account; sign in again, or check its roles",
            uri=uri,
            cause=_reason(exc),
        )
        if _is_passing(exc):
            error = ConnectionLostError(
                "the access token could not be fetched for the moment", uri=uri, cause=_reason(exc)
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
    return not isinstance(status, int) or status == 429 or status >= 500


_NO_ANSWER = (
    google.auth.exceptions.TransportError,
    google.auth.exceptions.TimeoutError,
    google.auth.exceptions.ResponseError,
)


def _reason(exc: Exception) -> str:
    """What a token endpoint says of its refusal; the rest of its answer may hold secrets."""
    if not isinstance(exc, google.auth.exceptions.GoogleAuthError):
        # others may quote what they can't read, such as a private key
        return reason(exc) if isinstance(exc, OSError) else type(exc).__name__
    first = masked(str(exc.args[0])) if exc.args else ""  # whole: what is cut is not recognized
    texts = [first.partition("\n")[0][:_LONGEST_REASON]] if first else []
    answer = exc.args[1] if len(exc.args) > 1 else None
    if isinstance(answer, Exception):
        texts.append(_reason(answer))
    if isinstance(answer, str):
        with contextlib.suppress(ValueError):
            answer = json.loads(answer)
    if isinstance(answer, Mapping):
        error = answer.get("error")
        told = (
            error.get("message") if isinstance(error, Mapping) else answer.get("error_description")
        )
        texts += [str(told)] if told else []
    return masked(f"{type(exc).__name__}: {': '.join(texts)}")
