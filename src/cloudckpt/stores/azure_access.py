"""How a container is reached: account, endpoint, credentials, and azure-identity's errors in ours.

An account key makes a shared access signature (SAS) for this container and what a store does there:
one HMAC in hours rather than one a request, the same way for keys and signatures, and the key
itself never travels.
"""

from __future__ import annotations

import datetime
import email.utils
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import SplitResult, quote, unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from cloudckpt.config import Config
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
    import certifi
    from azure.core.exceptions import AzureError, ClientAuthenticationError
    from azure.identity import DefaultAzureCredential
    from azure.storage.blob import (
        ContainerClient,
        ContainerSasPermissions,
        generate_container_sas,
    )
except ImportError as exc:
    raise MissingDependencyError(
        "az:// needs azure-storage-blob and azure-identity; install them with: "
        "pip install 'cloudckpt[azure]'",
        cause=exc,
    ) from exc

__all__ = ["ContainerAccess"]

logger = logging.getLogger("cloudckpt")

API_VERSION = "2021-12-02"
"""The version of the REST API that requests are written for: the first that knows the cold tier,
and later than those of batches within a container, encoded names in listings and large blocks."""

_AZURE_HOST = re.compile(
    r"\.(core\.windows\.net|core\.chinacloudapi\.cn|core\.usgovcloudapi\.net|storage\.azure\.net)$"
)
_SCOPE = "https://storage.azure.com/.default"
_SAS_LIFE = 6 * 3600.0  # seconds; renewed when half of them are over
_TOKEN_MARGIN = 300.0  # seconds before its end in which azure-identity gives a new token
_PAUSE = 30.0  # seconds between tries to renew what is still valid

_ACCOUNT = ("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME")
_KEY = ("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY")
_SAS = ("AZURE_STORAGE_SAS_TOKEN",)
_CONNECTION = "AZURE_STORAGE_CONNECTION_STRING"


class ContainerAccess:
    """What Azure's SDKs know about a container.

    Attributes:
        url: The URL of the container.
        is_azure: Whether the endpoint is Azure's own, in any of its clouds.
        http_options: How to connect to it.
        credentials: What authorizes requests.
    """

    def __init__(self, container: str, host: str, config: Config, uri: str) -> None:
        place = _locate(host, config, _from_environment(container, uri), uri)
        self.url = f"{place.endpoint}/{quote(container)}"
        parts = urlsplit(place.endpoint)
        self.is_azure = _is_azure(parts.hostname)
        self.http_options = _http_options(parts, config)
        permissions = ContainerSasPermissions(
            read=True, write=True, delete=True, list=True, tag=bool(config.azure.tags)
        )

        def look() -> _Source:
            if config.azure.anonymous:
                return _Source()
            given = _from_environment(container, uri)
            fits = given.account in ("", place.account)
            if fits and given.key:
                sign = _Signing(place, container, given.key, permissions)
                return _Source(sas=_Renewed(sign, uri).get, given=given.key)
            if fits and given.sas:
                return _Source(sas=lambda: given.sas, given=given.sas)
            if parts.scheme != "https":
                raise CredentialsError(
                    "no key and no shared access signature was found for this endpoint "
                    f"({', '.join((*_KEY, *_SAS))}, AZURE_STORAGE_CONNECTION_STRING), and tokens "
                    "are sent by https only",
                    uri=uri,
                )
            note = "" if fits else f" (AZURE_STORAGE_* is of another account, {given.account!r})"
            return _Source(token=_Renewed(_Identity(note), uri).get)

        self.credentials = Credentials(look)
        logging.getLogger("urllib3.connectionpool").addFilter(_hide_signature)

    def authorize(self, url: str, headers: Mapping[str, str]) -> tuple[str, dict[str, str]]:
        """The URL and headers with which a request may be sent.

        Raises:
            CredentialsError: If there are no credentials, or they can't be renewed.
        """
        headers = {**headers, "x-ms-date": email.utils.formatdate(usegmt=True)}
        source = self.credentials.current
        if source.sas is not None:
            return f"{url}{'&' if '?' in url else '?'}{source.sas()}", headers
        if source.token is not None:
            headers["Authorization"] = f"Bearer {source.token()}"
        return url, headers


@dataclass(frozen=True, kw_only=True, repr=False)
class _Source:
    """A signature for URLs, or a token for headers, or neither.

    Attributes:
        sas: Gives the signature.
        token: Gives the token.
        given: The key or signature that the environment holds, if it does.
    """

    sas: Callable[[], str] | None = None
    token: Callable[[], str] | None = None
    given: str = ""

    def secrets(self) -> tuple[str, ...]:
        if self.token is not None:
            return (self.token(),)
        return (self.given,) if self.given else ()


@dataclass(frozen=True, kw_only=True, repr=False)
class _Given:
    """What the environment says; empty where it says nothing."""

    endpoint: str = ""
    account: str = ""
    key: str = ""
    sas: str = ""


@dataclass(frozen=True)
class _Place:
    """The blob endpoint of an account, without a slash at its end."""

    endpoint: str
    account: str


def _from_environment(container: str, uri: str) -> _Given:
    text = os.environ.get(_CONNECTION, "")
    if not text.strip():
        sas, key = _secret(_SAS, uri).removeprefix("?"), _secret(_KEY, uri)
        return _Given(account=_first(_ACCOUNT), key=key, sas=sas)
    check_credential(text, _CONNECTION, uri, header=False)
    try:
        with ContainerClient.from_connection_string(text, container) as client:
            url, _, sas = client.url.partition("?")
            key = getattr(client.credential, "account_key", None) or ""
            account = client.account_name or _account_of(url.rpartition("/")[0])
    except ValueError:
        problem = ConfigError(  # without the text of the cause, which might quote a key
            "AZURE_STORAGE_CONNECTION_STRING can't be parsed; copy it anew from 'Access keys' of "
            "the storage account",
            uri=uri,
        )
        raise_alone(problem)
    check_credential(key, f"AccountKey in {_CONNECTION}", uri)
    check_credential(unquote(sas), f"SharedAccessSignature in {_CONNECTION}", uri)
    endpoint = url.rpartition("/")[0]
    check_endpoint(endpoint, f"BlobEndpoint in {_CONNECTION}")
    return _Given(endpoint=endpoint, account=account, key=key, sas=sas)


def _first(variables: tuple[str, ...]) -> str:
    return next((text for name in variables if (text := os.environ.get(name, "").strip())), "")


def _secret(variables: tuple[str, ...], uri: str) -> str:
    """The first of them that is set; it has no white space around it."""
    for name in variables:
        if (text := os.environ.get(name, "")).strip():
            check_credential(text, name, uri)
            return text
    return ""


def _locate(host: str, config: Config, given: _Given, uri: str) -> _Place:
    """The account: of the URI, else of the options, else of the environment."""
    options = config.azure
    if host:
        return _Place(f"https://{host}", host.partition(".")[0])
    if options.endpoint_url is not None:
        endpoint = options.endpoint_url.rstrip("/")
        parts = urlsplit(endpoint)
        named = None if _is_azure(parts.hostname) else options.account or given.account
        return _Place(endpoint, named or _account_of(endpoint))
    if given.endpoint and options.account in (None, given.account):
        return _Place(given.endpoint, given.account)
    account = options.account or given.account
    if not account:
        raise ConfigError(
            "the storage account is not known: set AZURE_STORAGE_ACCOUNT or "
            "AZURE_STORAGE_CONNECTION_STRING, or Config(azure=AzureOptions(account=...)), or name "
            "it in the URI: abfss://container@account.dfs.core.windows.net/path",
            uri=uri,
        )
    if not re.fullmatch(r"[a-z0-9]{3,24}", account):
        raise ConfigError(
            f"{account!r} is no name of a storage account: 3 to 24 small letters and digits",
            uri=uri,
        )
    return _Place(f"https://{account}.blob.core.windows.net", account)


def _is_azure(host: str | None) -> bool:
    return _AZURE_HOST.search(host or "") is not None


def _account_of(endpoint: str) -> str:
    """The account that an endpoint names: in its path for emulators, else first in its host."""
    parts = urlsplit(endpoint)
    return parts.path.strip("/") or (parts.hostname or "").partition(".")[0]


class _Renewed:
    """A secret with an end, made anew ahead of it: by one thread, while the others use the old."""

    def __init__(self, make: Callable[[], tuple[str, float, float]], uri: str) -> None:
        """``make`` returns the secret, when to renew it, and its end (seconds since the epoch)."""
        self._make = make
        self._uri = uri
        self._secret, self._renew_at, self._ends = "", 0.0, 0.0
        self._failure: tuple[float, StoreError] | None = None
        self._lock = threading.Lock()

    def get(self) -> str:
        """The secret.

        Raises:
            StoreError: If there is none that is valid, and none can be made.
        """
        now = time.time()
        if now < self._renew_at:
            return self._secret
        asked = time.monotonic()
        if not self._lock.acquire(blocking=now >= self._ends):
            return self._secret
        try:
            if time.time() >= self._renew_at:
                self._renew(asked)
            return self._secret
        finally:
            self._lock.release()

    def _renew(self, asked: float) -> None:
        if self._failure is not None and self._failure[0] > asked:
            error = self._failure[1]  # of another thread, while this one waited for its result
            raise type(error)(error.message, uri=self._uri, cause=error.cause)
        try:
            self._secret, self._renew_at, self._ends = self._make()
        except StoreError as error:
            error.uri = self._uri
            self._failure = time.monotonic(), error
            if time.time() >= self._ends:
                raise
            self._renew_at = min(time.time() + _PAUSE, self._ends)
            logger.warning("the credentials, still valid, could not be renewed: %s", error)


class _Signing:
    """Makes shared access signatures with an account key."""

    def __init__(
        self, place: _Place, container: str, key: str, permissions: ContainerSasPermissions
    ) -> None:
        self._place = place
        self._container = container
        self._key = key
        self._permissions = permissions

    def __call__(self) -> tuple[str, float, float]:
        now = time.time()
        try:
            sas = generate_container_sas(
                self._place.account,
                self._container,
                account_key=self._key,
                permission=self._permissions,
                expiry=datetime.datetime.fromtimestamp(now + _SAS_LIFE, datetime.timezone.utc),
                protocol="https" if self._place.endpoint.startswith("https:") else "https,http",
            )
        except (ValueError, AzureError):
            problem = CredentialsError(  # without the text of the cause, which might quote it
                "the key of the storage account is not valid base64; copy it anew from 'Access "
                "keys' of the account"
            )
            raise_alone(problem)
        return sas, now + _SAS_LIFE / 2, now + _SAS_LIFE


class _Identity:
    """Gets tokens of Microsoft Entra ID."""

    def __init__(self, note: str) -> None:
        self._credential: DefaultAzureCredential | None = None
        self._note = note

    def __call__(self) -> tuple[str, float, float]:
        name = "AZURE_CLIENT_SECRET"
        check_credential(os.environ.get(name, ""), name, header=False)
        try:
            if self._credential is None:
                self._credential = DefaultAzureCredential()
            token = self._credential.get_token(_SCOPE)
        except (ValueError, AzureError) as exc:
            raise_alone(self._meaning(exc))
        check_credential(token.token, "the access token of Microsoft Entra ID")
        ends = float(token.expires_on)
        return token.token, max(ends - _TOKEN_MARGIN, time.time() + _PAUSE), ends

    def _meaning(self, exc: Exception) -> StoreError:
        cause = reason(exc)
        if isinstance(exc, ClientAuthenticationError):
            return CredentialsError(
                f"no Azure credentials were found{self._note}: neither "
                "AZURE_STORAGE_CONNECTION_STRING, nor an account key "
                f"({', '.join(_KEY)}) or shared access signature ({', '.join(_SAS)}), nor by "
                "azure-identity (AZURE_CLIENT_ID and its companions, workload identity, managed "
                "identity, 'az login')",
                cause=cause,
            )
        if isinstance(exc, AzureError):
            return ConnectionLostError("no token came from Microsoft Entra ID", cause=cause)
        return CredentialsError("azure-identity rejects its settings", cause=cause)


def _http_options(endpoint: SplitResult, config: Config) -> HttpOptions:
    """Proxies and certificates as Azure's SDKs find them."""
    found = {} if proxy_bypass(endpoint.netloc) else getproxies_environment()
    proxy = found.get(endpoint.scheme) or found.get("all") or None
    bundle = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
    return HttpOptions.of(config, proxy=proxy, ca_bundle=bundle or certifi.where())


def _hide_signature(record: logging.LogRecord) -> bool:
    """Cuts signatures out of the URLs that urllib3 writes into its debug log."""
    if isinstance(record.args, tuple):
        record.args = tuple(
            masked(value) if isinstance(value, str) else value for value in record.args
        )
    return True
