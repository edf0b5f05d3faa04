"""The differences between two checkpoints: which entries, and by checksums, what content.

Checksums of blocks can be joined into that of a whole tensor, as long as its chunks are rows of it.
So a tensor that was saved by another number of ranks can still be compared.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from cloudckpt.checksum import ChecksumAlgorithm
from cloudckpt.config import Config, config_or_default
from cloudckpt.runs.contents import ReadContent, StoredItem, read_content
from cloudckpt.transfer.landing import StoredBytes
from cloudckpt.transfer.retry import open_store
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["ComparedItem", "Comparison", "diff"]

_Place = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a chunk in its tensor."""

_Content = dict[tuple[object, ...], tuple[object, int]]
"""By the position of each chunk and the kind of its mark, the mark that equal bytes share, and how
many bytes there are."""

Verdict = Literal["same", "changed", "reshaped", "removed", "added", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedItem:
    """An entry of either checkpoint.

    Attributes:
        name: Its fully qualified name.
        verdict: ``same``; ``changed``: other content; ``reshaped``: another shape or element type,
            or a tensor in only one of them; ``removed`` and ``added``: only in the first, or only
            in the second; ``unknown``: their checksums can't be compared.
        first: The entry in the first checkpoint, if it is there.
        second: The entry in the second checkpoint, if it is there.
        differing: For ``changed``: the bytes of the chunks that differ; None if unknown.
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
    """

    first: str
    second: str
    items: tuple[ComparedItem, ...]

    @property
    def are_same(self) -> bool | None:
        """Whether all entries are the same; None if their checksums don't tell."""
        verdicts = {item.verdict for item in self.items}
        if verdicts <= {"same", "unknown"}:
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
    return Comparison(first=str(here), second=str(there), items=tuple(items.values()))


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

    def checksums(self) -> _Content | None:
        """The checksums of its chunks; None if it has none."""
        found: _Content = {}
        for place, source in self.chunks().items():
            if source.blocks is None:
                return None
            mark = source.nbytes, _checksum(source)
            found[(place, source.blocks.algorithm)] = mark, source.nbytes
        return found


def _boxes_of(tensor: TensorStorageMetadata) -> list[_Place]:
    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks]


def _entries(part: ReadContent, pattern: str) -> dict[str, _Entry]:
    return {
        name: _Entry(part, name)
        for name in part.metadata.state_dict_metadata
        if fnmatchcase(name, pattern)
    }


def _read_indexes(entries: Sequence[_Entry], uri: CheckpointURI, config: Config) -> None:
    """Reads the checksums of all objects for which they are needed."""
    for part in {id(entry.part): entry.part for entry in entries}.values():
        part.places.read_indexes(open_store(uri, config), config)


def _compared(name: str, one: _Entry | None, other: _Entry | None) -> ComparedItem:
    """The result that the metadata alone give."""
    first = None if one is None else one.stored
    second = None if other is None else other.stored
    verdict: Verdict
    if one is None or other is None or first is None or second is None:
        verdict = "removed" if other is None else "added"
    elif (first.shape, first.dtype) != (second.shape, second.dtype):
        verdict = "reshaped"
    else:
        verdict = "unknown"
    return ComparedItem(name=name, verdict=verdict, first=first, second=second)


def _by_checksums(one: _Entry, other: _Entry) -> tuple[Verdict, int | None]:
    verdict, differing = _verdict(one.checksums(), other.checksums())
    joined = _joined(one), _joined(other)
    if verdict != "unknown" or None in joined or joined[0][0] is not joined[1][0]:  # type: ignore[index]
        return verdict, differing
    return ("same" if joined[0] == joined[1] else "changed"), None


def _verdict(ours: _Content | None, theirs: _Content | None) -> tuple[Verdict, int | None]:
    """What marks of equal chunks tell, and how many bytes differ."""
    if ours is None or theirs is None or ours.keys() != theirs.keys():
        return "unknown", None
    differing = [
        max(nbytes, theirs[place][1])
        for place, (mark, nbytes) in ours.items()
        if mark != theirs[place][0]
    ]
    return ("changed", sum(differing)) if differing else ("same", None)


def _checksum(source: StoredBytes) -> int:
    """The checksum of all its blocks together."""
    blocks = source.blocks
    assert blocks is not None
    lengths = (
        min(blocks.size, source.nbytes - start) for start in range(0, source.nbytes, blocks.size)
    )
    return blocks.algorithm.combine(zip(blocks.checksums, lengths, strict=True))


def _joined(entry: _Entry) -> tuple[ChecksumAlgorithm, int] | None:
    """The checksum of a whole tensor, if its chunks are rows of it that follow one another."""
    tensor = entry.tensor
    if tensor is None:
        return None
    shape, itemsize = tuple(tensor.size), tensor.properties.dtype.itemsize
    algorithm, total, row = None, 0, 0
    for (offsets, sizes), source in sorted(entry.chunks().items(), key=lambda pair: pair[0]):
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
