"""Locates the tensors in checkpoint items that are zip archives of ``torch.save``.

The directory of an archive is in its last bytes, and the description of the tensor in its first
ones. So a few KiB of each item are enough to locate the tensor's bytes, without an index.
"""

from __future__ import annotations

import functools
import io
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from cloudckpt.checkpoint.envelope import unwarned
from cloudckpt.checkpoint.pickles import Stub, unpickle
from cloudckpt.config import Config
from cloudckpt.errors import CheckpointCorruptError
from cloudckpt.stores.base import RangeReader
from cloudckpt.transfer.boxes import is_row_major
from cloudckpt.transfer.download import download, raise_it
from cloudckpt.transfer.landing import BytesSink, StoredBytes, Wanted
from cloudckpt.transfer.stats import TransferStats

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["StoredTensor", "TensorDescription", "describe_tensor", "locate"]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A plain tensor in a checkpoint: the byte range of its row-major elements, dtype and shape."""

    elements: StoredBytes
    dtype: torch.dtype
    shape: tuple[int, ...]


_EDGE = 4096
"""Bytes read at either end of an item: torch's directory takes about 700, as do
the first records.
"""

_ENCRYPTED = 1  # flag of an encrypted record
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")


def locate(
    store: RangeReader,
    items: Sequence[StoredBytes],
    config: Config,
    stats: TransferStats,
    damaged: Callable[[CheckpointCorruptError], None] = raise_it,
) -> Mapping[StoredBytes, StoredTensor | None]:
    """Locates the plain tensors in items that have no index.

    Args:
        store: The store of the items.
        items: The byte ranges of the items.
        config: Options.
        stats: Counts what is read.
        damaged: Called with the error of each item that can't be read.

    Returns:
        For each item its tensor, or None for an item that only ``torch.load`` can read.
    """
    edges: dict[StoredBytes, tuple[BytesSink, BytesSink]] = {}
    wanted: list[Wanted] = []
    for item in dict.fromkeys(items):
        edge = min(_EDGE, item.nbytes)
        head, tail = edges[item] = BytesSink(edge), BytesSink(edge)
        wanted.append(Wanted(item, 0, edge, head, True))
        wanted.append(Wanted(item, item.nbytes - edge, item.nbytes, tail, True))
    download(store, wanted, config, stats, damaged=damaged)
    return {
        item: _parse(item, bytes(head.data), bytes(tail.data))
        for item, (head, tail) in edges.items()
    }


def _parse(item: StoredBytes, head: bytes, tail: bytes) -> StoredTensor | None:
    try:
        return _found(item, head, tail)
    except Exception:  # noqa: BLE001 - zipfile raises errors of many kinds for what is damaged
        return None


class _LastBytes(io.RawIOBase):
    """A read-only file of which only the last bytes can be read."""

    def __init__(self, data: bytes, size: int) -> None:
        self._data, self._size, self._at = io.BytesIO(data), size, size
        self._first = size - len(data)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        if self._at < self._first:
            raise ValueError(
                "only the last bytes of this zip archive were read, and an earlier byte is needed"
            )
        self._data.seek(self._at - self._first)
        count = self._data.readinto(buffer)
        self._at += count
        return count


def _found(item: StoredBytes, head: bytes, tail: bytes) -> StoredTensor:
    with zipfile.ZipFile(_LastBytes(tail, item.nbytes)) as archive:  # this reads the directory only
        entries = {info.filename: info for info in archive.infolist()}

    def start_of(info: zipfile.ZipInfo) -> int:
        at = info.header_offset
        if at < 0 or info.compress_type != zipfile.ZIP_STORED or info.flag_bits & _ENCRYPTED:
            raise ValueError("a zip record is compressed or encrypted, or its offset is negative")
        *_, name_length, extra_length = _LOCAL_HEADER.unpack_from(head, at)
        return int(at + _LOCAL_HEADER.size + name_length + extra_length)

    def content_of(info: zipfile.ZipInfo) -> bytes:
        start = start_of(info)
        content = head[start : start + info.file_size]
        if zlib.crc32(content) != info.CRC:
            raise ValueError(
                "a zip record does not match its CRC, or is not within the bytes that were read"
            )
        return content

    pickled = next(name for name in entries if name.endswith("data.pkl"))
    root = pickled.removesuffix("data.pkl")
    order = content_of(entries[f"{root}byteorder"]) if f"{root}byteorder" in entries else b"little"
    described = describe_tensor(content_of(entries[pickled]))
    if described is None or not described.is_row_major or order != b"little":
        raise ValueError("the pickle does not describe a row-major, little-endian tensor")
    info = entries[f"{root}data/{described.record}"]
    begin, skipped = start_of(info), described.storage_offset * described.dtype.itemsize
    numel = math.prod(described.shape)
    nbytes = numel * described.dtype.itemsize
    if torch.Size(described.shape).numel() != numel:
        raise ValueError("the tensor has more elements than torch can count")
    if skipped + nbytes > info.file_size or begin + info.file_size > item.nbytes:
        raise ValueError("the tensor's bytes lie outside of its zip record")
    elements = replace(item, offset=item.offset + begin + skipped, nbytes=nbytes)
    return StoredTensor(elements, described.dtype, described.shape)


@dataclass(frozen=True)
class TensorDescription:
    """The description of a plain tensor in ``data.pkl``.

    Attributes:
        dtype: Element type.
        record: The name of the zip record of its storage, beneath ``data/``.
        storage_offset: The tensor's first element in the storage, counted in elements.
        shape: The tensor's shape.
        stride: The tensor's strides, in elements.
    """

    dtype: torch.dtype
    record: str
    storage_offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def is_row_major(self) -> bool:
        """Whether the elements are in row-major order without gaps."""
        return is_row_major(self.shape, self.stride)


def describe_tensor(data: bytes) -> TensorDescription | None:
    """Parses ``data.pkl``; returns None if it describes anything but a plain tensor."""
    try:
        return _plain_tensor(unpickle(data, persistent=True))
    except Exception:  # noqa: BLE001 - whatever it is, torch.load will tell
        return None


@functools.cache
def _type_of_storage(name: str) -> Any:
    """Returns the element type of a torch storage class, such as ``BFloat16Storage``."""
    if not name.endswith("Storage"):
        raise ValueError(f"{name} is not a storage class of torch")
    with unwarned():  # storage classes are deprecated, and torch.save still uses them
        return getattr(torch, name.rpartition(".")[2]).dtype


def _plain_tensor(described: Stub) -> TensorDescription:
    """Describes the plain tensor that an unpickled call of ``torch._utils._rebuild_*`` would make.

    Raises:
        ValueError: If it is not a plain tensor.
    """
    if described.name == "torch._utils._rebuild_parameter":
        described = described.arguments[0]
    version = described.name.removeprefix("torch._utils._rebuild_tensor_")
    storage, first, shape, stride, _, _, *more = described.arguments
    _, kind, record, _, _ = storage.arguments[0]
    # version 3 has an untyped storage, and names the element type separately
    dtype = more.pop(0) if version == "v3" else _type_of_storage(kind.name)
    is_plain = version in ("v2", "v3") and described.is_call and not any(more)
    if not is_plain or type(storage) is not Stub or not isinstance(dtype, torch.dtype):
        raise ValueError(
            "the pickle describes no plain tensor: it is of another kind, or has attributes or "
            "metadata, such as the conjugate bit"
        )
    numbers = (first, *shape, *stride)
    if len(shape) != len(stride) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError("the tensor's offset, shape or strides are not valid numbers")
    return TensorDescription(dtype, record, first, tuple(shape), tuple(stride))
