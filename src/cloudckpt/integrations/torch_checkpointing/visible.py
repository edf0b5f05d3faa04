"""Resolves paths to files: files of committed folders, a job's pending files, and plain objects.

There are three kinds of files: committed files, which a manifest names and which never change;
pending files, which a record names, in a temporary folder of the job; and plain objects, which
other programs read and write. If a path has several, they take precedence in this order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from cloudckpt.checkpoint.file_folder import (
    MANIFEST,
    folders_above,
    inside,
    is_content_name,
    is_record_name,
    name_of_record,
    record_name,
)
from cloudckpt.checkpoint.objects import is_drawn_name
from cloudckpt.errors import ObjectNotFoundError
from cloudckpt.integrations.torch_checkpointing.manifest import (
    MOST_MANIFEST_BYTES,
    MOST_RECORD_BYTES,
    StoredFile,
    beneath,
    read_manifest,
    read_record,
)
from cloudckpt.stores.base import ObjectInfo, ObjectStore
from cloudckpt.transfer.retry import Retrier

__all__ = ["VisibleFiles"]


class VisibleFiles:
    """The files and folders of a bucket that one job sees; safe for use from several threads."""

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
        self._manifests: dict[str, tuple[str, dict[str, StoredFile]]] = {}

    def exists(self, key: str) -> bool:
        """Returns whether there is a file at a key, or a folder with files."""
        return self.manifest(key) is not None or self.find(key) is not None or self.is_folder(key)

    def is_folder(self, key: str) -> bool:
        """Returns whether there is a folder with files at a key."""
        if self.manifest(key) is not None or any(self.beneath_folder(key)):
            return True
        return any(
            name.startswith(f"{beneath(folder, key)}/")
            for folder in folders_above(key)
            if (manifest := self.manifest(folder)) is not None
            for name in manifest[1]
        )

    def names(self, key: str) -> list[str]:
        """Lists the names of the files and folders directly in a folder, sorted.

        Raises:
            FileNotFoundError: If the folder has no file that this job sees.
        """
        found: set[str] = set()
        for folder in (key, *folders_above(key)):
            if (manifest := self.manifest(folder)) is not None:
                begin = inside(beneath(folder, key))
                found |= {
                    name.removeprefix(begin).partition("/")[0]
                    for name in manifest[1]
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
            raise FileNotFoundError(f"there is no folder with files at {self._store.uri(key)}")
        return sorted(found)

    def beneath_folder(self, folder: str) -> Iterator[ObjectInfo]:
        """Yields the objects beneath a folder, at any depth, that this job sees; listed lazily."""
        listed = self._store.list(inside(folder), self._retrier.call)
        return (info for info in listed if self.sees(info.key))

    def sees(self, key: str) -> bool:
        """Returns whether a key is that of a plain file, a manifest, or a record of this job.

        A record describes a pending file, and a manifest the files of a committed folder.
        """
        name = key.rpartition("/")[2]
        if is_record_name(name):
            return name_of_record(name)[1] == self._job
        return bool(name) and not is_content_name(name) and not is_drawn_name(name)

    def committed(self, key: str) -> StoredFile | None:
        """Returns the file at a key, if the manifest of a folder above names it; else None."""
        for folder in folders_above(key):
            manifest = self.manifest(folder)
            if manifest is not None and (file := manifest[1].get(beneath(folder, key))):
                return file
        return None

    def find(self, key: str) -> StoredFile | None:
        """Returns the committed, pending or plain file at a key; None if there is no file.

        Raises:
            CheckpointCorruptError: If a manifest, or the record of the pending file, is damaged.
        """
        if (file := self.committed(key)) is not None:
            return file
        with contextlib.suppress(ObjectNotFoundError):
            return self.record(record_name(key, self._job))
        with contextlib.suppress(ObjectNotFoundError):
            size = self._retrier.call(lambda: self._store.head(key)).size
            return StoredFile(key=key, size=size, blocks=None)
        return None

    def existing(self, key: str) -> StoredFile:
        """Returns the file at a key, as :meth:`find` does.

        Raises:
            FileNotFoundError: If there is no such file.
        """
        found = self.find(key)
        if found is None:
            raise FileNotFoundError(f"there is no file at {self._store.uri(key)}")
        return found

    def record(self, key: str) -> StoredFile:
        """Reads the record of a pending file.

        Raises:
            ObjectNotFoundError: If the record does not exist.
            CheckpointCorruptError: If the record is damaged.
        """
        data, _ = self._retrier.call(lambda: self._store.get(key, limit=MOST_RECORD_BYTES))
        return read_record(data, self._store.uri(key))

    def manifest(self, folder: str) -> tuple[str, dict[str, StoredFile]] | None:
        """Returns the version of a folder's manifest, and its files; None if it has no manifest.

        Raises:
            CheckpointCorruptError: If the manifest is damaged.
        """
        key = inside(folder) + MANIFEST
        try:
            version = self._retrier.call(lambda: self._store.head(key)).version
            known = self._manifests.get(folder)
            if known is not None and known[0] == version:
                return known
            data, info = self._retrier.call(lambda: self._store.get(key, limit=MOST_MANIFEST_BYTES))
        except ObjectNotFoundError:
            return None
        read = (info.version, read_manifest(data, folder, self._store.uri(key)))
        self._manifests = {folder: read}  # cached for the checkpoint being read
        return read
