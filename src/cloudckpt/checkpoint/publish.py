"""From data objects to a checkpoint: completeness, manifest, metadata, commit, clean-up."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from cloudckpt.checkpoint.commit import Baseline, Probe, commit, conditions_work
from cloudckpt.checkpoint.manifest import ItemKey, Manifest, ManifestId
from cloudckpt.checkpoint.metadata import dump_metadata
from cloudckpt.checkpoint.records import ItemRecord
from cloudckpt.checkpoint.replaced import hidden, replaced
from cloudckpt.checkpoint.same_store import look_for
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checkpoint.torch_private import CURRENT_DCP_VERSION, StorageInfo
from cloudckpt.config import Config
from cloudckpt.errors import (
    CheckpointConflictError,
    CommitUnknownError,
    IncompleteSaveError,
    StoreError,
)
from cloudckpt.gc_pause import paused_gc
from cloudckpt.stores.base import ObjectStore
from cloudckpt.transfer.group import TaskGroup
from cloudckpt.transfer.retry import Retrier
from cloudckpt.transfer.upload import creates_only, delete_quietly, put_new
from cloudckpt.uri import CheckpointURI

__all__ = ["publish"]


def publish(
    store: ObjectStore,
    uri: CheckpointURI,
    config: Config,
    *,
    baseline: Baseline,
    attempt: str,
    metadata: Metadata,
    written: Mapping[MetadataIndex, ItemRecord],
    own: Collection[str],
    structure: Structure,
) -> None:
    """Commits a checkpoint, if all of its data objects are in the store.

    Args:
        store: The store of ``uri``.
        uri: The checkpoint.
        config: The options.
        baseline: What was there when the save began.
        attempt: The random name of this save.
        metadata: torch's metadata; the places of the items are filled in.
        written: Every item that some rank has written.
        own: The names of the objects that this rank itself has written to ``store``; those of
            others are looked for.
        structure: How the items were nested.

    Raises:
        IncompleteSaveError: If the metadata promises an item that nobody has written.
        DifferentCheckpointsError: If another rank has written to another store.
        CheckpointConflictError: If another writer has committed since the save began.
        CommitUnknownError: If the store does not say whether the commit took place.
        StoreError: If it did not take place, and will not.
    """
    objects = {record.object.name: record.object for record in written.values()}
    names = sorted(objects)
    manifest_id: list[ManifestId] = []

    def discard() -> None:
        own = [*names, *(identity.name for identity in manifest_id)]
        delete_quietly(store, [uri.key(name) for name in own], config.retry)

    retrier = Retrier(config.retry)
    try:
        _check_complete(metadata, written, str(uri))
        with paused_gc():
            manifest = Manifest(
                {_item_key(index): record for index, record in written.items()},
                store.capabilities.checksum,
                structure,
            )
            content = manifest.to_json()
        identity = manifest.identify(attempt, content)
        manifest_id.append(identity)
        key, view = uri.key(identity.name), memoryview(content)
        create_only = creates_only(store, config)
        others = [record for name, record in objects.items() if name not in own]
        group = TaskGroup(config.connections, name="cloudckpt-commit", interrupt=store.interrupt)
        look = Retrier(config.retry, group.cancellation)

        def look_and_put() -> None:
            look_for(store, uri, others, group, look)
            put_new(store, key, view, retrier, create_only=create_only)

        group.run(look_and_put)
        probe = Probe(key, content)
        conditional = conditions_work(store, config.conditional_writes, probe, retrier)
        unneeded = replaced(store, baseline, retrier)
        _fill_in(metadata, written, StorageMeta(str(uri), str(identity)))
        data = dump_metadata(metadata)
    except BaseException:
        discard()  # nothing can have become visible yet
        raise
    try:
        commit(store, baseline, data, conditional=conditional, retrier=retrier)
    except (CheckpointConflictError, StoreError):
        discard()  # only these two say for certain that nothing became visible
        raise
    except CommitUnknownError:
        raise
    except Exception as error:
        raise CommitUnknownError(
            "the commit failed in an unexpected way and may have taken place; its data was kept",
            uri=str(uri),
            cause=error,
        ) from error
    unneeded |= hidden(store, uri, baseline, Retrier.for_cleanup(config.retry))
    delete_quietly(store, [uri.key(name) for name in unneeded.difference(names)], config.retry)


def _check_complete(
    metadata: Metadata, written: Mapping[MetadataIndex, ItemRecord], uri: str
) -> None:
    """Whether every item that a reader may ask for was written."""
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            wanted = [MetadataIndex(fqn, chunk.offsets) for chunk in entry.chunks]
        else:
            wanted = [MetadataIndex(fqn)]
        for index in wanted:
            if index not in written:
                raise IncompleteSaveError(
                    f"{fqn} (offsets {index.offset}) was planned, but no rank has written it; "
                    "nothing was committed",
                    uri=uri,
                    item=fqn,
                )


def _item_key(index: MetadataIndex) -> ItemKey:
    return index.fqn, None if index.offset is None else tuple(index.offset)


def _fill_in(
    metadata: Metadata, written: Mapping[MetadataIndex, ItemRecord], storage_meta: StorageMeta
) -> None:
    """What a storage writer adds to the planner's metadata."""
    with paused_gc():
        metadata.storage_data = {
            index: StorageInfo(record.object.name, record.offset, record.length)
            for index, record in written.items()
        }
    metadata.storage_meta = storage_meta
    metadata.version = CURRENT_DCP_VERSION
