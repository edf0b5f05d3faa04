"""Compares two checkpoints: their entries by metadata, and the content of entries by checksums.

The checksums of chunks can be combined into the checksum of a whole tensor if the tensor was
divided only along its first dimension. So tensors saved by different numbers of ranks can still be
compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from cloudckpt.checksum import ChecksumAlgorithm
from cloudckpt.config import Config, config_or_default
from cloudckpt.errors import ConfigError
from cloudckpt.runs.contents import ReadContent, StoredItem, read_content
from cloudckpt.transfer.retry import open_store
from cloudckpt.uri import CheckpointURI, URILike

__all__ = ["ComparedItem", "Comparison", "diff"]

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
        differing: For ``changed``: the bytes of the chunks that differ; None if not known, and for
            the other verdicts.
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
        """Whether all entries are the same; None if some can't be compared, and no other differs.

        False if any entry differs.
        """
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

    No tensor is read. Equal checksums count as equal content: of 2³² different blocks, one has
    the same checksum by chance. Notes, metrics, and the division of tensors among ranks are not
    compared.

    Args:
        first: The location of a checkpoint, for example ``s3://bucket/path``.
        second: The location of the other checkpoint, possibly in another cloud.
        pattern: The names of the entries to compare; ``*`` stands for any text.
        config: Options; None reads them from the environment.

    Returns:
        The comparison of each entry; ``are_same`` says whether all of them are the same.

    Raises:
        InvalidURIError: If ``first`` or ``second`` is not a valid location.
        CheckpointNotFoundError: If either location has no committed checkpoint.
        CheckpointCorruptError: If metadata is damaged.
        CheckpointError: If metadata can't be read for another reason: it names code that is not on
            the allow-list, for example, or is replaced again and again.
        ConfigError: If no entry has a name that ``pattern`` matches, or an option is invalid.
        StoreError: If a store refuses or stays unreachable.
    """
    config = config_or_default(config)
    first_uri, second_uri = CheckpointURI.parse(first), CheckpointURI.parse(second)
    before, after = read_content(first_uri, config), read_content(second_uri, config)
    names = {*before.metadata.state_dict_metadata, *after.metadata.state_dict_metadata}
    pairs = [
        (_stored(before, name), _stored(after, name))
        for name in sorted(names)
        if fnmatchcase(name, pattern)
    ]
    if names and not pairs:
        raise ConfigError(f"pattern={pattern!r} matches no entry: see them with cloudckpt inspect")
    if any(_are_alike(one, other) for one, other in pairs):
        for uri, part in ((first_uri, before), (second_uri, after)):
            part.places.read_indexes(open_store(uri, config), config)
    items = [_compared(one, other, before, after) for one, other in pairs]
    return Comparison(first=str(first_uri), second=str(second_uri), items=tuple(items))


def _stored(part: ReadContent, name: str) -> StoredItem | None:
    """Describes an entry of a checkpoint; None if the checkpoint lacks it."""
    entry = part.metadata.state_dict_metadata.get(name)
    return None if entry is None else part.item(name, entry)


def _are_alike(one: StoredItem | None, other: StoredItem | None) -> bool:
    """Returns whether both checkpoints have an entry, of the same shape and element type."""
    if one is None or other is None:
        return False
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def _compared(
    one: StoredItem | None, other: StoredItem | None, before: ReadContent, after: ReadContent
) -> ComparedItem:
    """Compares an entry by shape and type and, if these are equal, by its chunks' checksums.

    ``one`` and ``other`` are the entry in the two checkpoints; at most one of them is None.
    """
    stored, differing = one or other, None
    assert stored is not None
    verdict: Verdict
    if one is None or other is None:
        verdict = "added" if one is None else "removed"
    elif not _are_alike(one, other):
        verdict = "reshaped"
    else:
        sums = _checksums(before, stored.name), _checksums(after, stored.name)
        verdict, differing = _by_checksums(*sums, stored)
    return ComparedItem(
        name=stored.name, verdict=verdict, first=one, second=other, differing=differing
    )


@dataclass(frozen=True)
class _Chunk:
    """The checksum of a chunk's stored bytes, its algorithm, and the number of bytes."""

    algorithm: ChecksumAlgorithm
    checksum: int
    nbytes: int


_Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The position of a chunk in its tensor: its offsets and its sizes."""


def _checksums(part: ReadContent, name: str) -> dict[_Box, _Chunk] | None:
    """Returns the checksum of each chunk of an entry; None if a chunk has none."""
    entry = part.metadata.state_dict_metadata[name]
    boxes: list[_Box] = [((), ())]
    if isinstance(entry, TensorStorageMetadata):
        boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
    chunks: dict[_Box, _Chunk] = {}
    for box, source in zip(boxes, part.places.wholes(part.indices(name)), strict=True):
        if (blocks := source.blocks) is None:
            return None
        starts = range(0, source.nbytes, blocks.size)
        lengths = (min(blocks.size, source.nbytes - start) for start in starts)
        checksum = blocks.algorithm.combine(zip(blocks.checksums, lengths, strict=True))
        chunks[box] = _Chunk(blocks.algorithm, checksum, source.nbytes)
    return chunks


def _by_checksums(
    ours: dict[_Box, _Chunk] | None, theirs: dict[_Box, _Chunk] | None, stored: StoredItem
) -> tuple[Verdict, int | None]:
    """Compares the checksums of an entry chunk by chunk, or else of the whole tensors.

    Returns:
        The verdict, and for ``changed`` the bytes of the chunks that differ; None if these are not
        known, and for the other verdicts.
    """
    if ours is None or theirs is None:
        return "unknown", None
    if ours.keys() == theirs.keys() and all(
        one.algorithm is theirs[box].algorithm for box, one in ours.items()
    ):
        differing = [
            max(one.nbytes, theirs[box].nbytes) for box, one in ours.items() if one != theirs[box]
        ]
        return ("changed", sum(differing)) if differing else ("same", None)
    one, other = _joined(ours, stored), _joined(theirs, stored)
    if one is None or other is None or one.algorithm is not other.algorithm:
        return "unknown", None
    return ("same" if one == other else "changed"), None


def _joined(chunks: dict[_Box, _Chunk], stored: StoredItem) -> _Chunk | None:
    """Combines the checksums of a tensor's chunks into the checksum of the whole tensor.

    Returns None if the tensor has no dimensions, or is divided along any dimension but the first;
    if chunks are missing or not stored as raw elements; if their checksums are of several
    algorithms; or if the entry is not a tensor.
    """
    shape, kinds = stored.shape, {one.algorithm for one in chunks.values()}
    if not shape or len(kinds) != 1:
        return None
    [algorithm], checksum, row = kinds, 0, 0
    for (offsets, sizes), one in sorted(chunks.items(), key=lambda pair: pair[0]):
        is_next = offsets == (row, *([0] * (len(shape) - 1))) and sizes[1:] == shape[1:]
        is_raw = one.nbytes * math.prod(shape) == stored.nbytes * math.prod(sizes)
        if not is_next or not is_raw:
            return None
        checksum = algorithm.joined(checksum, one.checksum, one.nbytes)
        row += sizes[0]
    return _Chunk(algorithm, checksum, stored.nbytes) if row == shape[0] else None
