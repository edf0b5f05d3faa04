"""Microsoft Entra ID access tokens from azure-identity's ``DefaultAzureCredential``."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from cloudckpt._version import __version__
from cloudckpt.config import Config
from cloudckpt.errors import CredentialsError, MissingDependencyError
from cloudckpt.stores.credentials import Origin, alone, check_credential, fetching
from cloudckpt.stores.redaction import raise_alone, told

try:
    from azure.core.exceptions import AzureError, ClientAuthenticationError
    from azure.identity import DefaultAzureCredential, get_bearer_token_provider
except ImportError as exc:
    raise MissingDependencyError(
        "az:// needs azure-storage-blob and azure-identity; install them with: "
        "pip install 'cloudckpt[azure]'",
        cause=exc,
    ) from exc

__all__ = ["Tokens"]

_SCOPE = "https://storage.azure.com/.default"
_LONGEST = 3000  # characters of what all sources say
_CLI_TIMEOUT = 60  # seconds; `az` starts slowly on a busy machine


class Tokens:
    """A valid token, shared by all threads; azure-identity keeps it and renews it when it is due.

    Only some of its sources keep their token: `az` would run for each request, so its provider of
    tokens, which keeps one, is asked; and by one thread at a time, of which the first fetches it.
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
        self._provider: Callable[[], str] | None = None
        self._lock = threading.Lock()

    def get(self) -> str:
        """The token.

        Raises:
            CredentialsError: If no source has credentials, or they are refused.
            TransientStoreError: If it temporarily can't be fetched or renewed.
        """
        with alone(self._lock, self._uri):
            return self._fetched()

    def origin(self) -> Origin:
        """Which azure-identity source gave the token; azure-identity has no public name for it."""
        found = getattr(self._credential, "_successful_credential", None) or self._credential
        return Origin(source=f"azure-identity's {type(found).__name__}")

    def _fetched(self) -> str:
        name = "AZURE_CLIENT_SECRET"
        check_credential(os.environ.get(name, ""), name, self._uri, header=False)
        with fetching("Azure", self._uri, is_passing=_is_passing):
            if self._provider is None:
                self._credential = DefaultAzureCredential(**self._settings)
                self._provider = get_bearer_token_provider(self._credential, _SCOPE)
            try:
                token = self._provider()
            except ClientAuthenticationError as exc:
                raise_alone(self._none(exc))
        check_credential(token, "the access token of Microsoft Entra ID", self._uri)
        return token

    def _none(self, exc: Exception) -> CredentialsError:
        return CredentialsError(
            f"no Azure credentials were found{self._note}: neither "
            "AZURE_STORAGE_CONNECTION_STRING, nor an account key (AZURE_STORAGE_KEY, "
            "AZURE_STORAGE_ACCOUNT_KEY) or shared access signature (AZURE_STORAGE_SAS_TOKEN), "
            "nor a token by azure-identity (AZURE_CLIENT_ID and related variables, workload "
            "identity, managed identity, 'az login'); set one of them",
            uri=self._uri,
            cause=told(str(exc), most=_LONGEST),  # a line of each source
            certain=True,
        )


def _is_passing(exc: Exception) -> bool:
    return isinstance(exc, AzureError)  # but the refusals, of which its chain speaks
