"""Which store serves a URI, one per bucket and configuration in each process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from cloudckpt.config import Config
from cloudckpt.stores.base import ObjectStore
from cloudckpt.uri import CheckpointURI

__all__ = ["open_store"]


def _memory(uri: CheckpointURI, config: Config) -> ObjectStore:
    from cloudckpt.stores.memory import MemoryStore

    return MemoryStore(uri.bucket)


def _local(uri: CheckpointURI, config: Config) -> ObjectStore:
    from cloudckpt.stores.local import LocalStore

    return LocalStore()


def _s3(uri: CheckpointURI, config: Config) -> ObjectStore:
    from cloudckpt.stores.s3 import S3Store

    return S3Store(uri.bucket, config)


def _gs(uri: CheckpointURI, config: Config) -> ObjectStore:
    from cloudckpt.stores.gcs import GCSStore

    return GCSStore(uri.bucket, config)


def _azure(uri: CheckpointURI, config: Config) -> ObjectStore:
    from cloudckpt.stores.azure import AzureStore

    return AzureStore(uri.bucket, config, uri.account, uri.root)


_OPENERS: dict[str, Callable[[CheckpointURI, Config], ObjectStore]] = {
    "memory": _memory,
    "file": _local,
    "s3": _s3,
    "az": _azure,
    "gs": _gs,
}

_lock = threading.Lock()
_open: dict[tuple[int, str, Config], ObjectStore] = {}


def open_store(uri: CheckpointURI, config: Config) -> ObjectStore:
    """The store of ``uri``'s bucket; the same object for the same bucket, options and process.

    Connections, credentials and endpoint look-ups are thus shared by all saves and loads of a
    process, while a forked child opens its own.
    """
    key = (os.getpid(), uri.root, config)
    with _lock:
        if key not in _open:
            _open[key] = _OPENERS[uri.scheme](uri, config)
        return _open[key]


def _after_fork() -> None:
    """A child must not inherit a lock that another thread of its parent held."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
