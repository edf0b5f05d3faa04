"""Microsoft Entra ID access tokens from azure-identity's ``DefaultAzureCredential``."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, replace

from cloudckpt._version import __version__
from cloudckpt.config import Config
from cloudckpt.errors import CredentialsError, MissingDependencyError, StoreError
from cloudckpt.stores.credentials import alone, check_credential, fetching
from cloudckpt.stores.origins import Origin
from cloudckpt.stores.redaction import raise_alone, told

try:
    from azure.core.exceptions import AzureError, ClientAuthenticationError
    from azure.identity import DefaultAzureCredential
except ImportError as exc:
    raise MissingDependencyError(
        "az:// needs azure-storage-blob and azure-identity; install them with: "
        "pip install 'cloudckpt[azure]'",
        cause=exc,
    ) from exc

__all__ = ["Tokens"]

_SCOPE = "https://storage.azure.com/.default"
_MARGIN = 300.0  # seconds before a token's end from which azure-identity gives a new one
_LONGEST = 3000  # characters of what all sources say
_PAUSE = 30.0  # seconds between renewals; azure-identity's own interval after failures
_CLI_TIMEOUT = 60  # seconds; `az` starts slowly on a busy machine


@dataclass(frozen=True, repr=False)
class _Held:
    """A token, when to renew it, and when it expires (seconds since the epoch)."""

    token: str = ""
    due: float = 0.0
    ends: float = 0.0


class Tokens:
    """A valid token, shared by all threads.

    Only some of azure-identity's sources cache their token: `az` would run for each request. One
    thread renews the token when its issuer wants that, or five minutes before it expires;
    meanwhile, and if that fails, the others keep using the old token as long as it is valid.
    """

    def __init__(self, config: Config, uri: str, *, note: str = "") -> None:
        """
        Args:
            config: How long to wait for the network.
            uri: What the token is for, in messages.
            note: What else to say if no credentials are found.
        """
        self._uri = uri
        self._note = note
        self._settings = {
            "process_timeout": _CLI_TIMEOUT,
            "connection_timeout": config.connect_timeout,
            "read_timeout": config.read_timeout,
            "user_agent": f"cloudckpt/{__version__}",
        }
        self._credential: DefaultAzureCredential | None = None
        self._held = _Held()
        self._lock = threading.Lock()

    def get(self) -> str:
        """The token.

        Raises:
            CredentialsError: If no source has credentials, or they are refused.
            TransientStoreError: If the token has expired and temporarily can't be renewed.
        """
        held, now = self._held, time.time()
        if now < held.due:
            return held.token
        with alone(self._lock, self._uri, wait=now >= held.ends) as is_mine:
            if is_mine and self._held is held:  # no other thread has renewed it
                self._held = self._renewed(held)
        return self._held.token

    def origin(self) -> Origin:
        """Which azure-identity source gave the token; azure-identity has no public name for it."""
        found = getattr(self._credential, "_successful_credential", None) or self._credential
        source = f"azure-identity's {type(found).__name__}"
        return Origin(source=source, ends=self._held.ends or None)

    def _renewed(self, held: _Held) -> _Held:
        try:
            return self._fetch()
        except StoreError:
            now = time.time()
            if now >= held.ends:
                raise
            return replace(held, due=min(now + _PAUSE, held.ends))

    def _fetch(self) -> _Held:
        name = "AZURE_CLIENT_SECRET"
        check_credential(os.environ.get(name, ""), name, self._uri, header=False)
        with fetching("Azure", self._uri, is_passing=_is_passing):
            if self._credential is None:
                self._credential = DefaultAzureCredential(**self._settings)
            try:
                found = self._credential.get_token_info(_SCOPE)
            except ClientAuthenticationError as exc:
                raise_alone(self._none(exc))
        check_credential(found.token, "the access token of Microsoft Entra ID", self._uri)
        ends = float(found.expires_on)
        due = max(float(found.refresh_on or ends - _MARGIN), time.time() + _PAUSE)
        return _Held(found.token, min(due, ends), ends)

    def _none(self, exc: Exception) -> CredentialsError:
        return CredentialsError(
            f"no Azure credentials were found that give a token{self._note}: neither "
            "AZURE_STORAGE_CONNECTION_STRING, nor an account key (AZURE_STORAGE_KEY, "
            "AZURE_STORAGE_ACCOUNT_KEY) or shared access signature (AZURE_STORAGE_SAS_TOKEN), "
            "nor by azure-identity (AZURE_CLIENT_ID and its companions, workload identity, "
            "managed identity, 'az login')",
            uri=self._uri,
            cause=told(str(exc), most=_LONGEST),  # a line of each source
            certain=True,
        )


def _is_passing(exc: Exception) -> bool:
    return isinstance(exc, AzureError)  # but the refusals, of which its chain speaks
