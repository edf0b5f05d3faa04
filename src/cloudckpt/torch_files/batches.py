"""How tensors of a file travel to all ranks: cut into batches that fit into memory."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from cloudckpt.config import MIB
from cloudckpt.dcp.failures import portable_errors
from cloudckpt.errors import CheckpointError, ShapeMismatchError, UnsupportedTensorError
from cloudckpt.torch_files.file_contents import FileContents, StoredTensor
from cloudckpt.torch_files.skeletons import Place
from cloudckpt.transfer.boxes import Box, row_major_slices, row_major_strides
from cloudckpt.transfer.landing import copy_into, narrow
from cloudckpt.transfer.memory import bytes_of

__all__ = [
    "Batch",
    "BatchReader",
    "Targets",
    "batches",
    "read_header",
    "room_for_batches",
    "write_header",
]

_ALIGNMENT = 64
_HEADER = 64 * 1024  # bytes before the data: the length of a pickled error, and the error
_LENGTH = 8
_REQUESTS = 16  # of a batch, about: with fewer, few connections would have work
_LEAST_REQUEST, _MOST_REQUEST = 4 * MIB, 16 * MIB


@dataclass(frozen=True)
class _Slice:
    """A box of a tensor, whose elements follow each other in row-major order; ``at`` a byte."""

    tensor: StoredTensor
    box: Box
    at: int

    @property
    def nbytes(self) -> int:
        return math.prod(length for _, length in self.box) * self.tensor.dtype.itemsize

    @property
    def first(self) -> int:
        """The first byte in the tensor."""
        strides = row_major_strides(self.tensor.shape)
        steps = zip(self.box, strides, strict=True)
        return sum(start * stride for (start, _), stride in steps) * self.tensor.dtype.itemsize

    def view(self, room: torch.Tensor) -> torch.Tensor:
        flat = room[self.at : self.at + self.nbytes].view(self.tensor.dtype)
        return flat.view([length for _, length in self.box])


@dataclass
class Batch:
    """Slices that are sent together, behind a header that can tell of a failure."""

    slices: list[_Slice] = field(default_factory=list)
    size: int = _HEADER

    def add(self, tensor: StoredTensor, box: Box) -> None:
        part = _Slice(tensor, box, self.size)
        self.slices.append(part)
        self.size += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT


def room_for_batches(limit: int, device: str) -> torch.Tensor:
    """Memory for batches of at most ``limit`` bytes, one after the other."""
    return torch.empty(limit, dtype=torch.uint8, device=device)


def batches(tensors: Iterable[StoredTensor], limit: int) -> Iterator[Batch]:
    """Batches of at most ``limit`` bytes; the same on every rank."""
    limit = limit // _ALIGNMENT * _ALIGNMENT
    batch = Batch()
    for tensor in tensors:
        itemsize = tensor.dtype.itemsize
        for box in row_major_slices(tensor.shape, itemsize, limit - _HEADER - _ALIGNMENT):
            nbytes = math.prod(length for _, length in box) * itemsize
            if batch.slices and batch.size + nbytes > limit:
                yield batch
                batch = Batch()
            batch.add(tensor, box)
    if batch.slices:
        yield batch


def write_header(room: torch.Tensor, failure: BaseException | None, uri: str) -> None:
    """Says what follows: data, or nothing, because of a failure."""
    data = b"" if failure is None else _pickled(failure, uri)
    header = bytes_of(room[:_HEADER])
    header[:_LENGTH] = len(data).to_bytes(_LENGTH, "little")
    header[_LENGTH : _LENGTH + len(data)] = data


def _pickled(failure: BaseException, uri: str) -> bytes:
    try:
        with portable_errors(uri):
            raise failure
    except Exception as error:  # noqa: BLE001 - sent to the other ranks
        data = pickle.dumps(error)
    except BaseException:  # noqa: BLE001 - an interrupt is of this rank alone
        data = b""
    if not 0 < len(data) <= _HEADER - _LENGTH:
        text = f"{type(failure).__name__}: {failure}"[:1000]
        data = pickle.dumps(CheckpointError("the rank that reads failed", uri=uri, cause=text))
    return data


def read_header(room: torch.Tensor) -> Exception | None:
    """The failure that a batch tells of, if any."""
    header = room[:_LENGTH].cpu()  # each kept in a variable: bytes_of shows memory it does not own
    length = int.from_bytes(bytes_of(header), "little")
    if not length:
        return None
    pickled = room[_LENGTH : _LENGTH + length].cpu()
    error = pickle.loads(bytes_of(pickled))  # noqa: S301 - of a rank
    assert isinstance(error, Exception)
    return error


class BatchReader:
    """Fills batches from a file."""

    def __init__(self, contents: FileContents) -> None:
        self._contents = contents
        self._held: tuple[str, torch.Tensor] | None = None

    def fill(self, batch: Batch, room: torch.Tensor) -> None:
        """Reads what a batch carries, over parallel connections."""
        memory, ranges = bytes_of(room), []
        for part in batch.slices:
            place = self._contents.place(part.tensor.fqn)
            if place is not None and place.is_row_major:
                at = place.storage_offset + place.extent[0] + part.first
                ranges.append((at, memory[part.at : part.at + part.nbytes]))
            else:
                part.view(room).copy_(narrow(self._tensor(part.tensor.fqn, place), part.box))
        size = min(max(batch.size // _REQUESTS, _LEAST_REQUEST), _MOST_REQUEST)
        self._contents.file.read_bytes(ranges, request_size=size)

    def _tensor(self, fqn: str, place: Place | None) -> torch.Tensor:
        if self._held is None or self._held[0] != fqn:
            self._held = None  # one at a time
            self._held = fqn, self._read(fqn, place)
        return self._held[1]

    def _read(self, fqn: str, place: Place | None) -> torch.Tensor:
        if place is not None:
            return self._contents.file.read(place).detach()
        tensor = self._contents.whole()[fqn].detach()
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
            raise UnsupportedTensorError(
                f"{fqn} is a {type(tensor).__name__} of layout {tensor.layout}, which can't be "
                "sharded: convert it to a plain tensor and save it again",
                uri=self._contents.uri,
                item=fqn,
            )
        return tensor


@dataclass(frozen=True)
class _Target:
    """Where a region of a tensor is wanted: the region begins at ``offsets``."""

    tensor: torch.Tensor
    offsets: tuple[int, ...]


class Targets:
    """The tensors of this rank that are loaded into."""

    def __init__(self, planner: LoadPlanner) -> None:
        self._planner = planner
        self._by_fqn: dict[str, list[_Target]] = {}
        self._items: list[tuple[ReadItem, torch.Tensor]] = []

    def add_all(self, plan: LoadPlan, tensors: Iterable[StoredTensor], uri: str) -> None:
        """Takes the targets of a plan.

        Raises:
            ShapeMismatchError: If a tensor has another shape in the file than in the state dict.
        """
        shapes = {tensor.fqn: tensor.shape for tensor in tensors}
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                continue
            fqn, start = item.storage_index.fqn, item.storage_index.offset
            begin = start if start is not None else (0,) * len(item.storage_offsets)
            # the planner's chunks are those of the state dict: the file has all of each tensor
            offsets = tuple(a + b for a, b in zip(begin, item.storage_offsets, strict=True))
            target = self._planner.resolve_tensor(item).detach()
            self._check(fqn, shapes[fqn], offsets, target, uri)
            self._by_fqn.setdefault(fqn, []).append(_Target(target, offsets))
            self._items.append((item, target))

    def _check(
        self, fqn: str, stored: tuple[int, ...], offsets: tuple[int, ...], target: torch.Tensor,
        uri: str,
    ) -> None:  # fmt: skip
        entries = getattr(getattr(self._planner, "metadata", None), "state_dict_metadata", {})
        wanted = tuple(getattr(entries.get(fqn), "size", stored))
        fits = len(stored) == target.dim() and all(
            offset + length <= size
            for offset, length, size in zip(offsets, target.shape, stored, strict=True)
        )
        if wanted != stored or not fits:
            raise ShapeMismatchError(
                f"{fqn} has shape {stored} in the file and {wanted} in the state dict",
                uri=uri,
                item=fqn,
            )

    def deliver(self, batch: Batch, room: torch.Tensor) -> None:
        """Copies what this rank wants of a batch."""
        for part in batch.slices:
            for target in self._by_fqn.get(part.tensor.fqn, ()):
                _copy_common(part, room, target)

    def commit(self) -> None:
        """Tells the planner that all have arrived."""
        for item, target in self._items:
            self._planner.commit_tensor(item, target)


def _copy_common(part: _Slice, room: torch.Tensor, target: _Target) -> None:
    """Copies what a slice and a target have in common."""
    here, there = [], []
    for (start, length), offset, size in zip(
        part.box, target.offsets, target.tensor.shape, strict=True
    ):
        first, stop = max(start, offset), min(start + length, offset + size)
        if first >= stop:
            return
        here.append((first - start, stop - first))
        there.append((first - offset, stop - first))
    source = narrow(part.view(room), tuple(here))
    copy_into(narrow(target.tensor, tuple(there)), source)
