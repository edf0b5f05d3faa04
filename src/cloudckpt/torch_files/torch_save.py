"""``torch.save`` to a store: whole or not at all."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import IO, Any, cast

import torch

from cloudckpt.config import Config
from cloudckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CloudCheckpointError,
    InvalidURIError,
    ObjectNotFoundError,
)
from cloudckpt.events import Span
from cloudckpt.stores.base import ObjectStore
from cloudckpt.stores.listings import forget_listings
from cloudckpt.torch_files.torch_file import object_at
from cloudckpt.torch_files.upload_stream import UploadStream, upload_stream
from cloudckpt.transfer.retry import Retrier
from cloudckpt.transfer.stats import Transferred, TransferStats
from cloudckpt.uri import CheckpointURI

__all__ = ["check_destination", "write_torch_file"]

_OTHER_FORMATS = {
    ".gguf": "GGUF",
    ".h5": "HDF5",
    ".hdf5": "HDF5",
    ".json": "JSON",
    ".keras": "Keras",
    ".msgpack": "MessagePack",
    ".npy": "NumPy",
    ".npz": "NumPy",
    ".onnx": "ONNX",
    ".pte": "ExecuTorch",
    ".safetensors": "safetensors",
    ".tflite": "LiteRT",
}
"""Names under which other programs look for something that is no file of ``torch.save``."""


def check_destination(uri: CheckpointURI, config: Config) -> tuple[ObjectStore, str]:
    """The store and the key of a file to be written.

    Raises:
        InvalidURIError: If the location can't be that of a file, or is named like a file of another
            format, whose readers would find something else in it.
        CheckpointExistsError: If there is something and ``overwrite`` is off. This looks once: it
            does not keep two writers apart.
    """
    store, key = object_at(uri, config)
    suffix = PurePosixPath(key).suffix.lower()
    if suffix in _OTHER_FORMATS:
        raise InvalidURIError(
            f"{uri} is named like a file of {_OTHER_FORMATS[suffix]}, and what is written here is "
            f"one of torch.save: name it {PurePosixPath(key).stem}.pt, or write the other format "
            "with its own library"
        )
    if uri.scheme == "file" and os.path.isdir(key):
        raise InvalidURIError(f"{uri} is a folder: write for example {uri.join('model.pt')}")
    if not config.overwrite:
        with contextlib.suppress(ObjectNotFoundError):
            Retrier(config.retry).call(lambda: store.head(key))
            raise CheckpointExistsError(
                "a file already exists here and overwrite is off: delete it, or write another one",
                uri=str(uri),
            )
    return store, key


def write_torch_file(
    value: Any, uri: CheckpointURI, config: Config, *, rank: int = 0
) -> Transferred:
    """``torch.save`` to a location: atomic, in parallel parts.

    The file appears, or replaces the one that is there, when it is complete. Besides ``value`` it
    takes ``memory_budget``; storages of accelerators pass through host memory one by one.

    Args:
        value: What to write.
        uri: Where to.
        config: Options.
        rank: Who writes, for the events.

    Raises:
        CheckpointError: If ``torch.save`` can't write ``value``.
        StoreError: If the store refuses or stays unreachable. As with any failure, nothing changes
            at the location.
    """
    store, key = check_destination(uri, config)
    expected = _size_of(value)
    stats = TransferStats(str(uri), rank, expected)
    with Span("upload", str(uri), rank) as span:
        try:
            write = functools.partial(_dump, value, uri=str(uri))
            upload_stream(store, key, write, config, stats, expected=expected)
        finally:
            span.bytes = stats.snapshot().bytes
            forget_listings()
    return stats.snapshot()


def _dump(value: Any, stream: UploadStream, uri: str) -> None:
    try:
        torch.save(value, cast(IO[bytes], stream))
    except Exception as exc:
        if stream.failure is not None or isinstance(
            exc, (CloudCheckpointError, Warning, MemoryError, torch.OutOfMemoryError)
        ):
            raise
        raise CheckpointError(
            "torch.save can't write this state: remove or convert what it names",
            uri=uri,
            cause=exc,
        ) from exc


def _size_of(value: Any) -> int:
    """About how many bytes ``torch.save`` will write."""
    storages: dict[int, int] = {}
    waiting, seen = [value], set[int]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            with contextlib.suppress(Exception):  # subclasses without a storage
                storage = value.untyped_storage()
                storages[storage._cdata] = max(storage.nbytes(), value.nbytes)
        elif isinstance(value, (Mapping, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            waiting.extend(value.values() if isinstance(value, Mapping) else value)
    return sum(storages.values()) + 1024 * (len(storages) + 1)
