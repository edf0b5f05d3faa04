"""Writes ``torch.save`` files to a store atomically, and loads each from one version of it."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import IO, Any, cast

import torch

from cloudckpt.checkpoint.values import load_saved, untrusted
from cloudckpt.config import Config
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CloudCheckpointError,
    InvalidURIError,
    ObjectNotFoundError,
)
from cloudckpt.events import Span, Transferred
from cloudckpt.stores.base import ObjectStore
from cloudckpt.torch_files.object_file import ObjectFile, object_at
from cloudckpt.torch_files.written_file import WrittenFile
from cloudckpt.transfer.retry import Retrier
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.uri import CheckpointURI

__all__ = ["check_destination", "load_torch_file", "size_of", "storages_of", "write_torch_file"]

_BEGINNINGS = (b"PK\3\4", b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.")
"""The first bytes of a ``torch.save`` file: of its zip format, and of the format before torch 1.6
(a pickled magic number)."""

_OTHER_FORMATS = {".gguf", ".h5", ".hdf5", ".json", ".keras", ".msgpack", ".npy", ".npz", ".onnx"}
_OTHER_FORMATS |= {".pte", ".safetensors", ".tflite"}
"""File name extensions of formats other than ``torch.save``'s."""

_NOT_OF_THE_FILE = (CloudCheckpointError, Warning, MemoryError, torch.OutOfMemoryError)
"""Errors of ``torch.load`` that do not mean that the file is damaged."""


def check_destination(uri: CheckpointURI, config: Config) -> tuple[ObjectStore, str]:
    """Checks that a file may be written to a location; returns its store and key.

    Raises:
        InvalidURIError: If the location can't be that of a file, or has the extension of another
            file format.
        CheckpointExistsError: If the file exists, and ``overwrite`` is off. This is checked only
            once, so two concurrent writers may both pass.
    """
    store, key = object_at(uri, config)
    if PurePosixPath(key).suffix.lower() in _OTHER_FORMATS:
        raise InvalidURIError(
            f"{uri} has the suffix of another format, but this function writes that of torch.save: "
            f"name it {PurePosixPath(key).stem}.pt, or use the other format's own library"
        )
    if uri.scheme == "file" and os.path.isdir(key):
        raise InvalidURIError(f"{uri} is a folder: write for example {uri.join('model.pt')}")
    if not config.overwrite:
        with contextlib.suppress(ObjectNotFoundError):
            Retrier(config.retry).call(lambda: store.head(key))
            raise CheckpointExistsError(
                "a file already exists here and overwrite is off: delete it, use another name, or "
                "set Config(overwrite=True) (on the command line: --overwrite)",
                uri=str(uri),
            )
    return store, key


def write_torch_file(
    value: Any, uri: CheckpointURI, config: Config, *, rank: int = 0
) -> Transferred:
    """Writes a value with ``torch.save`` to a location, atomically and in parallel parts.

    The file appears, or replaces the existing file, when it is complete; after an error nothing has
    changed at the location, unless the answer to the last request was lost. It uses at most
    ``memory_budget`` bytes besides ``value``, and more only for files above about 100 GiB; storages
    of accelerators are copied to host memory one at a time.

    Args:
        value: The value to write.
        uri: The location of the file.
        config: Options.
        rank: The number of the writing rank, for events.

    Returns:
        The bytes and requests that were sent.

    Raises:
        InvalidURIError: If the location can't be that of a ``torch.save`` file.
        CheckpointExistsError: If the file exists, and ``overwrite`` is off.
        CheckpointError: If ``torch.save`` can't write ``value``.
        StoreError: If the store refuses or stays unreachable.
    """
    store, key = check_destination(uri, config)
    expected = size_of(value)
    stats = TransferStats(str(uri), rank, expected)
    with Span("upload", str(uri), rank) as span:
        try:
            with WrittenFile(store, key, config, expected=expected, stats=stats) as file:
                torch.save(value, cast(IO[bytes], file))
        except _NOT_OF_THE_FILE:
            raise
        except Exception as exc:
            raise CheckpointError(
                "torch.save can't write this state: remove or convert the value that the cause "
                "names",
                uri=str(uri),
                cause=exc,
            ) from exc
        finally:
            span.nbytes = stats.snapshot().nbytes
    return stats.snapshot()


def load_torch_file(
    uri: CheckpointURI,
    config: Config,
    stats: TransferStats,
    *,
    map_location: Any = "cpu",
    trust_pickle: bool = False,
) -> Any:
    """Loads a file with ``torch.load`` from one version of the object, large storages in parallel.

    It needs memory for one copy of the state, and ``memory_budget`` bytes.

    Args:
        uri: The location of the file.
        config: Options.
        stats: Counts the bytes received.
        map_location: The devices of the tensors, as in ``torch.load``.
        trust_pickle: Whether the file's pickle may run any code.

    Raises:
        CheckpointNotFoundError: If the file does not exist.
        CheckpointCorruptError: If the file was not written by ``torch.save``; or, with
            ``map_location="cpu"``, if it is truncated or damaged.
        CheckpointError: With another ``map_location``: if the file is truncated or damaged, or if a
            device that ``map_location`` or the file names does not exist.
        CheckpointReplacedError: If the file was replaced or deleted meanwhile.
        InvalidURIError: If the location can't be that of a file.
        StoreError: If the store refuses or stays unreachable.
        UntrustedPickleError: If the pickle needs code that is not on torch's allow-list.
    """
    store, key = object_at(uri, config)
    try:
        file = ObjectFile(store, key, config, stats)
    except ObjectNotFoundError as error:
        raise CheckpointNotFoundError(
            "there is no file here: check the location (cloudckpt.load reads folders)",
            uri=str(uri),
        ) from error
    if not file.read(len(_BEGINNINGS[1])).startswith(_BEGINNINGS):
        raise CheckpointCorruptError(
            "the file was not written by torch.save: check the location", uri=str(uri)
        )
    file.seek(0)
    try:
        return load_saved(cast(IO[bytes], file), map_location, trust=trust_pickle)
    except Exception as exc:
        if file.failure is not None:
            raise file.failure from None
        if isinstance(exc, _NOT_OF_THE_FILE):
            raise
        if isinstance(exc, pickle.UnpicklingError) and not trust_pickle:
            raise untrusted("the file", exc, str(uri)) from None
        if str(map_location) != "cpu":
            raise CheckpointError(
                "torch.load can't read the file: it is damaged or was not written by torch.save, "
                "or this machine lacks the device that map_location or the file names; "
                'pass map_location="cpu" to load without the device',
                uri=str(uri),
                cause=exc,
            ) from exc
        raise CheckpointCorruptError(
            "torch.load can't read the file: it is truncated or damaged, or was not written by "
            "torch.save; load another copy of it",
            uri=str(uri),
            cause=exc,
        ) from exc


def size_of(value: Any) -> int:
    """Estimates how many bytes ``torch.save`` will write for a value."""
    storages = storages_of(value)
    return sum(one.nbytes() for one in storages) + 1024 * (len(storages) + 1)


def storages_of(value: Any) -> list[torch.UntypedStorage]:
    """Returns the storages of the tensors in nested dicts, lists and tuples, each storage once.

    For a DTensor, the storage of the local shard is returned. Tensors without a storage are left
    out.
    """
    found: dict[int, torch.UntypedStorage] = {}
    waiting, seen = [value], set[int]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            with contextlib.suppress(Exception):  # some tensor subclasses have no storage
                storage = getattr(value, "_local_tensor", value).untyped_storage()
                found[storage._cdata] = storage
        elif isinstance(value, (Mapping, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            waiting.extend(value.values() if isinstance(value, Mapping) else value)
    return [*found.values()]
