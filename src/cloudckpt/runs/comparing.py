"""The differences between two checkpoints: which entries, and by checksums, what content.

Checksums of blocks can be joined into that of a whole tensor, as long as its chunks are rows of it.
So a tensor that was saved by another number of ranks can still be compared.
Where incremental saves have stored digests, those are compared, and not even the checksums are
read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from cloudckpt.checkpoint.base import Digest
from cloudckpt.checkpoint.columns import counted
from cloudckpt.checksum import ChecksumAlgorithm
from cloudckpt.config import Config, config_or_default
from cloudckpt.runs.contents import ReadContent, StoredItem, read_content
from cloudckpt.transfer.landing import StoredBytes
from cloudckpt.transfer.retry import open_store
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
            the second; ``unknown``: their checksums can't be compared.
        first: The entry in the first checkpoint, if it is there.
        second: The entry in the second checkpoint, if it is there.
        differing: For ``changed``: the bytes of the chunks whose digests differ, or of the blocks
            whose checksums do; None if unknown.
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
        """Whether all entries are the same; None if their checksums don't tell."""
        verdicts = {item.verdict for item in self.items}
        if verdicts <= {"same", "unknown"} and not self.empty_dicts:
            return None if "unknown" in verdicts else True
        return False


def diff(
    first: URILike,
    second: URILike,
    *,
    pattern: str = "*",
    config: Config | None = None,
) -> Comparison:
    """Compares the entries of two checkpoints, and their content by checksums.

    No tensor is read. Equal checksums are taken for equal content: one in
    2³² blocks that differ has the same checksum by chance. Notes, metrics, and how tensors are
    divided among ranks do not count.

    Args:
        first: ``s3://bucket/path`` or another location.
        second: The other checkpoint; it may be in another cloud.
        pattern: Names to compare; ``*`` stands for any text.
        config: Options.

    Raises:
        CheckpointNotFoundError: If either location has no committed checkpoint.
        CheckpointCorruptError: If metadata is damaged.
        StoreError: If a store refuses or stays unreachable.
    """
    config = config_or_default(config)
    here, there = CheckpointURI.parse(first), CheckpointURI.parse(second)
    before, after = read_content(here, config), read_content(there, config)
    ours, theirs = _entries(before, pattern), _entries(after, pattern)
    items = {
        name: _compared(name, ours.get(name), theirs.get(name))
        for name in sorted(ours.keys() | theirs.keys())
    }

    unknown = [
        (name, ours[name], theirs[name])
        for name, item in items.items()
        if item.verdict == "unknown"
    ]
    if unknown:
        _read_indexes([one for _, one, _ in unknown], here, config)
        _read_indexes([other for _, _, other in unknown], there, config)
    for name, one, other in unknown:
        verdict, differing = _by_checksums(one, other)
        items[name] = dataclasses.replace(items[name], verdict=verdict, differing=differing)
    for name, item in items.items():
        if item.verdict == "same" and _are_moved(ours[name], theirs[name]):
            items[name] = dataclasses.replace(item, verdict="moved")
    return Comparison(
        first=str(here),
        second=str(there),
        items=tuple(items.values()),
        empty_dicts=tuple(sorted(_empty_dicts(before, after, pattern))),
    )


@dataclass(frozen=True)
class _Entry:
    """An entry, and the commit object that names it."""

    part: ReadContent
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


def _entries(part: ReadContent, pattern: str) -> dict[str, _Entry]:
    return {
        name: _Entry(part, name)
        for name in part.metadata.state_dict_metadata
        if fnmatchcase(name, pattern)
    }


def _are_moved(one: _Entry, other: _Entry) -> bool:
    """Whether state dicts that are loaded from both have an entry in different places."""
    restored = one.part.said.record is not None and other.part.said.record is not None
    return one.path(restored=restored) != other.path(restored=restored)


def _empty_dicts(first: ReadContent, second: ReadContent, pattern: str) -> set[str]:
    """The empty dicts in only one of two checkpoints; none if one is another writer's."""
    if first.said.record is None or second.said.record is None:
        return set()
    ours, theirs = (
        {".".join(map(str, path)) for path in one.said.structure.empty} for one in (first, second)
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
