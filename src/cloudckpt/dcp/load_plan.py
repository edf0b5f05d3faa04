"""Plans which chunks of the checkpoint a rank reads for its own chunks.

torch's planner makes objects of all chunks of all ranks and sorts them, for each tensor. Here they
are rows of numbers, and all overlaps are computed at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.tensor import DTensor

from cloudckpt.checkpoint.columns import column_of
from cloudckpt.checkpoint.from_torch import NotInColumnsError, table_of_metadata
from cloudckpt.checkpoint.lazy import table_behind
from cloudckpt.checkpoint.shard import check_placements
from cloudckpt.checkpoint.table import Table
from cloudckpt.checkpoint.torch_private import create_chunk_list
from cloudckpt.errors import CheckpointCorruptError, CheckpointError, UnsupportedTensorError
from cloudckpt.transfer.memory import PLAIN

__all__ = [
    "check_types",
    "check_whole",
    "conversions",
    "plan_reads",
    "replaced",
    "saved_types",
    "table_of",
    "tell_replaced",
]

logger = logging.getLogger("cloudckpt")

_FEW = 16
"""Up to this many chunks, comparing one by one is faster than all at once."""

_NOTHING = torch.Size([0])


def table_of(metadata: Metadata, uri: str) -> Table:
    """Returns the table of a checkpoint's metadata, made from torch's classes if they have none.

    Raises:
        CheckpointError: If the metadata have classes that columns can't express, of another
            package.
    """
    if (table := table_behind(metadata)) is not None:
        return table
    try:
        # all other fields belong to its planner
        return table_of_metadata(Metadata(metadata.state_dict_metadata))
    except NotInColumnsError as exc:
        raise CheckpointError(
            f"the metadata can't be read as torch's: {exc}. Load the checkpoint with the "
            "package that saved it, then save it again",
            uri=uri,
            cause=exc,
        ) from exc


def plan_reads(state_dict: Mapping[str, Any], table: Table) -> tuple[LoadPlan, set[str]]:
    """Plans reads as torch's ``create_default_local_load_plan`` does, for names in the checkpoint.

    Args:
        state_dict: The state dict to load, by flat names; tensors have the checkpoint's shapes.
        table: The table of the checkpoint.

    Returns:
        The plan, and the names of tensors that were saved with other chunks.

    Raises:
        ValueError: If a name is a tensor in the checkpoint, but not in the state dict.
        UnsupportedTensorError: If a tensor has a partial placement.
    """
    items: list[ReadItem] = []
    moved: set[str] = set()
    for name, value in state_dict.items():
        entry = table.get(name)
        if entry is None:
            continue
        if isinstance(value, DTensor):
            check_placements(value, name)
            if value.device_mesh.get_coordinate() is None:
                continue  # this rank has no part of it
        if entry.shape is None:
            index = MetadataIndex(name)
            items.append(ReadItem(LoadItemType.BYTE_IO, index, _NOTHING, index, _NOTHING, _NOTHING))
            continue
        chunks = table.chunks[len(entry.shape)] if entry.count else None
        for number, own in enumerate(create_chunk_list(value)):
            if chunks is not None:
                stop = entry.place + entry.count
                offsets, sizes = (
                    column[entry.place : stop] for column in (chunks.offsets, chunks.sizes)
                )
                reads, is_as_saved = _reads(name, number, own, offsets, sizes)
                items += reads
                if not is_as_saved:
                    moved.add(name)
    return LoadPlan(items), moved


def check_whole(
    state_dict: Mapping[str, Any], plan: LoadPlan, metadata: Metadata, uri: str
) -> None:
    """Checks that a plan reads all elements that this rank has of each tensor.

    torch reads the existing chunks and silently leaves the other elements unchanged.

    Args:
        state_dict: The state dict to load, by flat names.
        plan: The plan of the reads.
        metadata: The metadata of the checkpoint.
        uri: The checkpoint.

    Raises:
        CheckpointCorruptError: If the metadata lack a part of a tensor.
    """
    dtype_of = saved_types(metadata)
    planned: dict[str, int] = {}
    for item in plan.items:
        if item.type == LoadItemType.TENSOR:
            name = item.dest_index.fqn
            planned[name] = planned.get(name, 0) + item.lengths.numel()
    for name, value in state_dict.items():
        if dtype_of(name) is None or planned.get(name, 0) >= (wanted := _elements(value)):
            continue
        what = f"{planned.get(name, 0)} of the {wanted} elements of {name} on this rank"
        raise CheckpointCorruptError(
            f"the metadata describes only {what}: it is damaged, or a part was not saved; load "
            "an older checkpoint",
            uri=uri,
            item=name,
        )


def conversions(
    state_dict: Mapping[str, Any], dtype_of: Callable[[str], torch.dtype | None]
) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """Returns the saved and the wanted element type of each tensor for which these differ.

    Args:
        state_dict: The state dict to load, by flat names.
        dtype_of: Returns the saved type of a name, see :func:`saved_types`.
    """
    found: dict[str, tuple[torch.dtype, torch.dtype]] = {}
    for name, value in state_dict.items():
        wanted = getattr(value, "dtype", None)
        saved = dtype_of(name)
        if saved is not None and saved != wanted and isinstance(wanted, torch.dtype):
            found[name] = saved, wanted
    return found


def check_types(
    converted: Mapping[str, tuple[torch.dtype, torch.dtype]], uri: str, *, logs: bool
) -> None:
    """Checks that tensors' types can hold the saved values, and logs that tensors are converted.

    Args:
        converted: See :func:`conversions`.
        uri: The checkpoint.
        logs: Whether this rank logs conversions.

    Raises:
        UnsupportedTensorError: If a type is of a lesser kind: integer for floating point, real for
            complex. A narrower type of the same kind is accepted, and integers that it can't hold
            wrap, as in torch.
    """
    for name, (saved, wanted) in converted.items():
        if not torch.can_cast(saved, wanted):
            raise UnsupportedTensorError(
                f"{name} is {saved} in the checkpoint, but {wanted} in the state dict, which "
                f"can't hold its values: load into a tensor of {saved}, and convert it "
                "afterwards",
                uri=uri,
                item=name,
            )
    if converted and logs:
        name, (saved, wanted) = next(iter(converted.items()))
        logger.warning(
            "%s: %d tensors are converted while they are loaded, such as %s, from %s to %s. To "
            "load what was saved, load into tensors of that type, for example after "
            "model.to(%s)",
            uri,
            len(converted),
            name,
            saved,
            wanted,
            saved,
        )


def replaced(state_dict: Mapping[str, Any], metadata: Metadata) -> list[str]:
    """Returns the tensors for which the checkpoint has another kind of value.

    As in torch, the loaded value replaces the tensor in the state dict, and the tensor itself is
    not changed.

    Args:
        state_dict: The state dict to load, by flat names.
        metadata: The metadata of the checkpoint.
    """
    dtype_of, stored = saved_types(metadata), metadata.state_dict_metadata
    return [
        name
        for name, value in state_dict.items()
        if isinstance(value, torch.Tensor) and dtype_of(name) is None and name in stored
    ]


def tell_replaced(names: Sequence[str], uri: str) -> None:
    """Logs that loaded values replace these tensors, see :func:`replaced`."""
    logger.warning(
        "%s: %d tensors of the state dict are other values in the checkpoint, such as %s. The "
        "loaded values replace them in the state dict; the tensors themselves are not changed. "
        "Pass the loaded state dict to load_state_dict",
        uri,
        len(names),
        names[0],
    )


def saved_types(metadata: Metadata) -> Callable[[str], torch.dtype | None]:
    """Returns a function that maps a tensor's name to its saved type.

    The function returns None for other values, and for names that the checkpoint does not have.
    """
    table = table_behind(metadata)

    def dtype_of(name: str) -> torch.dtype | None:
        if table is None:
            stored = metadata.state_dict_metadata.get(name)
            return stored.properties.dtype if isinstance(stored, TensorStorageMetadata) else None
        entry = table.get(name)
        if entry is None or entry.shape is None:
            return None
        return entry.form.dtype

    return dtype_of


def _elements(value: Any) -> int:
    """Returns how many elements of a tensor this rank has."""
    if isinstance(value, DTensor):
        return value._local_tensor.numel()
    if type(value) in PLAIN and not vars(value):
        return int(value.numel())
    return sum(chunk.sizes.numel() for chunk in create_chunk_list(value))


def _reads(
    name: str,
    number: int,
    own: ChunkStorageMetadata,
    offsets: torch.Tensor,
    sizes: torch.Tensor,
) -> tuple[list[ReadItem], bool]:
    """Plans the reads of a tensor for one of this rank's chunks of it.

    Returns:
        The reads, and whether they are all of one saved chunk, or none.
    """
    is_as_saved = True
    rows: Sequence[int] = range(len(offsets))
    if len(rows) > _FEW:
        begin = column_of(own.offsets)
        end = begin + column_of(own.sizes)
        overlap = (torch.minimum(offsets + sizes, end) > torch.maximum(offsets, begin)).all(1)
        found = overlap.nonzero().flatten()
        rows, offsets, sizes = found.tolist(), offsets[found], sizes[found]
    size = torch.Size
    made: list[ReadItem] = []
    for row, first, shape in zip(rows, offsets.tolist(), sizes.tolist(), strict=True):
        starts = [max(*pair) for pair in zip(first, own.offsets, strict=True)]
        lengths = [
            min(a + n, b + m) - start
            for a, n, b, m, start in zip(first, shape, own.offsets, own.sizes, starts, strict=True)
        ]
        if lengths and min(lengths) <= 0:
            continue
        is_as_saved = not made and lengths == shape
        made.append(
            ReadItem(
                LoadItemType.TENSOR,
                MetadataIndex(name, own.offsets, number),
                size(start - at for start, at in zip(starts, own.offsets, strict=True)),
                MetadataIndex(name, size(first), row),
                size(start - at for start, at in zip(starts, first, strict=True)),
                size(lengths),
            )
        )
    return made, is_as_saved
