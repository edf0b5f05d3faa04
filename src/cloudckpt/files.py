"""``save_file`` and ``load_file``: a single object of any kind at a URI."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
from collections.abc import Iterator
from typing import BinaryIO

import torch

from cloudckpt.checkpoint.commit import conditions_work
from cloudckpt.checkpoint.objects import trial_name
from cloudckpt.config import MIB, Config, config_or_default
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointReplacedError,
    ConfigError,
    InvalidRequestError,
    InvalidURIError,
    ObjectNotFoundError,
    PreconditionFailedError,
)
from cloudckpt.events import Span
from cloudckpt.stores.base import ObjectInfo, ObjectStore, random_suffix
from cloudckpt.stores.listings import forget_listings
from cloudckpt.torch_files.object_file import ObjectFile, object_at
from cloudckpt.torch_files.written_file import WrittenFile
from cloudckpt.transfer.retry import Retrier, retry_if_replaced
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.upload import put_whole
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["FileContent", "FileData", "load_file", "save_file"]

logger = logging.getLogger("cloudckpt")

FileData = bytes | bytearray | memoryview | os.PathLike[str] | BinaryIO
"""The content of a file to write: bytes; the path of a local file, as a ``pathlib.Path``; or a file
open for reading in binary mode. A string is not accepted, as it may be text or a path.
"""

_PIECE = 4 * MIB


class FileContent(bytes):
    """The bytes of a file, with the version that they are from.

    Attributes:
        version: The version of the file that was read; for ``if_version``.
    """

    version: str


def save_file(
    uri: URILike,
    data: FileData,
    *,
    if_absent: bool = False,
    if_version: str | None = None,
    config: Config | None = None,
) -> str:
    """Writes one object of any kind: a tokenizer, a configuration, a file.

    The object appears, or replaces the existing one, once all of it is in the store, which verifies
    its checksum where it can. If this raises, nothing has changed, unless the error is a
    :class:`StoreError` that is not ``certain``: then the new object may exist, complete. Large
    files are sent in parallel parts, using at most ``memory_budget`` bytes of memory.

    The store itself evaluates a condition, so that one of several writers wins. A conditional write
    is one request, sent from memory::

        content = cloudckpt.files.load_file("s3://bucket/run/config.json")
        cloudckpt.files.save_file(
            "s3://bucket/run/config.json", changed(content), if_version=content.version
        )

    Args:
        uri: ``s3://bucket/path`` or another location, of the object itself.
        data: Bytes, the path of a local file (a ``pathlib.Path``), or a file open for reading in
            binary mode. For text, write ``text.encode()``.
        if_absent: Write only if there is no object here.
        if_version: Write only if the object here still has this version, as returned by
            ``save_file`` or in ``load_file(uri).version``.
        config: Options; by default those of the environment. With ``overwrite=False`` an existing
            object is replaced only if ``if_version`` is given.

    Returns:
        The version of the object.

    Raises:
        InvalidURIError: If ``uri`` does not name a file.
        PreconditionFailedError: If the condition does not hold.
        CheckpointExistsError: If there is an object, ``overwrite`` is off, and no condition is
            given.
        ConfigError: If a condition is given or ``overwrite`` is off, and the store is known or
            configured not to honour conditions; if both conditions are given; or if an option is
            invalid.
        TypeError: If ``data`` is a string, or anything else not listed above.
        OSError: If the local file can't be read.
        StoreError: If the store refuses the request or stays unreachable.
    """
    location, config = CheckpointURI.parse(uri), config_or_default(config)
    if if_absent and if_version is not None:
        raise ConfigError("if_absent and if_version contradict each other: give only one of them")
    store, key = object_at(location, config)
    if location.scheme == "file" and os.path.isdir(key):
        raise InvalidURIError(
            f"{location} is a folder: give the name of a file, for example {location.join('name')}"
        )
    must_be_new = if_absent or (not config.overwrite and if_version is None)
    try:
        with Span("upload", str(location), 0) as span, _opened(data) as (source, expected):
            if must_be_new or if_version is not None:
                content = source.read()
                span.nbytes = len(content)
                info = _put_on_condition(store, key, content, if_version or "", config)
            else:
                stats = TransferStats(str(location), 0, expected)
                with WrittenFile(store, key, config, expected=expected, stats=stats) as file:
                    shutil.copyfileobj(source, file, _PIECE)
                assert file.info is not None  # it was closed without an error
                info = file.info
                span.nbytes = info.size
    except PreconditionFailedError as error:
        if not must_be_new or if_absent or not error.certain:
            raise
        raise CheckpointExistsError(
            "a file already exists here and overwrite is off: choose another location, or set "
            "Config(overwrite=True) to replace it",
            uri=str(location),
            cause=error,
        ) from error
    finally:
        forget_listings()
    return info.version


def load_file(
    uri: URILike, *, if_version: str | None = None, config: Config | None = None
) -> FileContent:
    """Reads one object of any kind, all from one version, and verifies it.

    The object is compared with the checksum that the store keeps. If the store keeps none for it
    (Azure, disks, many servers other than the clouds' own), it is read twice and both reads must
    agree. ``Config(verify=False)`` skips this. Large files are fetched over parallel connections;
    peak memory is twice the object's size.

    Args:
        uri: ``s3://bucket/path`` or another location, of the object itself.
        if_version: Fail unless the object has this version; None accepts any version.
        config: Options; by default those of the environment.

    Returns:
        The bytes; their attribute ``version`` is the version of the object that was read.

    Raises:
        InvalidURIError: If ``uri`` does not name a file.
        ObjectNotFoundError: If there is no such object; also a FileNotFoundError.
        PreconditionFailedError: If the object does not have the version ``if_version``.
        CheckpointCorruptError: If, in each of two attempts, the bytes differ from the store's
            checksum or, if the store keeps none, from those of a second read.
        CheckpointReplacedError: If the object was replaced during each of several tries.
        ConfigError: If an option is invalid.
        StoreError: If the store refuses the request or stays unreachable.
    """
    location, config = CheckpointURI.parse(uri), config_or_default(config)
    store, key = object_at(location, config)
    return retry_if_replaced(lambda: _load(store, key, if_version, config))


def _load(store: ObjectStore, key: str, if_version: str | None, config: Config) -> FileContent:
    file = ObjectFile(store, key, config, TransferStats(store.uri(key)))
    if if_version is not None and file.info.version != if_version:
        raise PreconditionFailedError(
            "the object no longer has the version given as if_version; to load the version that it "
            "has now, leave if_version= out",
            uri=store.uri(key),
            certain=True,
        )
    room = bytearray(file.info.size)
    for is_last in (False, True):
        if room:
            file.read_at(0, torch.frombuffer(room, dtype=torch.uint8))
        if not config.verify or _is_as_stored(store, file.info, room, config):
            break
        if is_last:
            raise CheckpointCorruptError(
                "the object does not match its checksum, or gives other bytes each time it is "
                "read; replace it by a backup, or read it with Config(verify=False)",
                uri=store.uri(key),
            )
        logger.warning("%s is read again, as the checksums differ", store.uri(key))
    content = FileContent(room)
    content.version = file.info.version
    return content


def _is_as_stored(store: ObjectStore, info: ObjectInfo, data: bytearray, config: Config) -> bool:
    """Returns whether the bytes match the checksum that the store keeps for this version.

    If the store keeps none, the object is read again, and its checksum is computed.

    Raises:
        CheckpointReplacedError: If the object no longer has this version.
    """
    try:
        kept = Retrier(config.retry).call(lambda: store.checksum_of(info))
    except (ObjectNotFoundError, PreconditionFailedError) as error:
        raise CheckpointReplacedError(
            "the object was replaced while it was read: read it when no other job writes to it",
            uri=store.uri(info.key),
            cause=error,
        ) from error
    return kept == store.capabilities.checksum.of(memoryview(data))


@contextlib.contextmanager
def _opened(data: FileData) -> Iterator[tuple[BinaryIO, int]]:
    """Yields a stream of the data to write, and its approximate size in bytes (0 if unknown)."""
    given: object = data
    if isinstance(data, (bytes, bytearray, memoryview)):
        yield io.BytesIO(data), memoryview(data).nbytes
    elif isinstance(data, os.PathLike):
        with open(data, "rb") as file:
            yield file, os.fstat(file.fileno()).st_size
    elif hasattr(data, "read") and not isinstance(given, io.TextIOBase):
        yield data, 0
    else:
        wanted = "bytes, the path of a file (a pathlib.Path), or a file that is open in binary mode"
        if isinstance(given, str):
            wanted = "data.encode() if it is text, or pathlib.Path(data) if it is a file's path"
        raise TypeError(f"data is of class {type(data).__name__}: give {wanted}")


def _put_on_condition(
    store: ObjectStore,
    key: str,
    content: bytes,
    if_version: str,
    config: Config,
) -> ObjectInfo:
    """Writes an object in one request: some stores ignore conditions of multipart uploads.

    Args:
        store: The store.
        key: The key of the object.
        content: Its bytes.
        if_version: The version that is replaced; empty if the object must not exist yet.
        config: Options.

    Raises:
        PreconditionFailedError: If the condition does not hold.
        ConfigError: If conditional writes are turned off, or the store does not honour them.
        InvalidRequestError: If the content is too large for one request.
    """
    if len(content) > store.capabilities.max_put_size:
        raise InvalidRequestError(
            f"the content has {len(content)} bytes, but if_absent, if_version and overwrite=False "
            "need a single request, which takes at most "
            f"{store.capabilities.max_put_size} bytes: write without them, or write less",
            uri=store.uri(key),
            certain=True,
        )
    if config.conditional_writes == "off":
        raise ConfigError(
            "if_absent, if_version and overwrite=False need conditional writes, which are off: set "
            "Config(conditional_writes='auto') if the store supports them, else use none of these",
            uri=store.uri(key),
        )
    retrier = Retrier(config.retry)
    folder, slash, _ = key.rpartition("/")
    trial = folder + slash + trial_name(random_suffix())
    conditions_work(store, config.conditional_writes, trial, retrier)
    return put_whole(store, key, memoryview(content), retrier, if_version=if_version)
