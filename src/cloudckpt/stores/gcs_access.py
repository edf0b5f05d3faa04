"""How a bucket is reached: the endpoint, where credentials are found, and the tokens they give.

google-auth finds them and fetches tokens; what it says of a failure is put in our words.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import warnings
from collections.abc import Iterator, Mapping
from datetime import timezone
from typing import Any

from cloudckpt._version import __version__
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
    Renewal,
    Validity,
    check_credential,
    masked,
    raise_alone,
    reason,
)
from cloudckpt.stores.http import HttpOptions
from cloudckpt.stores.origins import Origin, first_set, named_by

try:
    import google.auth
    import google.auth.compute_engine
    import google.auth.credentials
    import google.auth.exceptions
    import google.auth.impersonated_credentials
    import google.auth.transport.requests
    import requests
except ImportError as exc:
    raise MissingDependencyError(
        "gs:// needs google-auth; install it with: pip install 'cloudckpt[gcs]'", cause=exc
    ) from exc

__all__ = ["BucketAccess"]

_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_METADATA_TIMEOUT = 3  # seconds, google-auth's own
_LONGEST_PAUSE = 30.0  # seconds between renewals that fail while the old token holds
_LONGEST_REASON = 300  # characters; it may be a proxy's page

_KINDS = {  # of credentials, by the module that has their class
    "google.oauth2.service_account": "the key of a service account",
    "google.oauth2.credentials": "a user's sign-in",
    "google.auth.compute_engine.credentials": "the service account of the machine or pod",
    "google.auth.impersonated_credentials": "impersonation of a service account",
    "google.auth.external_account": "workload identity federation",
    "google.auth.external_account_authorized_user": "workforce identity federation",
}
_VALIDITY = {
    google.auth.credentials.TokenState.FRESH: Validity.GOOD,
    google.auth.credentials.TokenState.STALE: Validity.DUE,
    google.auth.credentials.TokenState.INVALID: Validity.ENDED,
}


class BucketAccess:
    """Where requests go, and what authorizes them.

    Attributes:
        endpoint: The URL that paths are appended to.
        endpoint_from: What names it.
        is_google: Whether it is Google's own.
        http_options: How to connect to it.
        credentials: What authorizes requests.
    """

    def __init__(self, config: Config, uri: str) -> None:
        self.endpoint, is_trusted = _endpoint(config.gcs)
        host = self.endpoint.split("/")[2].partition(":")[0]
        self.is_google = is_trusted and host.endswith(f".{_universe()}")
        self.endpoint_from = (
            named_by(config.gcs, "endpoint_url")
            or first_set("STORAGE_EMULATOR_HOST", "GOOGLE_CLOUD_UNIVERSE_DOMAIN")
            or "nothing: Google's own"
        )
        self.http_options = HttpOptions.of_environment(config, self.endpoint)
        self._payer = config.gcs.user_project
        self._user = (config.gcs.credentials_file, config.gcs.impersonate, config.gcs.anonymous)
        is_wanted = is_trusted and not config.gcs.anonymous
        if not is_wanted and (config.gcs.credentials_file or config.gcs.impersonate):
            raise ConfigError(
                f"credentials are only sent over https, but the endpoint is {self.endpoint}"
            )

        def look() -> _Token | _NoToken:
            if not is_wanted:
                return _NoToken()
            transport = _Transport((config.connect_timeout, config.read_timeout))
            found = _credentials(config.gcs, transport, uri)
            with _in_our_words(transport, uri):
                universe = found.universe_domain  # the metadata server's, on Google's machines
            _check_universe(universe, self.endpoint, host, uri)
            return _Token(found, transport, _place(config.gcs))

        self.credentials = Credentials(look)

    def shares_realm(self, other: BucketAccess) -> bool:
        """Whether one request may be about buckets of both: the same place and the same user."""
        return (self.endpoint, self._user) == (other.endpoint, other._user)

    def headers(self, method: str, url: str) -> Mapping[str, str]:
        """What authorizes a request, and says who pays for it.

        Raises:
            CredentialsError: If the credentials can't be refreshed.
            ConnectionLostError: If they can't be for the moment.
        """
        headers = self.credentials.current.headers(method, url)
        if self._payer is not None:
            headers["x-goog-user-project"] = self._payer
        return headers


class _NoToken:
    """What authorizes requests that need nothing."""

    def headers(self, method: str, url: str) -> dict[str, str]:
        return {}

    def secrets(self) -> tuple[str, ...]:
        return ()

    def origin(self) -> Origin:
        return Origin(source="none are sent: anonymous=True, or the endpoint is no https")


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


def _check_universe(universe: str, endpoint: str, host: str, uri: str) -> None:
    """Whether credentials are for the cloud that the endpoint belongs to, as Google's clients do.

    Clouds of Google's technology that others run ("universes") do not know each other's accounts.
    A token that is sent to another one is shown to strangers, who refuse it without a reason.
    """
    known = (_universe(), "googleapis.com")
    domain = next((name for name in known if host.endswith(f".{name}")), _universe())
    if host.endswith(f".{universe}") or universe == domain:
        return
    raise CredentialsError(
        f"the credentials are for the universe {universe}, but {endpoint} belongs to {domain}; use "
        f"other credentials, or set GOOGLE_CLOUD_UNIVERSE_DOMAIN={universe}, or the endpoint",
        uri=uri,
        certain=True,
    )


def _credentials(
    options: GCSOptions, transport: _Transport, uri: str
) -> google.auth.credentials.Credentials:
    """The credentials that the options name, or else the application default ones."""
    found: google.auth.credentials.Credentials
    with _in_our_words(transport, uri):
        if options.credentials_file is not None:
            found = _from_file(options.credentials_file, transport)
        else:
            found = _default(transport, uri)
        # only now: google-auth asks for the project of external accounts that have a scope
        found = google.auth.credentials.with_scopes_if_required(found, [_SCOPE])
        if options.impersonate is None:
            return found
        return google.auth.impersonated_credentials.Credentials(
            source_credentials=found,
            target_principal=options.impersonate,
            target_scopes=[_SCOPE],
        )


def _default(transport: _Transport, uri: str) -> google.auth.credentials.Credentials:
    """The application default credentials.

    Raises:
        CredentialsError: If there are none.
        ConnectionLostError: If that is not certain, since the metadata server does not answer yet.
    """
    name = "GOOGLE_APPLICATION_CREDENTIALS"
    check_credential(os.environ.get(name, ""), name, uri, header=False)
    try:
        found, _ = google.auth.default()
        return found
    except google.auth.exceptions.DefaultCredentialsError as exc:
        cause = _told(exc)
    if file := _default_file(name):
        raise CredentialsError(
            f"the Google credentials in {file} can't be used; write the file anew, or name another "
            "one",
            uri=uri,
            cause=cause,
            certain=True,
        )
    if (machine := _of_the_machine(transport, uri)) is not None:
        return machine
    raise CredentialsError(
        "no Google credentials were found: neither in the file that "
        "GOOGLE_APPLICATION_CREDENTIALS names, nor in gcloud's "
        "application_default_credentials.json, nor at the metadata server of Google's "
        "machines; run `gcloud auth application-default login`, or name a file",
        uri=uri,
        cause=cause,
        certain=True,
    )


def _default_file(variable: str) -> str | None:
    """The file that google-auth reads before it asks the metadata server, if there is one.

    https://cloud.google.com/docs/authentication/application-default-credentials
    """
    if os.environ.get(variable):
        return f"the file that {variable} names"
    folder = os.environ.get("CLOUDSDK_CONFIG") or os.path.expanduser("~/.config/gcloud")
    path = os.path.join(folder, "application_default_credentials.json")
    return f"gcloud's {path}" if os.path.isfile(path) else None


def _place(options: GCSOptions) -> str:
    """What has named the credentials that were found."""
    name = "GOOGLE_APPLICATION_CREDENTIALS"
    file = named_by(options, "credentials_file") or _default_file(name)
    return file or "the metadata server of this machine or pod"


def _of_the_machine(transport: _Transport, uri: str) -> google.auth.credentials.Credentials | None:
    """The account of this machine, if it is one of Google's, by one more look.

    google-auth takes a metadata server that is late, overloaded or just starting (in the first
    seconds of a pod of GKE) for none.

    Raises:
        ConnectionLostError: If there should be a metadata server, but it does not answer.
    """
    if os.environ.get("NO_GCE_CHECK") == "true":  # as google-auth has it
        return None
    server = os.environ.get("GCE_METADATA_IP") or "169.254.169.254"
    flavor = {"Metadata-Flavor": "Google"}  # of the request and, documented too, of every answer
    try:
        answer = transport(f"http://{server}", headers=flavor, timeout=_METADATA_TIMEOUT)
        is_metadata_server = answer.headers.get("Metadata-Flavor") == "Google"
        if is_metadata_server and answer.status == 200:
            found: google.auth.credentials.Credentials = (
                google.auth.compute_engine.Credentials().with_quota_project_from_environment()
            )
            return found
        problem = f"HTTP {answer.status}"
        if not (is_metadata_server or (transport.was_put_off() and _is_one_of_googles())):
            return None
    except google.auth.exceptions.TransportError as exc:
        if not _is_one_of_googles():
            return None
        problem = _told(exc)
    raise ConnectionLostError(
        "the metadata server, which has the credentials of Google's machines, does not answer for "
        "the moment, and no file with credentials was found",
        uri=uri,
        cause=problem,
        certain=True,
    )


def _is_one_of_googles() -> bool:
    """Whether there should be a metadata server; also if that can't be looked up at the moment.

    Its name is known on Google's machines only.
    """
    if os.environ.get("GCE_METADATA_IP") or os.environ.get("GCE_METADATA_HOST"):
        return True
    try:
        socket.getaddrinfo("metadata.google.internal", 80)
    except socket.gaierror as exc:
        return exc.errno == socket.EAI_AGAIN
    return True


def _from_file(path: str, transport: _Transport) -> google.auth.credentials.Credentials:
    found: google.auth.credentials.Credentials
    with warnings.catch_warnings():
        # google-auth warns of files of unknown origin; this one is named by who runs the job
        warnings.simplefilter("ignore", DeprecationWarning)
        found, _ = google.auth.load_credentials_from_file(path, request=transport)
    return found


class _Transport(google.auth.transport.requests.Request):
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

    def __deepcopy__(self, memo: object) -> _Transport:
        """Another one, as google-auth makes it for what it does in the background."""
        return _Transport(self._timeout)

    def forget(self) -> None:
        """Begins anew to remember what this thread is answered."""
        self._heard.status = None

    def was_put_off(self) -> bool:
        """Whether the last answer that this thread got asks to come again later."""
        status = getattr(self._heard, "status", None)
        return isinstance(status, int) and _is_later(status)


class _Token:
    """An access token that is always valid: see :class:`~cloudckpt.stores.credentials.Renewal`.

    google-auth calls a token stale some minutes before it ends.
    """

    def __init__(
        self,
        credentials: google.auth.credentials.Credentials,
        transport: _Transport,
        place: str,
    ) -> None:
        """``place`` is where google-auth has found the credentials."""
        self._place = place
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
        with _in_our_words(self._transport):
            if self._validity() is Validity.GOOD:
                self._credentials.before_request(self._transport, method, url, headers)
            else:
                self._credentials.apply(headers)
        return headers

    def secrets(self) -> tuple[str, ...]:
        if self._validity() is Validity.ENDED:
            self._renewal.ensure()
        return (str(self._credentials.token),)

    def origin(self) -> Origin:
        held = self._credentials
        kinds = (name for kind in type(held).__mro__ if (name := _KINDS.get(kind.__module__)))
        email, ends = getattr(held, "service_account_email", None), held.expiry
        return Origin(
            source=f"{next(kinds, type(held).__name__)}, found by {self._place}",
            identity=email if isinstance(email, str) and "@" in email else "",
            ends=ends.replace(tzinfo=timezone.utc).timestamp() if ends else None,
        )

    def _validity(self) -> Validity:
        return _VALIDITY[self._credentials.token_state]

    def _renew(self) -> None:
        with _in_our_words(self._transport):
            self._credentials.refresh(self._transport)


def _pause(failures: int) -> float:
    """The first two failures may be hiccups; from the third on, pauses grow."""
    return min(2.0 ** (failures - 3), _LONGEST_PAUSE) if failures > 2 else 0.0


@contextlib.contextmanager
def _in_our_words(transport: _Transport, uri: str | None = None) -> Iterator[None]:
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
            cause=_told(exc),
            certain=True,
        )
        if _is_passing(exc) or transport.was_put_off():
            error = ConnectionLostError(
                "the access token could not be fetched for the moment",
                uri=uri,
                cause=_told(exc),
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


def _told(exc: Exception) -> str:
    """What a token endpoint says of its refusal; the rest of its answer may hold secrets."""
    if not isinstance(exc, google.auth.exceptions.GoogleAuthError):
        # others may quote what they can't read, such as a private key
        return reason(exc) if isinstance(exc, OSError) else type(exc).__name__
    first = masked(str(exc.args[0])) if exc.args else ""  # whole: what is cut is not recognized
    texts = [first.partition("\n")[0][:_LONGEST_REASON]] if first else []
    answer = exc.args[1] if len(exc.args) > 1 else None
    if isinstance(answer, Exception):
        texts.append(_told(answer))
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
