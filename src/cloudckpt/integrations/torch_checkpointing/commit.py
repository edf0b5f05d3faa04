"""Commits a folder of files: writes its manifest, on the condition that none exists.

The files that it names are first compared with a listing.
"""

from __future__ import annotations

import functools
import time

from cloudckpt.checkpoint.baseline import Baseline, now
from cloudckpt.checkpoint.commit import commit, conditions_work
from cloudckpt.checkpoint.file_folder import (
    MANIFEST,
    FileManifest,
    StoredFile,
    beneath,
    inside,
    is_record_name,
    manifest_bytes,
    name_of_record,
)
from cloudckpt.checkpoint.objects import trial_name
from cloudckpt.config import Config
from cloudckpt.errors import (
    CheckpointConflictError,
    CheckpointCorruptError,
    CheckpointExistsError,
    ConfigError,
)
from cloudckpt.integrations.torch_checkpointing.visible import VisibleFiles
from cloudckpt.stores.base import ObjectInfo, ObjectStore, random_suffix
from cloudckpt.transfer.deleting import delete_quietly
from cloudckpt.transfer.group import TaskGroup
from cloudckpt.transfer.retry import Retrier

__all__ = ["FolderCommit"]


class FolderCommit:
    """What one job has written into a folder, to be committed as this folder or another."""

    def __init__(
        self, store: ObjectStore, config: Config, seen: VisibleFiles, job: str, folder: str
    ) -> None:
        """
        Args:
            store: The bucket.
            config: Options.
            seen: What the job sees.
            job: The job whose records are committed.
            folder: The folder that holds them.

        Raises:
            FileNotFoundError: If this job has written nothing there.
            FileExistsError: If the folder also holds other programs' files, without records.
        """
        self._store = store
        self._config = config
        self._seen = seen
        self._job = job
        self._folder = folder
        self._retrier = Retrier(config.retry)
        self._records = self._own_records()

    def carry_out(self, target: str) -> None:
        """Commits the files as a folder, and removes their records.

        Raises:
            FileExistsError: If another job has already committed there.
            CheckpointCorruptError: If what was written is gone.
            IncompleteSaveError: If the first file was written too long ago.
            CommitUnknownError: If the store does not say whether the commit took place.
            StoreError: If the commit did not and will not take place.
        """
        store, key = self._store, inside(target) + MANIFEST
        times = [info.modified for info in self._records if info.modified is not None]
        age = max(0.0, time.time() - min(times)) if times else 0.0
        baseline = Baseline(key, None, began=now() - age)
        baseline.check_age(store.uri(target))
        files = self._read_records()
        self._check_written(target, files)
        trial = inside(target) + trial_name(random_suffix())
        conditional = conditions_work(store, self._config.conditional_writes, trial, self._retrier)
        manifest = FileManifest(job=self._job, files=files)
        body = [memoryview(manifest_bytes(target, manifest))]
        try:
            commit(store, baseline, body, conditional=conditional, retrier=self._retrier)
        except CheckpointConflictError as error:
            raise CheckpointExistsError(
                "another writer has committed this meanwhile: theirs is kept",
                uri=store.uri(target),
                cause=error,
            ) from error
        keys = [info.key for info in self._records]
        delete_quietly(store, keys, self._config.retry, threads=self._config.requests_at_once)

    def _own_records(self) -> list[ObjectInfo]:
        store, folder, records = self._store, self._folder, []
        for info in self._seen.beneath_folder(folder):
            if not is_record_name(info.key):
                if info.key != inside(folder) + MANIFEST:
                    raise FileExistsError(
                        f"{store.uri(info.key)} was not written by this storage, and can't be "
                        "committed with the folder that it is in: remove it, or write elsewhere"
                    )
            elif name_of_record(info.key)[1] == self._job:
                records.append(info)
        if not records:
            raise FileNotFoundError(f"{store.uri(folder)}: this job has written nothing there")
        return records

    def _read_records(self) -> dict[str, StoredFile]:
        """The files, by name in the folder."""
        files: dict[str, StoredFile] = {}

        def read(key: str) -> None:
            files[beneath(self._folder, name_of_record(key)[0])] = self._seen.record(key)

        group = TaskGroup(
            self._config.requests_at_once, name="cloudckpt-commit", interrupt=self._store.interrupt
        )

        def submit() -> None:
            for info in self._records:
                group.submit(functools.partial(read, info.key))

        group.run(submit)
        return files

    def _check_written(self, target: str, files: dict[str, StoredFile]) -> None:
        """Checks that each object exists with its size: other ranks may use another store.

        Raises:
            ConfigError: If a file lies elsewhere than beneath the target, where a manifest can't
                name it.
            CheckpointCorruptError: If one is not there.
        """
        listed = self._store.list(inside(target), self._retrier.call)
        there = {(info.key, info.size) for info in listed}
        for name, file in files.items():
            uri = self._store.uri(file.key)
            if not file.key.startswith(inside(target)):
                raise ConfigError(
                    f"{name} was not written beneath {target}, to be committed there: give "
                    "CloudStorageConfig the temp_dir_prefix of the writer",
                    uri=uri,
                )
            if (file.key, file.size) not in there:
                raise CheckpointCorruptError(
                    f"{name} was written, but is not there with its {file.size} bytes; nothing was "
                    "committed. Compare on all ranks what leads to the store",
                    uri=uri,
                )
