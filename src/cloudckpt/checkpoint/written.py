"""What a rank reports to the coordinator: its objects, and where in them its items lie."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from cloudckpt.checkpoint.columns import (
    column_of,
    deflated,
    inflated,
    numbers_in,
    raw_bytes,
    unfilled,
)
from cloudckpt.checkpoint.objects import WrittenObject, pack_objects, unpack_objects
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checkpoint.timing import RankTiming

__all__ = ["Extents", "Written", "earlier_objects"]


@dataclass(frozen=True)
class Extents:
    """Where items lie, as columns of int64.

    Attributes:
        objects: The numbers of their objects.
        offsets: Their first bytes in these, envelopes included.
        lengths: Their bytes, envelopes included.
        high: The first halves of the items' digests (:mod:`cloudckpt.checkpoint.base`); None if
            digests were not requested.
        low: The second halves.
    """

    objects: torch.Tensor
    offsets: torch.Tensor
    lengths: torch.Tensor
    high: torch.Tensor | None = None
    low: torch.Tensor | None = None

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int]]) -> Extents:
        """Extents from rows of object, offset and length."""
        table = column_of(rows).reshape(-1, 3)
        return cls(*(column.contiguous() for column in table.unbind(1)))

    @classmethod
    def none(cls, *, digests: bool = False) -> Extents:
        """Extents of no items; ``digests``: with empty columns for digests."""
        return cls(*(unfilled(0) for _ in range(5 if digests else 3)))

    def __len__(self) -> int:
        return self.objects.numel()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Extents) or len(self) != len(other):
            return NotImplemented if not isinstance(other, Extents) else False
        if self.has_digests != other.has_digests:
            return False
        return all(map(torch.equal, self.all_columns, other.all_columns))

    __hash__ = None  # type: ignore[assignment]

    @property
    def columns(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The columns of the locations."""
        return self.objects, self.offsets, self.lengths

    @property
    def has_digests(self) -> bool:
        """Whether there are digests."""
        return self.high is not None and self.low is not None

    @property
    def all_columns(self) -> tuple[torch.Tensor, ...]:
        """The columns of the locations, and of the digests if there are any."""
        if self.high is None or self.low is None:
            return self.columns
        return (*self.columns, self.high, self.low)

    def digest(self) -> bytes:
        """A digest of all extents, in their order."""
        made = hashlib.blake2b(digest_size=16)
        for column in self.all_columns:
            made.update(raw_bytes(column))
        return made.digest()

    def at(self, items: torch.Tensor) -> Extents:
        """The extents of some items."""
        return Extents(*(column[items] for column in self.all_columns))

    def __reduce__(self) -> tuple[object, ...]:
        # a pickled tensor takes a thousand bytes
        packed = self.pack()
        return _extents, (deflated(packed), len(packed), len(self.all_columns))

    def pack(self) -> bytes:
        """All columns, one after the other, as little-endian 64-bit integers."""
        return b"".join(map(raw_bytes, self.all_columns))

    @classmethod
    def unpack(cls, packed: bytes | bytearray, columns: int) -> Extents:
        """The reverse of :meth:`pack`; ``columns`` is how many there are."""
        numbers = numbers_in(bytearray(packed), torch.int64, len(packed) // 8)
        return cls(*numbers.view(columns, -1).unbind(0))


@dataclass(frozen=True)
class Written:
    """What one rank has written in a save.

    Attributes:
        uri: The checkpoint.
        objects: Its objects, by ordinal, then those of earlier saves that hold some of its items.
        extents: Where the items of its plan are, in their order.
        unmoved: The digest of the extents if they are those of the rank's previous save; then
            ``extents`` is empty.
        structure: How its values were nested.
        indices: The indices of the plan's items, if the coordinator does not know them.
        timing: How long it took.
    """

    uri: str
    objects: tuple[WrittenObject, ...]
    extents: Extents
    unmoved: bytes = b""
    structure: Structure = field(default_factory=Structure)
    indices: tuple[MetadataIndex, ...] | None = None
    timing: RankTiming | None = None

    def seen_from(self, folder: str) -> Written:
        """The same for the checkpoint in ``folder``: see :meth:`WrittenObject.seen_from`."""
        if all(one.folder != folder for one in self.objects):
            return self
        objects = tuple(one.seen_from(folder) for one in self.objects)
        return dataclasses.replace(self, objects=objects)

    def without(self, earlier: Extents) -> Written:
        """A copy without the extents if they equal ``earlier``."""
        if self.extents != earlier:
            return self
        return dataclasses.replace(self, extents=Extents.none(), unmoved=earlier.digest())

    def completed(self, earlier: Extents) -> Written:
        """The reverse of :meth:`without`.

        Raises:
            ValueError: If it was called with another ``earlier``.
        """
        if not self.unmoved:
            return self
        if earlier.digest() != self.unmoved:
            raise ValueError("its items lie elsewhere than it says")
        return dataclasses.replace(self, extents=earlier, unmoved=b"")

    def __reduce__(self) -> tuple[object, ...]:
        packed = pack_objects(self.objects)
        rest = (self.extents, self.unmoved, self.structure, self.indices, self.timing)
        return _written, (self.uri, packed, *rest)


def earlier_objects(written: Iterable[Written], folder: str) -> set[str]:
    """The names of the objects of earlier saves that the checkpoint in ``folder`` will name."""
    return {
        one.seen_from(folder).name for of_rank in written for one in of_rank.objects if one.folder
    }


def _extents(packed: bytes, size: int, columns: int) -> Extents:
    return Extents.unpack(inflated(memoryview(packed), size), columns)


def _written(uri: str, packed: tuple[bytes, tuple[str, ...]], *fields: object) -> Written:
    return Written(uri, unpack_objects(*packed), *fields)  # type: ignore[arg-type]
