"""fsspec file systems over cloudckpt's stores, for frameworks that list and delete by fsspec.

Given ``s3://bucket/run``, a framework saves with torch's functions, but lists its checkpoints and
deletes old ones through fsspec, which needs s3fs, gcsfs or adlfs. Where these are not installed,
:func:`register` registers the file systems of this module, so that saves, listings and deletions
use the same credentials, endpoints and retries.

Four differences to these packages matter for checkpoints: no listing is cached; an unreachable
store is an error, not "no such file", after which a trainer would start over; a written file
appears whole when it is closed, and never after an error; and the deletion of a folder begins with
the commit object.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib.util
import io
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from operator import itemgetter
from typing import Any

import fsspec
from fsspec.registry import known_implementations, registry
from fsspec.spec import AbstractFileSystem

from cloudckpt.checkpoint.file_folder import MANIFEST
from cloudckpt.checkpoint.objects import METADATA, keeps_in
from cloudckpt.checkpoint.references import protected
from cloudckpt.config import Config
from cloudckpt.dcp.install import chosen_config
from cloudckpt.errors import (
    CheckpointNotFoundError,
    InvalidURIError,
    ObjectNotFoundError,
    PreconditionFailedError,
)
from cloudckpt.files import load_file, save_file
from cloudckpt.runs.deleting import delete
from cloudckpt.stores.base import ObjectInfo, ObjectStore
from cloudckpt.torch_files.object_file import ObjectFile
from cloudckpt.torch_files.written_file import WrittenFile
from cloudckpt.transfer.deleting import delete_all
from cloudckpt.transfer.retry import Retrier, open_store
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.uri import CheckpointURI

__all__ = [
    "AzureFileSystem",
    "GCSFileSystem",
    "S3FileSystem",
    "file_system",
    "register",
]

_COMMITS = {METADATA, MANIFEST, "model.safetensors.index.json"}
"""The names of commit objects, without which a folder is not a checkpoint."""

_postponed: ContextVar[list[Callable[[], None]] | None] = ContextVar("postponed", default=None)
"""Uploads of commit objects that the ``put`` in progress makes last; None without a ``put``."""


class _StoreFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """A file system for one scheme; paths are ``bucket/key``, with or without the scheme.

    ``mkdir``, ``makedirs`` and ``rmdir`` do nothing, as fsspec's own do: folders are only common
    prefixes of keys.
    """

    scheme: str

    def __init__(self, *args: Any, config: Config | None = None, **options: Any) -> None:
        """
        Args:
            args: Arguments of fsspec's ``AbstractFileSystem``.
            config: Options; None for those given to ``cloudckpt.install``, else those given to
                :func:`register`, else those of the environment.
            options: Options of fsspec's ``AbstractFileSystem``.
        """
        super().__init__(*args, **options)
        self._given = config

    @property
    def _config(self) -> Config:
        """The options given to this file system, ``install`` or :func:`register`, in this order.

        If none were given, the options are read from the environment.
        """
        return self._given or chosen_config() or _registered or Config()

    def _uri(self, path: str) -> CheckpointURI:
        return CheckpointURI.parse(f"{self.scheme}://{self._strip_protocol(path)}")

    def _open_store(self, path: str) -> tuple[ObjectStore, str, Retrier]:
        """Returns the store of a path, the path's key in the store, and a retrier."""
        uri = self._uri(path)
        return open_store(uri, self._config), uri.prefix, Retrier(self._config.retry)

    # ---- listing

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Describes the file at a path, or else the folder if there are files beneath the path.

        A bucket is always described as a folder.

        Returns:
            ``name``, ``size`` in bytes (0 for a folder) and ``type`` (``"file"`` or
            ``"directory"``); for a file also ``version`` and, if the store reports it, ``mtime`` in
            seconds since 1970.

        Raises:
            FileNotFoundError: If there is neither a file nor a folder.
            StoreError: If the store refuses or stays unreachable.
        """
        path = self._strip_protocol(path)
        store, key, retrier = self._open_store(path)
        if key:
            with contextlib.suppress(ObjectNotFoundError):
                return self._file(path, retrier.call(lambda: store.head(key)))
        below = f"{key}/" if key else ""
        if next(iter(store.list_level(below, retrier.call)), None) is None and key:
            raise FileNotFoundError(f"there is no file or folder at {self.scheme}://{path}")
        return self._folder(path)

    def exists(self, path: str, **_: Any) -> bool:
        return self._type(path) is not None

    def isdir(self, path: str) -> bool:
        return self._type(path) == "directory"

    def isfile(self, path: str) -> bool:
        return self._type(path) == "file"

    def _type(self, path: str) -> str | None:
        """Returns ``"file"``, ``"directory"``, or None if nothing exists at the path.

        Other errors are raised; fsspec's own methods would return False for them.
        """
        with contextlib.suppress(FileNotFoundError):
            return str(self.info(path)["type"])
        return None

    def modified(self, path: str) -> datetime.datetime:
        """Returns when a file, or the newest file in a folder, was written, by the store's clock.

        Raises:
            FileNotFoundError: If there is neither a file nor a folder, or the store gives no time.
        """
        store, key, retrier = self._open_store(path)
        file = next(iter(store.list(key, retrier.call)), None) if key else None
        infos = [file] if file is not None and file.key == key else self._listed(path)
        times = [one.modified for one in infos if one.modified is not None]
        if not times:
            raise FileNotFoundError(f"no file with a known time of writing at {self._uri(path)}")
        return datetime.datetime.fromtimestamp(max(times), datetime.timezone.utc)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """Lists the files and folders directly in a folder, or a single file; never cached.

        Returns:
            Descriptions as by :meth:`info`, sorted by name; without ``detail`` only the names.

        Raises:
            FileNotFoundError: If there is neither a file nor a folder.
        """
        path = self._strip_protocol(path)
        store, key, retrier = self._open_store(path)
        level = list(store.list_level(f"{key}/" if key else "", retrier.call))
        bucket = path.partition("/")[0]
        entries = [
            self._folder(f"{path}/{found}")
            if isinstance(found, str)
            else self._file(f"{bucket}/{found.key}", found)
            for found in level
            if isinstance(found, str) or not found.key.endswith("/")
        ]
        if not level:
            entry = self.info(path)
            entries = [entry] if entry["type"] == "file" else []
        entries.sort(key=itemgetter("name"))
        return entries if detail else [entry["name"] for entry in entries]

    def walk(
        self,
        path: str,
        maxdepth: int | None = None,
        topdown: bool = True,
        on_error: Any = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """Walks a folder as fsspec does.

        Without ``on_error``, missing folders are skipped, and other errors are raised.
        """
        on_error = on_error or _raise_unless_missing
        return super().walk(path, maxdepth, topdown, on_error, **kwargs)  # type: ignore[no-any-return]

    def _listed(self, path: str) -> list[ObjectInfo]:
        """Lists all objects beneath a folder, at any depth."""
        store, key, retrier = self._open_store(path)
        return list(store.list(f"{key}/" if key else "", retrier.call))

    @staticmethod
    def _file(path: str, found: ObjectInfo) -> dict[str, Any]:
        entry = {"name": path, "size": found.size, "type": "file", "version": found.version}
        return entry if found.modified is None else entry | {"mtime": found.modified}

    @staticmethod
    def _folder(path: str) -> dict[str, Any]:
        return {"name": path, "size": 0, "type": "directory"}

    # ---- reading and writing

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        **_: Any,
    ) -> io.BufferedIOBase:
        if mode == "rb":
            store, key, _retrier = self._open_store(path)
            file = ObjectFile(store, key, self._config, TransferStats(store.uri(key)))
            return io.BufferedReader(file)
        if mode != "wb" or not autocommit:
            raise NotImplementedError(
                f"{self._uri(path)} can't be opened with mode {mode!r}"
                f"{'' if autocommit else ' in a transaction'}: objects are written as a whole, "
                "with mode 'wb' outside of transactions"
            )
        store, key, _retrier = self._open_store(path)
        return WrittenFile(store, key, self._config)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        """Reads a file, or its bytes from ``start`` to ``end``, both counted as in a slice."""
        if start is None and end is None:
            return load_file(self._uri(path), config=self._config)
        with self._open(path) as file:
            start, end, _ = slice(start, end).indices(file.seek(0, io.SEEK_END))
            file.seek(start)
            return file.read(max(0, end - start))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        try:
            save_file(self._uri(path), value, if_absent=mode == "create", config=self._config)
        except PreconditionFailedError as error:
            raise FileExistsError(
                f"{self._uri(path)} already exists: delete it, or write to another location"
            ) from error

    def touch(self, path: str, truncate: bool = True, **_: Any) -> None:
        if truncate or not self.exists(path):
            self.pipe_file(path, b"")

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        if not self.isdir(path1):  # `mv` copies, too: torch's FsspecWriter renames its metadata
            with self._open(path1) as source:
                save_file(self._uri(path2), source, config=self._config)  # type: ignore[arg-type]

    def expand_path(self, path: Any, *args: Any, **kwargs: Any) -> list[str]:
        """Expands paths as fsspec does, but sorts commit objects last, so they are copied last."""
        return sorted(super().expand_path(path, *args, **kwargs), key=_is_commit)

    def put(self, *args: Any, **kwargs: Any) -> None:
        """Uploads files and folders as fsspec does, but commit objects last."""
        commits: list[Callable[[], None]] = []
        before = _postponed.set(commits)
        try:
            super().put(*args, **kwargs)
        finally:
            _postponed.reset(before)
        for upload in commits:
            upload()

    def put_file(self, lpath: Any, rpath: str, *args: Any, **kwargs: Any) -> None:
        upload = functools.partial(super().put_file, lpath, rpath, *args, **kwargs)
        commits = _postponed.get()
        if commits is not None and _is_commit(rpath):
            commits.append(upload)
        else:
            upload()

    # ---- removing

    def rm_file(self, path: str) -> None:
        store, key, retrier = self._open_store(path)
        retrier.call(lambda: store.head(key))
        retrier.call(lambda: store.delete(key))

    def rm(
        self, path: str | list[str], recursive: bool = False, maxdepth: int | None = None
    ) -> None:
        """Deletes files and folders; a folder's commit objects first, unless ``maxdepth`` is given.

        A folder is deleted only with ``recursive``. The folder of a checkpoint is deleted as by
        :func:`cloudckpt.delete`: an object that other checkpoints of the run refer to stays until
        the last of these checkpoints is deleted.

        Raises:
            FileNotFoundError: If a path is neither a file nor a folder, or is a folder and
                ``recursive`` is off.
            StoreError: If an object could not be deleted; the deletion of all others was tried.
        """
        for one in [path] if isinstance(path, str) else path:
            if not recursive or maxdepth is not None:
                for found in reversed(self.expand_path(one, recursive, maxdepth)):
                    if not recursive or self.info(found)["type"] == "file":  # a folder is no object
                        self.rm_file(found)
                continue
            keys = [found.key for found in self._listed(one)]
            if keys:
                left = self._without_checkpoint(self._uri(one), keys)
                self._delete(one, [key for key in left if _is_commit(key)])
                self._delete(one, [key for key in left if not _is_commit(key)])
            if not keys or self.isfile(one):
                self.rm_file(one)

    def _without_checkpoint(self, uri: CheckpointURI, keys: list[str]) -> list[str]:
        """Deletes the checkpoint in a folder, if any; returns the other keys that may be deleted.

        Objects that other checkpoints need are left out, and with them the marks that record this
        need. ``keys`` has the keys of all objects beneath the folder.
        """
        if not uri.folder:
            return keys
        if uri.key(METADATA) in keys:
            with contextlib.suppress(CheckpointNotFoundError):
                delete(uri, config=self._config)
            keys = [found.key for found in self._listed(str(uri))]
        marks = {key for key in keys if key.startswith(keeps_in(uri))}
        if not marks:
            return keys
        store, _, _ = self._open_store(str(uri))
        kept = protected(store, uri, {uri.folder: {*keys} - marks}, self._config)
        return [key for key in keys if key not in kept and not (kept and key in marks)]

    def _delete(self, path: str, keys: list[str]) -> None:
        """Deletes objects, given their keys in the bucket of a path."""
        store, _, _ = self._open_store(path)
        threads = self._config.requests_at_once
        delete_all(store, keys, self._config.retry, threads=threads, what="objects of a folder")


class S3FileSystem(_StoreFileSystem):
    """fsspec file system for ``s3://`` paths, over cloudckpt's S3 store."""

    protocol = scheme = "s3"


class GCSFileSystem(_StoreFileSystem):
    """fsspec file system for ``gs://`` paths, over cloudckpt's Google Cloud Storage store."""

    protocol = scheme = "gs"


class AzureFileSystem(_StoreFileSystem):
    """fsspec file system for ``az://`` paths, over cloudckpt's Azure Blob Storage store."""

    protocol = scheme = "az"


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _is_commit(key: str) -> bool:
    return key.rpartition("/")[2] in _COMMITS


def file_system(scheme: str, config: Config | None = None) -> _StoreFileSystem:
    """Makes cloudckpt's file system for a scheme, whether or not it is registered with fsspec.

    Raises:
        InvalidURIError: If cloudckpt has no file system for the scheme.
    """
    if scheme not in _OURS:
        raise InvalidURIError(
            f"cloudckpt has no file system for {scheme}://: use one of {', '.join(_OURS)}"
        )
    return _OURS[scheme](config=config)


# ---- registration

_OURS = {served.scheme: served for served in (S3FileSystem, GCSFileSystem, AzureFileSystem)}
_registered: Config | None = None


def register(config: Config | None = None) -> list[str]:
    """Registers file systems with fsspec for ``s3``, ``gs`` and ``az`` where no package has them.

    A scheme is skipped if the package that fsspec names for it (s3fs, gcsfs, adlfs) is installed,
    or another class is registered. The packages are not imported for this check.

    Args:
        config: Options of file systems made without options, including those made before, unless
            options are given to ``install``; None keeps those of the last call.

    Returns:
        The schemes for which fsspec uses cloudckpt.
    """
    global _registered
    _registered = config or _registered
    return [scheme for scheme, ours in _OURS.items() if _register_scheme(scheme, ours)]


def _register_scheme(scheme: str, ours: type[_StoreFileSystem]) -> bool:
    """Registers a class for a scheme, unless another package handles the scheme.

    Returns:
        Whether fsspec uses the class.
    """
    if scheme in registry:
        return registry[scheme] is ours
    name = f"{ours.__module__}.{ours.__name__}"
    known = known_implementations.get(scheme, {}).get("class", "")
    package = known.partition(".")[0]
    if known != name and package and importlib.util.find_spec(package) is not None:
        return False
    fsspec.register_implementation(scheme, name, clobber=True)
    return True
