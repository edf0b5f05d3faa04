"""Where each item of a checkpoint lies, and the checksums of its bytes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ItemRecord", "ObjectRecord"]


@dataclass(frozen=True, slots=True)
class ObjectRecord:
    """An object of the checkpoint: its name beneath the prefix, bytes, checksum."""

    name: str
    size: int
    checksum: int


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
        checksums: Of each block, packed.
    """

    object: ObjectRecord
    offset: int
    length: int
    raw_offset: int
    raw_length: int
    dtype: str | None
    shape: tuple[int, ...]
    block_size: int
    checksums: bytes
