"""Whether the two descriptions in a commit object of ours say the same, name by name.

Loads of ours believe the columns, and stock torch believes its pickle before them. One that is
wrong is noticed by nobody who reads the other: so whoever verifies a checkpoint compares the two,
column by column. The pickle is read as that of a stranger, and no code of it is run. What the
indexes of data objects say is compared where these are read, :mod:`cloudckpt.checkpoint.places`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties

from cloudckpt.checkpoint.columns import column_of, counted, repeated, unfilled
from cloudckpt.checkpoint.from_torch import NotInColumnsError, inventory_of_metadata
from cloudckpt.checkpoint.inventory import Chunks, Entry, Inventory
from cloudckpt.checkpoint.lazy import save_id_of
from cloudckpt.checkpoint.record import Record
from cloudckpt.checkpoint.torch_private import StorageInfo, with_strides
from cloudckpt.gc_pause import paused_gc

__all__ = ["contradictions"]

_NOBODY = ""  # the name of what belongs to no item


def contradictions(record: Record, pickled: Metadata) -> dict[str, str]:
    """What torch's metadata in a commit object contradict ours in.

    Args:
        record: Ours.
        pickled: torch's, as the pickle beside the record has them.

    Returns:
        By the name of an item, what is said of it by the one and by the other; by the empty name
        what is no item's.
    """
    found = _Contradictions()
    with paused_gc():
        save_id = getattr(pickled.storage_meta, "save_id", None)
        if save_id != save_id_of(record.attempt):
            found.add(_NOBODY, f"the save is {save_id!r}", repr(save_id_of(record.attempt)))
        if record.inventory is None:
            _compare_objects(record, pickled, found)
            return found.told()
        _compare_entries(record.inventory, pickled, found)
        _compare_places(record.inventory, pickled, found)
        _compare_paths(record.inventory.paths, pickled.planner_data, found)
    return found.told()


class _Contradictions:
    """Collects them; of each name the first is told, and how many there are."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}
        self._more: dict[str, int] = {}

    def add(self, name: str, torchs: str, ours: str) -> None:
        """Notes what is said of a name: a clause by torch's metadata, and its end by ours."""
        if name in self._first:
            self._more[name] = self._more.get(name, 0) + 1
        else:
            self._first[name] = f"{torchs} by torch's metadata, and {ours} by ours"

    def told(self) -> dict[str, str]:
        """All of them, by name."""
        return {
            name: f"{what} ({more} more)" if (more := self._more.get(name)) else what
            for name, what in self._first.items()
        }


def _compare_entries(ours: Inventory, pickled: Metadata, found: _Contradictions) -> None:
    """Names, kinds, shapes, properties, and which parts of their tensors the chunks are."""
    try:
        theirs = inventory_of_metadata(Metadata(pickled.state_dict_metadata), ours.checksum)
    except NotInColumnsError as error:
        found.add(_NOBODY, f"there is {error}", "nothing of the kind")
        return
    for name in theirs.entries.keys() - ours.entries.keys():
        found.add(name, "it is there", "it is not")
    pairs: dict[int, list[tuple[str, Entry, Entry]]] = {}
    for name, mine in ours.entries.items():
        its = theirs.entries.get(name)
        if its is None:
            found.add(name, "it is not there", "it is")
        elif mine.shape is None or its.shape is None:
            if mine.shape is not its.shape:
                found.add(name, _kind(its), _kind(mine))
        else:
            if mine.shape != its.shape:
                found.add(name, f"its shape is {its.shape}", str(mine.shape))
            _compare_properties(
                name, theirs.properties[its.properties], ours.properties[mine.properties], found
            )
            if mine.count != its.count:
                found.add(name, f"it has {its.count} chunks", str(mine.count))
            elif len(mine.shape) == len(its.shape):
                pairs.setdefault(len(mine.shape), []).append((name, mine, its))
    for dims, of_dims in pairs.items():
        _compare_chunks(of_dims, ours.chunks[dims], theirs.chunks[dims], found)


def _kind(entry: Entry) -> str:
    return "it is no tensor" if entry.shape is None else "it is a tensor"


def _compare_properties(
    name: str, theirs: TensorProperties, ours: TensorProperties, found: _Contradictions
) -> None:
    theirs = with_strides(theirs, None)
    if theirs == ours:
        return
    for field in dataclasses.fields(ours):
        its, mine = getattr(theirs, field.name), getattr(ours, field.name)
        if its != mine:
            found.add(name, f"its {field.name} is {its}", str(mine))


def _compare_chunks(
    pairs: Sequence[tuple[str, Entry, Entry]],
    ours: Chunks,
    theirs: Chunks,
    found: _Contradictions,
) -> None:
    """The chunks of tensors with as many dimensions, and as many chunks, in both."""
    counts = column_of([mine.count for _, mine, _ in pairs])
    mine = _places([entry.place for _, entry, _ in pairs], counts)
    its = _places([entry.place for _, _, entry in pairs], counts)
    differ = (ours.offsets[mine] != theirs.offsets[its]).any(1)
    differ |= (ours.sizes[mine] != theirs.sizes[its]).any(1)
    ends = counts.cumsum(0)
    for number in differ.nonzero().view(-1).tolist():
        pair = int(torch.searchsorted(ends, number, right=True))
        found.add(
            pairs[pair][0],
            f"a chunk is {_box(theirs, int(its[number]))}",
            _box(ours, int(mine[number])),
        )


def _places(firsts: Sequence[int], counts: torch.Tensor) -> torch.Tensor:
    """The numbers of chunks: of each tensor ``counts`` from a first one on."""
    before = column_of(firsts) - (counts.cumsum(0) - counts)
    return repeated(before, counts) + counted(0, int(counts.sum()))


def _box(chunks: Chunks, number: int) -> str:
    offsets, sizes = chunks.offsets[number].tolist(), chunks.sizes[number].tolist()
    return f"{tuple(sizes)} at {tuple(offsets)}"


def _compare_places(ours: Inventory, pickled: Metadata, found: _Contradictions) -> None:
    """In which objects, and where in them, all items lie."""
    indices: list[MetadataIndex] = []
    places: list[StorageInfo] = []
    for index, place in _items(pickled, found):
        indices.append(index)
        places.append(place)
    numbers = {one.name: number for number, one in enumerate(ours.objects)}
    rows = ours.rows(indices)
    for number in (rows < 0).nonzero().view(-1).tolist():
        index = indices[number]
        found.add(index.fqn, f"there is an item {_item(index)}", "none")
    its = unfilled(3, rows.numel())
    its[0] = column_of([numbers.get(place.relative_path, -1) for place in places])
    its[1] = column_of([place.offset for place in places])
    its[2] = column_of([place.length for place in places])
    is_known = rows >= 0
    mine = torch.stack(ours.extents.at(rows.clamp(min=0)).columns) if len(ours.extents) else its
    for number in ((its != mine).any(0) & is_known).nonzero().view(-1).tolist():
        written, offset, length = ours.extent_of(int(rows[number]))
        place = places[number]
        found.add(
            indices[number].fqn,
            f"an item {_item(indices[number])} lies at "
            f"{_where(place.relative_path, place.offset, place.length)}",
            f"at {_where(written.name, offset, length)}",
        )
    missing = torch.ones(len(ours.extents), dtype=torch.bool, device="cpu")
    missing[rows[is_known]] = False
    for row in missing.nonzero().view(-1).tolist():
        written, offset, length = ours.extent_of(row)
        where = f"at {_where(written.name, offset, length)}"
        found.add(ours.name_of(row), "an item lies nowhere", where)


def _items(
    pickled: Metadata, found: _Contradictions
) -> Iterator[tuple[MetadataIndex, StorageInfo]]:
    """What torch's metadata say of places; what is of another form is told."""
    if not isinstance(pickled.storage_data, Mapping):
        found.add(_NOBODY, "there are no places of items", "there are")
        return
    for index, place in pickled.storage_data.items():
        name = index.fqn if isinstance(index, MetadataIndex) else _NOBODY
        if not isinstance(index, MetadataIndex) or not isinstance(place, StorageInfo):
            found.add(name, "a place is of another form", "none")
            continue
        if transforms := getattr(place, "transform_descriptors", None):
            found.add(name, f"an item was changed by {', '.join(transforms)[:200]}", "by nothing")
        yield index, place


def _compare_paths(ours: Mapping[str, Any] | None, theirs: Any, found: _Contradictions) -> None:
    """The planner's data: where in the state dict the names stood."""
    if ours == theirs:
        return
    if ours is None or not isinstance(theirs, Mapping):
        found.add(_NOBODY, f"the planner's data are {_short(theirs)}", _short(ours))
        return
    for name in dict.fromkeys([*ours, *theirs]):
        if (mine := ours.get(name)) != (its := theirs.get(name)):
            found.add(str(name), f"its path is {_short(its)}", _short(mine))


def _compare_objects(record: Record, pickled: Metadata, found: _Contradictions) -> None:
    """Of metadata without columns: whether all places are within objects that the record has."""
    ends = {one.name: one.size - one.index_size for one in record.objects}
    for index, place in _items(pickled, found):
        end = ends.get(place.relative_path)
        if end is None or place.offset + place.length > end:
            where = _where(place.relative_path, place.offset, place.length)
            there = "there is no such object" if end is None else f"its items end at byte {end}"
            found.add(index.fqn, f"an item {_item(index)} lies at {where}", there)


def _item(index: MetadataIndex) -> str:
    return "of its own" if index.offset is None else f"from {tuple(index.offset)} on"


def _where(name: object, offset: int, length: int) -> str:
    return f"bytes {offset} to {offset + length} of {str(name)[:200]}"


def _short(value: object) -> str:
    return "none" if value is None else repr(value)[:200]
