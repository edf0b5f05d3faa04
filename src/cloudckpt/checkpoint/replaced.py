"""What a checkpoint leaves without a purpose when it is committed: the objects of older ones."""

from __future__ import annotations

import functools
import logging

from cloudckpt.checkpoint.commit import Baseline
from cloudckpt.checkpoint.manifest import ManifestId
from cloudckpt.checkpoint.metadata import load_metadata
from cloudckpt.checkpoint.names import METADATA, checked, is_metadata_of_a_rank
from cloudckpt.checkpoint.torch_private import StorageInfo
from cloudckpt.errors import CheckpointConflictError, CloudCheckpointError, ObjectNotFoundError
from cloudckpt.stores.base import ObjectStore
from cloudckpt.transfer.retry import Retrier
from cloudckpt.uri import CheckpointURI

__all__ = ["hidden", "replaced"]

logger = logging.getLogger("cloudckpt")


def replaced(store: ObjectStore, baseline: Baseline, retrier: Retrier) -> set[str]:
    """The names of the objects of the checkpoint that was there when the save began.

    Raises:
        CheckpointConflictError: If it is no longer there.
    """
    if baseline.version is None:
        return set()
    try:
        data, info = retrier.call(lambda: store.get_latest(baseline.key))
    except ObjectNotFoundError:
        info = None
    if info is None or info.version != baseline.version:
        raise CheckpointConflictError(
            "the checkpoint that was to be replaced has itself been replaced or deleted since this "
            "save began; this save is discarded",
            uri=store.uri(baseline.key),
        )
    return _objects_of(data, store.uri(baseline.key))


def hidden(
    store: ObjectStore, uri: CheckpointURI, baseline: Baseline, retrier: Retrier
) -> set[str]:
    """The names of the objects of a checkpoint without collectives that a new one now hides.

    Readers look for the common metadata first. Failures are logged: the new one is committed.
    """
    if baseline.version is not None or baseline.key != uri.key(METADATA):
        return set()
    names: set[str] = set()
    start = uri.key("__")
    try:
        for listed in retrier.call(lambda: list(store.list(start))):
            name = listed.key.removeprefix(uri.key(""))
            if is_metadata_of_a_rank(name):
                data, _ = retrier.call(functools.partial(store.get_latest, listed.key))
                names |= {name} | _objects_of(data, store.uri(listed.key))
    except Exception as error:  # noqa: BLE001 - nothing that is wrong here may undo a commit
        logger.warning("an older checkpoint without collectives may be left behind: %s", error)
    return names


def _objects_of(metadata: bytes | bytearray, uri: str) -> set[str]:
    """The names of the data objects and of the manifest; none if the metadata can't be trusted.

    What it names may be anything beneath the prefix, also the commit object that is there by now or
    another checkpoint: only what can be data of this one counts.
    """
    try:
        old = load_metadata(metadata, uri)
        places = old.storage_data if isinstance(old.storage_data, dict) else {}
        names = {
            checked(entry.relative_path, uri)
            for entry in places.values()
            if isinstance(entry, StorageInfo)
        }
        identity = ManifestId.parse(getattr(old.storage_meta, "save_id", None), uri)
    except (CloudCheckpointError, MemoryError) as error:
        logger.warning("the objects of a replaced checkpoint are left behind: %s", error)
        return set()
    data = {name for name in names if "/" not in name and not name.endswith(METADATA)}
    if data != names:
        logger.warning(
            "%s: the replaced metadata names what is no data of it, which is left as it is", uri
        )
    return data | ({identity.name} if identity is not None else set())
