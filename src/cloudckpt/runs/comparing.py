"""The differences between two checkpoints: which entries, and by checksums, what content.

Checksums of blocks can be joined into that of a whole tensor, as long as its chunks are rows of it.
So a tensor that was saved by another number of ranks can still be compared without reading it.
Where incremental saves have stored digests, those are compared, and not even the checksums are
read.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeVar, cast

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from cloudckpt.checkpoint.base import Digest
from cloudckpt.checkpoint.columns import counted
from cloudckpt.checkpoint.values import load_item
from cloudckpt.checksum import ChecksumAlgorithm
from cloudckpt.config import Config, config_or_default
from cloudckpt.dcp.loading import Load
from cloudckpt.errors import CloudCheckpointError
from cloudckpt.runs.contents import CheckpointPart, StoredItem, parts
from cloudckpt.transfer.boxes import Box, row_major_slices
from cloudckpt.transfer.landing import StoredBytes
from cloudckpt.transfer.memory import narrow
from cloudckpt.transfer.retry import open_store
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["ComparedItem", "Comparison", "diff"]

_Place = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a chunk in its tensor."""

Verdict = Literal["same", "changed", "reshaped", "moved", "removed", "added", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedItem:
    """An entry of either checkpoint.

    Attributes:
        name: Its fully qualified name.
        verdict: ``same``; ``changed``: other content; ``reshaped``: another shape or element type,
            or a tensor in only one of them; ``moved``: the same, but under keys of another type, or
            in a list in only one of them; ``removed`` and ``added``: only in the first, or only in
            the second; ``unknown``: their checksums can't be compared, so the entries have to be
            read.
        first: The entry in the first checkpoint, if it is there.
        second: The entry in the second checkpoint, if it is there.
        differing: For ``changed``: the bytes that differ, or if the entry was not read, the bytes
            of the chunks whose digests differ, or of the blocks whose checksums do; None if
            unknown.
    """

    name: str
    verdict: Verdict
    first: StoredItem | None
    second: StoredItem | None
    differing: int | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What two checkpoints have in common, and where they differ.

    Attributes:
        first: The location of the first.
        second: The location of the second.
        items: The entries of both, by name.
        empty_dicts: The empty dicts in only one of them, by name.
    """

    first: str
    second: str
    items: tuple[ComparedItem, ...]
    empty_dicts: tuple[str, ...] = ()

    @property
    def are_same(self) -> bool | None:
        """Whether all entries are the same; None if that is not known without reading."""
        verdicts = {item.verdict for item in self.items}
        if verdicts <= {"same", "unknown"} and not self.empty_dicts:
            return None if "unknown" in verdicts else True
        return False


def diff(
    first: URILike,
    second: URILike,
    *,
    pattern: str = "*",
    read: bool = False,
    config: Config | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """Compares the entries of two checkpoints, and their content by checksums.

    No tensor is read unless ``read`` says so. Equal checksums are taken for equal content: one in
    2³² blocks that differ has the same checksum by chance. Notes, metrics, and how tensors are
    divided among ranks do not count.

    Args:
        first: ``s3://bucket/path`` or another location.
        second: The other checkpoint; it may be in another cloud.
        pattern: Names to compare; ``*`` stands for any text.
        read: Whether to read what checksums can't decide: entries without checksums in either, or
            with those of another kind, and tensors whose chunks differ and are not rows. This takes
            a quarter of ``memory_budget`` for each checkpoint, besides that of the transfers, and
            all of a value that is not a tensor.
        config: Options.
        progress: Called with the bytes of the first checkpoint read so far, and in all.

    Raises:
        CheckpointNotFoundError: If either location has no committed checkpoint.
        CheckpointCorruptError: If metadata, or what is read, is damaged.
        StoreError: If a store refuses or stays unreachable.
    """
    config = config_or_default(config)
    here, there = CheckpointURI.parse(first), CheckpointURI.parse(second)
    first_parts, second_parts = list(parts(here, config)), list(parts(there, config))
    ours, theirs = _entries(first_parts, pattern), _entries(second_parts, pattern)
    items = {
        name: _compared(name, ours.get(name), theirs.get(name))
        for name in sorted(ours.keys() | theirs.keys())
    }

    def unknown_ones() -> list[tuple[str, _Entry, _Entry]]:
        return [(n, ours[n], theirs[n]) for n, item in items.items() if item.verdict == "unknown"]

    if unknown := unknown_ones():
        _read_indexes([one for _, one, _ in unknown], here, config)
        _read_indexes([other for _, _, other in unknown], there, config)
    for name, one, other in unknown:
        verdict, differing = _by_checksums(one, other)
        items[name] = dataclasses.replace(items[name], verdict=verdict, differing=differing)
    unknown = unknown_ones()
    if read and unknown:
        for name, count in _read(unknown, here, there, config, progress).items():
            items[name] = dataclasses.replace(
                items[name], verdict="changed" if count else "same", differing=count or None
            )
    for name, item in items.items():
        if item.verdict == "same" and _are_moved(ours[name], theirs[name]):
            items[name] = dataclasses.replace(item, verdict="moved")
    return Comparison(
        first=str(here),
        second=str(there),
        items=tuple(items.values()),
        empty_dicts=tuple(sorted(_empty_dicts(first_parts, second_parts, pattern))),
    )


@dataclass(frozen=True)
class _Entry:
    """An entry, and the commit object that names it."""

    part: CheckpointPart
    name: str

    @property
    def stored(self) -> StoredItem:
        return self.part.item(self.name, self.part.metadata.state_dict_metadata[self.name])

    @property
    def tensor(self) -> TensorStorageMetadata | None:
        entry = self.part.metadata.state_dict_metadata[self.name]
        return entry if isinstance(entry, TensorStorageMetadata) else None

    def chunks(self) -> dict[_Place, StoredBytes]:
        """Its bytes, by the position of each chunk in the tensor."""
        tensor = self.tensor
        if tensor is None:
            (value,) = self.part.places.wholes([MetadataIndex(self.name)])
            return {((), ()): value}
        indices = [
            MetadataIndex(self.name, chunk.offsets, number)
            for number, chunk in enumerate(tensor.chunks)
        ]
        return dict(zip(_boxes_of(tensor), self.part.places.wholes(indices), strict=True))

    def digests(self) -> dict[_Place, tuple[Digest, int]] | None:
        """Digest and bytes of each chunk, by its position; None if digests were not stored."""
        inventory = self.part.said.inventory
        if inventory is None or not inventory.extents.has_digests:
            return None
        known = inventory.entries[self.name]
        rows = counted(known.first, known.first + known.count)
        _, _, lengths, highs, lows = (
            one.tolist() for one in inventory.extents.at(rows).all_columns
        )
        digests = list(zip(highs, lows, strict=True))
        tensor = self.tensor
        if tensor is None:
            return {((), ()): (digests[0], lengths[0])}
        return {
            place: (digest, math.prod(place[1]) * tensor.properties.dtype.itemsize)
            for place, digest in zip(_boxes_of(tensor), digests, strict=True)
        }

    def path(self, *, restored: bool) -> list[tuple[type, str]]:
        """Its keys in the nested state dict, where 0 is not "0", nor an entry of a list.

        Args:
            restored: Whether keys are those of the state dict; torch's paths have them as strings.
        """
        paths, keys = self.part.metadata.planner_data, self.part.said.structure.keys
        found = paths.get(self.name) if isinstance(paths, Mapping) else None
        path = found if isinstance(found, tuple) else (self.name,)
        return [
            (type(one), repr(keys.get(path[:depth], {}).get(one, one) if restored else one))
            for depth, one in enumerate(path)
        ]


def _boxes_of(tensor: TensorStorageMetadata) -> list[_Place]:
    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks]


def _entries(found: Sequence[CheckpointPart], pattern: str) -> dict[str, _Entry]:
    return {
        name: _Entry(part, name)
        for part in found
        for name in part.metadata.state_dict_metadata
        if fnmatchcase(name, pattern)
    }


def _are_moved(one: _Entry, other: _Entry) -> bool:
    """Whether state dicts that are loaded from both have an entry in different places."""
    restored = one.part.said.record is not None and other.part.said.record is not None
    return one.path(restored=restored) != other.path(restored=restored)


def _empty_dicts(
    first: Sequence[CheckpointPart], second: Sequence[CheckpointPart], pattern: str
) -> set[str]:
    """The empty dicts in only one of two checkpoints; none if one is another writer's."""
    if any(part.said.record is None for part in (*first, *second)):
        return set()
    ours, theirs = (
        {".".join(map(str, path)) for part in one for path in part.said.structure.empty}
        for one in (first, second)
    )
    return {name for name in ours ^ theirs if fnmatchcase(name, pattern)}


def _read_indexes(entries: Sequence[_Entry], uri: CheckpointURI, config: Config) -> None:
    """Reads the checksums of all objects for which they are needed."""
    for part in {id(entry.part): entry.part for entry in entries}.values():
        part.places.read_indexes(open_store(uri, config), config)


def _compared(name: str, one: _Entry | None, other: _Entry | None) -> ComparedItem:
    """The result that the metadata alone give."""
    first = None if one is None else one.stored
    second = None if other is None else other.stored
    verdict: Verdict
    differing = None
    if one is None or other is None or first is None or second is None:
        verdict = "removed" if other is None else "added"
    elif (first.shape, first.dtype) != (second.shape, second.dtype):
        verdict = "reshaped"
    else:
        verdict, differing = _by_digests(one, other)
    return ComparedItem(name=name, verdict=verdict, first=first, second=second, differing=differing)


def _by_digests(one: _Entry, other: _Entry) -> tuple[Verdict, int | None]:
    ours, theirs = one.digests(), other.digests()
    if ours is None or theirs is None or ours.keys() != theirs.keys():
        return "unknown", None
    differing = [
        max(ours[place][1], theirs[place][1])
        for place in ours
        if ours[place][0] != theirs[place][0]
    ]
    return ("changed", sum(differing)) if differing else ("same", None)


def _by_checksums(one: _Entry, other: _Entry) -> tuple[Verdict, int | None]:
    ours, theirs = one.chunks(), other.chunks()
    if ours.keys() == theirs.keys():
        found = [_differing(ours[place], theirs[place]) for place in ours]
        if None not in found:
            differing = sum(count or 0 for count in found)
            return ("changed", differing) if differing else ("same", None)
        return "unknown", None
    joined = _joined(one, ours), _joined(other, theirs)
    if None in joined or joined[0][0] is not joined[1][0]:  # type: ignore[index]
        return "unknown", None
    return ("same" if joined[0] == joined[1] else "changed"), None


def _differing(one: StoredBytes, other: StoredBytes) -> int | None:
    """The bytes of the blocks that differ; None if their checksums can't be compared."""
    ours, theirs = one.blocks, other.blocks
    if ours is None or theirs is None or ours.algorithm is not theirs.algorithm:
        return None
    if one.nbytes != other.nbytes:
        return max(one.nbytes, other.nbytes)
    if ours.size != theirs.size:
        return 0 if _checksum(one) == _checksum(other) else one.nbytes
    if ours.checksums == theirs.checksums:
        return 0
    pairs = zip(ours.checksums, theirs.checksums, strict=True)
    return sum(
        min(ours.size, one.nbytes - number * ours.size)
        for number, (mine, its) in enumerate(pairs)
        if mine != its
    )


def _checksum(source: StoredBytes) -> int:
    """The checksum of all its blocks together."""
    blocks = source.blocks
    assert blocks is not None
    lengths = (
        min(blocks.size, source.nbytes - start) for start in range(0, source.nbytes, blocks.size)
    )
    return blocks.algorithm.combine(zip(blocks.checksums, lengths, strict=True))


def _joined(
    entry: _Entry, chunks: dict[_Place, StoredBytes]
) -> tuple[ChecksumAlgorithm, int] | None:
    """The checksum of a whole tensor, if its chunks are rows of it that follow one another."""
    tensor = entry.tensor
    if tensor is None:
        return None
    shape, itemsize = tuple(tensor.size), tensor.properties.dtype.itemsize
    algorithm, total, row = None, 0, 0
    for (offsets, sizes), source in sorted(chunks.items(), key=lambda pair: pair[0]):
        is_next = offsets == (row, *([0] * (len(shape) - 1))) and sizes[1:] == shape[1:]
        is_raw = source.nbytes == math.prod(sizes) * itemsize
        if not shape or not is_next or not is_raw or source.blocks is None:
            return None
        if algorithm not in (None, source.blocks.algorithm):
            return None
        algorithm = source.blocks.algorithm
        total = algorithm.joined(total, _checksum(source), source.nbytes)
        row += sizes[0]
    return None if algorithm is None or row != shape[0] else (algorithm, total)


def _read(
    pairs: Sequence[tuple[str, _Entry, _Entry]],
    here: CheckpointURI,
    there: CheckpointURI,
    config: Config,
    progress: Callable[[int, int], None],
) -> dict[str, int]:
    """How many bytes of each pair differ, after reading them piece by piece."""
    budget = config.memory_budget // 4
    differing = {name: 0 for name, _, _ in pairs}
    total, done = sum(one.stored.nbytes for _, one, _ in pairs), 0
    pieces = (
        (name, one, other, box, nbytes)
        for name, one, other in pairs
        for box, nbytes in _boxes(one, budget)
    )
    for batch in _batches(pieces, budget, lambda piece: piece[4]):
        ours = _Pieces([(one, box) for _, one, _, box, _ in batch]).read(here, config)
        theirs = _Pieces([(other, box) for _, _, other, box, _ in batch]).read(there, config)
        for (name, one, _, _, nbytes), mine, its in zip(batch, ours, theirs, strict=True):
            differing[name] += _different_bytes(mine, its, name, one)
            done += nbytes
        progress(done, total)
    return differing


def _boxes(entry: _Entry, limit: int) -> Iterator[tuple[Box | None, int]]:
    """The regions in which an entry is read, and their bytes; None stands for a whole value."""
    tensor = entry.tensor
    if tensor is None:
        yield None, entry.stored.nbytes
        return
    for slab in row_major_slices(tuple(tensor.size), tensor.properties.dtype.itemsize, limit):
        yield slab.box, slab.stop - slab.start


T = TypeVar("T")


def _batches(pieces: Iterator[T], limit: int, nbytes_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Batches of pieces that stay below the limit, with at least one piece each."""
    batch: list[T] = []
    size = 0
    for piece in pieces:
        if batch and size + nbytes_of(piece) > limit:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += nbytes_of(piece)
    if batch:
        yield batch


class _Pieces:
    """Regions of tensors and whole values of one checkpoint, and the planner to load them."""

    def __init__(self, wanted: Sequence[tuple[_Entry, Box | None]]) -> None:
        self._wanted = wanted
        self._found: list[torch.Tensor | bytes] = [
            b"" if box is None or entry.tensor is None else _empty(entry.tensor, box)
            for entry, box in wanted
        ]

    def read(self, uri: CheckpointURI, config: Config) -> list[torch.Tensor | bytes]:
        store = open_store(uri, config)
        for part in {id(entry.part): entry.part for entry, _ in self._wanted}.values():
            items = [
                item
                for number, (entry, box) in enumerate(self._wanted)
                if entry.part is part
                for item in _read_items(number, entry, box)
            ]
            stats, planner = TransferStats(str(uri)), cast(LoadPlanner, self)
            load = Load(
                store, config, planner, stats, part.places, uri=str(uri), trust_pickle=False
            )
            load.prepare(LoadPlan(items))
            load.run()
        return self._found

    # what a load asks of its planner

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        target = self._found[cast(int, item.dest_index.index)]
        assert isinstance(target, torch.Tensor)
        return narrow(target, tuple(zip(item.dest_offsets, item.lengths, strict=True)))

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        pass

    def load_bytes(self, item: ReadItem, value: io.BytesIO) -> None:
        self._found[cast(int, item.dest_index.index)] = value.getvalue()


def _empty(tensor: TensorStorageMetadata, box: Box) -> torch.Tensor:
    sizes = [length for _, length in box]
    return torch.empty(sizes, dtype=tensor.properties.dtype, device="cpu")


def _read_items(number: int, entry: _Entry, box: Box | None) -> Iterator[ReadItem]:
    """The requests for a piece; each names the piece by its number."""
    name, tensor = entry.name, entry.tensor
    target = MetadataIndex(name, index=number)
    none = torch.Size([])
    if tensor is None or box is None:
        yield ReadItem(LoadItemType.BYTE_IO, target, none, MetadataIndex(name), none, none)
        return
    offsets, sizes = (torch.Size(side) for side in zip(*box, strict=True)) if box else (none, none)
    for item in create_read_items_for_chunk_list(
        name, tensor, [ChunkStorageMetadata(offsets, sizes)]
    ):
        yield dataclasses.replace(item, dest_index=target)


def _different_bytes(
    one: torch.Tensor | bytes, other: torch.Tensor | bytes, name: str, entry: _Entry
) -> int:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        ours, theirs = (each.reshape(-1).view(torch.uint8) for each in (one, other))
        return 0 if torch.equal(ours, theirs) else int((ours != theirs).sum())
    assert isinstance(one, bytes)
    assert isinstance(other, bytes)
    return 0 if one == other or _are_equal(one, other, name) else max(len(one), len(other))


def _are_equal(one: bytes, other: bytes, name: str) -> bool:
    """Whether two values are equal, even if pickled differently, as by torch's writer and ours."""
    try:
        ours, theirs = (load_item(data, name, "", map_location="cpu") for data in (one, other))
        return type(ours) is type(theirs) and bool(ours == theirs)
    except (CloudCheckpointError, RuntimeError, TypeError, ValueError):
        return False
