"""How a tensor is stored: whether it can be, in which form, and from which memory it is sent."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cloudckpt.checkpoint.envelope import envelope, has_stored_form
from cloudckpt.checkpoint.index import LONGEST_EDGE
from cloudckpt.checkpoint.object_index import code_of
from cloudckpt.checkpoint.object_plan import (
    STATE,
    Destination,
    ObjectPlan,
    StoredForm,
    send,
    sending_group,
)
from cloudckpt.checkpoint.objects import WrittenObject
from cloudckpt.checkpoint.pending import Pending
from cloudckpt.checkpoint.torch_private import create_chunk_list, declared_shards, declares_shards
from cloudckpt.errors import UnsupportedTensorError
from cloudckpt.stores.base import ObjectStore
from cloudckpt.transfer.memory import READABLE, has_memory, is_plain, memory_at
from cloudckpt.transfer.packing import PACKED_BELOW
from cloudckpt.transfer.parts import Piece
from cloudckpt.transfer.staging import StagingPool
from cloudckpt.transfer.stats import TransferStats

__all__ = [
    "Layout",
    "Memory",
    "Sender",
    "check_placements",
    "check_shards",
    "check_supported",
    "form_of",
    "send_here",
    "small_form_of",
    "travels_as_bytes",
]


@functools.lru_cache(maxsize=8192)
def form_of(dtype: torch.dtype, shape: tuple[int, ...]) -> StoredForm | None:
    """Returns how a strided tensor is stored; None if an object's index can't describe the tensor.

    In that case the tensor has to be stored as a pickle.
    """
    around, code = envelope(dtype, shape), code_of(dtype)
    if code is None or max(len(around.head), len(around.tail)) > LONGEST_EDGE:
        return None
    return StoredForm(around.head, math.prod(shape) * dtype.itemsize, around.tail, code)


def small_form_of(tensor: torch.Tensor) -> StoredForm | None:
    """Returns how a small, contiguous tensor in host memory is stored; None for any other tensor.

    It also returns None if the tensor has no elements, is a negated or conjugate view, or can't be
    described by the index (:func:`form_of`).
    """
    if tensor.is_quantized or tensor.layout != torch.strided:
        return None
    if not 0 < tensor.numel() * tensor.itemsize < PACKED_BELOW or not is_plain(tensor):
        return None
    return form_of(tensor.dtype, tuple(tensor.shape))


def check_supported(tensor: torch.Tensor, fqn: str) -> None:
    """Refuses a tensor that can't be stored faithfully, before anything is sent.

    Raises:
        UnsupportedTensorError: For quantized, sparse, nested and meta tensors, for element types
            that torch can't save, and for tensors without memory.
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
        kind = f"a tensor of layout {tensor.layout}: save its to_dense() or its components instead"
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
    """Refuses a DTensor with a partial placement, whose values no rank has.

    Raises:
        UnsupportedTensorError: If a placement is partial.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedTensorError(
            f"{fqn} is a DTensor with a partial placement, so that no rank has its values: "
            "redistribute it to Replicate() or Shard() before it is saved or loaded",
            item=fqn,
        )


def check_shards(value: Any, fqn: str) -> None:
    """Refuses a tensor whose attributes declare invalid parts of a larger tensor.

    Raises:
        UnsupportedTensorError: If torch does not accept the declared parts.
    """
    if not declares_shards(value):
        return
    try:
        declared_shards(value)
        for chunk in create_chunk_list(value)[:1]:  # all of them would take quadratic time
            find_tensor_shard(value, MetadataIndex(fqn, chunk.offsets, 0))
    except Exception as exc:
        raise UnsupportedTensorError(
            "the attributes global_shape, global_offsets, local_offsets and local_sizes of "
            f"{fqn} do not describe parts of a larger tensor: correct them",
            item=fqn,
            cause=exc,
        ) from exc


def travels_as_bytes(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor wraps other tensors; having no memory itself, it is pickled."""
    return type(tensor) is not torch.Tensor and bool(is_traceable_wrapper_subclass(tensor))


class Memory(Protocol):
    """The memory that plans refer to, which also takes bytes that are made during the save.

    Attributes:
        pool: Memory for copies that are being sent.
        is_private: Whether no other code writes to this memory during the save.
    """

    is_private: bool

    @property
    def pool(self) -> StagingPool: ...

    def place_of(self, address: int) -> int | None:
        """Returns the offset of an address in the state's buffer; None if it is outside."""

    def put(self, view: memoryview, owner: object) -> tuple[int, int]:
        """Adds bytes that ``owner`` keeps alive; returns a buffer's number and their offset."""

    def put_strided(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Adds a tensor's elements in row-major order; returns what :meth:`put` returns."""


class Layout(Protocol):
    """The items of a rank, which are assigned to objects while they are sent."""

    def plans(self, memory: Memory) -> Iterator[ObjectPlan]:
        """Yields the plans of the objects, in the order in which they are to be carried out.

        Args:
            memory: Takes the bytes of items that are made meanwhile, such as pickles.
        """

    def pending(self, template: Pending) -> Pending:
        """Returns ``template`` with the locations of all items, after :meth:`plans` has ended."""


class Sender(Protocol):
    """Sends the items of a layout.

    Attributes:
        outlives: Whether the sender goes on when this trainer ends before the commit.
    """

    @property
    def outlives(self) -> bool: ...

    def __call__(
        self,
        destination: Destination,
        store: ObjectStore,
        layout: Layout,
        stats: TransferStats,
        pending: Pending | None,
    ) -> tuple[WrittenObject, ...]:
        """Sends the objects; returns them once the store has all of them.

        If it fails, it deletes the objects that it has written, as far as possible.

        Args:
            destination: The checkpoint, the rank, and options.
            store: The destination's store.
            layout: The items.
            stats: Counts the bytes sent.
            pending: A template of the record that is left in the store if this trainer ends before
                the commit. It has no locations of items: the sender adds them, by
                :meth:`Layout.pending`. None to leave nothing.
        """


_KEPT = 1


class _OwnMemory:
    """The memory of this process, for plans that it carries out itself.

    The buffer of the state is the whole address space, so its offsets are addresses. A second
    buffer keeps other bytes, such as pickles, until they are sent.
    """

    is_private = False

    def __init__(self, pool: StagingPool) -> None:
        self.pool = pool
        self._kept: dict[int, Iterable[Piece]] = {}
        self._count = 0

    def place_of(self, address: int) -> int:
        return address

    def put(self, view: memoryview, owner: object) -> tuple[int, int]:
        return self._keep((Piece(view, owner=owner),))

    def put_strided(self, tensor: torch.Tensor) -> tuple[int, int]:
        return self._keep(self.pool.pieces(tensor))

    def _keep(self, pieces: Iterable[Piece]) -> tuple[int, int]:
        self._count += 1
        self._kept[self._count] = pieces
        return _KEPT, self._count

    def views(self, plan: ObjectPlan) -> Iterator[memoryview]:
        for start, form in zip(plan.starts, plan.forms, strict=True):
            if plan.buffer == STATE:
                yield memory_at(start, form.nbytes, READABLE)
            else:
                for piece in self._kept.pop(start):
                    yield piece.view

    def pieces(self, buffer: int, start: int, nbytes: int) -> Iterable[Piece]:
        return self._kept.pop(start)


class _SendHere:
    """Sends a layout's items by threads of this process, while the layout still makes plans."""

    outlives = False

    def __call__(
        self,
        destination: Destination,
        store: ObjectStore,
        layout: Layout,
        stats: TransferStats,
        pending: Pending | None = None,
    ) -> tuple[WrittenObject, ...]:
        group = sending_group(destination, store)
        memory = _OwnMemory(StagingPool(destination.config.memory_budget, group.cancellation))
        return send(destination, store, layout.plans(memory), memory, group, stats)


send_here = _SendHere()
