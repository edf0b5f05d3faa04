"""The commit: one conditional write of ``.metadata`` makes a checkpoint visible, or nothing does.

A save goes like this:

1. :func:`begin` notes which version of ``.metadata`` is there, if any: the :class:`Baseline`.
2. Each rank uploads its objects, whose names have a random part. Two attempts never write to the
   same key, nothing is renamed, and nothing is deleted yet.
3. :func:`publish`, on the rank that commits, looks whether all that the metadata promise was
   written, and whether it sees the objects of the other ranks as they have written them. It writes
   the manifest, tries whether the store honours conditions where nobody knows, and reads the names
   of the objects that will have no purpose from the very version of the baseline.
4. :func:`commit` writes ``.metadata`` on the condition that it is still that version, or still
   missing. It is one PUT at any size: some stores ignore conditions where multipart uploads end.
5. What was replaced is deleted.

So these can't happen, where A and B are two jobs, or a process that was thought dead and the one
that was started in its place:

- *Both begin, A commits, then B.* B's condition does not hold: it gets a conflict, and deletes
  what it has written itself, which A's checkpoint does not name.
- *A lists what it replaces, B commits, A deletes B's objects.* A deletes behind its own commit
  only, and what that replaces is what A has listed, by the condition.
- *A dies.* Before its commit nothing is visible, and what was there is whole. Behind it the new
  checkpoint is whole, and objects of the old one may stay, which no metadata name.
- *The store carries out A's commit, and the answer is lost.* Sent again, it is refused, for A
  itself has changed the version. So a try counts as failed only if the store itself says so
  (``StoreError.certain``). Behind any other, ``.metadata`` is compared with what was sent: if it is
  A's, the save has succeeded; if the store has refused a try and another's is there, B was faster.
- *A gateway answers 503, and has A's commit carried out seconds later.* Nobody knows that it will
  not, also when nothing is there yet: that is a :class:`CommitUnknownError`, and nothing is deleted
  that the checkpoint would need.
- *A reader has the old metadata when step 5 deletes their objects.* It finds that the metadata were
  replaced and begins anew (``transfer.retry.begun_anew``); it never takes this for damage.

With ``use_collectives=False`` each rank commits a ``__{rank}.metadata`` of its own like this.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from cloudckpt.checkpoint.manifest import ItemRecord, Manifest, ManifestId
from cloudckpt.checkpoint.metadata import dump_metadata, load_metadata
from cloudckpt.checkpoint.objects import (
    METADATA,
    ObjectRecord,
    checked,
    commits_of_ranks,
    look_for,
    manifest_name,
)
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checkpoint.torch_private import CURRENT_DCP_VERSION, StorageInfo
from cloudckpt.config import Config, Switch
from cloudckpt.errors import (
    CheckpointConflictError,
    CheckpointExistsError,
    CloudCheckpointError,
    CommitUnknownError,
    ConfigError,
    IncompleteSaveError,
    InvalidRequestError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
)
from cloudckpt.gc_pause import paused_gc
from cloudckpt.stores.base import ObjectStore
from cloudckpt.transfer.deleting import delete_quietly
from cloudckpt.transfer.group import TaskGroup
from cloudckpt.transfer.retry import Retrier
from cloudckpt.transfer.upload import creates_only, put_whole
from cloudckpt.uri import CheckpointURI

__all__ = [
    "LONGEST_SAVE",
    "Baseline",
    "begin",
    "commit",
    "conditions_work",
    "honours_conditions",
    "named_objects",
    "objects_of",
    "publish",
    "publish_objects",
]

logger = logging.getLogger("cloudckpt")

LONGEST_SAVE = 12 * 3600.0
"""Seconds from the beginning of a save to its commit. Leftovers are swept when they are older than
twice that."""

_NO_VERSION = '"00000000000000000000000000000000"'


def now() -> float:
    """Seconds since some time in the past; they count while the machine is suspended, too."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@dataclass(frozen=True)
class Baseline:
    """What was there when the save began.

    Attributes:
        key: The commit object.
        version: Its version, or None if there was none.
        began: When that was, in seconds by a clock that also counts while the machine sleeps.
    """

    key: str
    version: str | None
    began: float = field(default_factory=now, compare=False)

    def check_age(self, uri: str) -> None:
        """Whether the save may still commit.

        What is twice as old is swept as a leftover: an object that is, is of no save that will
        commit. The commit is sent at once; docs/guarantees.md says what happens if the machine is
        suspended just then.

        Raises:
            IncompleteSaveError: If it began too long ago.
        """
        if now() - self.began > LONGEST_SAVE:
            raise IncompleteSaveError(
                f"the save has taken more than {LONGEST_SAVE / 3600:g} hours, and its objects may "
                "be swept as leftovers; nothing was committed",
                uri=uri,
            )


def begin(store: ObjectStore, key: str, *, overwrite: bool, retrier: Retrier) -> Baseline:
    """Looks for a checkpoint that is there already.

    Raises:
        CheckpointExistsError: If there is one and it must not be overwritten.
    """
    try:
        version: str | None = retrier.call(lambda: store.head(key)).version
    except ObjectNotFoundError:
        version = None
    if version is not None and not overwrite:
        raise CheckpointExistsError(
            "Checkpoint already exists and overwrite is off: choose another location, or allow it "
            "with Config(overwrite=True)",
            uri=store.uri(key),
        )
    return Baseline(key, version)


def conditions_work(
    store: ObjectStore, setting: Switch, key: str, content: bytes, retrier: Retrier
) -> bool:
    """Whether the commit may rely on conditional writes.

    Args:
        store: The store.
        setting: The user's word; ``auto`` believes the vendor's documentation where there is one
            and tries it out otherwise, once for a store.
        key: An object of this save, which may be written again.
        content: What it holds.
        retrier: For transient failures of the trial.

    Raises:
        ConfigError: If the store ignores conditions and the user has not accepted that.
    """
    if setting == "off":
        logger.warning(
            "%s: conditional writes are off; concurrent writers of one checkpoint are not detected",
            store.root,
        )
        return False
    if setting == "on" or store.capabilities.conditional_writes:
        return True
    if store.capabilities.conditional_writes is None:
        found = honours_conditions(store, key, content, retrier)
        store.capabilities = dataclasses.replace(store.capabilities, conditional_writes=found)
        if found:
            return True
    raise ConfigError(
        "the store ignores conditional writes (If-None-Match, If-Match), which protect a commit "
        "from concurrent writers. If only one job ever writes to a location, set "
        "Config(conditional_writes='off') or CLOUDCKPT_CONDITIONAL_WRITES=off",
        uri=store.root,
    )


def honours_conditions(store: ObjectStore, key: str, content: bytes, retrier: Retrier) -> bool:
    """Whether a store minds conditions, found out with an object that may be written again.

    It is: twice on conditions that do not hold, once on one that does.
    """
    body = [memoryview(content)]
    checksum = store.capabilities.checksum.of(content)

    def put(*, if_absent: bool = False, if_version: str | None = None) -> None:
        store.put(key, body, checksum=checksum, if_absent=if_absent, if_version=if_version)

    try:
        for condition in ({"if_absent": True}, {"if_version": _NO_VERSION}):
            try:
                retrier.call(functools.partial(put, **condition))
            except PreconditionFailedError:
                continue
            return False
        # the version is asked for at each try: one whose answer was lost may have changed it
        retrier.call(lambda: put(if_version=store.head(key).version))
    except (PreconditionFailedError, InvalidRequestError):
        return False  # the condition that holds was not recognized, or conditions are refused
    return True


def commit(
    store: ObjectStore, baseline: Baseline, data: bytes, *, conditional: bool, retrier: Retrier
) -> None:
    """Makes the checkpoint visible, in a single request.

    A try fails for certain only if the store itself says so (:class:`StoreError`). Of all others
    nobody knows: a gateway may answer 503 and have the request carried out seconds later, when the
    commit object was looked for and not found. If there was one such try, the checkpoint must be
    there, or another writer's be proof that it can't appear any more; else its data is needed.

    Raises:
        CheckpointConflictError: If another writer has committed. Nothing of this save is visible,
            nor will be.
        CommitUnknownError: If it can't be found out whether the commit took place, or will.
        StoreError: If it certainly did not, and will not.
    """
    key, body = baseline.key, [memoryview(data)]
    checksum = store.capabilities.checksum.of(data)
    absent = conditional and baseline.version is None
    version = baseline.version if conditional else None
    uncertain = False

    def put() -> None:
        nonlocal uncertain
        try:
            store.put(key, body, checksum=checksum, if_absent=absent, if_version=version)
        except StoreError as error:
            uncertain = uncertain or not error.certain
            raise

    try:
        retrier.call(put)
    except StoreError as error:
        overtaken = conditional and isinstance(error, PreconditionFailedError)
        if uncertain:
            is_ours, found = _found(store, key, data, error, retrier)
            if is_ours:
                return
            if not overtaken or found == baseline.version:
                raise _unknown(store, key, error) from error
        if not overtaken:
            raise
        raise CheckpointConflictError(
            "another writer has committed to this location since this save began; this save is "
            "discarded and theirs is kept",
            uri=store.uri(key),
            cause=error,
        ) from error


def _found(
    store: ObjectStore, key: str, data: bytes, failure: StoreError, retrier: Retrier
) -> tuple[bool, str | None]:
    """Whether the commit object holds ``data`` now, and its version; None if there is no object.

    A store that tells the checksum of an object is believed, as it says what is there now: its
    bytes may come from a cache that keeps those of the checkpoint before.

    Raises:
        CommitUnknownError: If the store does not answer.
    """
    try:
        info = retrier.call(lambda: store.head(key))
        if info.checksum is not None:
            checksum = store.capabilities.checksum.of(data)
            return (info.size, info.checksum) == (len(data), checksum), info.version
        held, info = retrier.call(lambda: store.get_latest(key))
    except StoreError as error:
        if isinstance(error, ObjectNotFoundError) and error.certain:
            return False, None
        raise _unknown(store, key, failure) from error
    return held == data, info.version


def _unknown(store: ObjectStore, key: str, error: StoreError) -> CommitUnknownError:
    return CommitUnknownError(
        "the store itself did not say whether it carried out the commit, which may have taken "
        "place or take place yet; look whether this checkpoint is there before you go on. Its data "
        "was kept",
        uri=store.uri(key),
        cause=error,
    )


def _replaced(store: ObjectStore, baseline: Baseline, retrier: Retrier) -> set[str]:
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
    return objects_of(data, store.uri(baseline.key))


def _hidden(
    store: ObjectStore, uri: CheckpointURI, baseline: Baseline, retrier: Retrier
) -> set[str]:
    """The names of the objects of a checkpoint without collectives that a new one now hides.

    Readers look for the common metadata first. Failures are logged: the new one is committed.
    """
    if baseline.version is not None or baseline.key != uri.key(METADATA):
        return set()
    names: set[str] = set()
    below = uri.key("")
    try:
        for key in commits_of_ranks(store, below, retrier):
            data, _ = retrier.call(functools.partial(store.get_latest, key))
            names |= {key.removeprefix(below)} | objects_of(data, store.uri(key))
    except Exception as error:  # noqa: BLE001 - nothing that is wrong here may undo a commit
        logger.warning("an older checkpoint without collectives may be left behind: %s", error)
    return names


def objects_of(metadata: bytes | bytearray, uri: str) -> set[str]:
    """The names of the data objects and of the manifest; none if the metadata can't be trusted.

    What it names may be anything beneath the prefix, also the commit object that is there by now or
    another checkpoint: only what can be data of this one counts.
    """
    try:
        return named_objects(metadata, uri)
    except (CloudCheckpointError, MemoryError) as error:
        logger.warning("the objects of an older checkpoint are left behind: %s", error)
        return set()


def named_objects(metadata: bytes | bytearray, uri: str) -> set[str]:
    """The same.

    Raises:
        CloudCheckpointError: If the metadata can't be read.
    """
    old = load_metadata(metadata, uri)
    places = old.storage_data if isinstance(old.storage_data, dict) else {}
    names = {
        checked(entry.relative_path, uri)
        for entry in places.values()
        if isinstance(entry, StorageInfo)
    }
    identity = ManifestId.parse(getattr(old.storage_meta, "save_id", None), uri)
    data = {name for name in names if "/" not in name and not name.endswith(METADATA)}
    if data != names:
        logger.warning(
            "%s: the replaced metadata names what is no data of it, which is left as it is", uri
        )
    return data | ({identity.name} if identity is not None else set())


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
    notes: bytes = b"",
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
        notes: What is noted with the checkpoint, see :mod:`cloudckpt.checkpoint.notes`.

    Raises:
        IncompleteSaveError: If the metadata promises an item that nobody has written.
        DifferentCheckpointsError: If another rank has written to another store.
        CheckpointConflictError: If another writer has committed since the save began.
        CommitUnknownError: If the store does not say whether the commit took place.
        StoreError: If it did not take place, and will not.
    """
    objects = {record.object.name: record.object for record in written.values()}

    def manifest() -> Manifest:
        _check_complete(metadata, written, str(uri))
        _fill_in(metadata, written)
        items = {(index.fqn, _tuple(index.offset)): record for index, record in written.items()}
        return Manifest(items, store.capabilities.checksum, structure)

    publish_objects(
        store,
        uri,
        config,
        baseline=baseline,
        attempt=attempt,
        metadata=metadata,
        objects=list(objects.values()),
        own=own,
        manifest=manifest,
        notes=notes,
    )


def publish_objects(
    store: ObjectStore,
    uri: CheckpointURI,
    config: Config,
    *,
    baseline: Baseline,
    attempt: str,
    metadata: Metadata,
    objects: Collection[ObjectRecord],
    own: Collection[str],
    manifest: Callable[[], Manifest | None],
    notes: bytes = b"",
) -> None:
    """Commits a checkpoint that is made of these objects; what is not said is as in `publish`.

    Args:
        store: The store of ``uri``.
        uri: The checkpoint.
        config: The options.
        baseline: What was there when the save began.
        attempt: The random name of this save.
        metadata: torch's metadata; they say where the items are, when ``manifest`` has returned.
        objects: All data objects, which are in the store.
        own: The names of those that this rank has written.
        manifest: Makes the manifest; None for a copy of a checkpoint of another writer.
        notes: What is noted with the checkpoint.
    """
    sent = sorted(record.name for record in objects)

    def delete(names: Iterable[str]) -> None:
        keys = [uri.key(name) for name in names]
        delete_quietly(store, keys, config.retry, threads=config.connections)

    retrier = Retrier(config.retry)
    try:
        with paused_gc():
            made = manifest()
            content = made.to_json() if made is not None else b""
        name = manifest_name(attempt)
        sent.append(name)
        key, view = uri.key(name), memoryview(content)
        create_only = creates_only(store, config)
        others = [record for record in objects if record.name not in own]
        group = TaskGroup(config.connections, name="cloudckpt-commit", interrupt=store.interrupt)
        look = Retrier(config.retry, group.cancellation)

        def look_and_put() -> None:
            look_for(store, uri, others, group, look)
            put_whole(store, key, view, retrier, if_absent=create_only)

        group.run(look_and_put)
        conditional = conditions_work(store, config.conditional_writes, key, content, retrier)
        unneeded = _replaced(store, baseline, retrier)
        if made is None:
            unneeded.add(name)  # it has only served to try the conditions
        else:
            metadata.storage_meta = StorageMeta(str(uri), str(made.identify(attempt, content)))
        data = dump_metadata(metadata, notes)
        baseline.check_age(str(uri))
    except BaseException:
        delete(sent)  # nothing can have become visible yet
        raise
    try:
        commit(store, baseline, data, conditional=conditional, retrier=retrier)
    except (CheckpointConflictError, StoreError):
        delete(sent)  # only these two say for certain that nothing became visible
        raise
    except CommitUnknownError:
        raise
    except Exception as error:
        raise CommitUnknownError(
            "the commit failed in an unexpected way and may have taken place; its data was kept",
            uri=str(uri),
            cause=error,
        ) from error
    unneeded |= _hidden(store, uri, baseline, Retrier.for_cleanup(config.retry))
    delete(unneeded.difference(record.name for record in objects))


def _tuple(offset: torch.Size | None) -> tuple[int, ...] | None:
    return None if offset is None else tuple(offset)


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


def _fill_in(metadata: Metadata, written: Mapping[MetadataIndex, ItemRecord]) -> None:
    """What a storage writer adds to the planner's metadata."""
    metadata.storage_data = {
        index: StorageInfo(record.object.name, record.offset, record.length)
        for index, record in written.items()
    }
    metadata.version = CURRENT_DCP_VERSION
