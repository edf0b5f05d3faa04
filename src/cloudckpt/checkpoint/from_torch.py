"""Converts torch's metadata, or a rank's save plan, to a :class:`.Table` of columns."""

from __future__ import annotations

import itertools
import operator
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
    """Converts torch's metadata to a :class:`Table`, without the locations of items in objects.

    Raises:
        NotInColumnsError: If the metadata contains other classes than torch's, invalid numbers, or
            names or paths of other types than torch's planners make.
    """
    known = {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"}
    if type(metadata) is not Metadata or vars(metadata).keys() - known:
        raise NotInColumnsError("the metadata has another class or more fields than torch's")
    forms: dict[Form, int] = {}
    form_of, counts, rows = array("q"), array("q"), Counter[int]()
    offsets: dict[int, array[int]] = {}  # by number of dimensions
    sizes: dict[int, array[int]] = {}
    for name, entry in metadata.state_dict_metadata.items():
        form, count = VALUE, 1
        if type(entry) is TensorStorageMetadata:
            form, count = _form(name, entry), len(entry.chunks)
            rows[form.dims] += count
            try:
                for numbers, field in ((offsets, "offsets"), (sizes, "sizes")):
                    of_chunks = map(operator.attrgetter(field), entry.chunks)
                    flat = numbers.setdefault(form.dims, array("q"))
                    flat.extend(itertools.chain.from_iterable(of_chunks))
            except (TypeError, OverflowError) as exc:
                raise NotInColumnsError(
                    f"the offsets or sizes of a chunk of {name} are not 64-bit integers"
                ) from exc
        elif type(entry) is not BytesStorageMetadata:
            raise NotInColumnsError(
                f"the metadata of {name} is of class {type(entry).__name__}, but must be torch's "
                "TensorStorageMetadata or BytesStorageMetadata"
            )
        form_of.append(forms.setdefault(form, len(forms)))
        counts.append(count)
    chunks = {
        dims: Chunks(matrix_of(offsets[dims], dims, count), matrix_of(sizes[dims], dims, count))
        for dims, count in sorted(rows.items())
    }
    if any(bool(((of.offsets < 0) | (of.sizes < 0)).any()) for of in chunks.values()):
        raise NotInColumnsError("the offset or the size of a tensor's chunk is negative")
    names = list(metadata.state_dict_metadata)
    if not all(type(name) is str for name in names):
        raise NotInColumnsError("the name of an item is not a string")
    columns = column_of(form_of), column_of(counts)
    return Table(numbered(names), [*forms], *columns, chunks, _paths(metadata.planner_data))


def _form(name: str, entry: TensorStorageMetadata) -> Form:
    """Returns the form of a tensor (shape and element type), after checking its metadata.

    Raises:
        NotInColumnsError: If the metadata has other classes than torch's, a chunk does not have as
            many dimensions as the tensor, or the shape is invalid (:meth:`Form.of`).
    """
    properties, chunks, dims = entry.properties, entry.chunks, len(entry.size)
    is_plain = type(properties) is TensorProperties and type(chunks) is list
    if not is_plain or set(map(type, chunks)) - {ChunkStorageMetadata}:
        raise NotInColumnsError(f"the properties or chunks of {name} are not of torch's classes")
    if any(len(chunk.offsets) != dims or len(chunk.sizes) != dims for chunk in chunks):
        raise NotInColumnsError(f"a chunk of {name} does not have as many dimensions as the tensor")
    try:
        return Form.of(entry.size, properties.dtype, properties.requires_grad)
    except NotInColumnsError as exc:
        raise NotInColumnsError(f"{name} is not valid: {exc}") from exc


def table_of_plan(plan: SavePlan) -> tuple[Table, torch.Tensor]:
    """Converts the save plan of a rank to a table, whose rows are the plan's items in their order.

    Args:
        plan: A plan of torch's planner, or of one that makes the same classes.

    Returns:
        The table, and an int64 tensor: it lists, by their numbers in ``table.names``, the tensors
        that the plan saves whole, so that no other rank may have a part of them.

    Raises:
        NotInColumnsError: If a table can't express the plan.
    """
    entries, whole = dict[str, TensorStorageMetadata | BytesStorageMetadata](), list[int]()
    for name, of_name in itertools.groupby(plan.items, key=lambda item: item.index.fqn):
        items = list(of_name)
        first, data = items[0], items[0].tensor_data
        if name in entries or (data is None and len(items) > 1):
            raise NotInColumnsError(f"the plan has items of {name} apart, or two values for it")
        if not all(map(_is_plain, items)) or any(_kind(item) != _kind(first) for item in items[1:]):
            raise NotInColumnsError(
                f"the save planner's write items for {name} differ in type, dtype or shape, or one "
                "of them is not a plain torch WriteItem, or has an index that does not fit its data"
            )
        if data is None:
            entries[name] = BytesStorageMetadata()
            continue
        if first.type == WriteItemType.TENSOR:
            whole.append(len(entries))
        chunks = [item.tensor_data.chunk for item in items if item.tensor_data is not None]
        entries[name] = TensorStorageMetadata(data.properties, data.size, chunks)
    made = table_of_metadata(Metadata(entries, plan.planner_data))
    made.check_names()
    made.check_chunks()
    return made, column_of(whole)


def _is_plain(item: WriteItem) -> bool:
    """Returns whether an item is of torch's own class, and its index agrees with its data."""
    data = item.tensor_data
    if type(item) is not WriteItem or (data is None) != (item.type == WriteItemType.BYTE_IO):
        return False
    if data is None:
        return item.index.offset is None and item.bytes_io_data is None
    return item.index.offset == data.chunk.offsets


def _kind(item: WriteItem) -> tuple[Any, ...]:
    """Returns what all items of a name must share: the type and, for a tensor, shape and dtype."""
    data = item.tensor_data
    return (item.type, *(() if data is None else (data.size, data.properties.dtype)))


def _paths(planner_data: Any) -> Paths | None:
    if planner_data is None:
        return None
    if type(planner_data) is not dict:
        raise NotInColumnsError(f"planner_data is of class {type(planner_data).__name__}, not dict")
    for name, path in planner_data.items():
        if type(name) is not str or type(path) is not tuple or not all(map(_is_element, path)):
            raise NotInColumnsError(
                f"planner_data maps {name!r} to {path!r:.200}: its keys must be strings, and its "
                "values tuples of strings and non-negative integers"
            )
    return planner_data


def _is_element(element: object) -> bool:
    return type(element) is str or (type(element) is int and 0 <= element < _END)
