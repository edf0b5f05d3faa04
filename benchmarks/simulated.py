"""One rank of a large job by itself: the others say what this one says, of shards of their own.

Planner, writer and reader are the real ones, and so is every byte that a rank would send to the
others; only processes, network and the tensors' bytes are missing. torch's process group ``fake``
tells DTensor which rank this is, and torch's wrapper of collectives is replaced for the process.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from cloudckpt.checkpoint.record import Extents, Record

_ROWS = (8, 2, 4, 6)
_COLUMNS = (64, 128, 192, 256)


def begin(rank: int, world: int) -> None:
    """Makes this process rank ``rank`` of ``world``."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


def sharded(tensors: int, ranks: int) -> dict[str, Any]:
    """Row-sharded DTensors as ``ranks`` ranks have saved them, sharded over those of this job."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {"step": 1000, "schedule": {"warmup": 10, "lr": 1e-4}}
    for index in range(tensors):
        rows, columns = _ROWS[index % 4] * ranks, _COLUMNS[index // 4 % 4]
        first, end = _share(rows)
        local = torch.full((end - first, columns), float(index))
        state[f"model.layers.{index // 8}.block.{index % 8}.weight"] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=(rows, columns), stride=(columns, 1)
        )
    return state


def _share(rows: int) -> tuple[int, int]:
    most = -(-rows // dist.get_world_size())
    first = min(rows, most * dist.get_rank())
    return first, min(rows, first + most)


class Others:
    """What the other ranks say, made from what this one does: their shards have the same shapes.

    Values that are no tensors are left to this one.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, torch.Size] = {}
        self._tensors: list[int] = []
        self._extents = Extents.none()

    def told(self, value: Any, rank: int) -> Any:
        """What rank ``rank`` sends where this one sends ``value``, which ours pickles itself."""
        if isinstance(value, bytes):
            return pickle.dumps(self._told(pickle.loads(value), rank))
        return self._told(value, rank)

    def _told(self, value: Any, rank: int) -> Any:
        if isinstance(value, bytes):  # what its rank would write, as columns
            return self._record(Record.parse(value, ""), rank).to_bytes()
        if isinstance(value, SavePlan):
            self._tensors = [
                number for number, item in enumerate(value.items) if item.tensor_data is not None
            ]
            items = [self._item(value.items[number], rank) for number in self._tensors]
            return replace(value, items=items)
        if isinstance(value, tuple):
            written, compared = value
            objects = tuple(replace(one, rank=rank) for one in written.objects)
            if not written.unmoved:
                self._extents = written.extents.at(torch.tensor(self._tensors))
                return replace(written, objects=objects, extents=self._extents), compared
            unmoved = replace(written, objects=objects, extents=self._extents, unmoved="")
            return unmoved.without(self._extents), compared
        return [
            replace(
                result,
                index=self._index(result.index, rank),
                storage_data=replace(
                    result.storage_data, relative_path=of(result.storage_data.relative_path, rank)
                ),
            )
            for result in value
            if result.index.fqn in self._sizes
        ]

    def _record(self, own: Record, rank: int) -> Record:
        of_own = own.table
        assert of_own is not None
        are_tensors = of_own.dims >= 0
        self._tensors = of_own.firsts[are_tensors].tolist()
        names = [name for name, entry in of_own.entries() if entry.shape is not None]
        self._sizes = dict.fromkeys(names, torch.Size(()))
        chunks = of_own.chunks[2]
        offsets = chunks.offsets.clone()
        offsets[:, 0] = chunks.sizes[:, 0] * rank
        table = replace(
            of_own,
            names={name: number for number, name in enumerate(names)},
            form_of=of_own.form_of[are_tensors],
            counts=of_own.counts[are_tensors],
            chunks={2: replace(chunks, offsets=offsets)},
        )
        return replace(own, table=table)

    def _item(self, item: WriteItem, rank: int) -> WriteItem:
        assert item.tensor_data is not None
        sizes = self._sizes[item.index.fqn] = item.tensor_data.chunk.sizes
        index = self._index(item.index, rank)
        chunk = ChunkStorageMetadata(torch.Size(index.offset or ()), sizes)
        return replace(item, index=index, tensor_data=replace(item.tensor_data, chunk=chunk))

    def _index(self, index: MetadataIndex, rank: int) -> MetadataIndex:
        rows, *_ = self._sizes[index.fqn]
        return MetadataIndex(index.fqn, (rank * rows, 0), index.index)


def of(name: str, rank: int) -> str:
    """The name that another rank gives to what is called so on rank 0."""
    return name.replace("__0_", f"__{rank}_", 1)


@contextmanager
def others(
    gathered: Callable[[], None] = lambda: None,
    *,
    planned: Callable[[Any], Any] = lambda plan: plan,
    committed: Any = None,
) -> Iterator[list[int]]:
    """Has the other ranks take part in gatherings.

    Args:
        gathered: Called on the coordinator when all have sent, and nothing was unpickled.
        planned: What another rank is handed as its part of the plan.
        committed: What it is told of the commit.

    Yields:
        The bytes that this rank has sent in each gathering.
    """
    sent: list[int] = []
    last: list[Any] = []
    told = Others().told

    def gather(self: Any, value: Any) -> list[Any] | None:
        data = pickle.dumps(value)
        sent.append(len(data))
        last[:] = [value]
        if dist.get_rank():
            return None
        world = range(1, dist.get_world_size())
        received = [data, *(pickle.dumps(told(value, rank)) for rank in world)]
        gathered()
        return [pickle.loads(data) for data in received]

    def scatter(self: Any, values: list[Any] | None) -> Any:
        # nobody else has the shards of this rank, so that its part is what it has planned
        if values is not None:
            return values[0]
        return planned(pickle.loads(last[0]) if isinstance(last[0], bytes) else last[0])

    methods: dict[str, Any] = {
        "gather_object": gather,
        "scatter_object": scatter,
        "broadcast_object": lambda self, value: value if value is not None else committed,
    }
    usual = {name: getattr(_DistWrapper, name) for name in methods}
    try:
        for name, method in methods.items():
            setattr(_DistWrapper, name, method)
        yield sent
    finally:
        for name, method in usual.items():
            setattr(_DistWrapper, name, method)


@contextmanager
def counted_gatherings(sent: list[int]) -> Iterator[None]:
    """Notes the bytes that this rank sends in each gathering, as torch pickles them."""
    usual = _DistWrapper.gather_object

    def gather(self: Any, value: Any) -> Any:
        sent.append(len(pickle.dumps(value)))
        return usual(self, value)

    _DistWrapper.gather_object = gather
    try:
        yield
    finally:
        _DistWrapper.gather_object = usual
