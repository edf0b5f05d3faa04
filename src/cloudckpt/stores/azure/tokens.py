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
_LONGEST = 3000  # characters of the messages of all sources
_CLI_TIMEOUT = 60  # seconds; `az` starts slowly on a busy machine


class Tokens:
    """A valid access token shared by all threads; azure-identity caches it and renews it when due.

    Only some of its sources cache their token; for others `az` would run at each request. So
    azure-identity's token provider is used, which caches; one thread at a time calls it, so that
    only the first fetches a token.
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
        self._provider: Callable[[], str] | None = None
        self._lock = threading.Lock()

    def get(self) -> str:
        """Returns the token, fetched or renewed if necessary.

        Raises:
            CredentialsError: If no source has credentials, or they are refused.
            TransientStoreError: If it temporarily can't be fetched or renewed.
        """
        with alone(self._lock, self._uri):
            return self._fetched()

    def origin(self) -> Origin:
        """Returns which azure-identity source supplied the token; azure-identity has no public name
        for it.
        """
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
            cause=told(str(exc), most=_LONGEST),  # a line per source
            certain=True,
        )


def _is_passing(exc: Exception) -> bool:
    # its subclass ClientAuthenticationError, a refusal, was caught before
    return isinstance(exc, AzureError)
