"""What to send, as a script: the trainer records it, and its saving process carries it out.

A script lists the bytes of shared memory that make up each object, in order, and what the index at
the object's end needs to know about its items. The bytes themselves are not sent: they lie in the
arena of the staged copy, or were written to the annex. The saving process packs small items from
the arena. A script contains no torch or user objects.
"""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cloudckpt.checkpoint.index import index_growth
from cloudckpt.checkpoint.sending import Destination, LayOut, OpenObject
from cloudckpt.checksum import BlockChecksums, block_size_for
from cloudckpt.stores.capabilities import Capabilities
from cloudckpt.transfer.boxes import ALIGNMENT, padding
from cloudckpt.transfer.group import Cancellation
from cloudckpt.transfer.packing import READABLE, Form, Packer, SlabPool, memory_at
from cloudckpt.transfer.parts import Piece, PieceWriter

if TYPE_CHECKING:  # the saving process has no torch
    from cloudckpt.background.arena import Annex, Arena

__all__ = ["ObjectScript", "Recording", "replay"]

_ARENA, _ANNEX, _PACKED = 0, 1, 2
_NO_ITEM = -1
_COLUMNS = 5
_ZEROS = bytes(ALIGNMENT)


@dataclass(frozen=True)
class ObjectScript:
    """One object.

    Attributes:
        staged: Whether its parts have the size of those that pass through a pool.
        pieces: Five numbers per piece: the memory that it lies in (0: the arena, 1: the annex,
            2: a small item in the arena, to be packed), its first byte there, its size in bytes,
            the number of the item whose data it is (-1 for none), and where it begins in that
            data; for a small item the number of its form.
        forms: The bytes before and after small items.
        heads: Per item, bytes of the envelope before the data.
        tails: Per item, bytes of the envelope after the data.
        dtypes: Per item, the number of its element type.
        raw_lengths: Per item, bytes of the data.
        sums: Per item, the checksum of its only block, if known.
    """

    staged: bool
    pieces: array[int]
    forms: Sequence[tuple[bytes, bytes]]
    heads: Sequence[int]
    tails: Sequence[int]
    dtypes: Sequence[int]
    raw_lengths: Sequence[int]
    sums: Sequence[int | None]


class _RecordedUpload:
    """Records where the pieces of an object lie, and copies what is not in the arena."""

    def __init__(self, staged: bool, arena: Arena | None, annex: Annex) -> None:
        self.position = 0
        self.staged = staged
        self.pieces = array("q")
        self.checks: list[object] = []  # of the pieces
        self.forms: dict[tuple[bytes, bytes], int] = {}
        self._annex = annex
        self._begin = 0 if arena is None else arena.address
        self._end = 0 if arena is None else self._begin + arena.size

    def write(self, piece: Piece) -> None:
        if piece.ready is not None:
            piece.ready()
        view = piece.view
        address = 0
        if piece.lease is None and not view.readonly:
            address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        if self._begin <= address < self._end:
            place = _ARENA, address - self._begin
        else:
            place = _ANNEX, self._annex.append(view)
        self.position += view.nbytes
        self.pieces.extend((*place, view.nbytes, _NO_ITEM, piece.start))
        self.checks.append(piece.checksums)
        if piece.lease is not None:
            piece.lease.release()

    def close(self, end: Piece) -> None:
        self.position += end.view.nbytes  # the saving process makes the index

    def write_small(
        self, forms: Sequence[Form], addresses: Sequence[int]
    ) -> tuple[list[int], list[object]] | None:
        """Records small items; returns their offsets in the object and checksum placeholders.

        Returns None if they do not lie in the arena.
        """
        if not (self._begin <= min(addresses) and max(addresses) < self._end):
            return None
        positions: list[int] = []
        checks: list[object] = []
        for form, address in zip(forms, addresses, strict=True):
            edges = form.head, form.tail
            number = self.forms.setdefault(edges, len(self.forms))
            self.pieces.extend((_PACKED, address - self._begin, form.size, _NO_ITEM, number))
            positions.append(self.position)
            checks.append(_MadeLater())
            self.position += len(edges[0]) + form.size + len(edges[1])
        self.checks += checks
        return positions, checks


class _MadeLater:
    """A placeholder for a small item's checksum, which the saving process computes."""

    __slots__ = ()


class _RecordedPacking:
    """Records what to pack instead of packing it."""

    def __init__(self, upload: PieceWriter, _: SlabPool) -> None:
        assert isinstance(upload, _RecordedUpload)
        self._upload = upload

    @property
    def position(self) -> int:
        return self._upload.position

    def append(self, buffers: Sequence[bytes | memoryview], nbytes: int) -> tuple[int, memoryview]:
        self._align()
        position, copy = self.position, b"".join(buffers)
        self._upload.write(Piece(memoryview(copy)))
        self._align()
        return position, memoryview(copy)[:nbytes]

    def append_all(
        self, forms: Sequence[Form], addresses: Sequence[int], checksum: Callable[..., int]
    ) -> tuple[list[int], Sequence[object]]:
        self._align()
        if (noted := self._upload.write_small(forms, addresses)) is not None:
            return noted
        positions, sums = [], []
        for form, address in zip(forms, addresses, strict=True):
            content = memory_at(address, form.size, READABLE)
            head, size = len(form.head), form.size
            position, copy = self.append((form.head, content, form.tail), head + size)
            positions.append(position)
            sums.append(checksum(copy[head:]))
        return positions, sums

    def _align(self) -> None:
        if gap := padding(self.position):
            self._upload.write(Piece(memoryview(_ZEROS)[:gap]))

    def flush(self) -> None:
        """Does nothing: nothing is buffered."""


class Recording:
    """Records the objects of a rank instead of sending them."""

    def __init__(
        self,
        destination: Destination,
        capabilities: Capabilities,
        arena: Arena | None,
        annex: Annex,
        began: Callable[[str], None],
    ) -> None:
        """
        Args:
            destination: Where they will go.
            capabilities: The capabilities of that store.
            arena: The memory of the staged copy.
            annex: Takes what lies elsewhere.
            began: Called with the name of each object.
        """
        self._destination = destination
        self._capabilities = capabilities
        self._arena = arena
        self._annex = annex
        self._began = began
        self._opened: list[tuple[OpenObject, _RecordedUpload]] = []

    def open(self, staged: bool) -> OpenObject:
        """Begins an object; see :data:`~cloudckpt.checkpoint.sending.LayOut`."""
        ordinal = len(self._opened)
        self._began(self._destination.name(ordinal))
        upload = _RecordedUpload(staged, self._arena, self._annex)
        part_size = self._destination.part_size(self._capabilities, staged=staged)
        capacity = part_size * self._capabilities.max_parts
        made = OpenObject(
            upload, ordinal, self._capabilities.checksum, capacity, packing=_RecordedPacking
        )
        self._opened.append((made, upload))
        return made

    def scripts(self) -> list[ObjectScript]:
        """The scripts of all objects, once all have ended."""
        return [_script(made, upload) for made, upload in self._opened]


def _script(made: OpenObject, upload: _RecordedUpload) -> ObjectScript:
    numbers = {id(found): number for number, found in enumerate(made.sums)}
    for row, checks in enumerate(upload.checks):
        if checks is not None:
            upload.pieces[row * _COLUMNS + 3] = numbers[id(checks)]
    return ObjectScript(
        upload.staged,
        upload.pieces,
        list(upload.forms),
        made.heads,
        made.tails,
        made.dtypes,
        made.raw_lengths,
        [found if isinstance(found, int) else None for found in made.sums],
    )


def replay(scripts: Sequence[ObjectScript], memory: Sequence[memoryview], budget: int) -> LayOut:
    """The layout that writes what was recorded.

    Args:
        scripts: The objects' scripts.
        memory: The arena and the annex.
        budget: Bytes of memory for packing.
    """

    def lay_out(open_object: Callable[[bool], OpenObject], cancellation: Cancellation) -> None:
        pool = SlabPool(budget, cancellation)
        try:
            for script in scripts:
                made = open_object(script.staged)
                made.add_all(
                    script.heads,
                    script.tails,
                    script.dtypes,
                    script.raw_lengths,
                    [
                        BlockChecksums(made.algorithm, block_size_for(length))
                        if checksum is None
                        else checksum
                        for checksum, length in zip(script.sums, script.raw_lengths, strict=True)
                    ],
                    sum(index_growth(length, made.algorithm) for length in script.raw_lengths),
                )
                _write(script, made, memory, Packer(made.upload, pool))
                made.end()
        finally:
            pool.close()

    return lay_out


def _write(
    script: ObjectScript, made: OpenObject, memory: Sequence[memoryview], packer: Packer
) -> None:
    numbers = iter(script.pieces)
    rows = zip(*[numbers] * _COLUMNS, strict=True)
    for packed, run in itertools.groupby(rows, lambda row: row[0] == _PACKED):
        if packed:
            _pack(list(run), script, made, memory[_ARENA], packer)
            packer.flush()
            continue
        for where, first, size, item, start in run:
            view = memory[where][first : first + size]
            found = None if item == _NO_ITEM else made.sums[item]
            checksums = found if isinstance(found, BlockChecksums) else None
            made.upload.write(Piece(view, checksums, start))


def _pack(
    rows: Sequence[tuple[int, ...]],
    script: ObjectScript,
    made: OpenObject,
    arena: memoryview,
    packer: Packer,
) -> None:
    def small() -> Iterator[tuple[bytes, memoryview, bytes]]:
        for _, first, size, _, form in rows:
            head, tail = script.forms[form]
            yield head, arena[first : first + size], tail

    _, checksums = packer.append_views(small(), made.algorithm.of)
    for (_, _, _, item, _), checksum in zip(rows, checksums, strict=True):
        made.sums[item] = checksum
