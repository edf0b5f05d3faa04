"""Lays out the items of one rank in objects: envelope, raw data, envelope, and so on."""

from __future__ import annotations

import functools
import io
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cloudckpt.checkpoint.envelope import envelope, has_stored_form
from cloudckpt.checkpoint.index import LONGEST_EDGE, index_growth
from cloudckpt.checkpoint.object_index import code_of
from cloudckpt.checkpoint.sending import OpenObject
from cloudckpt.checkpoint.torch_private import create_chunk_list, declared_shards, declares_shards
from cloudckpt.checksum import BlockChecksums, ChecksumAlgorithm, block_size_for
from cloudckpt.errors import UnsupportedTensorError
from cloudckpt.transfer.boxes import ALIGNMENT, padding
from cloudckpt.transfer.memory import bytes_of, has_memory, is_plain
from cloudckpt.transfer.packing import PACKED_BELOW, Packing
from cloudckpt.transfer.parts import Piece
from cloudckpt.transfer.staging import StagingPool

__all__ = [
    "Place",
    "ShardWriter",
    "SmallForm",
    "check_placements",
    "check_shards",
    "check_supported",
    "travels_as_bytes",
]

_ZEROS = bytes(ALIGNMENT)


class Place(NamedTuple):
    """Where an item was written: the object's number, and the byte range including the envelope."""

    object: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class SmallForm:
    """The form of a packed tensor in an object, regardless of its values.

    Attributes:
        head: The envelope before it.
        size: Its bytes, without the envelope.
        tail: The envelope after it, with the zeros up to the next item.
        length: Its bytes with the envelope, without the zeros.
        dtype: The number of its element type in the index.
        growth: By how many bytes it lengthens the index.
    """

    head: bytes
    size: int
    tail: bytes
    length: int
    dtype: int
    growth: int

    @classmethod
    def of(cls, tensor: torch.Tensor, algorithm: ChecksumAlgorithm) -> SmallForm | None:
        """The form of a tensor; None if not packed, packed differently, or impossible to store."""
        if tensor.is_quantized or tensor.layout != torch.strided:
            return None
        if not 0 < tensor.numel() * tensor.itemsize < PACKED_BELOW or not is_plain(tensor):
            return None
        return _small_form(tensor.dtype, tuple(tensor.shape), algorithm)


@functools.lru_cache(maxsize=8192)
def _small_form(
    dtype: torch.dtype, shape: tuple[int, ...], algorithm: ChecksumAlgorithm
) -> SmallForm | None:
    around, code, size = envelope(dtype, shape), code_of(dtype), math.prod(shape) * dtype.itemsize
    if code is None or max(len(around.head), len(around.tail)) > LONGEST_EDGE:
        return None
    length = len(around.head) + size + len(around.tail)
    tail = around.tail + _ZEROS[: padding(length)]
    return SmallForm(around.head, size, tail, length, code, index_growth(size, algorithm))


def check_supported(tensor: torch.Tensor, fqn: str) -> None:
    """Refuses what can't be stored faithfully, before anything is sent.

    Raises:
        UnsupportedTensorError: For quantized, sparse, nested and meta tensors, and for those
            without memory.
    """
    kind = None
    if tensor.is_quantized:
        kind = "a quantized tensor: save its int_repr(), scale and zero point instead"
    elif tensor.is_meta:
        kind = (
            "a meta tensor, which has no data: give the model memory and values before it is "
            "saved, by model.to_empty(device=...) and its initialization or a load"
        )
    elif tensor.is_nested:
        kind = "a nested tensor: save its components instead"
    elif tensor.layout != torch.strided:
        kind = f"a tensor of layout {tensor.layout}: save its indices and values instead"
    elif not has_stored_form(tensor.dtype) or str(tensor.dtype).startswith("torch.bits"):
        kind = f"of type {tensor.dtype}, which torch can't save: view it as another type"
    elif not travels_as_bytes(tensor) and not has_memory(tensor):
        kind = (
            "a tensor whose memory was freed or never allocated: gather or load it before the "
            "save, or leave it out"
        )
    if kind is not None:
        raise UnsupportedTensorError(f"{fqn} is {kind}", item=fqn)


def check_placements(tensor: DTensor, fqn: str) -> None:
    """Refuses a DTensor whose values no rank has.

    Raises:
        UnsupportedTensorError: If a placement is partial.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedTensorError(
            f"{fqn} is a DTensor with a partial placement, so that no rank has its values: "
            "redistribute it to Replicate() or Shard() before the save",
            item=fqn,
        )


def check_shards(value: Any, fqn: str) -> None:
    """Refuses a tensor that declares by invalid attributes which parts of a larger one it holds.

    Raises:
        UnsupportedTensorError: If torch can't understand them.
    """
    if not declares_shards(value):
        return
    try:
        declared_shards(value)
        for chunk in create_chunk_list(value)[:1]:  # looking all of them up is quadratic
            find_tensor_shard(value, MetadataIndex(fqn, chunk.offsets, 0))
    except Exception as exc:
        raise UnsupportedTensorError(
            "the attributes global_shape, global_offsets, local_offsets and local_sizes of "
            f"{fqn} do not describe parts of a larger tensor: {exc}",
            item=fqn,
            cause=exc,
        ) from exc


def travels_as_bytes(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no storage of its own, so that only ``torch.save`` can write it."""
    return type(tensor) is not torch.Tensor and bool(is_traceable_wrapper_subclass(tensor))


class ShardWriter:
    """Appends items to objects, and starts the next object when one is full.

    There are two lanes, each with its own object: for data sent straight from where it lies, and
    for data that passes through the staging pool (accelerator and strided tensors, small items).
    The parts of the latter must be small enough for the pool.

    Args:
        open_object: Begins an object for a lane (True: staged).
        pool: Memory for data that can't be sent from where it lies.
        checksum: The algorithm that the store verifies.
    """

    def __init__(
        self,
        open_object: Callable[[bool], OpenObject],
        pool: StagingPool,
        *,
        checksum: ChecksumAlgorithm,
    ) -> None:
        self._open_object = open_object
        self._pool = pool
        self._checksum = checksum
        self._lanes: dict[bool, OpenObject] = {}
        self._packer: Packing | None = None

    def add_tensor(
        self,
        tensor: torch.Tensor,
        fqn: str,
        *,
        expected: Sequence[int] = (),
        copied: Callable[[memoryview], None] | None = None,
    ) -> Place:
        """Writes a strided tensor with any strides, on any device.

        Args:
            tensor: The tensor.
            fqn: Its name, for messages.
            expected: The checksums of its blocks, if they were computed before. If they do not
                match what is sent, the save ends with a TensorChangedError.
            copied: Receives the copy of a tensor that is small enough to be packed.
        """
        shape, nbytes = tuple(tensor.shape), tensor.numel() * tensor.itemsize
        plain = is_plain(tensor)
        around = envelope(tensor.dtype, shape)
        length = len(around.head) + nbytes + len(around.tail)
        dtype, head = code_of(tensor.dtype), len(around.head)
        if dtype is None or max(head, len(around.tail)) > LONGEST_EDGE:
            buffer = io.BytesIO()
            torch.save(tensor.contiguous(), buffer)
            return self.add_bytes(buffer.getvalue())
        if plain and nbytes < PACKED_BELOW:
            raw = bytes_of(tensor)
            target, offset, packed = self._pack((around.head, raw, around.tail), length)
            # checksum of the copy: the tensor may have changed since
            copy = packed[head : head + nbytes]
            if copied is not None:
                copied(copy)
            only = self._checksum.of(copy)
            target.add(head, len(around.tail), dtype, nbytes, only)
            return Place(target.ordinal, offset, length)
        checksums = BlockChecksums(
            self._checksum, block_size_for(nbytes), expected, reuse=plain, item=fqn
        )
        target, offset = self._room_for(length, staged=not plain)
        upload = target.upload
        upload.write(Piece(memoryview(around.head)))
        for piece in self._pieces(tensor, checksums, plain):
            piece.item = fqn
            upload.write(piece)
        upload.write(Piece(memoryview(around.tail)))
        target.add(head, len(around.tail), dtype, nbytes, checksums)
        return Place(target.ordinal, offset, length)

    def add_small(
        self,
        forms: Sequence[SmallForm],
        tensors: Sequence[torch.Tensor],
        copied: Callable[[int, memoryview], None] | None = None,
    ) -> list[Place]:
        """Writes tensors in host memory as :meth:`add_tensor` would, at a fraction of the cost.

        Args:
            forms: Their forms.
            tensors: The tensors.
            copied: Receives the number and the copy of each tensor, if copies are made here.
        """
        length = sum([form.length for form in forms]) + ALIGNMENT * len(forms)
        lane = self._lanes.get(True)
        if lane is None or self._packer is None:
            lane, _ = self._room_for(length, staged=True)
        packer = self._packer
        assert packer is not None
        growth = sum([form.growth for form in forms])
        if not lane.has_room(packer.position, length, growth):
            return [
                self.add_tensor(
                    tensor, "a small tensor", copied=copied and functools.partial(copied, number)
                )
                for number, tensor in enumerate(tensors)
            ]
        addresses = [tensor.data_ptr() for tensor in tensors]
        offsets, checksums = packer.append_all(forms, addresses, self._checksum_of(copied))
        lane.add_all(
            [len(form.head) for form in forms],
            [form.length - len(form.head) - form.size for form in forms],
            [form.dtype for form in forms],
            [form.size for form in forms],
            checksums,
            growth,
        )
        return [
            Place(lane.ordinal, offset, form.length)
            for form, offset in zip(forms, offsets, strict=True)
        ]

    def _checksum_of(
        self, copied: Callable[[int, memoryview], None] | None
    ) -> Callable[[memoryview], int]:
        """A function that computes the checksums of copies, after passing each to ``copied``."""
        if copied is None:
            return self._checksum.of
        numbers = itertools.count()

        def checksum(copy: memoryview) -> int:
            copied(next(numbers), copy)
            return self._checksum.of(copy)

        return checksum

    def add_bytes(self, data: bytes) -> Place:
        """Writes bytes as they are."""
        length, view = len(data), memoryview(data)
        if length < PACKED_BELOW:
            target, offset, _ = self._pack((view,), length)
            only = self._checksum.of(view)
            target.add(0, 0, 0, length, only)
            return Place(target.ordinal, offset, length)
        checksums = BlockChecksums(self._checksum, block_size_for(length))
        target, offset = self._room_for(length, staged=False)
        target.upload.write(Piece(view, checksums, owner=data))
        target.add(0, 0, 0, length, checksums)
        return Place(target.ordinal, offset, length)

    def close(self) -> None:
        """Ends the last objects."""
        if self._packer is not None:
            self._packer.flush()
        for lane in self._lanes.values():
            lane.end()

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

    def _pack(
        self, buffers: tuple[bytes | memoryview, ...], length: int
    ) -> tuple[OpenObject, int, memoryview]:
        """Adds a small item to the staged lane; returns where it went, and its copy."""
        lane, packer = self._lanes.get(True), self._packer
        if lane is None or packer is None or not lane.has_room(packer.position, length):
            lane, _ = self._room_for(length, staged=True)
            packer = self._packer
        assert packer is not None
        return lane, *packer.append(buffers, length)

    def _room_for(self, length: int, *, staged: bool) -> tuple[OpenObject, int]:
        """The object that the next item goes into, and an aligned position in it."""
        if staged and self._packer is not None:
            self._packer.flush()
        lane = self._lanes.get(staged)
        if lane is not None:
            gap = padding(lane.upload.position)
            if not lane.has_room(lane.upload.position, length):
                lane.end()
                lane = None
            elif gap:
                lane.upload.write(Piece(memoryview(_ZEROS)[:gap]))
        if lane is None:
            lane = self._lanes[staged] = self._open_object(staged)
            if staged:
                self._packer = lane.packing(lane.upload, self._pool)
        return lane, lane.upload.position
