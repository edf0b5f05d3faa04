"""Opening a store, which may fail for a moment as any request may.

Credentials come from services: those of an instance or a container, STS, the identity platforms of
the clouds. A hiccup of one of them would end a save before its first request.
"""

from __future__ import annotations

from cloudckpt.config import Config
from cloudckpt.stores import registry
from cloudckpt.stores.base import ObjectStore
from cloudckpt.transfer.retry import Retrier
from cloudckpt.uri import CheckpointURI

__all__ = ["open_store"]


def open_store(uri: CheckpointURI, config: Config) -> ObjectStore:
    """The store that the registry opens, tried as ``config.retry`` says.

    Raises:
        StoreError: If there are no credentials for it, none that can be used, or none in time.
        ConfigError: If it can't be reached with these options.
        MissingDependencyError: If its packages are not installed.
    """
    return Retrier(config.retry).call(lambda: registry.open_store(uri, config))
