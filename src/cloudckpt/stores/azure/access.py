"""Access to an Azure container: its account, endpoint and credentials."""

from __future__ import annotations

import base64
import contextlib
import datetime
import email.utils
import hmac
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from cloudckpt._version import __version__
from cloudckpt.config import Config
from cloudckpt.config.options import check_endpoint
from cloudckpt.errors import (
    ConfigError,
    CredentialsError,
    MissingDependencyError,
    StoreError,
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
from cloudckpt.stores.http.options import HttpOptions, first_set
from cloudckpt.stores.redaction import excerpt, raise_without_context
from cloudckpt.stores.rest import iso_date

try:
    from azure.core.credentials import AccessTokenInfo
    from azure.core.exceptions import AzureError, ClientAuthenticationError
    from azure.identity import DefaultAzureCredential
    from azure.storage.blob import ContainerClient, generate_blob_sas
except ImportError as exc:
    raise MissingDependencyError(
        "az:// needs azure-storage-blob and azure-identity; install them with: "
        "pip install 'cloudckpt[azure]'",
        cause=exc,
    ) from exc

__all__ = ["ContainerAccess", "Secret"]

API_VERSION = "2021-12-02"
"""The REST API version of all requests.

It is the first with the cold tier, and later than the versions that added encoded names in listings
and large blocks.
"""

_AZURE_HOST = re.compile(
    r"\.(core\.windows\.net|core\.chinacloudapi\.cn|core\.usgovcloudapi\.net|storage\.azure\.net)$"
)
_CLOUD = re.compile(r"\.(?P<zone>z\d+\.)?(?:privatelink\.)?blob\.(?P<suffix>.+)$")
# suffixes of the account in its endpoint
_VARIANT = re.compile(r"(-secondary)?(-ipv6|-dualstack)?$")

_ACCOUNT = ("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME")
_KEY = ("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY")
_SAS = ("AZURE_STORAGE_SAS_TOKEN",)
_CONNECTION = "AZURE_STORAGE_CONNECTION_STRING"

# from the request for a copy until its source has been read
_LONGEST_COPY = datetime.timedelta(hours=2)

_SCOPE = "https://storage.azure.com/.default"
_CLI_TIMEOUT = 60  # seconds; `az` starts slowly on a busy machine
_MARGIN = 300.0  # seconds before its end at which a token is renewed, if its issuer names no time
_PAUSE = 30.0  # seconds between renewals of a valid token
_LONGEST_TEXT = 3000  # characters of the messages of all sources of tokens

_SIGNED = (  # signed in this order, whether sent or not
    "content-encoding",
    "content-language",
    "content-length",
    "content-md5",
    "content-type",
    "date",
    "if-modified-since",
    "if-match",
    "if-none-match",
    "if-unmodified-since",
    "range",
)


class ContainerAccess(Access):
    """The endpoint and credentials of a container, determined as Azure's SDKs do.

    Attributes:
        container: The container's name.
        is_azure: Whether the endpoint is Azure's own, in any of its clouds.
    """

    def __init__(self, container: str, host: str, config: Config, uri: str) -> None:
        endpoint, account = _locate(host, config, _from_environment(container, uri), uri)
        self.container, self._endpoint = container, endpoint
        self.url = f"{endpoint}/{quote(container)}"
        parts = urlsplit(endpoint)
        self.is_azure = _is_azure(parts.hostname)
        self.http_options = HttpOptions.of_environment(config, endpoint)

        def find() -> NoCredentials | Secret | _Tokens:
            if config.azure.anonymous:
                return NoCredentials()
            given = _from_environment(container, uri)
            fits = given.account in ("", account) and _are_together(given.endpoint, endpoint)
            if given.sas and not given.key and not given.account and host:
                # a signature is sent, unlike a key: not to an account that only the URI names
                fits = False
            if fits and given.key:
                return _SharedKey(account, given, uri)
            if fits and given.sas:
                return _Signature(account, given)
            if parts.scheme != "https":
                raise CredentialsError(
                    "no account key and no shared access signature was found for this http "
                    f"endpoint ({', '.join((*_KEY, *_SAS))}, AZURE_STORAGE_CONNECTION_STRING), "
                    "and tokens are sent only over https: set one of these variables, or use "
                    "https",
                    uri=uri,
                )
            note = ""
            if not fits and given.account:
                whose = " at ".join(filter(None, (repr(given.account), given.endpoint)))
                note = f" (AZURE_STORAGE_* is set for another account, {whose})"
            elif not fits:
                note = (
                    " (AZURE_STORAGE_SAS_TOKEN is not sent to an account that only the URI "
                    f"names: set AZURE_STORAGE_ACCOUNT={account} if it belongs to that "
                    "account)"
                )
            return _Tokens(config, uri, note, errors)

        errors = partial(fetch_error, whose="Azure", uri=uri, is_transient=_is_transient)
        self.credentials = Credentials(find, errors)

    def authorize(
        self, method: str, url: str, headers: dict[str, str], body: Body, issued: Issued
    ) -> tuple[str, Mapping[str, str]]:
        """Implements :meth:`cloudckpt.stores.credentials.Access.authorize`."""
        headers["x-ms-version"] = API_VERSION
        headers["x-ms-date"] = email.utils.formatdate(usegmt=True)
        if isinstance(issued.source, _Tokens):
            headers["Authorization"] = f"Bearer {issued.secrets[0]}"
        elif isinstance(issued.source, Secret):
            url = issued.source.authorize(method, url, headers)
        return url, headers

    def reaches(self, other: ContainerAccess) -> bool:
        """Returns whether blobs of another container can be copied here: same cloud or endpoint."""
        if self.is_azure and other.is_azure:
            zones = (_CLOUD.search(urlsplit(access.url).netloc) for access in (self, other))
            return len({zone and zone["suffix"] for zone in zones}) == 1
        return self._endpoint == other._endpoint

    def as_source(self, key: str) -> tuple[str, str | None]:
        """Returns a URL from which the store can read a blob, and an Authorization header for it.

        The header is None if the URL is enough: it holds a signature, or the blob is public.

        Raises:
            StoreError: If there are no credentials, or they can't be renewed.
        """
        url = f"{self.url}/{quote(key, safe='/-._~')}"
        source, secrets = self.credentials.get()
        if isinstance(source, _Tokens):
            return url, f"Bearer {secrets[0]}"
        sas = source.sas_of(self.container, key) if isinstance(source, Secret) else ""
        return f"{url}?{sas}" if sas else url, None


class Secret(ABC):
    """A secret from the environment, which authorizes requests to one account.

    Attributes:
        kind: The type of the secret in words, for messages.
        secret: The secret.
        ends: When it expires, in seconds since 1970; None if that is unknown.
    """

    kind: str
    secret: str
    ends: float | None = None

    def __init__(self, account: str, given: _Given) -> None:
        self._account, self._named_by = account, given.named_by

    def secrets(self) -> tuple[str, ...]:
        return (self.secret,)

    def origin(self) -> Origin:
        source = f"{self.kind} ({self._named_by})"
        return Origin(source=source, identity=self._account, ends=self.ends)

    @abstractmethod
    def authorize(self, method: str, url: str, headers: dict[str, str]) -> str:
        """Adds the secret, or a signature made with it, to URL or `headers`; returns the URL."""

    @abstractmethod
    def sas_of(self, container: str, key: str) -> str:
        """Returns a shared access signature by which the store can read a blob."""


class _Signature(Secret):
    """A shared access signature, which is appended to URLs."""

    kind = "a shared access signature"

    def __init__(self, account: str, given: _Given) -> None:
        super().__init__(account, given)
        self.secret, self.ends = given.sas, _end_of(given.sas)

    def authorize(self, method: str, url: str, headers: dict[str, str]) -> str:
        return f"{url}{'&' if '?' in url else '?'}{self.secret}"

    def sas_of(self, container: str, key: str) -> str:
        return self.secret


class _Tokens:
    """Access tokens of Microsoft Entra ID, which azure-identity fetches.

    One thread at a time asks for a token: the source may be a slow program (``az``), or fail to
    respond. Meanwhile, and if the renewal fails, the previous token is used as long as it is valid:
    the token of a managed identity is due for renewal half a day before it expires.
    """

    def __init__(self, config: Config, uri: str, note: str, errors: Errors) -> None:
        """Prepares to fetch tokens; `note` is added to the error if no source has credentials."""
        self._uri, self._note = uri, note
        self._fetch = SharedCall(self._fetched, errors)
        self._held = AccessTokenInfo("", 0)
        self._due = 0.0  # when the token is to be renewed, in seconds since 1970
        self._credential = DefaultAzureCredential(
            process_timeout=_CLI_TIMEOUT,
            connection_timeout=config.connect_timeout,
            read_timeout=config.read_timeout,
            user_agent=f"cloudckpt/{__version__}",
        )

    def secrets(self) -> tuple[str, ...]:
        """Returns a valid token as the only element, renewing it if that is due.

        Raises:
            CredentialsError: If no source has credentials, or they are refused.
            ConnectionLostError: If a source does not respond.
            TLSError: If a source can't be reached by TLS.
        """
        now = time.time()
        if now >= self._held.expires_on:
            self._fetch()
        elif now >= self._due:
            self._due = now + _PAUSE  # the other threads use the valid token meanwhile
            with contextlib.suppress(StoreError):
                self._fetch()
        return (self._held.token,)

    def _fetched(self) -> None:
        try:
            held = self._credential.get_token_info(_SCOPE)
        except ClientAuthenticationError as exc:
            raise_without_context(self._not_found(exc))
        wanted = held.refresh_on or held.expires_on - _MARGIN
        self._held, self._due = held, max(wanted, time.time() + _PAUSE)

    def _not_found(self, exc: Exception) -> CredentialsError:
        return CredentialsError(
            f"no valid Azure credentials were found{self._note}: neither "
            "AZURE_STORAGE_CONNECTION_STRING, nor an account key (AZURE_STORAGE_KEY, "
            "AZURE_STORAGE_ACCOUNT_KEY) or shared access signature (AZURE_STORAGE_SAS_TOKEN), "
            "nor a token by azure-identity (AZURE_CLIENT_ID and related variables, workload "
            "identity, managed identity, 'az login'); set or correct one",
            uri=self._uri,
            cause=excerpt(str(exc), most=_LONGEST_TEXT),  # a line per source
            certain=True,
        )

    def origin(self) -> Origin:
        """Returns the azure-identity source that supplied the token, and the token's expiry."""
        found = getattr(self._credential, "_successful_credential", None) or self._credential
        ends = self._held.expires_on or None
        return Origin(source=f"azure-identity's {type(found).__name__}", ends=ends)


class _SharedKey(Secret):
    """An account key, which signs each request and is never sent.

    Only copies use a shared access signature made with the key, see `sas_of`: such signatures are
    tied to an API version that not every Azure cloud supports, and to the account's policy.
    https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key
    """

    kind = "an account key"

    def __init__(self, account: str, given: _Given, uri: str) -> None:
        """Decodes the account key.

        Raises:
            CredentialsError: If the key is not valid base64.
        """
        super().__init__(account, given)
        self.secret = given.key
        try:
            self._key = base64.b64decode(given.key, validate=True)
        except ValueError:
            raise_without_context(  # without the cause's text, which might quote the key
                CredentialsError(
                    f"the account key in {given.named_by} is not valid base64: copy it again from "
                    f"'Access keys' of the storage account {account}",
                    uri=uri,
                )
            )

    def authorize(self, method: str, url: str, headers: dict[str, str]) -> str:
        given = {name.lower(): value.strip() for name, value in headers.items()}
        if given.get("content-length") == "0":
            given["content-length"] = ""
        parts = urlsplit(url)
        lines = [method, *(given.get(name, "") for name in _SIGNED)]
        lines += [f"{name}:{given[name]}" for name in sorted(given) if name.startswith("x-ms-")]
        lines += [f"/{self._account}{parts.path}"]  # percent-encoded as in the request
        pairs = (pair.partition("=") for pair in parts.query.split("&") if pair)
        lines += sorted(f"{name.lower()}:{unquote(value)}" for name, _, value in pairs)
        digest = hmac.digest(self._key, "\n".join(lines).encode(), "sha256")
        signature = base64.b64encode(digest).decode("ascii")
        headers["Authorization"] = f"SharedKey {self._account}:{signature}"
        return url

    def sas_of(self, container: str, key: str) -> str:
        """Returns a signature that permits reading this blob for two hours; the key is not sent."""
        sas: str = generate_blob_sas(
            self._account,
            container,
            key,
            account_key=self.secret,
            permission="r",
            expiry=datetime.datetime.now(datetime.timezone.utc) + _LONGEST_COPY,
        )
        return sas


@dataclass(frozen=True, kw_only=True, repr=False)
class _Given:
    """The account's settings from the environment; empty where unset."""

    endpoint: str = ""
    account: str = ""
    key: str = ""
    sas: str = ""

    @property
    def named_by(self) -> str:
        """The name of the environment variable that holds the key or the signature."""
        return first_set(_CONNECTION, *(_KEY if self.key else _SAS))


def _from_environment(container: str, uri: str) -> _Given:
    text = os.environ.get(_CONNECTION, "")
    if not text.strip():
        sas, key = _first(_SAS).removeprefix("?"), _first(_KEY)
        return _Given(account=_first(_ACCOUNT), key=key, sas=sas)
    try:
        with ContainerClient.from_connection_string(text, container) as client:
            url, _, sas = client.url.partition("?")
            key = getattr(client.credential, "account_key", None) or ""
            endpoint = url.rpartition("/")[0]
            account = _VARIANT.sub("", client.account_name or "") or _account_of(endpoint)
    except ValueError:
        problem = ConfigError(  # without the cause's text, which might quote a key
            "AZURE_STORAGE_CONNECTION_STRING can't be parsed; copy it again from 'Access keys' "
            "of the storage account",
            uri=uri,
        )
        raise_without_context(problem)
    check_endpoint(endpoint, f"BlobEndpoint in {_CONNECTION}")
    return _Given(endpoint=endpoint, account=account, key=key, sas=sas)


def _end_of(sas: str) -> float | None:
    """Returns when a signature expires, in seconds since 1970; None if it names no valid time."""
    ends = dict(parse_qsl(sas)).get("se", "")
    if "T" not in ends:
        ends += "T00:00:00Z"  # it expires at the beginning of that day
    return iso_date(ends)


def _first(variables: tuple[str, ...]) -> str:
    return os.environ.get(first_set(*variables), "").strip()


def _locate(host: str, config: Config, given: _Given, uri: str) -> tuple[str, str]:
    """Returns the endpoint's URL and the account, from URI, options or environment variables.

    Raises:
        ConfigError: If none of them names an account, or the account's name is not valid.
    """
    options = config.azure
    if host:
        return f"https://{host}", _account_of(f"https://{host}")
    if options.endpoint_url is not None:
        endpoint = options.endpoint_url.rstrip("/")
        parts = urlsplit(endpoint)
        named = None if _is_azure(parts.hostname) else given.account
        return endpoint, named or _account_of(endpoint)
    if given.endpoint:
        return given.endpoint, given.account
    account = given.account
    if not account:
        raise ConfigError(
            "the storage account is not known: set AZURE_STORAGE_ACCOUNT or "
            "AZURE_STORAGE_CONNECTION_STRING, or name it in the URI: "
            "abfss://container@account.dfs.core.windows.net/path",
            uri=uri,
        )
    if not re.fullmatch(r"[a-z0-9]{3,24}", account):
        raise ConfigError(
            f"{account!r} is not a valid name of a storage account: write 3 to 24 lowercase "
            "letters and digits",
            uri=uri,
        )
    return f"https://{account}.blob.core.windows.net", account


def _is_azure(host: str | None) -> bool:
    return _AZURE_HOST.search(host or "") is not None


def _account_of(endpoint: str) -> str:
    """Returns the account in an endpoint: the path for emulators, else the first host label."""
    parts = urlsplit(endpoint)
    return _VARIANT.sub("", parts.path.strip("/") or (parts.hostname or "").partition(".")[0])


def _are_together(one: str, other: str) -> bool:
    """Returns False if two endpoints are known to be in different clouds or DNS zones, else True.

    In different clouds or zones, the same account name means different accounts.
    """
    clouds = [_CLOUD.search(urlsplit(endpoint).hostname or "") for endpoint in (one, other)]
    return None in clouds or len({cloud and cloud.group("zone", "suffix") for cloud in clouds}) == 1


def _is_transient(exc: Exception) -> bool:
    # its subclass ClientAuthenticationError, a refusal, was caught before
    return isinstance(exc, AzureError)
