"""Microsoft Entra ID access tokens from azure-identity's ``DefaultAzureCredential``."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, replace

from cloudckpt._version import __version__
from cloudckpt.config import Config
from cloudckpt.errors import CredentialsError, MissingDependencyError, StoreError
from cloudckpt.stores.credentials import Origin, alone, check_credential, fetching
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
_PAUSE = 30.0  # seconds between renewals; azure-identity's own interval after failures
_LONGEST = 3000  # characters of the messages of all sources
_CLI_TIMEOUT = 60  # seconds; `az` starts slowly on a busy machine


@dataclass(frozen=True, repr=False)
class _Held:
    """A token, when to renew it, and when it expires (seconds since the epoch)."""

    token: str = ""
    due: float = 0.0
    ends: float = 0.0


class Tokens:
    """A valid access token, shared by all threads, which azure-identity fetches.

    Only some of its sources cache their token; for others `az` would run at each request. One
    thread renews the token when it is due; meanwhile, and if that fails, all use the old one while
    it is valid, which is half a day with a managed identity. azure-identity's token provider would
    fail instead, and make all threads wait for a silent service.
    """

    def __init__(self, config: Config, uri: str, *, note: str = "") -> None:
        """Stores the settings; no token is fetched yet.

        Args:
            config: Supplies the network timeouts.
            uri: The container that the token is for, in messages.
            note: An addition to the message if no credentials are found.
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
        """Returns the token, fetched or renewed if necessary.

        Raises:
            CredentialsError: If no source has credentials, or they are refused.
            TransientStoreError: If there is no valid one, and it temporarily can't be fetched.
        """
        held, now = self._held, time.time()
        if now < held.due:
            return held.token
        with alone(self._lock, self._uri, wait=now >= held.ends) as is_mine:
            if is_mine and self._held is held:  # no other thread has renewed it
                self._held = self._renewed(held)
        return self._held.token

    def origin(self) -> Origin:
        """Returns which azure-identity source supplied the token (by a private attribute)."""
        found = getattr(self._credential, "_successful_credential", None) or self._credential
        source = f"azure-identity's {type(found).__name__}"
        return Origin(source=source, ends=self._held.ends or None)

    def _renewed(self, held: _Held) -> _Held:
        try:
            return self._fetched()
        except StoreError:
            now = time.time()
            if now >= held.ends:
                raise
            return replace(held, due=min(now + _PAUSE, held.ends))

    def _fetched(self) -> _Held:
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
            f"no Azure credentials were found{self._note}: neither "
            "AZURE_STORAGE_CONNECTION_STRING, nor an account key (AZURE_STORAGE_KEY, "
            "AZURE_STORAGE_ACCOUNT_KEY) or shared access signature (AZURE_STORAGE_SAS_TOKEN), "
            "nor a token by azure-identity (AZURE_CLIENT_ID and related variables, workload "
            "identity, managed identity, 'az login'); set one of them",
            uri=self._uri,
            cause=told(str(exc), most=_LONGEST),  # a line per source
            certain=True,
        )


def _is_passing(exc: Exception) -> bool:
    # its subclass ClientAuthenticationError, a refusal, was caught before
    return isinstance(exc, AzureError)
