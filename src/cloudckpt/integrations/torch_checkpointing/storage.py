"""Implements torch_checkpointing's storage interface for URIs.

A checkpoint is committed by renaming its temporary folder, so leave the writer's
``write_to_temp_dir`` on.

torch_checkpointing passes paths that ``pathlib`` has made from URIs (``s3:/bucket/run``). Other
parts of cloudckpt refuse that form, because it means a local folder; here it can only mean the URI.

Tested with torch_checkpointing 0.1.1.
"""

from __future__ import annotations

import hashlib
import io
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cloudckpt.checkpoint.torch_private import default_store
from cloudckpt.config import Config, config_or_default
from cloudckpt.errors import InvalidURIError, MissingDependencyError
from cloudckpt.integrations.torch_checkpointing.folders import FileFolders, is_tensor_memory
from cloudckpt.stores.base import random_suffix
from cloudckpt.torch_files.torch_file import size_of
from cloudckpt.transfer.retry import open_store
from cloudckpt.uri import CheckpointURI, unfolded

try:
    from torch_checkpointing.storage.base_storage import ReadArgs, Storage, StorageConfig
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        "cloudckpt.integrations.torch_checkpointing needs torch_checkpointing: pip install "
        "torch_checkpointing",
        cause=error,
    ) from error

__all__ = ["CloudStorage", "CloudStorageConfig"]

_KEY = "cloudckpt/torch_checkpointing"

_jobs: dict[int, str] = {}
"""The result of :func:`_job` by process id, because a forked child is a separate writer."""


@dataclass
class CloudStorageConfig(StorageConfig):  # type: ignore[misc]
    """A storage config by which torch_checkpointing saves to URIs.

    Attributes:
        config: Options; None reads them from the environment.
        temp_dir_prefix: The ``temp_dir_prefix`` of the ``CheckpointWriterConfig``; if it differs,
            commits are refused. Files in a folder with this prefix, or in a subfolder of it, are
            pending until their commit.
        job: Sixteen hexadecimal digits that all ranks of the job share, and no other job has; set
            at the first use.
    """

    config: Config | None = None
    temp_dir_prefix: str = "tmp_"
    job: str = field(default="", repr=False)

    def create_storage(self) -> CloudStorage:
        self._agree()
        return CloudStorage(self)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes to pickle, with ``job`` set.

        The process that saves has no process group by which to set it.
        """
        self._agree()
        return dict(self.__dict__)

    def _agree(self) -> None:
        self.job = self.job or _job()


class CloudStorage(Storage):  # type: ignore[misc]
    """torch_checkpointing's storage interface on cloudckpt's stores."""

    def __init__(self, config: CloudStorageConfig) -> None:
        self._config = config
        self._folders: dict[tuple[object, ...], FileFolders] = {}

    def _at(self, path: str | os.PathLike[str]) -> tuple[FileFolders, str]:
        """Returns the :class:`FileFolders` of a path's bucket, and the path's key.

        Raises:
            InvalidURIError: If the path is not in a cloud.
        """
        uri, config = _uri(path), config_or_default(self._config.config)
        bucket = (os.getpid(), uri.scheme, uri.bucket, uri.account)
        if bucket not in self._folders:
            self._folders[bucket] = FileFolders(
                open_store(uri, config),
                config,
                job=self._config.job,
                temporary=self._config.temp_dir_prefix,
            )
        return self._folders[bucket], uri.prefix

    # ---- files

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:
        """Opens a file for reading.

        Bytes that cloudckpt wrote are compared with their checksums before they are returned.

        Raises:
            FileNotFoundError: If there is no such file.
            CheckpointCorruptError: If the file is damaged; reading it may raise this, too.
            CheckpointReplacedError: If the folder is replaced again and again meanwhile.
        """
        folders, key = self._at(path)
        return folders.opened(key)

    def read(self, path: Path, read_args: ReadArgs | None = None) -> bytes:
        folders, key = self._at(path)
        return folders.read(key)

    def stream_write(self, path: Path) -> io.IOBase:
        folders, key = self._at(path)
        return folders.written(key)

    def get_write_stream(self, path: Path, data: object) -> io.IOBase:
        """Opens a file to write ``data``, whose large tensors in host memory are not copied.

        These are tensors of at least 64 KiB; they must not change until the file is closed.
        """
        folders, key = self._at(path)
        return folders.written(key, expected=size_of(data), is_immutable=is_tensor_memory(data))

    def write(self, path: Path, data: Any) -> None:
        folders, key = self._at(path)
        view = memoryview(data)
        with folders.written(key, expected=view.nbytes, is_immutable=lambda part: True) as file:
            file.write(view)

    def delete(self, path: Path) -> None:
        folders, key = self._at(path)
        folders.delete(key)

    def getsize(self, path: Path) -> int:
        folders, key = self._at(path)
        return folders.existing(key).size

    # ---- folders

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Does nothing: folders are only common prefixes of keys."""

    def rmdir(self, path: Path) -> None:
        folders, key = self._at(path)
        folders.remove_folder(key)

    def ls(self, path: Path) -> list[str]:
        """Lists the names in a folder that this job sees."""
        folders, key = self._at(path)
        return folders.names(key)

    def exists(self, path: Path) -> bool:
        """Returns whether there is a file at a path, or a folder with files, that this job sees."""
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
        """Commits a folder by one conditional write; a single file can't be renamed.

        The other arguments have no effect.

        Raises:
            InvalidURIError: If a path is not in a cloud, or the two are in different buckets.
            FileExistsError: If the target exists, or another program has written a file into the
                source; both stay unchanged.
            FileNotFoundError: If this job has written no file into the source.
            CloudCheckpointError: The other errors of :meth:`FileFolders.rename_folder`, such as
                CommitUnknownError if the store does not say whether the commit took place.
        """
        folders, key = self._at(src_path)
        there, target = self._at(dst_path)
        if there is not folders:
            raise InvalidURIError(
                f"{_uri(src_path)} can't be renamed to {_uri(dst_path)}, which is in another "
                "bucket or account: put the temporary folder and its target into one bucket"
            )
        folders.rename_folder(key, target)


def _uri(path: str | os.PathLike[str]) -> CheckpointURI:
    text = os.fspath(path)
    uri = CheckpointURI.parse(unfolded(text) or text)
    if not uri.is_cloud:
        raise InvalidURIError(
            f"{text!r} is a local path: pass LocalFileSystemStorageConfig() for local paths, or "
            "give a URI such as s3://bucket/path"
        )
    return uri


def _job() -> str:
    """Returns sixteen hexadecimal digits that all ranks of this job share, and no other job has.

    The ranks agree on them through the store of torch's process group; without one, several ranks
    derive them from torchrun's environment, and a single process draws them.
    """
    if dist.is_available() and dist.is_initialized():
        agreed: bytes = default_store().compare_set(_KEY, "", random_suffix())
        return agreed.decode()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
        settings = "\n".join(os.environ.get(name, "") for name in names)
        return hashlib.sha256(settings.encode()).hexdigest()[:16]
    return _jobs.setdefault(os.getpid(), random_suffix())
