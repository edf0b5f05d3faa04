"""Opens the store of a URI, once per bucket and configuration in each process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from cloudckpt.config import Config
from cloudckpt.errors import CloudCheckpointError
from cloudckpt.fork import late_imports
from cloudckpt.stores.azure.names import check_location
from cloudckpt.stores.base import ObjectStore
from cloudckpt.stores.redaction import conceal
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["checkpoint_location", "open_store"]


_Opener = Callable[[CheckpointURI, Config], ObjectStore]


def _local() -> _Opener:
    from cloudckpt.stores.local import LocalStore

    return lambda uri, config: LocalStore()


def _s3() -> _Opener:
    from cloudckpt.stores.s3.store import S3Store

    return lambda uri, config: S3Store(uri.bucket, config)


def _hf() -> _Opener:
    from cloudckpt.stores.s3.store import open_hugging_face

    return lambda uri, config: open_hugging_face(uri, config)


def _gs() -> _Opener:
    from cloudckpt.stores.gcs.store import GCSStore

    return lambda uri, config: GCSStore(uri.bucket, config)


def _azure() -> _Opener:
    from cloudckpt.stores.azure.store import AzureStore

    return lambda uri, config: AzureStore(uri.bucket, config, uri.account, uri.root)


_OPENERS: dict[str, Callable[[], _Opener]] = {
    "file": _local,
    "s3": _s3,
    "hf": _hf,
    "az": _azure,
    "gs": _gs,
}


class _Slot:
    """A store that is opened under a lock of its own, so that only threads that need it wait."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.store: ObjectStore | None = None


_places: dict[tuple[int, str, Config], _Slot] = {}


def checkpoint_location(location: URILike) -> CheckpointURI:
    """Returns the parsed location of a checkpoint that will be saved, after checking it.

    Raises:
        InvalidURIError: If it is not a valid location, or the store would change its name.
    """
    uri = CheckpointURI.parse(location)
    if uri.scheme == "az":
        check_location(uri)
    return uri


def open_store(uri: CheckpointURI, config: Config) -> ObjectStore:
    """Returns the store of a URI's bucket; the same object for equal options in a process.

    So all saves and loads of a process share connections, credentials and endpoint look-ups, while
    a forked child opens its own, even if its parent was just opening one. Opening may take minutes
    where credentials come from a service; other buckets do not wait for that.

    Raises:
        StoreError: If there are no usable credentials.
        ConfigError: If the options or variables are invalid for this store, or for Azure, if
            neither they nor the URI name an account.
        MissingDependencyError: If the store's packages are not installed.
    """
    key = (os.getpid(), uri.root, config)
    with late_imports:  # also guards the table
        slot = _places.setdefault(key, _Slot())
        opener = _OPENERS[uri.scheme]()
    with slot.lock:
        if slot.store is None:
            try:
                slot.store = opener(uri, config)
            except CloudCheckpointError as error:
                conceal(error)
                raise
        return slot.store
