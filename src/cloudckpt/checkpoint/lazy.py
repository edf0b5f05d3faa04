"""torch's metadata of an inventory, made on demand for the names that are accessed."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from itertools import islice
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from cloudckpt.checkpoint.inventory import Inventory
from cloudckpt.checkpoint.torch_private import CURRENT_DCP_VERSION, StorageInfo

__all__ = ["ReadLater", "inventory_behind", "lazy_metadata", "save_id_of"]

_AT_ONCE = 1 << 14  # rows


def save_id_of(attempt: str) -> str:
    """The ``storage_meta.save_id`` of a save; it has the same length for every save."""
    return f"cloudckpt-1-{attempt}"


def lazy_metadata(inventory: Inventory, attempt: str) -> Metadata:
    """The metadata of a save, whose mappings create their values on access."""
    metadata: Any = Metadata(state_dict_metadata={})
    metadata.state_dict_metadata = _Described(inventory)
    metadata.planner_data = None if inventory.paths is None else dict(inventory.paths)
    metadata.storage_data = _Places(inventory)
    metadata.storage_meta = StorageMeta(save_id=save_id_of(attempt))
    metadata.version = CURRENT_DCP_VERSION
    return metadata  # type: ignore[no-any-return]


def inventory_behind(metadata: Metadata) -> Inventory | None:
    """The columns that the metadata were made from; None for other metadata."""
    described = metadata.state_dict_metadata
    return described.inventory if isinstance(described, _Described) else None


class Lazy(Mapping[Any, Any]):
    """A mapping in metadata that is made on access. Pickles as a dict; printing makes nothing."""

    def __eq__(self, other: object) -> bool:
        if ReadLater in (type(self), type(other)):
            return self is other
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)


class ReadLater(Lazy):
    """One that is read on first access.

    It is equal to itself only: a rank must not wait for a store, or fail, to compare what it has.

    Args:
        read: Reads it; it is called again if it fails.
    """

    def __init__(self, read: Callable[[], Mapping[Any, Any]]) -> None:
        self._read = read

    def __getitem__(self, key: Any) -> Any:
        return self._read()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())


class _Described(Lazy):
    """``state_dict_metadata``; keeps what it has made."""

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if (made := self._made.get(name)) is None:
            made = self._made[name] = self.inventory.metadata_of(name)
        return made

    def __contains__(self, name: object) -> bool:
        return name in self.inventory.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.inventory.entries)

    def __len__(self) -> int:
        return len(self.inventory.entries)


class _Places(Lazy):
    """``storage_data``: an item's location, by torch's index.

    Attributes:
        inventory: The inventory with these locations.
    """

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory

    def __getitem__(self, index: MetadataIndex) -> StorageInfo:
        row = self.inventory.row_of(index) if isinstance(index, MetadataIndex) else None
        if row is None:
            raise KeyError(index)
        found, offset, length = self.inventory.extent_of(row)
        return StorageInfo(found.name, offset, length)

    def __iter__(self) -> Iterator[MetadataIndex]:
        offsets = {dims: _rows(of.offsets) for dims, of in self.inventory.chunks.items()}
        for name, entry in self.inventory.entries.items():
            if entry.shape is None:
                yield MetadataIndex(name)
                continue
            for number, offset in enumerate(islice(offsets[len(entry.shape)], entry.count)):
                yield MetadataIndex(name, torch.Size(offset), number)

    def items(self) -> _Items:
        """All of them, in one pass over the columns."""
        return _Items(self)

    def values(self) -> _Values:
        """All of them, in one pass over the columns."""
        return _Values(self)

    def __len__(self) -> int:
        return len(self.inventory.extents)


class _Values(ValuesView[StorageInfo]):
    _mapping: _Places

    def __iter__(self) -> Iterator[StorageInfo]:
        inventory = self._mapping.inventory
        names = [one.name for one in inventory.objects]
        for number, offset, length in zip(*map(_rows, inventory.extents.columns), strict=True):
            yield StorageInfo(names[number], offset, length)


class _Items(ItemsView[MetadataIndex, StorageInfo]):
    _mapping: _Places

    def __iter__(self) -> Iterator[tuple[MetadataIndex, StorageInfo]]:
        return zip(self._mapping, self._mapping.values(), strict=True)


def _rows(column: torch.Tensor) -> Iterator[Any]:
    """The rows of a column or matrix, as numbers of Python; only some of them are in memory."""
    for part in torch.split(column, _AT_ONCE):
        yield from part.tolist()
