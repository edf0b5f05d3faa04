"""One ``write_data``: what a save plan holds, the uploads, and what they have become."""

from __future__ import annotations

import io
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from cloudckpt.checkpoint.objects import data_name
from cloudckpt.checkpoint.shard import (
    OpenObject,
    Place,
    ShardWriter,
    SmallForm,
    check_supported,
    travels_as_bytes,
)
from cloudckpt.checkpoint.values import forewarn
from cloudckpt.checkpoint.written import Extents, WrittenObject
from cloudckpt.config import Config
from cloudckpt.errors import ShapeMismatchError, UnsupportedTensorError
from cloudckpt.stores.base import ObjectStore
from cloudckpt.transfer.group import TaskGroup
from cloudckpt.transfer.memory import settled
from cloudckpt.transfer.parts import choose_part_size
from cloudckpt.transfer.retry import Retrier
from cloudckpt.transfer.staging import StagingPool
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.upload import ObjectUpload, creates_only
from cloudckpt.uri import CheckpointURI

__all__ = ["Quick", "expected_size", "send"]

_PICKLED = WriteItemType.BYTE_IO
_RUN = 256
"""Small tensors that are written by one call."""


@dataclass(frozen=True)
class Quick:
    """What is known of items that were written in a save before, with the tensors of this one.

    Attributes:
        expected: About how many bytes they will take.
        forms: Of each item that is a small tensor in host memory how it looks in an object.
        tensors: These tensors.
    """

    expected: int
    forms: Sequence[SmallForm | None]
    tensors: Sequence[torch.Tensor | None]


def _has_its_memory(form: SmallForm, tensor: torch.Tensor) -> bool:
    """Whether its memory is there; if not, who looks closer says what is wrong."""
    try:
        storage, address = tensor.untyped_storage(), tensor.data_ptr()
        return address != 0 and address + form.size <= storage.data_ptr() + storage.nbytes()
    except RuntimeError:
        return False


def expected_size(items: Sequence[WriteItem]) -> int:
    """About how many bytes items will take; planners may change their mind."""
    return sum(map(_size_of, items))


def _size_of(item: WriteItem) -> int:
    if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
        return item.bytes_io_data.nbytes if item.bytes_io_data is not None else 4096
    sizes = item.tensor_data.chunk.sizes
    return sizes.numel() * item.tensor_data.properties.dtype.itemsize + 1536


def send(
    items: Sequence[WriteItem],
    planner: SavePlanner,
    store: ObjectStore,
    uri: CheckpointURI,
    config: Config,
    stats: TransferStats,
    *,
    rank: int,
    attempt: str,
    began: Callable[[str], None],
    quick: Quick | None = None,
) -> tuple[tuple[WrittenObject, ...], Extents]:
    """Sends the items of one rank; returns when the store has all of them.

    If it raises, nothing of them is left there.

    Args:
        items: What to send.
        planner: Has the data.
        store: The store of ``uri``.
        uri: The checkpoint.
        config: The options.
        stats: Counts what is sent.
        rank: That of this process.
        attempt: The random part of the names of its objects.
        began: Told the name of each object before it is begun.
        quick: What is known of them, of a save before.

    Returns:
        The objects, and where in them the items are, in the order of ``items``.
    """
    if not items:
        return (), Extents.none()
    uploads: list[ObjectUpload] = []
    group = TaskGroup(config.connections, name="cloudckpt-save", interrupt=store.interrupt)
    retrier = Retrier(config.retry, group.cancellation, on_retry=stats.add_retry)
    pool = StagingPool(config.memory_budget, group.cancellation)
    expected = quick.expected if quick is not None else expected_size(items)

    def open_object(ordinal: int, staged: bool) -> OpenObject:
        part_size = choose_part_size(
            expected,
            config.part_size,
            store.capabilities,
            connections=config.connections,
            copied=config.memory_budget if staged else None,
        )
        name, create_only = data_name(rank, ordinal, attempt), creates_only(store, config)
        began(name)
        upload = ObjectUpload(
            store, uri.key(name), part_size, group, retrier, stats, create_only=create_only
        )
        uploads.append(upload)
        return OpenObject(upload, ordinal, attempt, part_size * store.capabilities.max_parts)

    shard = ShardWriter(
        open_object, pool, checksum=store.capabilities.checksum, zip_crc32=config.zip_crc32
    )
    places = [array("q", bytes(8 * len(items))) for _ in range(3)]
    small: Sequence[tuple[SmallForm | None, torch.Tensor | None]] = ()
    if quick is not None and not config.zip_crc32:
        small = list(zip(quick.forms, quick.tensors, strict=True))
    run: list[tuple[int, SmallForm, torch.Tensor]] = []

    def note(number: int, place: Place) -> None:
        for column, value in zip(places, place, strict=True):
            column[number] = value

    def write_run() -> None:
        written = shard.add_small([form for _, form, _ in run], [tensor for _, _, tensor in run])
        for (number, _, _), place in zip(run, written, strict=True):
            note(number, place)
        run.clear()

    def produce() -> None:
        # what is pickled comes last: how long it is can't be foreseen, and nothing else shifts
        for number in sorted(range(len(items)), key=lambda n: items[n].type == _PICKLED):
            form, tensor = small[number] if small else (None, None)
            if form is not None and tensor is not None and _has_its_memory(form, tensor):
                run.append((number, form, tensor))
                if len(run) == _RUN:
                    write_run()
                continue
            if run:
                write_run()
            note(number, _write(items[number], planner, shard, str(uri)))
        if run:
            write_run()
        shard.close()

    try:
        group.run(produce)
    except BaseException:
        for upload in uploads:
            upload.abandon()
        raise
    finally:
        pool.close()
    return shard.objects(rank), Extents(*(torch.frombuffer(c, dtype=torch.int64) for c in places))


def _write(item: WriteItem, planner: SavePlanner, shard: ShardWriter, uri: str) -> Place:
    data, fqn, is_bytes = (
        planner.resolve_data(item),
        item.index.fqn,
        item.type == WriteItemType.BYTE_IO,
    )
    if not isinstance(data, io.BytesIO if is_bytes else torch.Tensor):
        raise UnsupportedTensorError(
            f"{fqn} is planned as {'bytes' if is_bytes else 'a tensor'}, and resolve_data of the "
            f"planner has returned a {type(data).__name__}",
            item=fqn,
        )
    if isinstance(data, io.BytesIO):
        content = data.getvalue()  # shared with the stream, no copy
        if isinstance(planner, DefaultSavePlanner):
            forewarn(content, fqn, _kind(planner, item), uri)
        return shard.add_bytes(content)
    tensor = settled(data).detach()
    check_supported(tensor, fqn)
    # another type than planned is converted by every reader: torch's cached plans don't heed types
    if item.tensor_data is not None and tensor.shape != item.tensor_data.chunk.sizes:
        raise ShapeMismatchError(
            f"{fqn} is planned with shape {tuple(item.tensor_data.chunk.sizes)}, and resolve_data "
            f"of the planner has returned one of shape {tuple(tensor.shape)}",
            item=fqn,
        )
    if travels_as_bytes(tensor):
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        forewarn(buffer.getvalue(), fqn, type(tensor), uri)
        return shard.add_bytes(buffer.getvalue())
    if type(tensor) is not torch.Tensor:
        tensor = tensor.as_subclass(torch.Tensor)
    return shard.add_tensor(tensor, fqn)


def _kind(planner: DefaultSavePlanner, item: WriteItem) -> type:
    """The class of a value that is no tensor."""
    try:
        return type(planner.lookup_object(item.index))
    except Exception:  # noqa: BLE001 - of a planner that makes its values in resolve_data
        return object
