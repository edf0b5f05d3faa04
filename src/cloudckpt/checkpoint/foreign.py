"""Finds the raw data in items that carry no manifest: checkpoints of torch and other writers.

Each item is a zip archive of its own. Its directory stands in its last bytes and the description of
the tensor in its first ones; reading these few tells where the tensor's bytes are.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cloudckpt.checkpoint.pickles import describe_tensor
from cloudckpt.config import Config
from cloudckpt.stores.base import ObjectStore
from cloudckpt.transfer.download import download
from cloudckpt.transfer.landing import BytesSink, Source, Wanted
from cloudckpt.transfer.stats import TransferStats

__all__ = ["ForeignItem", "RawTensor", "locate"]

_EDGE = 4096
"""Bytes looked at on either side: torch's directory takes about 700, its first records as many."""

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")


@dataclass(frozen=True)
class ForeignItem:
    """An item as torch's metadata places it: object, first byte, bytes, and its name."""

    key: str
    offset: int
    length: int
    name: str


@dataclass(frozen=True)
class RawTensor:
    """Row-major elements in an object, ``offset`` bytes from its beginning."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def locate(
    store: ObjectStore, items: Sequence[ForeignItem], config: Config, stats: TransferStats
) -> Mapping[ForeignItem, RawTensor | None]:
    """Where the raw data of each item is; None for those that only ``torch.load`` can read."""
    edges: dict[ForeignItem, tuple[BytesSink, BytesSink]] = {}
    wanted: list[Wanted] = []
    for item in dict.fromkeys(items):
        source = Source(item.key, item.offset, item.length, None, None, item.name)
        edge = min(_EDGE, item.length)
        head, tail = edges[item] = BytesSink(edge), BytesSink(edge)
        wanted.append(Wanted(source, 0, edge, head, True))
        wanted.append(Wanted(source, item.length - edge, item.length, tail, True))
    download(store, wanted, config, stats)
    return {
        item: _parse(item, bytes(head.data), bytes(tail.data))
        for item, (head, tail) in edges.items()
    }


def _parse(item: ForeignItem, head: bytes, tail: bytes) -> RawTensor | None:
    try:
        return _found(item, head, tail)
    except Exception:  # noqa: BLE001 - zipfile raises errors of many kinds for what is damaged
        return None


def _found(item: ForeignItem, head: bytes, tail: bytes) -> RawTensor | None:
    with zipfile.ZipFile(_Edges(head, tail, item.length)) as archive:
        entries = {info.filename: info for info in archive.infolist()}
        root = next(name for name in entries if name.endswith("data.pkl"))
        root = root.removesuffix("data.pkl")
        described = describe_tensor(archive.read(root + "data.pkl"))
        order = archive.read(root + "byteorder") if root + "byteorder" in entries else b"little"
    if described is None or not described.is_row_major or order != b"little":
        return None
    info = entries.get(f"{root}data/{described.record}")
    if info is None or info.compress_type != zipfile.ZIP_STORED:
        return None
    at = info.header_offset
    header = head[at : at + _LOCAL_HEADER.size]
    if len(header) < _LOCAL_HEADER.size:
        return None
    *_, name_length, extra_length = _LOCAL_HEADER.unpack(header)
    begin = at + _LOCAL_HEADER.size + name_length + extra_length
    skipped = described.storage_offset * described.dtype.itemsize
    numel = math.prod(described.shape)
    if torch.Size(described.shape).numel() != numel:  # more than torch can count
        return None
    nbytes = numel * described.dtype.itemsize
    if skipped + nbytes > info.file_size or begin + info.file_size > item.length:
        return None
    return RawTensor(item.offset + begin + skipped, described.dtype, described.shape)


class _OutsideError(Exception):
    pass


class _Edges(io.RawIOBase):
    """A file of which only both ends are known."""

    def __init__(self, head: bytes, tail: bytes, length: int) -> None:
        self._head = head
        self._tail = tail
        self._length = length
        self._position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("before the beginning")
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        stop = self._length if size is None or size < 0 else self._position + size
        stop = min(stop, self._length)
        start, tail_start = self._position, self._length - len(self._tail)
        if stop <= len(self._head):
            data = self._head[start:stop]
        elif start >= tail_start:
            data = self._tail[start - tail_start : stop - tail_start]
        else:
            raise _OutsideError
        self._position = stop
        return data
