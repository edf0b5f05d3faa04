"""What a job sees in a bucket: plain objects, its own files, and files of committed folders.

A file is one of three things (:data:`Found`): named by a manifest, and immutable; named by a
record, in a temporary folder of the job; or a plain object, which other programs read and write. If
several exist at one path, the first of these is seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from cloudckpt.checkpoint.file_folder import (
    MANIFEST,
    MOST_MANIFEST_BYTES,
    MOST_RECORD_BYTES,
    FileManifest,
    StoredFile,
    beneath,
    folders_above,
    inside,
    is_content_name,
    is_record_name,
    name_of_record,
    read_manifest,
    read_record,
    record_name,
)
from cloudckpt.checkpoint.objects import is_drawn_name
from cloudckpt.errors import ObjectNotFoundError
from cloudckpt.stores.base import ObjectInfo, ObjectStore
from cloudckpt.transfer.retry import Retrier

__all__ = ["CommittedFile", "Found", "PendingFile", "PlainFile", "VisibleFiles"]


@dataclass(frozen=True)
class PlainFile:
    """A file that other programs also see: an object at its own key."""

    info: ObjectInfo


@dataclass(frozen=True)
class PendingFile:
    """A file of this job that waits for its commit, and the key of its record."""

    file: StoredFile
    record: str


@dataclass(frozen=True)
class CommittedFile:
    """A file of a committed folder, and the version of the manifest."""

    file: StoredFile
    folder: str
    version: str


Found = PlainFile | PendingFile | CommittedFile


class VisibleFiles:
    """What one job sees of the files and folders of a bucket. Safe to use from many threads."""

    def __init__(self, store: ObjectStore, job: str, retrier: Retrier) -> None:
        """
        Args:
            store: The bucket.
            job: The job whose pending files are seen.
            retrier: Retries each request.
        """
        self._store = store
        self._job = job
        self._retrier = retrier
        self._manifests: dict[str, tuple[str, FileManifest]] = {}

    def exists(self, key: str) -> bool:
        """Whether there is a file, or a folder with any."""
        return self.manifest(key) is not None or self.find(key) is not None or self.is_folder(key)

    def is_folder(self, key: str) -> bool:
        """Whether there is a folder with any files."""
        if self.manifest(key) is not None or any(self.beneath_folder(key)):
            return True
        return any(
            name.startswith(f"{beneath(folder, key)}/")
            for folder in folders_above(key)
            if (manifest := self.manifest(folder)) is not None
            for name in manifest[1].files
        )

    def names(self, key: str) -> list[str]:
        """The names of the files and folders in a folder.

        Raises:
            FileNotFoundError: If there are none.
        """
        found: set[str] = set()
        for folder in (key, *folders_above(key)):
            if (manifest := self.manifest(folder)) is not None:
                begin = inside(beneath(folder, key))
                found |= {
                    name.removeprefix(begin).partition("/")[0]
                    for name in manifest[1].files
                    if name.startswith(begin)
                }
        for entry in self._store.list_level(inside(key), self._retrier.call):
            if not isinstance(entry, str):
                name = entry.key.rpartition("/")[2]
                if self.sees(entry.key) and name != MANIFEST:
                    found.add(name_of_record(name)[0] if is_record_name(name) else name)
            elif any(self.beneath_folder(inside(key) + entry)):
                found.add(entry)
        if not found:
            raise FileNotFoundError(self._store.uri(key))
        return sorted(found)

    def beneath_folder(self, folder: str) -> Iterator[ObjectInfo]:
        """What this job sees beneath a folder, at any depth; listed lazily."""
        listed = self._store.list(inside(folder), self._retrier.call)
        return (info for info in listed if self.sees(info.key))

    def sees(self, key: str) -> bool:
        """Whether an object is a file, a manifest, or the record of a file that this job sees."""
        name = key.rpartition("/")[2]
        if is_record_name(name):
            return name_of_record(name)[1] == self._job
        return bool(name) and not is_content_name(name) and not is_drawn_name(name)

    def find(self, key: str) -> Found | None:
        """What a file is, if it exists: committed files take precedence."""
        for folder in folders_above(key):
            if (manifest := self.manifest(folder)) is not None:
                version, said = manifest
                if (file := said.files.get(beneath(folder, key))) is not None:
                    return CommittedFile(file, folder, version)
        with contextlib.suppress(ObjectNotFoundError):
            own = record_name(key, self._job)
            return PendingFile(self.record(own), own)
        with contextlib.suppress(ObjectNotFoundError):
            return PlainFile(self._retrier.call(lambda: self._store.head(key)))
        return None

    def existing(self, key: str) -> Found:
        """Like :meth:`find`, for a file that must exist.

        Raises:
            FileNotFoundError: If there is no such file.
        """
        found = self.find(key)
        if found is None:
            raise FileNotFoundError(self._store.uri(key))
        return found

    def record(self, key: str) -> StoredFile:
        """Reads a record.

        Raises:
            ObjectNotFoundError: If there is no such record.
            CheckpointCorruptError: If it is damaged.
        """
        data, _ = self._retrier.call(lambda: self._store.get_latest(key, limit=MOST_RECORD_BYTES))
        return read_record(data, self._store.uri(key))

    def manifest(self, folder: str) -> tuple[str, FileManifest] | None:
        """The version of a folder's manifest, and what it says, if there is one.

        Raises:
            CheckpointCorruptError: If it is damaged.
        """
        key = inside(folder) + MANIFEST
        try:
            version = self._retrier.call(lambda: self._store.head(key)).version
            known = self._manifests.get(folder)
            if known is not None and known[0] == version:
                return known
            data, info = self._retrier.call(
                lambda: self._store.get_latest(key, limit=MOST_MANIFEST_BYTES)
            )
        except ObjectNotFoundError:
            return None
        read = (info.version, read_manifest(data, folder, self._store.uri(key)))
        self._manifests = {folder: read}  # of the checkpoint being read
        return read

    def size(self, key: str) -> int:
        """The size of a file in bytes.

        Raises:
            FileNotFoundError: If there is no such file.
        """
        found = self.existing(key)
        return found.info.size if isinstance(found, PlainFile) else found.file.size
