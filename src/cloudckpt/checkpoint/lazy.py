"""Makes torch's metadata from a record on demand, only for the names that are accessed."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from itertools import islice
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from cloudckpt.checkpoint.record import Record
from cloudckpt.checkpoint.table import Table
from cloudckpt.checkpoint.torch_private import CURRENT_DCP_VERSION, StorageInfo

__all__ = ["ReadLater", "lazy_metadata", "record_behind", "save_id_of", "table_behind"]


def save_id_of(attempt: str) -> str:
    """Returns the ``storage_meta.save_id`` of a save, given its random name ``attempt``."""
    return f"cloudckpt-1-{attempt}"


def lazy_metadata(record: Record) -> Metadata:
    """Returns torch's metadata for a record with a table; the values in it are made on access.

    Only the paths, ``planner_data``, are copied at once.
    """
    assert record.table is not None
    paths = record.table.paths
    metadata: Any = Metadata(state_dict_metadata={})
    metadata.state_dict_metadata = _Described(record, record.table)
    metadata.planner_data = None if paths is None else dict(paths)
    metadata.storage_data = _Places(record, record.table)
    metadata.storage_meta = StorageMeta(save_id=save_id_of(record.attempt))
    metadata.version = CURRENT_DCP_VERSION
    return metadata  # type: ignore[no-any-return]


def record_behind(metadata: Metadata) -> Record | None:
    """Returns the record of metadata made by :func:`lazy_metadata`, or None for other metadata."""
    described = metadata.state_dict_metadata
    return described.record if isinstance(described, _Described) else None


def table_behind(metadata: Metadata) -> Table | None:
    """Returns the table of metadata made by :func:`lazy_metadata`, or None for other metadata."""
    record = record_behind(metadata)
    return None if record is None else record.table


class Lazy(Mapping[Any, Any]):
    """A mapping in metadata whose values are made on access; it pickles as a dict.

    Printing it makes no values.
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)


class ReadLater(Lazy):
    """A lazy mapping that is read from the store on first access.

    It is equal only to itself: a comparison with another mapping would have to read it, and could
    fail.

    Args:
        read: Returns the mapping. It is called at each access, so it must cache the mapping; a
            read that has failed is tried again at the next access.
    """

    def __init__(self, read: Callable[[], Mapping[Any, Any]]) -> None:
        self._read = read

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None  # type: ignore[assignment]

    def __getitem__(self, key: Any) -> Any:
        return self._read()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())


class _Described(Lazy):
    """The mapping ``state_dict_metadata``; each entry is made on first access and kept."""

    def __init__(self, record: Record, table: Table) -> None:
        self.record, self._table = record, table
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if (made := self._made.get(name)) is None:
            made = self._made[name] = self._table.metadata_of(name)
        return made

    def __contains__(self, name: object) -> bool:
        return name in self._table.names

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.names)

    def __len__(self) -> int:
        return len(self._table.names)


class _Places(Lazy):
    """The mapping ``storage_data``, from the ``MetadataIndex`` of each item to its location."""

    def __init__(self, record: Record, table: Table) -> None:
        self.record, self._table = record, table

    def __getitem__(self, index: MetadataIndex) -> StorageInfo:
        row = int(self._table.rows([index])) if isinstance(index, MetadataIndex) else -1
        if row < 0:
            raise KeyError(index)
        found, offset, length = self.record.extent_of(row)
        return StorageInfo(found.name, offset, length)

    def __iter__(self) -> Iterator[MetadataIndex]:
        offsets = {dims: iter(of.offsets.tolist()) for dims, of in self._table.chunks.items()}
        for name, entry in self._table.entries():
            if entry.shape is None:
                yield MetadataIndex(name)
                continue
            for number, offset in enumerate(islice(offsets[entry.form.dims], entry.count)):
                yield MetadataIndex(name, torch.Size(offset), number)

    def items(self) -> ItemsView[MetadataIndex, StorageInfo]:
        """Returns all indexes with their locations, made in one pass over the columns."""
        names = [one.name for one in self.record.objects]
        rows = zip(*(column.tolist() for column in self.record.extents.columns[:3]), strict=True)
        places = (StorageInfo(names[number], *place) for number, *place in rows)
        return dict(zip(self, places, strict=True)).items()

    def values(self) -> ValuesView[StorageInfo]:
        """Returns all locations, made in one pass over the columns."""
        return dict(self.items()).values()

    def __len__(self) -> int:
        return len(self.record.extents)
