"""How a bucket is reached: the endpoint, and where credentials for it are found."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Mapping

from cloudckpt.config import Config, GCSOptions
from cloudckpt.config.options import check_endpoint
from cloudckpt.errors import ConfigError, ConnectionLostError, CredentialsError
from cloudckpt.stores.credentials import Credentials, check_credential
from cloudckpt.stores.gcs_token import Token, Transport, in_our_words, told
from cloudckpt.stores.http import HttpOptions

# isort: split
# below the module that says what to install if they are missing
import google.auth
import google.auth.compute_engine
import google.auth.credentials
import google.auth.exceptions
import google.auth.impersonated_credentials
import requests.utils

__all__ = ["BucketAccess"]

_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_METADATA_TIMEOUT = 3  # seconds, google-auth's own


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

        def look() -> Token | _NoToken:
            if not is_wanted:
                return _NoToken()
            transport = Transport((config.connect_timeout, config.read_timeout))
            found = _credentials(config.gcs, transport, uri)
            with in_our_words(transport, uri):
                universe = found.universe_domain  # the metadata server's, on Google's machines
            _check_universe(universe, self.endpoint, host, uri)
            return Token(found, transport)

        self.credentials = Credentials(look)

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
    options: GCSOptions, transport: Transport, uri: str
) -> google.auth.credentials.Credentials:
    """The credentials that the options name, or else the application default ones."""
    found: google.auth.credentials.Credentials
    with in_our_words(transport, uri):
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


def _default(transport: Transport, uri: str) -> google.auth.credentials.Credentials:
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
        cause = told(exc)
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


def _of_the_machine(transport: Transport, uri: str) -> google.auth.credentials.Credentials | None:
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
        problem = told(exc)
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


def _from_file(path: str, transport: Transport) -> google.auth.credentials.Credentials:
    found: google.auth.credentials.Credentials
    with warnings.catch_warnings():
        # google-auth warns of files of unknown origin; this one is named by who runs the job
        warnings.simplefilter("ignore", DeprecationWarning)
        found, _ = google.auth.load_credentials_from_file(path, request=transport)
    return found
