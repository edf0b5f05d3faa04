"""Folders of files in a store that appear whole or not at all, for libraries that rename folders.

In such a library all ranks write files into a temporary folder, and one rank renames it. Here each
file goes to its own object, with a random key, beneath the folder that the temporary one will be
renamed to; a record in the temporary folder says which object holds which file
(:mod:`cloudckpt.checkpoint.file_folder`). Renaming writes the manifest, in one request, on the
condition that none exists; no bytes are copied. Then the records are deleted.

This handles the following cases, where A and B are two jobs, or a process that was thought dead and
its replacement:

- *A dies.* Before the manifest is written there is no folder, whatever objects exist; afterwards
  the folder is complete, and records may be left in the temporary one. A's leftovers are swept by
  age, like any others.
- *A and B write to the same temporary folder.* A record is named after its job, and a job renames
  only what it has written: no manifest has files of both. The condition lets only one of the two
  manifests be written, and the other job gets a FileExistsError.
- *A file is missing, or differs from what was written.* Before the manifest is written, a listing
  must show each object with its size; every read is checked against the block checksums in the
  manifest, which has a checksum of its own.
- *The answer to the manifest's request is lost.* As in ``checkpoint.commit``, the manifest is read
  again; if that does not show whether it was written, the commit raises a CommitUnknownError.
- *A folder is removed while it is being read.* The manifest goes first, so a reader that misses an
  object finds no manifest any more, and reports a missing file, not a damaged one. Objects that the
  manifest does not name stay: they may belong to a save under way.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np
import torch

from cloudckpt.checkpoint.baseline import Baseline, now
from cloudckpt.checkpoint.commit import commit, conditions_work
from cloudckpt.checkpoint.file_folder import (
    MANIFEST,
    content_name,
    folder_of,
    inside,
    is_record_name,
    name_of_record,
    record_name,
)
from cloudckpt.checkpoint.objects import trial_name
from cloudckpt.checksum import BlockChecksums
from cloudckpt.config import Config
from cloudckpt.errors import (
    CheckpointConflictError,
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointReplacedError,
    ConfigError,
    ObjectNotFoundError,
    PreconditionFailedError,
)
from cloudckpt.integrations.torch_checkpointing.manifest import (
    BLOCK,
    StoredFile,
    beneath,
    manifest_bytes,
    record_bytes,
)
from cloudckpt.integrations.torch_checkpointing.visible import VisibleFiles
from cloudckpt.stores.base import ObjectInfo, ObjectStore, random_suffix
from cloudckpt.stores.listings import forget_listings
from cloudckpt.torch_files.object_file import ObjectFile
from cloudckpt.torch_files.torch_file import storages_of
from cloudckpt.torch_files.written_file import WrittenFile
from cloudckpt.transfer.deleting import delete_all, delete_quietly
from cloudckpt.transfer.group import TaskGroup
from cloudckpt.transfer.retry import Retrier, retry_if_replaced
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.upload import put_whole

__all__ = ["FileFolders", "is_tensor_memory"]

_DEPTH = 2  # how many levels above a file its temporary folder may be


class FileFolders(VisibleFiles):
    """Reads, writes, commits and deletes files and folders; safe for use from several threads.

    Store errors are those of :mod:`cloudckpt.errors`; errors that any file system may have are
    also ``OSError``.
    """

    def __init__(
        self,
        store: ObjectStore,
        config: Config,
        *,
        job: str,
        temporary: str,
    ) -> None:
        """
        Args:
            store: The bucket.
            config: Options.
            job: Sixteen hexadecimal digits shared by all ranks of the job, and by no other job.
            temporary: The prefix of temporary folders' names; the rest is the name of the folder
                that they are renamed to. Objects are written beneath that folder.
        """
        super().__init__(store, job, Retrier(config.retry))
        self._config = config
        self._temporary = temporary

    # ---- files

    def opened(self, key: str) -> io.RawIOBase:
        """Opens a file for reading, and compares read blocks with their checksums.

        Plain objects, which other programs may have written, have no checksums.

        Raises:
            FileNotFoundError: If there is no such file.
            CheckpointCorruptError: If the manifest or the record is damaged, or the object is gone
                or has another size. Reading from the file may raise this, too.
            CheckpointReplacedError: If the folder was replaced meanwhile, again and again.
        """
        return retry_if_replaced(lambda: self._opened(key))

    def _opened(self, key: str) -> io.RawIOBase:
        file, uri = self.existing(key), self._store.uri(key)
        try:
            stats = TransferStats(uri)
            opened = ObjectFile(self._store, file.key, self._config, stats, file.blocks)
            if file.blocks is None or opened.info.size == file.size:
                return opened
            problem = f"has {opened.info.size} bytes instead of {file.size}"
        except ObjectNotFoundError as error:
            if self.find(key) != file:
                raise CheckpointReplacedError(
                    "the folder was replaced or removed while it was read: read it again", uri=uri
                ) from error
            problem = "no longer exists"
        raise CheckpointCorruptError(
            f"the file's object {problem}: replace it by a backup, or load an older checkpoint",
            uri=self._store.uri(file.key),
        )

    def read(self, key: str) -> bytes:
        """Reads a whole file; raises the errors of :meth:`opened`, and of reading from the file."""
        file = self.opened(key)
        room = bytearray(file.seek(0, io.SEEK_END))
        file.seek(0)
        if room:
            file.readinto(room)
        return bytes(room)

    def written(
        self,
        key: str,
        *,
        expected: int = 0,
        is_immutable: Callable[[memoryview], bool] = lambda view: False,
    ) -> WrittenFile:
        """Opens a file in a temporary folder for writing; it appears when closed without an error.

        Args:
            key: The key of the file.
            expected: The approximate size of the file in bytes; 0 if it is not known.
            is_immutable: Returns whether the memory of a write stays unchanged until the file is
                closed; if so, writes of at least 64 KiB are sent without a copy.

        Raises:
            ConfigError: If the file is not in a temporary folder: it could not be committed.
        """
        if (object_key := self._object_key(key)) is None:
            raise ConfigError(
                "only files of a temporary folder can be written: leave write_to_temp_dir on, and "
                "give CloudStorageConfig the writer's temp_dir_prefix",
                uri=self._store.uri(key),
            )
        return RecordedFile(
            self._store,
            object_key,
            self._config,
            record=record_name(key, self._job),
            expected=expected,
            is_immutable=is_immutable,
        )

    def delete(self, key: str) -> None:
        """Deletes a plain file, or the record of a pending file, whose content a sweep deletes.

        Raises:
            FileNotFoundError: If there is no such file.
            FileExistsError: If the file belongs to a committed folder: delete that folder instead.
        """
        if self.committed(key) is not None:
            raise FileExistsError(
                f"{self._store.uri(key)} can't be deleted alone, because it belongs to a committed "
                "folder: delete the whole folder"
            )
        is_plain = self.existing(key).key == key
        self._delete([key if is_plain else record_name(key, self._job)])

    # ---- commits

    def rename_folder(self, source: str, target: str) -> None:
        """Commits the files that this job has written into a temporary folder as another folder.

        No bytes are copied: the source's name must be the temporary prefix followed by the target's
        name.

        Raises:
            FileNotFoundError: If this job has written no file into the source.
            FileExistsError: If the target exists, or another writer commits it first, or another
                program has written a file into the source; both stay unchanged.
            ConfigError: If an object of the files is not beneath the target.
            CheckpointCorruptError: If an object of the files is missing, or has another size; or if
                a record is damaged.
            IncompleteSaveError: If the first file was written too long ago.
            CommitUnknownError: If the store does not say whether the commit took place.
            StoreError: If the commit did not and will not take place.
        """
        records = self._own_records(source)
        if self.exists(target):
            raise CheckpointExistsError(
                f"{self._store.uri(source)} can't be renamed to {self._store.uri(target)}, which "
                "exists: remove that folder, or save to another location",
                uri=self._store.uri(target),
            )
        self._commit(records, source, target)
        forget_listings()

    def _own_records(self, folder: str) -> list[ObjectInfo]:
        """Lists the records of this job's files beneath a temporary folder.

        Raises:
            FileExistsError: If the folder has a plain file, which can't be committed.
            FileNotFoundError: If this job has no file there.
        """
        records = []
        for info in self.beneath_folder(folder):
            if not is_record_name(info.key):
                if info.key != inside(folder) + MANIFEST:
                    raise FileExistsError(
                        f"{self._store.uri(info.key)} was not written by this storage, so the "
                        "folder that contains it can't be committed: remove the file; if all files "
                        "there are like it, give CloudStorageConfig the writer's temp_dir_prefix"
                    )
            elif name_of_record(info.key)[1] == self._job:
                records.append(info)
        if not records:
            raise FileNotFoundError(
                f"this job has written nothing to {self._store.uri(folder)}: check the location"
            )
        return records

    def _commit(self, records: list[ObjectInfo], source: str, target: str) -> None:
        """Writes the manifest of the recorded files, and deletes the records."""
        store, key = self._store, inside(target) + MANIFEST
        times = [info.modified for info in records if info.modified is not None]
        age = max(0.0, time.time() - min(times)) if times else 0.0
        baseline = Baseline(key, None, began=now() - age)
        baseline.check_age(store.uri(target))
        keys = [info.key for info in records]
        group = TaskGroup(
            self._config.requests_at_once, name="cloudckpt-commit", interrupt=store.interrupt
        )
        names = [beneath(source, name_of_record(key)[0]) for key in keys]
        files = dict(zip(names, group.map(self.record, keys), strict=True))
        self._check_written(target, files)
        trial = inside(target) + trial_name(random_suffix())
        conditional = conditions_work(store, self._config.conditional_writes, trial, self._retrier)
        body = [memoryview(manifest_bytes(target, self._job, files))]
        try:
            commit(store, baseline, body, conditional=conditional, retrier=self._retrier)
        except CheckpointConflictError as error:
            raise CheckpointExistsError(
                "another writer committed this folder during this save; that commit was kept, and "
                "this save was not committed: save to another location",
                uri=store.uri(target),
                cause=error,
            ) from error
        delete_quietly(store, keys, self._config.retry, threads=self._config.requests_at_once)

    def _check_written(self, target: str, files: dict[str, StoredFile]) -> None:
        """Checks that each object exists beneath the target with its recorded size.

        An object is missing, for example, if a rank is configured for another store.

        Raises:
            ConfigError: If an object is not beneath the target, where the manifest can't name it.
            CheckpointCorruptError: If an object is missing or has another size.
        """
        listed = self._store.list(inside(target), self._retrier.call)
        sizes = {info.key: info.size for info in listed}
        for name, file in files.items():
            uri = self._store.uri(file.key)
            if not file.key.startswith(inside(target)):
                raise ConfigError(
                    f"{name} was not written under {target}, where it would be committed: pass "
                    "the writer's temp_dir_prefix to CloudStorageConfig",
                    uri=uri,
                )
            if (size := sizes.get(file.key)) != file.size:
                raise CheckpointCorruptError(
                    f"the object of {name} was written with {file.size} bytes, but now "
                    f"{'is not in the store' if size is None else f'has {size} bytes'}; nothing "
                    "was committed. Give all ranks the same store options, and save again to a "
                    "folder where nothing else writes or deletes",
                    uri=uri,
                )

    def remove_folder(self, key: str) -> None:
        """Deletes a folder and its subfolders: first manifests, if they are unchanged, then files.

        Objects that may belong to a save in progress stay, and are swept when they are old.

        Raises:
            FileNotFoundError: If there is no such folder.
            FileExistsError: If another writer has committed the folder meanwhile; it then stays.
            StoreError: If an object could not be deleted: if it is a manifest, no file was deleted;
                otherwise the deletion of all other files was tried.
        """
        listed = {info.key: info for info in self._store.list(inside(key), self._retrier.call)}
        gone = {one for one in listed if self.sees(one)}
        if not gone:
            raise FileNotFoundError(f"there is no folder with files at {self._store.uri(key)}")
        manifests = {one for one in gone if one.rpartition("/")[2] == MANIFEST}
        for one in manifests:
            folder, version = folder_of(one), listed[one].version
            try:
                if (manifest := self.manifest(folder)) is None:
                    continue
                version, files = manifest
                named = {file.key for file in files.values()}
            except CheckpointCorruptError:  # treat everything beneath it as its own
                named = {other for other in listed if other.startswith(inside(folder))}
            self._remove_manifest(one, version)
            gone |= named & listed.keys()
        # another job may have written a manifest again: each was deleted on its version only
        self._delete(sorted(gone - manifests))
        forget_listings()

    def _remove_manifest(self, key: str, version: str) -> None:
        try:
            self._retrier.call(lambda: self._store.delete(key, if_version=version))
        except PreconditionFailedError as error:
            raise FileExistsError(
                f"{self._store.uri(key)} was written again meanwhile, so it was not deleted: "
                "check what is there now, and delete the folder again if it is unneeded"
            ) from error

    # ---- shared

    def _object_key(self, key: str) -> str | None:
        """Returns a random key, beneath the folder to commit, for a file in a temporary folder.

        None if neither the file's folder nor the parent of that folder is temporary.
        """
        *folders, name = key.split("/")
        prefix = self._temporary
        for at in range(len(folders) - 1, max(-1, len(folders) - 1 - _DEPTH), -1):
            if prefix and folders[at].startswith(prefix) and folders[at] != prefix:
                folders[at] = folders[at].removeprefix(prefix)
                return "/".join([*folders, content_name(name, random_suffix())])
        return None

    def _delete(self, keys: list[str]) -> None:
        threads = self._config.requests_at_once
        delete_all(self._store, keys, self._config.retry, threads=threads, what="files")


class RecordedFile(WrittenFile):
    """A file in a temporary folder, whose record is written when the store has all its bytes.

    The record says which object holds the bytes.
    """

    def __init__(
        self, store: ObjectStore, key: str, config: Config, *, record: str, **options: Any
    ) -> None:
        """Takes the arguments of :class:`WrittenFile`, and the key of the record."""
        self._checksums = BlockChecksums(store.capabilities.checksum, BLOCK)
        self._where = (store, key, record, Retrier(config.retry))
        super().__init__(store, key, config, checks=self._checksums, **options)

    def __enter__(self) -> RecordedFile:
        """Makes ``torch.save`` skip its CRC32 in this thread, because no reader checks it."""
        self._before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        torch.serialization.set_crc32_options(self._before)
        super().__exit__(error_type, error, trace)

    def close(self) -> None:
        """Completes the object, and writes the record, which makes the file visible to the job.

        Raises:
            StoreError: If the store refuses or stays unreachable.
        """
        if self.closed:
            return
        super().close()
        store, key, record, retrier = self._where
        algorithm, sums = store.capabilities.checksum, self._checksums.finish(self._at)
        file = StoredFile.of_blocks(key, self._at, algorithm, sums)
        put_whole(store, record, memoryview(record_bytes(file)), retrier)


def is_tensor_memory(value: object) -> Callable[[memoryview], bool]:
    """Returns a function that tests whether memory belongs to a host tensor in ``value``.

    The memory has to begin where the tensor's storage begins, and must not be longer.
    """
    storages = [one for one in storages_of(value) if one.device.type == "cpu"]
    ends = {one.data_ptr(): one.data_ptr() + one.nbytes() for one in storages}

    def is_of_tensor(view: memoryview, _kept: object = storages) -> bool:
        start = np.frombuffer(view, np.uint8).ctypes.data
        return start + view.nbytes <= ends.get(start, 0)

    return is_of_tensor
