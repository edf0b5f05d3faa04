"""Access to a Google bucket: its endpoint, its credentials and their access tokens.

google-auth finds credentials and refreshes their tokens.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from datetime import timezone
from functools import partial
from typing import Any
from urllib.parse import quote

from cloudckpt.config import Config, GCSOptions
from cloudckpt.config.options import check_endpoint
from cloudckpt.errors import (
    ClockError,
    CloudCheckpointError,
    CredentialsError,
    MissingDependencyError,
    TransientStoreError,
)
from cloudckpt.stores.base import Body
from cloudckpt.stores.credentials import (
    Access,
    Credentials,
    Errors,
    Issued,
    NoCredentials,
    Origin,
    SharedCall,
    fetch_error,
)
from cloudckpt.stores.http.failures import causes
from cloudckpt.stores.http.options import HttpOptions, first_set
from cloudckpt.stores.redaction import excerpt, raise_without_context
from cloudckpt.stores.refusals import kind_of

try:
    import google.auth
    import google.auth.credentials
    import google.auth.exceptions
    import google.auth.transport.requests
except ImportError as exc:
    raise MissingDependencyError(
        "gs:// needs google-auth; install it with: pip install 'cloudckpt[gcs]'", cause=exc
    ) from exc

__all__ = ["BucketAccess"]

_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_FILE = "GOOGLE_APPLICATION_CREDENTIALS"
_INVALID = google.auth.credentials.TokenState.INVALID
_PAUSE = 15.0  # seconds between refreshes of a valid token that fail


class BucketAccess(Access):
    """The endpoint of a bucket, and the credentials that authorize its requests.

    Attributes:
        endpoint: The URL that paths are appended to.
        is_google: Whether the endpoint is Google's own.
    """

    def __init__(self, bucket: str, config: Config, uri: str) -> None:
        self.endpoint, is_trusted = _endpoint(config.gcs)
        self.url = f"{self.endpoint}/{quote(bucket, safe='')}"
        host = self.endpoint.split("/")[2].partition(":")[0]
        self.is_google = is_trusted and host.endswith(f".{_universe()}")
        self.http_options = HttpOptions.of_environment(config, self.endpoint)
        self._payer: dict[str, str] = {}
        if config.gcs.user_project is not None:
            self._payer["x-goog-user-project"] = config.gcs.user_project
        self._is_anonymous = config.gcs.anonymous
        is_wanted = is_trusted and not config.gcs.anonymous

        def find() -> _Token | NoCredentials:
            if not is_wanted:
                return NoCredentials()
            found = _Token(config, uri, errors)
            _check_universe(found.universe, self.endpoint, host, uri)
            return found

        errors = partial(_error, uri=uri)
        self.credentials = Credentials(find, errors)

    def shares_realm(self, other: BucketAccess) -> bool:
        """Returns whether the store copies between both buckets, see `ObjectStore.copies_from`."""
        return (self.endpoint, self._is_anonymous) == (other.endpoint, other._is_anonymous)

    def authorize(
        self, method: str, url: str, headers: dict[str, str], body: Body, issued: Issued
    ) -> tuple[str, Mapping[str, str]]:
        """Implements :meth:`cloudckpt.stores.credentials.Access.authorize`."""
        if isinstance(issued.source, _Token):
            issued.source.apply(method, url, headers)
        return url, {**headers, **self._payer}


def _universe() -> str:
    return os.environ.get("GOOGLE_CLOUD_UNIVERSE_DOMAIN") or "googleapis.com"


def _endpoint(options: GCSOptions) -> tuple[str, bool]:
    """Returns the endpoint's URL, and whether it is trusted with credentials.

    Not trusted are plain http, and the emulator that STORAGE_EMULATOR_HOST names.
    """
    if options.endpoint_url is not None:
        url = options.endpoint_url.rstrip("/")
        return url, url.startswith("https://")
    if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
        url = emulator if "://" in emulator else f"http://{emulator}"
        check_endpoint(url, "STORAGE_EMULATOR_HOST")
        return url.rstrip("/"), False
    return f"https://storage.{_universe()}", True


def _check_universe(universe: str, endpoint: str, host: str, uri: str) -> None:
    """Raises CredentialsError if the credentials belong to another cloud than the endpoint.

    Clouds that others run with Google's technology ("universes") have separate accounts. A token
    sent to another universe is exposed to strangers, and refused without a reason.
    """
    known = (_universe(), "googleapis.com")
    domain = next((name for name in known if host.endswith(f".{name}")), _universe())
    if host.endswith(f".{universe}") or universe == domain:
        return
    raise CredentialsError(
        f"the credentials are for the universe {universe}, but {endpoint} belongs to {domain}; "
        f"use other credentials, or set GOOGLE_CLOUD_UNIVERSE_DOMAIN={universe} or another "
        "endpoint",
        uri=uri,
        certain=True,
    )


class _Request(google.auth.transport.requests.Request):
    """google-auth's HTTP transport to token services, with the store's timeouts.

    google-auth's own timeout is two minutes.
    """

    timeout = (10.0, 60.0)  # seconds to connect, and to wait for a response

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        answer = super().__call__(*args, **{"timeout": self.timeout, **kwargs})
        # google-auth takes every failure of the workload identity service for a refusal
        if answer.status == 429 or answer.status >= 500:
            what = f"the token service answered with HTTP {answer.status}"
            raise google.auth.exceptions.TransportError(what, answer)
        return answer


class _Token:
    """An access token; google-auth refreshes it in the background before it expires."""

    def __init__(self, config: Config, uri: str, errors: Errors) -> None:
        """Finds the application default credentials; `errors` converts google-auth's exceptions."""
        self._uri = uri
        self._request = _Request()
        self._request.timeout = config.connect_timeout, config.read_timeout
        self._next_refresh = 0.0  # of a valid token, by the monotonic clock
        self._credentials = _find(uri)
        self._credentials.with_non_blocking_refresh()
        self.universe = self._credentials.universe_domain  # may ask the metadata server
        self._fetch = SharedCall(self._fetched, errors)

    def apply(self, method: str, url: str, headers: dict[str, str]) -> None:
        """Adds google-auth's headers to a request: the token, and others that it determines.

        ``before_request`` is google-auth's hook for this. It refreshes the token in the background
        before it expires, looks up from where the account may be used (regional access boundaries),
        and adds a header about that. If the refresh in the background has failed, the hook itself
        refreshes the token; if that fails too, the token is used, which `secrets` has just found to
        be valid.
        """
        if time.monotonic() >= self._next_refresh:
            try:
                self._credentials.before_request(self._request, method, url, headers)
                return
            except Exception:  # noqa: BLE001 - google-auth raises whatever its sources do
                self._next_refresh = time.monotonic() + _PAUSE
        self._credentials.apply(headers)

    def secrets(self) -> tuple[str, ...]:
        if self._credentials.token_state is _INVALID:
            self._fetch()
        token = self._credentials.token or ""
        if not token.isprintable():  # google-auth would log it
            text = "Google's access token contains a control character; renew the credentials"
            raise CredentialsError(text, uri=self._uri, certain=True)
        return (token,)

    def origin(self) -> Origin:
        found = self._credentials
        email, ends = getattr(found, "service_account_email", None), found.expiry
        place = first_set(_FILE)
        return Origin(
            source=type(found).__module__ + (f", found by {place}" if place else ""),
            identity=email if isinstance(email, str) and "@" in email else "",
            ends=ends.replace(tzinfo=timezone.utc).timestamp() if ends else None,
        )

    def _fetched(self) -> None:
        if self._credentials.token_state is _INVALID:
            self._credentials.refresh(self._request)


def _error(exc: Exception, uri: str) -> CloudCheckpointError:
    """Converts google-auth's exceptions, see :func:`fetch_error`."""
    error = fetch_error(exc, "Google", uri, is_transient=_is_transient, text_of=_text_of)
    # refused for the time in a service account's signature
    if isinstance(error, CredentialsError) and "reasonable timeframe" in (error.cause or ""):
        text = (
            "this machine's clock is wrong by minutes, so Google issues no access token: set the "
            "clock by NTP"
        )
        return ClockError(text, uri=uri, cause=error.cause, certain=True)
    return error


def _find(uri: str) -> google.auth.credentials.Credentials:
    """Returns the application default credentials.

    Raises:
        CredentialsError: If there are none.
    """
    found: google.auth.credentials.Credentials
    try:
        found, _ = google.auth.default()
    except google.auth.exceptions.DefaultCredentialsError as exc:
        raise_without_context(
            CredentialsError(
                "no Google credentials were found in the file that "
                "GOOGLE_APPLICATION_CREDENTIALS names, in gcloud's "
                "application_default_credentials.json, or at the metadata server of a Google "
                "machine; run `gcloud auth application-default login`, or set "
                "GOOGLE_APPLICATION_CREDENTIALS",
                uri=uri,
                cause=_text_of(exc),
                certain=True,
            )
        )
    # not earlier: google-auth looks up the project of external accounts that have a scope
    found = google.auth.credentials.with_scopes_if_required(found, [_SCOPE])
    return found


def _is_transient(exc: Exception) -> bool:
    """Returns whether a service of credentials did not respond, or asked to retry later."""
    chain = list(causes(exc))
    # an invalid request, which was never sent
    if any(isinstance(inner, ValueError) for inner in chain):
        return False
    for inner in chain:
        if isinstance(inner, google.auth.exceptions.TransportError):
            status = getattr(inner.args[-1] if inner.args else None, "status", None)
            return status is None or issubclass(kind_of(status), TransientStoreError)
    return bool(getattr(exc, "retryable", False))


def _text_of(exc: Exception) -> str:
    """Returns an exception's class and message; only the class if it may quote a private key."""
    if not isinstance(exc, (google.auth.exceptions.GoogleAuthError, OSError)):
        return type(exc).__name__
    return f"{type(exc).__name__}: {' '.join(excerpt(str(exc)).split())}"
