"""Converts torch's metadata, or the save plan of a rank, to a table."""

from __future__ import annotations

import itertools
import math
from array import array
from collections import Counter
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from cloudckpt.checkpoint.columns import NotInColumnsError, column_of, matrix_of
from cloudckpt.checkpoint.table import VALUE, Chunks, Form, Paths, Table, numbered

__all__ = ["NotInColumnsError", "table_of_metadata", "table_of_plan"]

_END = 1 << 63


def table_of_metadata(metadata: Metadata) -> Table:
    """Converts torch's metadata to a table, without the locations.

    Raises:
        NotInColumnsError: If the metadata contain anything but torch's classes.
    """
    known = {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"}
    if type(metadata) is not Metadata or vars(metadata).keys() - known:
        raise NotInColumnsError("the metadata has another class or more fields than torch's")
    collected = _Collected()
    for name, described in metadata.state_dict_metadata.items():
        if type(described) is BytesStorageMetadata:
            collected.add_value(name)
        elif type(described) is TensorStorageMetadata:
            collected.add_tensor(name, described.size, described.properties, described.chunks)
        else:
            raise NotInColumnsError(
                f"the metadata of {name} is a {type(described).__name__}, which is not torch's "
                "class for tensors or for other values"
            )
    return collected.table(metadata.planner_data)


def table_of_plan(plan: SavePlan) -> tuple[Table, torch.Tensor]:
    """Converts the save plan of a rank to a table: a row for each item, in the plan's order.

    Args:
        plan: A plan of torch's planner, or of one that makes the same classes.

    Returns:
        The table, and a column with the numbers of the names that this rank writes as whole
        tensors: torch expects no part of these on another rank.

    Raises:
        NotInColumnsError: If columns can't express the plan.
    """
    collected, whole = _Collected(), list[int]()
    for name, of_name in itertools.groupby(plan.items, key=lambda item: item.index.fqn):
        items = list(of_name)
        first, data = items[0], items[0].tensor_data
        if not all(map(_is_plain, items)) or any(_kind(item) != _kind(first) for item in items[1:]):
            raise NotInColumnsError(
                f"the save planner made write items for {name} of several types, dtypes or shapes, "
                "or an item that is not as torch's planner makes it"
            )
        if data is not None:
            chunks = [item.tensor_data.chunk for item in items if item.tensor_data is not None]
            if first.type == WriteItemType.TENSOR:
                whole.append(len(collected.names))
            collected.add_tensor(name, data.size, data.properties, chunks)
            continue
        if len(items) != 1:
            raise NotInColumnsError(
                f"the save planner made {len(items)} write items for {name}, which is one value"
            )
        collected.add_value(name)
    made = collected.table(plan.planner_data)
    made.check_names()
    made.check_chunks()
    return made, column_of(whole)


def _is_plain(item: WriteItem) -> bool:
    """Whether an item is as torch's planner makes it: its index agrees with its data."""
    data = item.tensor_data
    if type(item) is not WriteItem or (data is None) != (item.type == WriteItemType.BYTE_IO):
        return False
    if data is None:
        return item.index.offset is None and item.bytes_io_data is None
    return item.index.offset == data.chunk.offsets


def _kind(item: WriteItem) -> tuple[Any, ...]:
    """Returns what all items of one tensor have in common."""
    data = item.tensor_data
    return (item.type, *(() if data is None else (data.size, data.properties.dtype)))


class _Collected:
    """Collects names and chunks, one by one, for a table.

    Attributes:
        names: The names in the order in which they were added.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._forms: dict[Form, int] = {}
        self._form_of, self._counts = array("q"), array("q")
        self._offsets: dict[int, array[int]] = {}
        self._sizes: dict[int, array[int]] = {}
        self._per_dims: Counter[int] = Counter()

    def add_value(self, name: str) -> None:
        self._add(name, VALUE, 1)

    def add_tensor(
        self,
        name: str,
        size: torch.Size,
        properties: TensorProperties,
        chunks: list[ChunkStorageMetadata],
    ) -> None:
        shape = tuple(size)
        dims = len(shape)
        plain = type(properties) is TensorProperties and type(chunks) is list
        if not plain or set(map(type, chunks)) - {ChunkStorageMetadata}:
            raise NotInColumnsError(
                f"the properties or chunks of {name} are not of torch's classes"
            )
        offsets = [chunk.offsets for chunk in chunks]
        sizes = [chunk.sizes for chunk in chunks]
        if set(map(len, offsets)) | set(map(len, sizes)) | {dims} != {dims}:
            raise NotInColumnsError(
                f"a chunk of {name} does not have as many dimensions as the tensor"
            )
        if math.prod(shape) * properties.dtype.itemsize >= _END:
            raise NotInColumnsError(f"{name} has more bytes than a 64-bit number can count")
        try:
            for known, of_chunks in ((self._offsets, offsets), (self._sizes, sizes)):
                flat = known.setdefault(dims, array("q"))
                flat.extend(itertools.chain.from_iterable(of_chunks))
        except (TypeError, OverflowError) as exc:
            raise NotInColumnsError(
                f"the offsets or sizes of a chunk of {name} are not 64-bit integers"
            ) from exc
        self._per_dims[dims] += len(chunks)
        self._add(name, Form(shape, properties.dtype, properties.requires_grad), len(chunks))

    def _add(self, name: str, form: Form, count: int) -> None:
        self.names.append(name)
        self._form_of.append(self._forms.setdefault(form, len(self._forms)))
        self._counts.append(count)

    def table(self, planner_data: Any) -> Table:
        """Returns the table of everything that was added.

        Raises:
            NotInColumnsError: If names or ``planner_data`` do not fit into a table.
        """
        if not all(type(name) is str for name in self.names):
            raise NotInColumnsError("the name of an item is not a string")
        form_of, counts = column_of(self._form_of), column_of(self._counts)
        chunks = {
            dims: Chunks(
                matrix_of(self._offsets[dims], dims, count),
                matrix_of(self._sizes[dims], dims, count),
            )
            for dims, count in sorted(self._per_dims.items())
        }
        return Table(
            numbered(self.names), [*self._forms], form_of, counts, chunks, _paths(planner_data)
        )


def _paths(planner_data: Any) -> Paths | None:
    if planner_data is None:
        return None
    if type(planner_data) is not dict:
        raise NotInColumnsError(f"planner_data is a {type(planner_data).__name__}, not a dict")
    for name, path in planner_data.items():
        if type(name) is not str or type(path) is not tuple or not all(map(_is_element, path)):
            raise NotInColumnsError(
                f"planner_data maps {name!r} to a path that is not a tuple of strings and "
                "non-negative integers, or this name is not a string"
            )
    return planner_data


def _is_element(element: object) -> bool:
    return type(element) is str or (type(element) is int and 0 <= element < _END)
