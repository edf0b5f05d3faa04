"""Where each item of a checkpoint lies, and the checksums of its bytes."""

from __future__ import annotations

import struct
from dataclasses import dataclass

__all__ = ["ItemRecord", "ObjectRecord", "pack_crcs", "unpack_crcs"]


@dataclass(frozen=True, slots=True)
class ObjectRecord:
    """An object of the checkpoint: its name beneath the prefix, bytes, CRC32C."""

    name: str
    size: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class ItemRecord:
    """An item in an object. All offsets count from the object's first byte.

    Attributes:
        object: The object it lies in.
        offset: Its first byte, envelope included: what torch's readers are given.
        length: Its bytes, envelope included.
        raw_offset: The first byte of the data proper: a tensor's elements in row-major order, or
            all of the item if it is no plain tensor.
        raw_length: The bytes of the data proper.
        dtype: The element type without ``torch.``, or None if the item is no plain tensor.
        shape: The shape of the tensor.
        block_size: Bytes of raw data that share a checksum.
        crcs: The CRC32C of each block, four little-endian bytes each.
    """

    object: ObjectRecord
    offset: int
    length: int
    raw_offset: int
    raw_length: int
    dtype: str | None
    shape: tuple[int, ...]
    block_size: int
    crcs: bytes


def pack_crcs(crcs: tuple[int, ...]) -> bytes:
    """Checksums as they are stored."""
    return struct.pack(f"<{len(crcs)}I", *crcs)


def unpack_crcs(packed: bytes) -> tuple[int, ...]:
    """The reverse of :func:`pack_crcs`."""
    return struct.unpack(f"<{len(packed) // 4}I", packed)
