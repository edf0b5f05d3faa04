"""Sweeps the leftovers of killed saves: data that no checkpoint names, and open uploads.

A leftover looks like an object of a save in progress. Only its age shows the difference: a save
does not commit if it has taken longer than :data:`LONGEST_SAVE`, so an object that is twice as old
belongs to no save that can still commit. Ages are measured by the store's clock: the time of the
object is compared with that of an object that the sweep writes.

An object may be named by another checkpoint of the run than the one in whose folder it is. And a
save in progress may refer to old objects that no checkpoint names any more: it has put a mark, an
object that keeps them, into their folder (:mod:`cloudckpt.checkpoint.references`). So marks are
listed after all commit objects were read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from cloudckpt.checkpoint.baseline import LONGEST_SAVE
from cloudckpt.checkpoint.file_folder import (
    MANIFEST,
    drawn_part,
    folders_above,
    inside,
    is_content_name,
    is_record_name,
    unsealed,
)
from cloudckpt.checkpoint.objects import (
    METADATA,
    is_drawn_name,
    is_keep_name,
    keep_name,
    keeps_in,
    probe_name,
)
from cloudckpt.checkpoint.references import commit_at
from cloudckpt.config import Config
from cloudckpt.errors import (
    CheckpointCorruptError,
    CloudCheckpointError,
    ObjectNotFoundError,
    StoreError,
)
from cloudckpt.runs.catalog import Run
from cloudckpt.stores.base import ObjectInfo, random_suffix
from cloudckpt.transfer.deleting import delete_each, delete_quietly
from cloudckpt.transfer.upload import only_if_new, put_whole
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["LEFTOVERS_AGE", "Leftovers", "clock_of", "find_leftovers", "sweep"]

LEFTOVERS_AGE = 2 * LONGEST_SAVE
"""Seconds after which an object that no checkpoint names is a leftover."""


@dataclass(frozen=True, kw_only=True)
class Leftovers:
    """The leftovers of killed saves in a run.

    Attributes:
        objects: The URIs of objects that no checkpoint needs: data, temporary objects, records of
            saving processes or of files, and marks (which keep data that other checkpoints use).
        nbytes: The bytes of these objects.
        uploads: The URIs of objects whose upload cloudckpt has begun and not completed.
        unread: The URIs of damaged commit objects and manifests of files: objects that these may
            name do not count as leftovers.
    """

    objects: tuple[str, ...]
    nbytes: int
    uploads: tuple[str, ...]
    unread: tuple[str, ...]


def find_leftovers(
    run: URILike, *, older_than: float = LEFTOVERS_AGE, config: Config | None = None
) -> Leftovers:
    """Returns the leftovers that :func:`sweep` would delete, and deletes nothing.

    To see the store's clock, it writes a small object, and deletes that again.

    Args:
        run: The folder of a run, or any other folder; all objects beneath it are examined.
        older_than: The minimum age of a leftover in seconds; choose less than a day only if no job
            is saving there.
        config: Options; None reads them from the environment.

    Raises:
        InvalidURIError: If ``run`` is not a valid location.
        ConfigError: If an option is invalid.
        StoreError: If the store refuses, stays unreachable, or reports no times.
    """
    return _Sweep(run, older_than, config).leftovers()


def sweep(
    run: URILike,
    *,
    older_than: float = LEFTOVERS_AGE,
    only: Leftovers | None = None,
    config: Config | None = None,
) -> Leftovers:
    """Deletes the leftovers of killed saves in a folder, and returns what was deleted.

    It never deletes an object that a checkpoint names, an object of a save that may still commit,
    or an object that cloudckpt has not written: other files, uploads of other programs, and objects
    of torch's own writers, whose names are the same in each save. Uploads of models and of single
    files also stay in S3 and Google Cloud Storage, because other programs use the same names.

    Args:
        run: The folder of a run, or any other folder; all objects beneath it are examined.
        older_than: The minimum age of a leftover in seconds; choose less than a day only if no job
            is saving there.
        only: The result of :func:`find_leftovers` that a user has confirmed: only these leftovers
            are deleted. None deletes all.
        config: Options; None reads them from the environment.

    Raises:
        InvalidURIError: If ``run`` is not a valid location.
        ConfigError: If an option is invalid.
        StoreError: If the store refuses, stays unreachable, or reports no times; then nothing is
            deleted. Or if a leftover can't be deleted; the other ones are deleted all the same.
    """
    leftovers = _Sweep(run, older_than, config)
    leftovers.delete(only)
    return leftovers.leftovers()


class _Sweep:
    """The leftovers of a run, listed when this is created; :meth:`delete` deletes them."""

    def __init__(self, run: URILike, older_than: float, config: Config | None) -> None:
        """Lists objects and uploads beneath the folder, and selects the leftovers among them."""
        self._run = Run(run, config=config)
        self._objects: list[ObjectInfo] = []
        self._unread: list[str] = []
        self._manifests: dict[str, bytes | None] = {}
        store, retrier = self._run.store, self._run.retrier
        below = self._run.root.key("")
        limit = clock_of(self._run) - older_than
        uploads = store.list_uploads(below, retrier.call)
        self._uploads = [
            upload
            for upload in uploads
            if upload.began is not None
            and upload.began <= limit
            and (upload.is_ours or _is_ours(upload.key))
        ]
        listed = [info for info in store.list(below, retrier.call) if _is_ours(info.key)]
        folders: dict[str, list[ObjectInfo]] = {}
        for info in listed:
            if _is_old(info, limit):
                folders.setdefault(info.key.rpartition("/")[0], []).append(info)
        around: dict[str, _Named] = {}
        for folder, old in folders.items():
            files = [info for info in old if _is_of_files(info.key)]
            if files:
                self._objects += self._uncommitted(files)
            others = [info for info in old if not _is_of_files(info.key)]
            own = self._named(folder) if others else _Named()
            left = [info for info in others if info.key not in own.keys]
            if left and not own.unread:
                parent = folder.rpartition("/")[0]
                if parent not in around and self._marks_in(folder):
                    around[parent] = self._named_beneath(parent)
                named = around.get(parent)  # None: no mark in the folder, so nothing refers to it
                self._objects += (
                    left if named is None else self._unneeded(folder, left, named, limit)
                )

    def leftovers(self) -> Leftovers:
        """Returns the listed leftovers; after :meth:`delete`, the deleted ones."""
        uri = self._run.store.uri
        return Leftovers(
            objects=tuple(uri(info.key) for info in self._objects),
            nbytes=sum(info.size for info in self._objects),
            uploads=tuple(uri(upload.key) for upload in self._uploads),
            unread=tuple(self._unread),
        )

    def delete(self, only: Leftovers | None) -> None:
        """Deletes the listed leftovers; with ``only``, just the leftovers that it names.

        Raises:
            StoreError: If a leftover can't be deleted; the other ones are deleted all the same.
        """
        uri = self._run.store.uri
        if only is not None:
            self._objects = [info for info in self._objects if uri(info.key) in only.objects]
            self._uploads = [info for info in self._uploads if uri(info.key) in only.uploads]
        store, config = self._run.store, self._run.config
        policy, threads = config.retry, config.requests_at_once
        keys = [info.key for info in self._objects]
        uploads = delete_each(store, self._uploads, policy, threads=threads)
        objects = delete_each(store, keys, policy, threads=threads)
        if left := [*uploads.values(), *objects.values()]:
            reason = left[0]
            reason.message += (
                f" (leftovers that could not be deleted: objects {len(objects)}, uploads "
                f"{len(uploads)})"
            )
            raise reason

    def _unneeded(
        self, folder: str, left: list[ObjectInfo], named: _Named, limit: float
    ) -> Iterable[ObjectInfo]:
        """Returns a folder's old objects that no checkpoint names and no save may refer to.

        Args:
            folder: The key of the folder.
            left: The old objects in the folder that the folder's own checkpoint does not name.
            named: The keys that all checkpoints of the run need.
            limit: Objects written at this time or before are old, in seconds since 1970.
        """
        if named.unread:  # a damaged checkpoint may refer to any of them
            return ()
        marks = [info for info in left if is_keep_name(info.key.rpartition("/")[2])]
        data = [info for info in left if info not in marks and info.key not in named.keys]
        if data:
            in_folder = self._marks_in(folder)
            if not all(_is_old(info, limit) for info in in_folder):
                data = []
        return data + [info for info in marks if info.key not in named.marks]

    def _marks_in(self, folder: str) -> list[ObjectInfo]:
        """Lists the marks by which checkpoints and saves keep objects in a folder."""
        start = keeps_in(self._uri(folder))
        return list(self._run.store.list(start, self._run.retrier.call))

    def _named_beneath(self, run: str) -> _Named:
        """Returns the keys that all checkpoints of a run need; ``run`` is the key of its folder."""
        references, below = _Named(), inside(run)
        for name in list(self._run.store.list_level(below, self._run.retrier.call)):
            if isinstance(name, str):
                named = self._named(below + name)
                references.keys |= named.keys
                references.marks |= named.marks
                references.unread |= named.unread
        return references

    def _named(self, folder: str) -> _Named:
        """Returns the keys that a folder's checkpoint needs; empty if none is committed there.

        If its commit object is damaged, ``unread`` of the result is True, and the object's URI is
        added to :attr:`Leftovers.unread`.
        """
        store, uri = self._run.store, self._uri(folder)
        key = uri.key(METADATA)
        try:
            commit = commit_at(store, uri, self._run.retrier)
            if commit is None:
                return _Named()
            keys = {uri.key(name) for name in commit.names(store.uri(key))}
        except (StoreError, MemoryError):
            raise
        except CloudCheckpointError:
            if store.uri(key) not in self._unread:
                self._unread.append(store.uri(key))
            return _Named(unread=True)
        if commit.record is None:
            return _Named(keys)
        mark = keep_name(commit.record.attempt)
        folders = {stored.folder for stored in commit.objects if stored.folder}
        return _Named(keys, {uri.beside(name).key(mark) for name in folders})

    def _uri(self, folder: str) -> CheckpointURI:
        """Returns the location of a folder, given its key in the bucket."""
        return replace(self._run.root, prefix=folder)

    def _uncommitted(self, old: list[ObjectInfo]) -> Iterable[ObjectInfo]:
        """Returns the objects of ``old`` that no manifest names; none if a manifest is damaged.

        The objects of ``old`` have the content or the record of a file, and are in one folder;
        manifests may be in this folder and the folders above it
        (:mod:`cloudckpt.checkpoint.file_folder`).
        """
        above = [self._manifest(folder) for folder in folders_above(old[0].key)]
        if None in above:
            return ()
        names = b"".join(filter(None, above))
        return [info for info in old if drawn_part(info.key) not in names]

    def _manifest(self, folder: str) -> bytes | None:
        """Returns the manifest in a folder; empty if there is none, None if it is damaged."""
        if folder not in self._manifests:
            store, key = self._run.store, inside(folder) + MANIFEST
            content: bytes | None = None
            try:
                data, _ = self._run.retrier.call(partial(store.get, key))
                content = unsealed(data, store.uri(key))
            except ObjectNotFoundError:
                content = b""
            except CheckpointCorruptError:
                self._unread.append(store.uri(key))
            self._manifests[folder] = content
        return self._manifests[folder]


@dataclass
class _Named:
    """The keys of objects that checkpoints need.

    Attributes:
        keys: The keys of the data objects.
        marks: The keys of the marks by which the checkpoints keep objects in other folders.
        unread: Whether keys are missing because a commit object is damaged.
    """

    keys: set[str] = field(default_factory=set)
    marks: set[str] = field(default_factory=set)
    unread: bool = False


def clock_of(run: Run) -> float:
    """Returns the store's time in seconds since 1970, by writing an object and reading its time.

    The object is deleted again.

    Raises:
        StoreError: If the store reports no times, refuses, or stays unreachable.
    """
    store, retrier = run.store, run.retrier
    key = run.root.key(probe_name("sweep", random_suffix()))
    put_whole(store, key, memoryview(b""), retrier, if_version=only_if_new(store, run.config))
    try:
        listed = list(store.list(key, retrier.call))
    finally:
        delete_quietly(store, [key], run.config.retry, threads=1)
    if not listed or listed[0].modified is None:
        raise StoreError(
            "the store does not report when objects were written, so data of a killed save can't "
            "be distinguished from that of a save in progress; nothing was deleted or committed. "
            "Delete leftovers with the store's own tools while no job saves here",
            uri=str(run.root),
        )
    return listed[0].modified


def _is_old(info: ObjectInfo, limit: float) -> bool:
    """Returns whether an object was last written at ``limit`` (seconds since 1970) or before.

    False if the store does not report when it was written.
    """
    times = [time for time in (info.modified, info.arrived) if time is not None]
    return bool(times) and max(times) <= limit


def _is_ours(key: str) -> bool:
    """Returns whether the last part of a key is a name that only cloudckpt gives to objects."""
    return is_drawn_name(key.rpartition("/")[2]) or _is_of_files(key)


def _is_of_files(key: str) -> bool:
    """Returns whether a key is that of an object with the content, or the record, of a file.

    Such objects make up folders of files (:mod:`cloudckpt.checkpoint.file_folder`).
    """
    name = key.rpartition("/")[2]
    return is_content_name(name) or is_record_name(name)
