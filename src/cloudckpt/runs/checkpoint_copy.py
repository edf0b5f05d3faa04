"""Copies one checkpoint: it is committed like a save, with bytes from another location."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

from cloudckpt.checkpoint.baseline import begin
from cloudckpt.checkpoint.commit import publish
from cloudckpt.checkpoint.manifest import Manifest
from cloudckpt.checkpoint.objects import OF_RANKS, WrittenObject, checked, data_name
from cloudckpt.checkpoint.record import Record
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    InvalidRequestError,
    ObjectNotFoundError,
    PreconditionFailedError,
)
from cloudckpt.runs.catalog import Run
from cloudckpt.runs.contents import ReadContent, read_content
from cloudckpt.runs.verifying import Progress
from cloudckpt.stores.base import ObjectInfo, random_suffix
from cloudckpt.stores.listings import forget_listings
from cloudckpt.transfer.copying import CopyTask, MismatchError, copies_within, relay
from cloudckpt.transfer.deleting import delete_quietly
from cloudckpt.transfer.retry import check_unchanged
from cloudckpt.transfer.stats import TransferStats

__all__ = ["Copied", "copy_checkpoint"]

logger = logging.getLogger("cloudckpt")

# errors of a copy by the store itself, after which the bytes are streamed through this machine: if
# the object is gone, or reading it is denied, that fails with the same error
_NOT_COPIED = (
    AccessDeniedError,
    InvalidRequestError,
    ObjectNotFoundError,
    PreconditionFailedError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """The result of a copy: numbers of checkpoints, objects and bytes.

    Attributes:
        checkpoints: The number of copied checkpoints.
        objects: The number of copied data objects.
        nbytes: The bytes of these objects.
        by_store: The bytes that the store copied itself; the rest passed through this machine.
        already_there: The number of a run's checkpoints that were not copied, because the target
            already had identical ones; of :func:`detach`, 1 if there was nothing to copy.
    """

    checkpoints: int = 0
    objects: int = 0
    nbytes: int = 0
    by_store: int = 0
    already_there: int = 0

    def __add__(self, other: Copied) -> Copied:
        names = [field.name for field in fields(self)]
        return Copied(**{name: getattr(self, name) + getattr(other, name) for name in names})


def copy_checkpoint(
    source: Run, target: Run, progress: Progress, *, skips_same: bool = False
) -> Copied:
    """Copies one checkpoint, or makes it independent of other checkpoints of its run.

    If the source is also the target, the objects that the checkpoint refers to in other folders are
    copied into its own folder.

    Args:
        source: The location of the checkpoint.
        target: The location of the copy; its options say whether it may replace a checkpoint.
        progress: Counts the copied bytes.
        skips_same: Whether nothing is copied if the target already has a copy of the checkpoint.

    Raises:
        CheckpointReplacedError: If the source was replaced meanwhile; the caller may try again.
        CloudCheckpointError: The other errors of :func:`cloudckpt.copy`.
    """
    part = read_content(source.root, source.config)
    if skips_same and _has_the_same(target, part):
        return Copied(already_there=1)
    key = target.root.key(part.commit.info.key.removeprefix(source.root.key("")))
    look = partial(target.retrier.call, partial(target.store.look, key))
    may_replace = target.config.overwrite or source.root == target.root
    baseline = begin(look, key, str(target.root), overwrite=may_replace)
    attempt = random_suffix()
    tasks = _tasks(part, source, target, attempt)
    # those that are not copied keep their names
    objects = {stored.name: stored for stored in part.commit.objects}
    for ordinal, (name, task) in enumerate(tasks.items()):
        known = objects.get(name) or WrittenObject(0, 0, "", task.size, 0, 0, 0)
        objects[name] = replace(known, rank=0, ordinal=ordinal, attempt=attempt, folder="")
    manifest = Manifest.of_copy(part.commit, objects, attempt)
    nbytes = sum(task.size for task in tasks.values())
    progress.total = max(progress.total, nbytes)
    written = {objects[name].name for name in tasks}
    try:
        by_store = _send(source, target, list(tasks.values()), part, progress)
    except BaseException:
        keys = [task.target for task in tasks.values()]
        threads = target.config.requests_at_once
        delete_quietly(target.store, keys, target.config.retry, threads=threads)
        raise
    try:
        publish(  # if it fails, it deletes the objects itself, unless they may be needed
            target.store,
            target.root,
            target.config,
            baseline=baseline,
            attempt=random_suffix(),
            objects=manifest.objects,
            own=written,
            kept={stored.name for stored in manifest.objects} - written,
            data=partial(manifest.data, part.commit.notes),
        )
    finally:
        forget_listings()
    return Copied(checkpoints=1, objects=len(tasks), nbytes=nbytes, by_store=by_store)


def _tasks(part: ReadContent, source: Run, target: Run, attempt: str) -> dict[str, CopyTask]:
    """Returns the copies to make, by the names of the data objects in the source.

    For a copy to its own location, only objects in the folders of other checkpoints are copied.

    Raises:
        CheckpointCorruptError: If the checkpoint has no checksums, and an object is missing or too
            short.
    """
    uri, to, algorithm = source.root, target.root, part.commit.checksum
    objects: dict[str, tuple[int, int | None]] = {}  # size and checksum
    if algorithm is not None:
        for stored in part.commit.objects:
            if stored.folder or uri != to:
                objects[stored.name] = stored.size, stored.checksum
    else:
        needed: dict[str, int] = {}  # the minimum size of each object
        for entry in (part.metadata.storage_data or {}).values():
            name = checked(entry.relative_path, str(uri))
            needed[name] = max(needed.get(name, 0), entry.offset + entry.length)
        algorithm = source.store.capabilities.checksum
        infos = _heads(source, [uri.key(name) for name in needed])
        for (name, least), info in zip(needed.items(), infos, strict=True):
            objects[name] = info.size, info.checksum
            if info.size < least:
                raise CheckpointCorruptError(
                    f"this object was truncated: it has {info.size} bytes, but the checkpoint "
                    f"needs at least {least}; copy another checkpoint",
                    uri=source.store.uri(info.key),
                )
    return {
        name: CopyTask(uri.key(name), to.key(data_name(0, number, attempt)), *stored, algorithm)
        for number, (name, stored) in enumerate(objects.items())
    }


def _heads(source: Run, keys: Sequence[str]) -> list[ObjectInfo]:
    """Reads the size, version and checksum of each object, in the order of ``keys``.

    Raises:
        CheckpointCorruptError: If an object does not exist.
    """
    store, view = source.store, source.view

    def head(key: str) -> ObjectInfo:
        try:
            return view.retrier.call(lambda: store.head(key))
        except ObjectNotFoundError as error:
            raise CheckpointCorruptError(
                "an object of the checkpoint no longer exists: copy another checkpoint",
                uri=store.uri(key),
                cause=error,
            ) from error

    return view.each(head, keys)


def _send(
    source: Run,
    target: Run,
    tasks: Sequence[CopyTask],
    part: ReadContent,
    progress: Progress,
) -> int:
    """Copies objects until all have arrived; returns the bytes that the store copied itself.

    If the store can't copy by itself, the rest is streamed through this machine. If the bytes of an
    object do not match their checksum, they may have been damaged in transit, so the object is
    copied once more; a second mismatch is an error.

    Raises:
        CheckpointReplacedError: If the source was replaced meanwhile.
        CheckpointCorruptError: If the source is damaged.
        StoreError: If a store refuses or stays unreachable.
    """
    within = [
        task.source
        for task in tasks
        # a copy by the file system reports no checksum to compare
        if source.root.scheme != "file" and copies_within(source.store, target.store, task.size)
    ]
    infos = {info.key: info for info in _heads(source, within)}
    left = {task.target: replace(task, info=infos.get(task.source)) for task in tasks}
    by_store, mismatches, stats = 0, 0, TransferStats(str(target.root))

    def arrived(task: CopyTask) -> None:
        nonlocal by_store
        del left[task.target]
        by_store += task.size if task.info is not None else 0

    while True:
        try:
            relay(
                source.store,
                target.store,
                list(left.values()),
                target.config,
                stats,
                moved=progress.add,
                arrived=arrived,
            )
            return by_store
        except _NOT_COPIED as error:
            if all(task.info is None for task in left.values()):
                raise
            logger.warning(
                "the data pass through this machine, as the store itself did not copy: %s", error
            )
            left = {key: replace(task, info=None) for key, task in left.items()}
        except CheckpointCorruptError as error:
            check_unchanged(
                source.store, part.commit.info, str(source.root), source.config.retry, error
            )
            mismatches += 1
            if not isinstance(error, MismatchError) or mismatches == 2:
                raise


def _has_the_same(target: Run, ours: ReadContent) -> bool:
    """Returns whether the target has a complete checkpoint with the same checksums and notes.

    False if a checkpoint has no checksums, or if the target is damaged, which is logged.
    """
    try:
        theirs = read_content(target.root, target.config)
        if not ours.has_checksums or not theirs.has_checksums:
            return False
        if ours.commit.notes != theirs.commit.notes or _content(ours) != _content(theirs):
            return False
    except (CheckpointNotFoundError, CheckpointReplacedError):
        return False
    except CheckpointCorruptError as error:
        logger.warning("the checkpoint at the target is damaged, so it is copied again: %s", error)
        return False
    root, objects = target.root, theirs.commit.objects
    folders = {one.folder for one in objects}  # its own folder, and those it refers to
    places = [root.beside(folder) if folder else root for folder in folders]
    listed = [info for one in places for info in target.view.objects(one.key(OF_RANKS))]
    sizes = {info.key: info.size for info in listed}
    return all(sizes.get(root.key(one.name)) == one.size for one in objects)


def _content(part: ReadContent) -> bytes:
    """Returns a checkpoint's metadata as bytes, without names of objects: a copy changes these."""
    record = part.commit.record
    assert record is not None  # the checkpoint has checksums
    unnamed = partial(replace, rank=0, ordinal=0, attempt="", folder="")
    return Record(
        table=record.table,
        extents=record.extents,
        objects=[*map(unnamed, record.objects)],
        checksum=record.checksum,
        structure=record.structure,
    ).to_bytes()
