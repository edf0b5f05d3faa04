"""Turns the items of one rank into objects: envelope, raw data, envelope, and so on."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cloudckpt.checkpoint.envelope import envelope
from cloudckpt.checkpoint.records import ItemRecord, ObjectRecord, pack_crcs
from cloudckpt.checksum import BlockChecksums, block_size_for
from cloudckpt.errors import UnsupportedTensorError
from cloudckpt.transfer.memory import bytes_of, is_plain
from cloudckpt.transfer.parts import Piece
from cloudckpt.transfer.staging import StagingPool
from cloudckpt.transfer.upload import ObjectUpload

__all__ = ["OpenObject", "PendingItem", "ShardWriter", "check_supported", "travels_as_bytes"]

_ALIGNMENT = 64
_PADDING = bytes(_ALIGNMENT)


@dataclass(frozen=True)
class OpenObject:
    """An object under construction: its upload, its name, and the bytes that it can have."""

    upload: ObjectUpload
    name: str
    capacity: int


@dataclass
class PendingItem:
    """An item that was written, but whose object may not be complete."""

    upload: ObjectUpload
    name: str
    offset: int
    length: int
    raw_offset: int
    raw_length: int
    dtype: str | None
    shape: tuple[int, ...]
    checksums: BlockChecksums

    def record(self, objects: dict[str, ObjectRecord]) -> ItemRecord:
        """The record, once all uploads are complete; ``objects`` shares those of one object."""
        if self.name not in objects:
            upload = self.upload
            objects[self.name] = ObjectRecord(self.name, upload.position, upload.crc32c)
        return ItemRecord(
            object=objects[self.name],
            offset=self.offset,
            length=self.length,
            raw_offset=self.raw_offset,
            raw_length=self.raw_length,
            dtype=self.dtype,
            shape=self.shape,
            block_size=self.checksums.block_size,
            crcs=pack_crcs(self.checksums.finish(self.raw_length)),
        )


def check_supported(tensor: torch.Tensor, fqn: str) -> None:
    """Refuses what can't be stored faithfully, before anything is sent.

    Raises:
        UnsupportedTensorError: For quantized, sparse, nested and meta tensors.
    """
    kind = None
    if tensor.is_quantized:
        kind = "a quantized tensor: save its int_repr(), scale and zero point instead"
    elif tensor.is_meta:
        kind = "a meta tensor, which has no data: materialize it first"
    elif tensor.is_nested:
        kind = "a nested tensor: save its components instead"
    elif tensor.layout != torch.strided:
        kind = f"a tensor of layout {tensor.layout}: save its indices and values instead"
    if kind is not None:
        raise UnsupportedTensorError(f"{fqn} is {kind}", item=fqn)


def travels_as_bytes(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no storage of its own, so that only ``torch.save`` can write it."""
    return bool(is_traceable_wrapper_subclass(tensor))


class ShardWriter:
    """Appends items to objects, and starts the next object when one is full.

    There are two lanes, each with an object of its own: what is sent as it lies, and what passes
    through the staging pool. The parts of the latter must be small enough for the pool.

    Args:
        open_object: Begins the object of an ordinal (0, 1, …) for a lane (True: staged).
        pool: Memory for tensors that can't be sent as they lie.
        zip_crc32: Whether to fill in the CRC32 of the zip records.
    """

    def __init__(
        self,
        open_object: Callable[[int, bool], OpenObject],
        pool: StagingPool,
        *,
        zip_crc32: bool,
    ) -> None:
        self._open_object = open_object
        self._pool = pool
        self._zip_crc32 = zip_crc32
        self._opened = 0
        self._lanes: dict[bool, OpenObject] = {}

    def add_tensor(self, tensor: torch.Tensor) -> PendingItem:
        """Writes a strided tensor of any device and strides."""
        shape, nbytes = tuple(tensor.shape), tensor.numel() * tensor.itemsize
        around = envelope(tensor.dtype, shape)
        checksums = BlockChecksums(block_size_for(nbytes))
        length = len(around.head) + nbytes + len(around.tail)
        plain = is_plain(tensor)
        upload, name = self._room_for(length, staged=not plain)
        offset = upload.position
        upload.write(Piece(memoryview(around.head)))
        crc32 = 0
        for piece in self._pieces(tensor, checksums, plain):
            if self._zip_crc32:
                if piece.ready is not None:
                    piece.ready()
                crc32 = zlib.crc32(piece.view, crc32)
            upload.write(piece)
        if self._zip_crc32:
            around = envelope.__wrapped__(tensor.dtype, shape, crc32)
        upload.write(Piece(memoryview(around.tail)))
        raw_offset = offset + len(around.head)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return PendingItem(
            upload, name, offset, length, raw_offset, nbytes, dtype, shape, checksums
        )

    def add_bytes(self, data: memoryview, owner: object) -> PendingItem:
        """Writes bytes as they are."""
        checksums = BlockChecksums(block_size_for(data.nbytes))
        upload, name = self._room_for(data.nbytes, staged=False)
        offset = upload.position
        if data.nbytes:
            upload.write(Piece(data, checksums, owner=owner))
        return PendingItem(
            upload, name, offset, data.nbytes, offset, data.nbytes, None, (), checksums
        )

    def add_object(self, tensor: torch.Tensor) -> PendingItem:
        """Writes a tensor subclass without storage of its own, as ``torch.save`` does."""
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        return self.add_bytes(buffer.getbuffer(), buffer)

    def close(self) -> None:
        """Ends the last objects."""
        self._pool.close()
        for lane in self._lanes.values():
            lane.upload.close()

    def _pieces(
        self, tensor: torch.Tensor, checksums: BlockChecksums, plain: bool
    ) -> Iterable[Piece]:
        if not tensor.numel():
            return ()
        if plain:
            return (Piece(bytes_of(tensor), checksums, owner=tensor),)
        return self._staged(tensor, checksums)

    def _staged(self, tensor: torch.Tensor, checksums: BlockChecksums) -> Iterator[Piece]:
        for piece in self._pool.pieces(tensor):
            piece.checksums = checksums
            yield piece

    def _room_for(self, length: int, *, staged: bool) -> tuple[ObjectUpload, str]:
        """The object that the next item goes into, at an aligned position."""
        lane = self._lanes.get(staged)
        if lane is not None:
            padding = -lane.upload.position % _ALIGNMENT
            if lane.upload.position + padding + length > lane.capacity:
                lane.upload.close()
                lane = None
            elif padding:
                lane.upload.write(Piece(memoryview(_PADDING)[:padding]))
        if lane is None:
            lane = self._lanes[staged] = self._open_object(self._opened, staged)
            self._opened += 1
        return lane.upload, lane.name
