"""torch_checkpointing on URIs: its ``StorageConfig`` with our stores.

>>> from torch_checkpointing.checkpoint_manager import CheckpointManager  # doctest: +SKIP
>>> config = CheckpointManager.Config(storage_config=CloudStorageConfig())  # doctest: +SKIP
>>> config.build().save("s3://bucket/run/step-1000", {"model": state})  # doctest: +SKIP

It commits a checkpoint by renaming the folder that all ranks have written to, which is one
conditional write here: :mod:`cloudckpt.integrations.file_folders` says how. Where its writer is
told to write in place (``write_to_temp_dir=False``), :meth:`CloudStorageConfig.publish` is the
callback that commits.

Its writers hand over paths that ``pathlib`` has made of URIs (``s3:/bucket/run``). That form is
refused elsewhere in cloudckpt, for it means a local folder; here nothing else can be meant.

Tested with torch_checkpointing 0.1.1.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cloudckpt.checkpoint.torch_private import default_store
from cloudckpt.config import Config
from cloudckpt.errors import ConfigError, InvalidURIError, MissingDependencyError
from cloudckpt.integrations.file_folders import FileFolders
from cloudckpt.integrations.recorded_file import tensors_last
from cloudckpt.stores.base import random_suffix
from cloudckpt.torch_files.torch_save import size_of
from cloudckpt.transfer.retry import open_store
from cloudckpt.uri import CheckpointURI, unfolded

try:
    from torch_checkpointing.storage.base_storage import ReadArgs, Storage, StorageConfig
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        "this needs torch_checkpointing: pip install torch_checkpointing", cause=error
    ) from error

__all__ = ["CloudStorage", "CloudStorageConfig"]

_KEY = "cloudckpt/torch_checkpointing"

_jobs: dict[int, str] = {}
"""By process: what :func:`_job` has said, as a forked child is a writer of its own."""


@dataclass
class CloudStorageConfig(StorageConfig):  # type: ignore[misc]
    """Checkpoints are in stores; paths are URIs.

    Attributes:
        config: Options; read from the environment where they are not given.
        temp_dir_prefix: That of ``CheckpointWriterConfig``. Files in a folder of such a name, or in
            one within it, wait for their commit; if this is another prefix than the writer's, a
            commit has the store copy what was written. Empty for a writer in place.
        published: Whether files that are written in place wait for their commit, too, which is
            :meth:`publish` then: only the job that writes them sees them before.
        job: What all ranks of the job have, and no other job: sixteen hexadecimal digits, on which
            they agree by the store of torch's process group when this is first used.
    """

    config: Config | None = None
    temp_dir_prefix: str = "tmp_"
    published: bool = False
    job: str = field(default="", repr=False)

    def create_storage(self) -> CloudStorage:
        self._agree()
        return CloudStorage(self)

    def __getstate__(self) -> dict[str, Any]:
        """Goes to the saving process, which has no process group to ask."""
        self._agree()
        return dict(self.__dict__)

    def _agree(self) -> None:
        self.job = self.job or _job()

    def publish(self, told: object, *_: object) -> None:
        """Commits a checkpoint that was written in place: a ``finalize_callback``.

        >>> storage = CloudStorageConfig(published=True)  # doctest: +SKIP
        >>> save = SyncCheckpointSaverConfig(
        ...     writer_config=CheckpointWriterConfig(write_to_temp_dir=False)
        ... )  # doctest: +SKIP
        >>> CheckpointManager.Config(
        ...     save=save, storage_config=storage, finalize_callback=storage.publish
        ... )  # doctest: +SKIP

        All ranks call it behind their barrier; the first one commits. Until then no other job sees
        what was written.

        Args:
            told: What the writer hands over: an object with the ``path``, or the path itself.

        Raises:
            ConfigError: If what is written in place does not wait for it.
            FileExistsError: If another job has committed there before.
            CommitUnknownError: If the store did not say whether it has carried out the commit.
        """
        if not self.published:
            raise ConfigError("publish needs CloudStorageConfig(published=True)")
        path = getattr(told, "path", told)
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"publish is a finalize_callback, and was given {told!r} for a path")
        if os.environ.get("RANK", "0") == "0":
            folders, key = self.create_storage()._at(path)
            folders.publish(key)


class CloudStorage(Storage):  # type: ignore[misc]
    """What torch_checkpointing reads and writes, in stores of ours."""

    def __init__(self, config: CloudStorageConfig) -> None:
        self._config = config
        self._folders: dict[tuple[object, ...], FileFolders] = {}

    def _at(self, path: str | os.PathLike[str]) -> tuple[FileFolders, str]:
        """The bucket of a path, and its key there.

        Raises:
            InvalidURIError: If it is none of a store.
        """
        uri, config = _uri(path), self._config.config or Config()
        bucket = (os.getpid(), uri.scheme, uri.bucket, uri.account)
        if bucket not in self._folders:
            self._folders[bucket] = FileFolders(
                open_store(uri, config),
                config,
                job=self._config.job,
                temporary=self._config.temp_dir_prefix,
                is_published=self._config.published,
            )
        return self._folders[bucket], uri.prefix

    # ---- files

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:
        """A file for reading, from which no byte comes that its checksum does not cover."""
        folders, key = self._at(path)
        return folders.opened(key)

    def read(self, path: Path, read_args: ReadArgs | None = None) -> bytes:
        folders, key = self._at(path)
        return folders.read(key)

    def stream_write(self, path: Path) -> io.IOBase:
        folders, key = self._at(path)
        return folders.written(key)

    def get_write_stream(self, path: Path, data: object) -> io.IOBase:
        """A file for ``data``, whose tensors in host memory are sent from there.

        They must stay as they are until it is closed.
        """
        folders, key = self._at(path)
        return folders.written(key, expected=size_of(data), lasts=tensors_last(data))

    def write(self, path: Path, data: Any) -> None:
        folders, key = self._at(path)
        view = memoryview(data)
        with folders.written(key, expected=view.nbytes, lasts=lambda part: True) as file:
            file.write(view)

    def delete(self, path: Path) -> None:
        folders, key = self._at(path)
        folders.delete(key)

    def getsize(self, path: Path) -> int:
        folders, key = self._at(path)
        return folders.size(key)

    # ---- folders

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Does nothing: folders are what keys have in common."""

    def rmdir(self, path: Path) -> None:
        folders, key = self._at(path)
        folders.remove_folder(key)

    def ls(self, path: Path) -> list[str]:
        """Names in a folder, without those of folders of which nothing is committed."""
        folders, key = self._at(path)
        return folders.names(key)

    def glob(self, pattern: str) -> list[str]:
        folder, _, names = pattern.rpartition("/")
        if not self.exists(Path(folder)):
            return []
        return [f"{folder}/{name}" for name in fnmatch.filter(self.ls(Path(folder)), names)]

    def exists(self, path: Path) -> bool:
        """Whether there is a file, or a folder that is committed or written to."""
        folders, key = self._at(path)
        return folders.exists(key)

    def isdir(self, path: Path) -> bool:
        folders, key = self._at(path)
        return folders.is_folder(key)

    def remap_path(self, path: Path) -> str:
        return str(_uri(path))

    def rename(
        self,
        src_path: Path,
        dst_path: Path,
        is_directory: bool = False,
        background_cleanup: bool = False,
        **_: Any,
    ) -> None:
        """Commits a folder by one conditional write, or gives a file another path.

        Raises:
            FileExistsError: If something is in the way; it is left as it is.
            FileNotFoundError: If there is nothing to rename.
            CommitUnknownError: If the store did not say whether it has carried out the commit.
        """
        source, target = _uri(src_path), _uri(dst_path)
        if (source.scheme, source.bucket, source.account) != (
            target.scheme,
            target.bucket,
            target.account,
        ):
            raise InvalidURIError(f"{source} can't be renamed to {target}, of another bucket")
        folders, key = self._at(src_path)
        if folders.is_folder(key):
            folders.rename_folder(key, target.prefix)
        else:
            folders.move_file(key, target.prefix)


def _uri(path: str | os.PathLike[str]) -> CheckpointURI:
    text = os.fspath(path)
    uri = CheckpointURI.parse(unfolded(text) or text)
    if not uri.is_cloud:
        raise InvalidURIError(
            f"{text!r} is a local path: give LocalFileSystemStorageConfig() for these, or a URI"
        )
    return uri


def _job() -> str:
    """What all ranks of this job say, and no other job.

    Ranks that have no process group yet can't agree: they tell one job from another by what
    torchrun has told them, if there are several.
    """
    if dist.is_available() and dist.is_initialized():
        agreed: bytes = default_store().compare_set(_KEY, "", random_suffix())
        return agreed.decode()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
        told = "\n".join(os.environ.get(name, "") for name in names)
        return hashlib.sha256(told.encode()).hexdigest()[:16]
    return _jobs.setdefault(os.getpid(), random_suffix())
