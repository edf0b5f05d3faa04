"""fsspec file systems over our stores, for frameworks that list and delete through fsspec.

Given ``s3://bucket/run``, a framework saves with torch's functions, but finds its checkpoints and
removes old ones through fsspec, which needs s3fs, gcsfs or adlfs. :func:`register` substitutes the
file systems here where those are not installed, so that the same credentials, endpoints and retries
serve both.

They differ from those packages where it matters for checkpoints: no listing is cached; an
unreachable store is an error, not "no such file", on which a trainer would start over; a file being
written appears whole when it is closed, and never after an error; and when a folder is removed,
what makes a checkpoint visible goes first.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import io
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import fsspec
from fsspec.registry import known_implementations, registry
from fsspec.spec import AbstractFileSystem

from cloudckpt.checkpoint.file_folder import MANIFEST
from cloudckpt.checkpoint.objects import METADATA, keeps_in
from cloudckpt.checkpoint.references import protected
from cloudckpt.config import Config
from cloudckpt.errors import (
    CheckpointNotFoundError,
    InvalidURIError,
    ObjectNotFoundError,
    PreconditionFailedError,
)
from cloudckpt.files import load_file, save_file
from cloudckpt.runs.deleting import delete
from cloudckpt.stores.base import ObjectInfo, ObjectStore
from cloudckpt.torch_files.object_file import ObjectFile, PinnedObject
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
"""Names of objects that make what lies beside them a checkpoint."""


class _StoreFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The files of one kind of store; paths are ``bucket/key``, with or without the scheme."""

    cachable = True
    root_marker = ""
    scheme: str

    def __init__(self, *args: Any, config: Config | None = None, **options: Any) -> None:
        """
        Args:
            args: As fsspec's.
            config: Options; those given to ``cloudckpt.install`` by default.
            options: As fsspec's.
        """
        super().__init__(*args, **options)
        self._given = config

    @property
    def _config(self) -> Config:
        return self._given or _installed or Config()

    def _uri(self, path: str) -> CheckpointURI:
        return CheckpointURI.parse(f"{self.scheme}://{self._strip_protocol(path)}")

    def _place(self, path: str) -> tuple[ObjectStore, str, Retrier]:
        uri = self._uri(path)
        return open_store(uri, self._config), uri.prefix, Retrier(self._config.retry)

    # ---- looking

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Describes what is at a path: a file, or a folder if there are files beneath it.

        Raises:
            FileNotFoundError: If there is nothing.
            StoreError: If the store does not answer that.
        """
        path = self._strip_protocol(path)
        store, key, retrier = self._place(path)
        if key:
            try:
                return self._file(path, retrier.call(lambda: store.head(key)))
            except ObjectNotFoundError:
                pass
        below = f"{key}/" if key else ""
        if next(iter(store.list_level(below, retrier.call)), None) is None and key:
            raise FileNotFoundError(f"{self.scheme}://{path}")
        return self._folder(path)

    def exists(self, path: str, **_: Any) -> bool:
        return self._type(path) is not None

    def isdir(self, path: str) -> bool:
        return self._type(path) == "directory"

    def isfile(self, path: str) -> bool:
        return self._type(path) == "file"

    def _type(self, path: str) -> str | None:
        """The type from `info`; fsspec's own version takes any error for an answer."""
        try:
            return str(self.info(path)["type"])
        except FileNotFoundError as error:
            _omit_what_is_gone(error)
            return None

    def modified(self, path: str) -> datetime.datetime:
        """When a file, or the newest file in a folder, was written, by the store's clock.

        Raises:
            FileNotFoundError: If there is nothing.
        """
        store, key, retrier = self._place(path)
        file = next(iter(store.list(key, retrier.call)), None) if key else None
        found = [file] if file is not None and file.key == key else self._listed(path)
        times = [one.modified for one in found if one.modified is not None]
        if not times:
            raise FileNotFoundError(f"{self.scheme}://{self._strip_protocol(path)}")
        return datetime.datetime.fromtimestamp(max(times), datetime.timezone.utc)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """Lists what is directly beneath a path, or the file there; never cached."""
        path = self._strip_protocol(path)
        store, key, retrier = self._place(path)
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
        """As fsspec's, but by default a denied path or missing bucket raises instead."""
        on_error = on_error or _omit_what_is_gone
        return super().walk(path, maxdepth, topdown, on_error, **kwargs)  # type: ignore[no-any-return]

    def _listed(self, path: str) -> list[ObjectInfo]:
        store, key, retrier = self._place(path)
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
            store, key, _retrier = self._place(path)
            pinned = PinnedObject(store, key, self._config, TransferStats(store.uri(key)))
            return io.BufferedReader(ObjectFile(pinned, self._config))
        if mode != "wb" or not autocommit:
            raise NotImplementedError(
                f"mode {mode!r}{'' if autocommit else ' in a transaction'} is not supported: "
                "objects are written as a whole, with mode 'wb'"
            )
        store, key, _retrier = self._place(path)
        return WrittenFile(store, key, self._config)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        """The bytes of a file or of a slice of it; the slice may count from the file's end."""
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
        if not self.isdir(path1):
            with self._open(path1) as source:
                save_file(self._uri(path2), source, config=self._config)  # type: ignore[arg-type]

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """Does nothing, like `makedirs` and `rmdir`: folders are only common prefixes of keys."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def rmdir(self, path: str) -> None:
        pass

    # ---- removing

    def rm_file(self, path: str) -> None:
        store, key, retrier = self._place(path)
        retrier.call(lambda: store.head(key))
        retrier.call(lambda: store.delete(key))

    def rm(
        self, path: str | list[str], recursive: bool = False, maxdepth: int | None = None
    ) -> None:
        """Removes files and the contents of folders; what makes a checkpoint visible goes first.

        A checkpoint folder is removed as by :func:`cloudckpt.delete`: objects that neighbouring
        checkpoints refer to stay until the last of these is removed.

        Raises:
            FileNotFoundError: If there is nothing at a path.
            StoreError: If something could not be removed; everything else was tried.
        """
        for one in [path] if isinstance(path, str) else path:
            if not recursive or maxdepth is not None:
                super().rm(one, recursive=recursive, maxdepth=maxdepth)
                continue
            keys = [found.key for found in self._listed(one)]
            if keys:
                left = self._without_checkpoint(self._uri(one), keys)
                self._delete(one, [key for key in left if _makes_visible(key)])
                self._delete(one, [key for key in left if not _makes_visible(key)])
            if not keys or self.isfile(one):
                self.rm_file(one)

    def _without_checkpoint(self, uri: CheckpointURI, keys: list[str]) -> list[str]:
        """Deletes a folder's checkpoint; returns the other keys beneath it that are to go."""
        if not uri.folder:
            return keys
        if uri.key(METADATA) in keys:
            with contextlib.suppress(CheckpointNotFoundError):
                delete(uri, config=self._config)
            keys = [found.key for found in self._listed(str(uri))]
        marks = {key for key in keys if key.startswith(keeps_in(uri))}
        if not marks:
            return keys
        store, _, _ = self._place(str(uri))
        kept = protected(store, uri, {uri.folder: {*keys} - marks}, self._config)
        return [key for key in keys if key not in kept and not (kept and key in marks)]

    def _delete(self, path: str, keys: list[str]) -> None:
        store, _, _ = self._place(path)
        threads = self._config.requests_at_once
        delete_all(store, keys, self._config.retry, threads=threads, what="objects of a folder")


class S3FileSystem(_StoreFileSystem):
    """``s3://``."""

    protocol = scheme = "s3"


class GCSFileSystem(_StoreFileSystem):
    """``gs://``."""

    protocol = scheme = "gs"


class AzureFileSystem(_StoreFileSystem):
    """``az://``."""

    protocol = scheme = "az"


def _omit_what_is_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _makes_visible(key: str) -> bool:
    return key.rpartition("/")[2] in _COMMITS


def file_system(scheme: str, config: Config | None = None) -> _StoreFileSystem:
    """Our file system for a scheme, whether or not fsspec uses it.

    Raises:
        InvalidURIError: If there is none.
    """
    if scheme not in _OURS:
        raise InvalidURIError(
            f"cloudckpt has no file system for {scheme}://, only for {', '.join(_OURS)}"
        )
    return _OURS[scheme](config=config)


# ---- who serves s3://, gs:// and az://

_OURS = {kind.scheme: kind for kind in (S3FileSystem, GCSFileSystem, AzureFileSystem)}
_installed: Config | None = None


def register(config: Config | None = None) -> list[str]:
    """Serves ``s3``, ``gs`` and ``az`` to fsspec where no other package does.

    A scheme is taken unless the package that fsspec names for it (s3fs, gcsfs, adlfs) is installed,
    or a class is registered. Nothing is imported to find out.

    Args:
        config: Options of file systems that are made without any, also of those made before.

    Returns:
        The schemes that cloudckpt serves.
    """
    global _installed
    _installed = config
    return [scheme for scheme, ours in _OURS.items() if _serves(scheme, ours)]


def _serves(scheme: str, ours: type[_StoreFileSystem]) -> bool:
    """Registers our class for a scheme unless another package serves it."""
    if scheme in registry:
        return registry[scheme] is ours
    name = f"{ours.__module__}.{ours.__name__}"
    known = known_implementations.get(scheme, {}).get("class", "")
    package = known.partition(".")[0]
    if known != name and package and importlib.util.find_spec(package) is not None:
        return False
    fsspec.register_implementation(scheme, name, clobber=True)
    return True
