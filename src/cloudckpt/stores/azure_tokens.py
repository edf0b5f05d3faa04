"""Access tokens of Microsoft Entra ID: azure-identity fetches them, we keep them valid.

azure-identity's chain of sources answers every failure alike, with one error that lists what each
source says: no such credentials here, a refusal, or a network that is down. It would end a job on a
hiccup of the metadata service. So its requests travel through a transport that remembers which of
them got no answer, or one that asks to come back.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cloudckpt._version import __version__
from cloudckpt.config import Config
from cloudckpt.errors import (
    ConnectionLostError,
    CredentialsError,
    MissingDependencyError,
    ServerError,
    StoreError,
    ThrottledError,
)
from cloudckpt.stores.credentials import Renewal, Validity, check_credential, raise_alone, reason
from cloudckpt.stores.origins import Origin
from cloudckpt.stores.refusals import retry_after
from cloudckpt.stores.tls import lasting_failure

try:
    from azure.core.credentials import AccessTokenInfo, TokenRequestOptions
    from azure.core.exceptions import AzureError, ClientAuthenticationError
    from azure.core.pipeline.transport import RequestsTransport
    from azure.identity import AzureAuthorityHosts, DefaultAzureCredential
except ImportError as exc:
    raise MissingDependencyError(
        "az:// needs azure-storage-blob and azure-identity; install them with: "
        "pip install 'cloudckpt[azure]'",
        cause=exc,
    ) from exc

__all__ = ["Tokens", "tenant_asked_for"]

_SCOPE = "https://storage.azure.com/.default"
_MARGIN = 300.0  # seconds before its end in which azure-identity gives a new token
_SHORTEST = 30.0  # seconds between renewals, whatever their issuer wants
_CLI_TIMEOUT = 60  # seconds; on a busy machine `az` takes many of them to start

_SOURCES = {  # by azure-identity's names for them
    "EnvironmentCredential": "the environment (AZURE_CLIENT_ID and its companions)",
    "WorkloadIdentityCredential": "workload identity (AZURE_FEDERATED_TOKEN_FILE)",
    "ManagedIdentityCredential": "the managed identity of the machine or pod",
    "SharedTokenCacheCredential": "the sign-in of another program of this user",
    "VisualStudioCodeCredential": "the sign-in of Visual Studio Code",
    "AzureCliCredential": "az login",
    "AzurePowerShellCredential": "Connect-AzAccount of PowerShell",
    "AzureDeveloperCliCredential": "azd auth login",
}

_SLOW_DOWN = frozenset({404, 410, 429, 503})  # the first two: it is updated, for up to 70 s

_METADATA_HOST = "169.254.169.254"
_METADATA_PATH = "/metadata/identity/"
_CHASSIS = Path("/sys/class/dmi/id/chassis_asset_tag")
_AZURE_CHASSIS = "7783-7084-3265-9085-8269-3286-77"  # of every machine of Azure; cloud-init's sign

_AUTHORITIES = frozenset(
    {
        AzureAuthorityHosts.AZURE_PUBLIC_CLOUD,
        AzureAuthorityHosts.AZURE_CHINA,
        AzureAuthorityHosts.AZURE_GOVERNMENT,
        "login.windows.net",
        "sts.windows.net",
    }
)
_NO_TENANTS = frozenset({"common", "consumers", "organizations"})
_CHALLENGE = "www-authenticate"


@dataclass(frozen=True, repr=False)
class _Held:
    """A token, when to renew it, and its end (seconds since the epoch)."""

    token: str = ""
    renew_at: float = 0.0
    ends: float = 0.0


class Tokens:
    """A token that is always valid: see :class:`~cloudckpt.stores.credentials.Renewal`."""

    def __init__(self, config: Config, uri: str, *, tenant: str = "", note: str = "") -> None:
        """
        Args:
            config: How long to wait for the network.
            uri: What the token is for, in messages.
            tenant: Whose token is wanted, if the store has asked for one.
            note: What else to say where no credentials are found.
        """
        self._config = config
        self._uri = uri
        self._tenant = tenant
        self._note = note
        self._credential: DefaultAzureCredential | None = None
        self._wire = _Wire(config, uri)
        self._held = _Held()
        self._renewal = Renewal(self._validity, self._renew)

    def get(self) -> str:
        """The token.

        Raises:
            CredentialsError: If no source has credentials, or they are refused.
            TransientStoreError: If a source, or the network before it, fails for the moment.
            TLSError: If a source can't be trusted.
        """
        self._renewal.ensure()
        return self._held.token

    def origin(self) -> Origin:
        """Which of azure-identity's sources has given it."""
        found = getattr(self._credential, "_successful_credential", None)
        name = type(found).__name__ if found is not None else "azure-identity"
        return Origin(source=_SOURCES.get(name, name), ends=self._held.ends or None)

    def _validity(self) -> Validity:
        held, now = self._held, time.time()
        if now < held.renew_at:
            return Validity.GOOD
        return Validity.DUE if now < held.ends else Validity.ENDED

    def _renew(self) -> None:
        try:
            self._held = self._fetch()
        except StoreError as error:
            error.uri = self._uri
            raise

    def _fetch(self) -> _Held:
        name = "AZURE_CLIENT_SECRET"
        check_credential(os.environ.get(name, ""), name, header=False)
        self._wire.forget()
        try:
            if self._credential is None:
                self._credential = DefaultAzureCredential(
                    transport=self._wire,
                    retry_total=0,  # whoever sends the request to the store tries again
                    user_agent=f"cloudckpt/{__version__}",
                    process_timeout=_CLI_TIMEOUT,
                )
            found = self._ask(self._credential)
        except Exception as exc:  # noqa: BLE001 - a source of the chain raises whatever it meets
            self._credential = None  # MSAL repeats the last refusal, for up to a minute, unasked
            raise_alone(self._meaning(exc))
        check_credential(found.token, "the access token of Microsoft Entra ID")
        now, ends = time.time(), float(found.expires_on)
        due = float(found.refresh_on) if found.refresh_on else ends - _MARGIN
        return _Held(found.token, min(max(due, now + _SHORTEST), ends), ends)

    def _ask(self, credential: DefaultAzureCredential) -> AccessTokenInfo:
        if self._tenant:
            options: TokenRequestOptions = {"tenant_id": self._tenant}
            try:
                return credential.get_token_info(_SCOPE, options=options)
            except ClientAuthenticationError:
                if self._wire.failures or self._wire.was_refused:
                    raise
                # azure-identity did not ask: an identity is of one tenant, which may have two names
        return credential.get_token_info(_SCOPE, options={})

    def _meaning(self, exc: Exception) -> StoreError:
        cause = reason(exc)
        for failure in self._wire.failures.values():
            failure.cause = f"{failure.cause}; {cause}"
            return failure
        if isinstance(exc, ClientAuthenticationError) and self._wire.was_refused:
            return CredentialsError(
                f"Microsoft Entra ID refuses the credentials that azure-identity has found"
                f"{self._note}; check AZURE_CLIENT_ID and its companions, the federation of the "
                "workload identity, and the tenant",
                cause=cause,
            )
        if isinstance(exc, ClientAuthenticationError):
            return CredentialsError(
                f"no Azure credentials were found that give a token{self._note}: neither "
                "AZURE_STORAGE_CONNECTION_STRING, nor an account key (AZURE_STORAGE_KEY, "
                "AZURE_STORAGE_ACCOUNT_KEY) or shared access signature (AZURE_STORAGE_SAS_TOKEN), "
                "nor by azure-identity (AZURE_CLIENT_ID and its companions, workload identity, "
                "managed identity, 'az login')",
                cause=cause,
            )
        if isinstance(exc, AzureError):
            return ConnectionLostError("no token came from Microsoft Entra ID", cause=cause)
        return CredentialsError("azure-identity can't use its settings or files", cause=cause)


class _Wire(RequestsTransport):  # type: ignore[misc]  # azure-core loads it late, without a type
    """What azure-identity's requests travel through, one attempt to get a token after the other.

    Attributes:
        failures: Of each host that has said nothing about credentials in the end: why.
        was_refused: Whether an authority has refused to give a token.
    """

    def __init__(self, config: Config, uri: str) -> None:
        super().__init__(
            connection_timeout=config.connect_timeout, read_timeout=config.read_timeout
        )
        self._uri = uri
        self.forget()

    def forget(self) -> None:
        """Begins an attempt."""
        self.failures: dict[str, StoreError] = {}
        self.was_refused = False

    def send(self, request: Any, **options: Any) -> Any:
        host = urlsplit(request.url).netloc
        self.failures.pop(host, None)
        try:
            response = super().send(request, **options)
        except AzureError as exc:
            if host != _METADATA_HOST or _is_machine_of_azure():
                self.failures[host] = _unanswered(host, exc)
            raise
        status = response.status_code
        if _is_passing(request.url, host, status):
            kind = ThrottledError if status in _SLOW_DOWN else ServerError
            error = kind(
                "getting an access token: not for the moment",
                uri=self._uri,
                cause=f"HTTP {status} of {host}",
                certain=True,
            )
            error.retry_after = retry_after(response.headers)
            self.failures[host] = error
        elif request.method == "POST" and 400 <= status < 500:
            self.was_refused = True
        return response


def _is_passing(url: str, host: str, status: int) -> bool:
    """Whether an answer is one to come back after."""
    if status == 404:  # only of a metadata service; those of other clouds have none of this name
        is_metadata = urlsplit(url).path.startswith(_METADATA_PATH)
        return is_metadata and (host != _METADATA_HOST or _is_machine_of_azure())
    return status in _SLOW_DOWN or status == 408 or status >= 500


def _unanswered(host: str, exc: AzureError) -> StoreError:
    inner = exc.inner_exception or exc
    lasting = lasting_failure(inner, host)
    return lasting or ConnectionLostError(
        f"no access token came from {host} (Microsoft Entra ID, or a managed identity's service)",
        cause=reason(inner),
    )


def _is_machine_of_azure() -> bool:
    """Whether this machine is one of Azure's, whose metadata service is there though it is silent.

    Elsewhere nobody has this address, or another cloud's service, and that is how azure-identity
    learns that there is no managed identity.
    """
    if os.environ.get("AZURE_TOKEN_CREDENTIALS", "").strip().lower() == "managedidentitycredential":
        return True
    try:
        return _CHASSIS.read_text("ascii").strip() == _AZURE_CHASSIS
    except (OSError, ValueError):
        return False


def tenant_asked_for(headers: Mapping[str, str]) -> str:
    """The tenant whose token a 401 asks for; empty if it names none, or by an unknown authority.

    Azure Storage answers a token of another tenant with ``WWW-Authenticate: Bearer
    authorization_uri=https://login.microsoftonline.com/<tenant>/oauth2/authorize
    resource_id=https://storage.azure.com``. Only the tenant is taken from it: a store that could
    name authority and resource too might have itself sent a token that opens other doors.
    """
    challenge = next((text for name, text in headers.items() if name.lower() == _CHALLENGE), "")
    found = re.search(
        r"\bBearer\b.*\bauthorization_uri=[\"']?([^\s,\"']+)", challenge, re.IGNORECASE
    )
    parts = urlsplit(found[1] if found else "")
    tenant = parts.path[1:].partition("/")[0]
    if parts.scheme != "https" or parts.netloc.lower() not in _AUTHORITIES | {_authority()}:
        return ""
    if not re.fullmatch(r"[A-Za-z0-9.-]+", tenant) or tenant.lower() in _NO_TENANTS:
        return ""
    return tenant


def _authority() -> str:
    """The host that azure-identity gets its tokens from, if the environment names one."""
    text = os.environ.get("AZURE_AUTHORITY_HOST", "").strip()
    return urlsplit(text if "://" in text else f"https://{text}").netloc.lower()
