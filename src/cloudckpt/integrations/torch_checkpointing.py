"""torch_checkpointing on URIs: its ``StorageConfig`` with our stores.

>>> from torch_checkpointing.checkpoint_manager import CheckpointManager  # doctest: +SKIP
>>> config = CheckpointManager.Config(storage_config=CloudStorageConfig())  # doctest: +SKIP
>>> config.build().save("s3://bucket/run/step-1000", {"model": state})  # doctest: +SKIP

Its writers hand over paths that ``pathlib`` has made of URIs (``s3:/bucket/run``). That form is
refused elsewhere in cloudckpt, for it means a local folder; here nothing else can be meant.

It commits a checkpoint by renaming the folder that all ranks have written to, which no object store
can do: :meth:`CloudStorage.rename` says what is done instead.

Tested with torch_checkpointing 0.1.1.
"""

from __future__ import annotations

import fnmatch
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudckpt.config import Config
from cloudckpt.errors import InvalidURIError, MissingDependencyError
from cloudckpt.integrations.fsspec import file_system
from cloudckpt.uri import CheckpointURI, unfolded

try:
    from torch_checkpointing.storage.base_storage import ReadArgs, Storage, StorageConfig
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        "this needs torch_checkpointing: pip install torch_checkpointing", cause=error
    ) from error

__all__ = ["CloudStorage", "CloudStorageConfig"]

_RENAMING = ".cloudckpt-renaming"
"""Name of an object in a folder whose content is not complete yet."""


@dataclass
class CloudStorageConfig(StorageConfig):  # type: ignore[misc]
    """Checkpoints are in stores; paths are URIs.

    Attributes:
        config: Options; read from the environment where they are not given.
    """

    config: Config | None = None

    def create_storage(self) -> CloudStorage:
        return CloudStorage(self.config)


class CloudStorage(Storage):  # type: ignore[misc]
    """What torch_checkpointing reads and writes, in stores of ours."""

    def __init__(self, config: Config | None = None) -> None:
        self._config = config

    def _at(self, path: str | os.PathLike[str]) -> tuple[Any, str]:
        """The file system of a path, and what the path is there.

        Raises:
            InvalidURIError: If it is none of a store.
        """
        text = os.fspath(path)
        uri = CheckpointURI.parse(unfolded(text) or text)
        if not uri.is_cloud:
            raise InvalidURIError(
                f"{text!r} is a local path: give LocalFileSystemStorageConfig() for these, or a URI"
            )
        return file_system(uri.scheme, self._config), str(uri)

    # ---- files

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:
        files, uri = self._at(path)
        stream: io.RawIOBase = files.open(uri, "rb").detach()
        return stream

    def read(self, path: Path, read_args: ReadArgs | None = None) -> bytes:
        files, uri = self._at(path)
        content: bytes = files.cat_file(uri)
        return content

    def stream_write(self, path: Path) -> io.IOBase:
        files, uri = self._at(path)
        stream: io.IOBase = files.open(uri, "wb")
        return stream

    def write(self, path: Path, data: Any) -> None:
        files, uri = self._at(path)
        files.pipe_file(uri, data)

    def delete(self, path: Path) -> None:
        files, uri = self._at(path)
        files.rm_file(uri)

    def getsize(self, path: Path) -> int:
        files, uri = self._at(path)
        return int(files.size(uri))

    # ---- folders

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Does nothing: folders are what keys have in common."""

    def rmdir(self, path: Path) -> None:
        files, uri = self._at(path)
        files.rm(uri, recursive=True)

    def ls(self, path: Path) -> list[str]:
        """Names in a folder, without those of folders that are not complete."""
        files, uri = self._at(path)
        inside = f"{files._strip_protocol(uri)}/"
        names = [found.removeprefix(inside) for found in files.find(uri)]
        if not names:
            raise FileNotFoundError(uri)
        hidden = {name.rpartition("/")[0] for name in names if name.endswith(f"/{_RENAMING}")}
        return sorted({name.partition("/")[0] for name in names} - hidden - {_RENAMING})

    def glob(self, pattern: str) -> list[str]:
        folder, _, names = pattern.rpartition("/")
        if not self.exists(Path(folder)):
            return []
        return [f"{folder}/{name}" for name in fnmatch.filter(self.ls(Path(folder)), names)]

    def exists(self, path: Path) -> bool:
        """Whether there is a file, or a folder that is complete."""
        files, uri = self._at(path)
        return bool(files.exists(uri)) and not files.exists(f"{uri}/{_RENAMING}")

    def isdir(self, path: Path) -> bool:
        files, uri = self._at(path)
        return bool(files.isdir(uri)) and self.exists(path)

    def remap_path(self, path: Path) -> str:
        return self._at(path)[1]

    def rename(
        self,
        src_path: Path,
        dst_path: Path,
        is_directory: bool = False,
        background_cleanup: bool = False,
    ) -> None:
        """Copies what is in a folder, by the store itself where it can, then removes the source.

        Until all of it is there the folder does not exist for this storage: a mark lies in it,
        whose removal is the commit. A copy that was cut off is begun anew by the next rename to the
        same place. For programs that know nothing of the mark a folder may seem complete before it
        is.

        Raises:
            FileExistsError: If something is there; it is left as it is.
            FileNotFoundError: If there is nothing to rename.
        """
        files, source = self._at(src_path)
        _, target = self._at(dst_path)
        is_folder = files.info(source)["type"] == "directory"
        if not is_folder:
            if files.isdir(target):
                raise _occupied(source, target)
            files.cp_file(source, target)  # what is there stays as it is until this is done
            files.rm_file(source)
            return
        mark = f"{target}/{_RENAMING}"
        if files.exists(target):
            if not files.exists(mark):
                raise _occupied(source, target)
            files.rm([path for path in files.find(target) if not path.endswith(_RENAMING)])
        files.pipe_file(mark, b"")
        inside = files._strip_protocol(source)
        pairs = [(path, f"{target}{path.removeprefix(inside)}") for path in files.find(source)]
        files.copy_files(pairs)
        files.rm_file(mark)
        files.rm(source, recursive=True)


def _occupied(source: str, target: str) -> FileExistsError:
    return FileExistsError(
        f"{source} can't be renamed to {target}, where something is: delete that, or save elsewhere"
    )
