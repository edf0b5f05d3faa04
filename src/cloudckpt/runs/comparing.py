"""Compares two checkpoints: their entries by metadata, and the content of entries by checksums.

The checksums of blocks can be combined into the checksum of a whole tensor if each of its chunks
consists of whole rows. So tensors saved by different numbers of ranks can still be compared.
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
"""The position of a chunk in its tensor: its offsets and its sizes."""

_Content = dict[tuple[object, ...], tuple[object, int]]
"""For each chunk of an entry, keyed by its position and checksum algorithm: a value that is equal
for equal bytes, and the number of bytes."""

Verdict = Literal["same", "changed", "reshaped", "removed", "added", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedItem:
    """The comparison of one entry of two checkpoints.

    Attributes:
        name: The fully qualified name of the entry.
        verdict: ``same``: equal content; ``changed``: different content; ``reshaped``: different
            shape or element type, or a tensor in only one of the checkpoints; ``removed``: only in
            the first checkpoint; ``added``: only in the second; ``unknown``: the checksums can't be
            compared.
        first: The entry in the first checkpoint; None if that checkpoint lacks it.
        second: The entry in the second checkpoint; None if that checkpoint lacks it.
        differing: For ``changed``: the bytes of the chunks that differ; None if not known.
    """

    name: str
    verdict: Verdict
    first: StoredItem | None
    second: StoredItem | None
    differing: int | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison of two checkpoints, entry by entry.

    Attributes:
        first: The location of the first checkpoint.
        second: The location of the second checkpoint.
        items: The comparison of each entry that either checkpoint has, sorted by name.
    """

    first: str
    second: str
    items: tuple[ComparedItem, ...]

    @property
    def are_same(self) -> bool | None:
        """Whether all entries are the same; None if some can't be compared and no other differs."""
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
    """Compares two checkpoints entry by entry, and the content of entries by their checksums.

    No tensor is read. Equal checksums count as equal content: of 2³² blocks that differ, one has
    the same checksum by chance. Notes, metrics, and the division of tensors among ranks are not
    compared.

    Args:
        first: The location of a checkpoint, for example ``s3://bucket/path``.
        second: The location of the other checkpoint, possibly in another cloud.
        pattern: The names of the entries to compare; ``*`` stands for any text.
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
    """An entry of a checkpoint that is being compared."""

    part: ReadContent
    name: str

    @property
    def stored(self) -> StoredItem:
        """The entry's name, shape, type and size."""
        return self.part.item(self.name, self.part.metadata.state_dict_metadata[self.name])

    @property
    def tensor(self) -> TensorStorageMetadata | None:
        """The metadata of the tensor; None if the entry is not a tensor."""
        entry = self.part.metadata.state_dict_metadata[self.name]
        return entry if isinstance(entry, TensorStorageMetadata) else None

    def chunks(self) -> dict[_Place, StoredBytes]:
        """Returns where each chunk's bytes are stored, by the position of the chunk."""
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
        """Returns the checksums of the entry's chunks; None if a chunk has no checksum."""
        found: _Content = {}
        for place, source in self.chunks().items():
            if source.blocks is None:
                return None
            mark = source.nbytes, _checksum(source)
            found[(place, source.blocks.algorithm)] = mark, source.nbytes
        return found


def _boxes_of(tensor: TensorStorageMetadata) -> list[_Place]:
    """Returns the positions of a tensor's chunks."""
    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks]


def _entries(part: ReadContent, pattern: str) -> dict[str, _Entry]:
    """Returns the entries of a checkpoint whose names match the pattern."""
    return {
        name: _Entry(part, name)
        for name in part.metadata.state_dict_metadata
        if fnmatchcase(name, pattern)
    }


def _read_indexes(entries: Sequence[_Entry], uri: CheckpointURI, config: Config) -> None:
    """Reads the indexes, with the block checksums, of the checkpoints that have these entries."""
    for part in {id(entry.part): entry.part for entry in entries}.values():
        part.places.read_indexes(open_store(uri, config), config)


def _compared(name: str, one: _Entry | None, other: _Entry | None) -> ComparedItem:
    """Compares an entry by metadata alone; ``unknown`` if only checksums can decide."""
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
    """Compares the checksums of two entries chunk by chunk, or else of the whole tensors.

    Returns:
        The verdict, and how many bytes differ, or None if that is not known.
    """
    verdict, differing = _verdict(one.checksums(), other.checksums())
    joined = _joined(one), _joined(other)
    if verdict != "unknown" or None in joined or joined[0][0] is not joined[1][0]:  # type: ignore[index]
        return verdict, differing
    return ("same" if joined[0] == joined[1] else "changed"), None


def _verdict(ours: _Content | None, theirs: _Content | None) -> tuple[Verdict, int | None]:
    """Compares checksums chunk by chunk; returns the verdict and how many bytes differ.

    If the entries are not divided into the same chunks, the verdict is ``unknown``.
    """
    if ours is None or theirs is None or ours.keys() != theirs.keys():
        return "unknown", None
    differing = [
        max(nbytes, theirs[place][1])
        for place, (mark, nbytes) in ours.items()
        if mark != theirs[place][0]
    ]
    return ("changed", sum(differing)) if differing else ("same", None)


def _checksum(source: StoredBytes) -> int:
    """Combines the checksums of all blocks of a chunk into one."""
    blocks = source.blocks
    assert blocks is not None
    lengths = (
        min(blocks.size, source.nbytes - start) for start in range(0, source.nbytes, blocks.size)
    )
    return blocks.algorithm.combine(zip(blocks.checksums, lengths, strict=True))


def _joined(entry: _Entry) -> tuple[ChecksumAlgorithm, int] | None:
    """Combines the checksums of a tensor's chunks into one of the whole tensor, with its algorithm.

    Returns None if the chunks are not whole rows that follow one another without a gap, are not
    stored as raw elements, or lack checksums of one algorithm.
    """
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
