"""Locates the tensors in checkpoint items that are zip archives of ``torch.save``.

The directory of an archive is in its last bytes, and the description of the tensor in its first
bytes. So a few KiB of each item are enough to locate the tensor's bytes, without an index.
"""

from __future__ import annotations

import functools
import io
import math
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cloudckpt.checkpoint.envelope import unwarned
from cloudckpt.checkpoint.pickles import Stub, Unpickler
from cloudckpt.config import Config
from cloudckpt.stores.base import RangeReader
from cloudckpt.transfer.boxes import is_row_major
from cloudckpt.transfer.download import download
from cloudckpt.transfer.landing import BytesSink, StoredBytes, Wanted
from cloudckpt.transfer.stats import TransferStats

__all__ = ["StoredTensor", "describe_tensor", "locate"]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a checkpoint that is stored as plain bytes.

    Attributes:
        elements: The byte range of its elements, which are in row-major order.
        dtype: The element type.
        shape: The shape.
    """

    elements: StoredBytes
    dtype: torch.dtype
    shape: tuple[int, ...]


_EDGE = 4096
"""Bytes that are read at each end of an item.

The zip directory at the end takes about 700 bytes, and so do the records before the tensor's bytes.
"""

_ENCRYPTED = 1  # flag of an encrypted record
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")


def locate(
    store: RangeReader,
    items: Sequence[StoredBytes],
    config: Config,
    stats: TransferStats,
) -> Mapping[StoredBytes, StoredTensor | None]:
    """Locates the plain tensors in items that ``torch.save`` has written.

    It reads at most 4 KiB at either end of each item.

    Args:
        store: The store of the items.
        items: The byte ranges of the items in their objects.
        config: Options.
        stats: Counts the bytes read.

    Returns:
        For each item its tensor; None for an item that is damaged, or that only ``torch.load`` can
        read.

    Raises:
        CheckpointCorruptError: If an object of an item is missing, too short, or was replaced.
        StoreError: If the store refuses or stays unreachable.
    """
    edges: dict[StoredBytes, tuple[BytesSink, BytesSink]] = {}
    wanted: list[Wanted] = []
    for item in dict.fromkeys(items):
        edge = min(_EDGE, item.nbytes)
        head, tail = edges[item] = BytesSink(edge), BytesSink(edge)
        wanted.append(Wanted(item, 0, edge, head, True))
        wanted.append(Wanted(item, item.nbytes - edge, item.nbytes, tail, True))
    download(store, wanted, config, stats)
    return {
        item: _tensor_in(item, bytes(head.data), bytes(tail.data))
        for item, (head, tail) in edges.items()
    }


def _tensor_in(item: StoredBytes, head: bytes, tail: bytes) -> StoredTensor | None:
    """Returns the plain tensor in an item, given the item's ends; None if there is none."""
    try:
        return _found(item, head, tail)
    except Exception:  # noqa: BLE001 - zipfile and damaged pickles raise errors of many classes
        return None


class _LastBytes(io.BytesIO):
    """A read-only file that has only its last bytes in memory, at their offsets in the whole file.

    Seeking from the start to an offset before these bytes raises ValueError.
    """

    def __init__(self, data: bytes, size: int) -> None:
        super().__init__(data)
        self._first = size - len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        super().seek(offset - (0 if whence else self._first), whence)
        return self.tell()

    def tell(self) -> int:
        return super().tell() + self._first


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
    if order != b"little":
        raise ValueError("the tensor is not little-endian")
    record, dtype, shape, first = describe_tensor(content_of(entries[pickled]))
    info = entries[f"{root}data/{record}"]
    begin, skipped = start_of(info), first * dtype.itemsize
    numel = math.prod(shape)
    nbytes = numel * dtype.itemsize
    if torch.Size(shape).numel() != numel:
        raise ValueError("the tensor has more elements than torch can count")
    if skipped + nbytes > info.file_size or begin + info.file_size > item.nbytes:
        raise ValueError("the tensor's bytes lie outside of its zip record")
    elements = replace(item, offset=item.offset + begin + skipped, nbytes=nbytes)
    return StoredTensor(elements, dtype, shape)


@functools.cache
def _type_of_storage(name: str) -> Any:
    """Returns the element type of a storage class of this name, such as ``torch.BFloat16Storage``.

    Raises:
        ValueError: If the name does not end with ``Storage``.
        AttributeError: If torch has no such class, or it has no element type.
    """
    if not name.endswith("Storage"):
        raise ValueError(f"{name} is not a storage class of torch")
    with unwarned():  # storage classes are deprecated, and torch.save still uses them
        return getattr(torch, name.rpartition(".")[2]).dtype


def describe_tensor(data: bytes) -> tuple[str, torch.dtype, tuple[int, ...], int]:
    """Parses the description of a tensor in an archive of ``torch.save``, its record ``data.pkl``.

    The tensor is not made: ``data.pkl`` pickles a call of ``torch._utils._rebuild_*``, and only the
    arguments are read.

    Returns:
        The name of the zip record of its storage, beneath ``data/``; the element type and the shape
        of the tensor; and the number of its first element in the storage.

    Raises:
        ValueError: If the record does not describe a plain row-major tensor; malformed pickles may
            raise other errors.
    """
    unpickler = Unpickler(io.BytesIO(data))
    unpickler.persistent_load = Stub  # type: ignore[method-assign]
    described: Stub = unpickler.load()
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
            "the pickle does not describe a plain tensor: it is another value, or has attributes "
            "or metadata, such as the conjugate bit"
        )
    if not all(type(n) is int and n >= 0 for n in (first, *shape, *stride)):
        raise ValueError("the tensor's offset, shape or strides are not valid numbers")
    if not is_row_major(shape, stride):  # raises if they differ in length
        raise ValueError("the tensor's elements are not in row-major order without gaps")
    return record, dtype, tuple(shape), first
