"""What is to be sent, as a script: the trainer records it, and its saving process carries it out.

A script says which bytes of shared memory make up each object, in their order, and what the index
at the object's end needs of its items. The bytes themselves do not travel: they lie in the arena of
the staged copy, or were written to the annex. Nothing in it is of torch, or of the user's.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cloudckpt.checkpoint.index import index_growth
from cloudckpt.checkpoint.sending import Destination, LayOut, OpenObject
from cloudckpt.checksum import BlockChecksums, block_size_for
from cloudckpt.stores.base import Capabilities
from cloudckpt.transfer.group import Cancellation
from cloudckpt.transfer.parts import Piece

if TYPE_CHECKING:  # the saving process has no torch
    from cloudckpt.background.arena import Annex, Arena

__all__ = ["ObjectScript", "Recording", "replay"]

_ARENA, _ANNEX = 0, 1
_NO_ITEM = -1
_COLUMNS = 5


@dataclass(frozen=True)
class ObjectScript:
    """One object.

    Attributes:
        staged: Whether its parts have the size of those that pass through a pool.
        pieces: Of each piece five numbers: which memory it lies in (0: the arena, 1: the annex),
            its first byte there, its bytes, the number of the item whose data it is (-1 for none),
            and where it begins in that data.
        heads: Of each item, bytes of the envelope before the data proper.
        tails: The same of the envelope behind it.
        dtypes: The number of its element type.
        raw_lengths: Bytes of the data proper.
        sums: The checksum of its only block, if it is known.
    """

    staged: bool
    pieces: array[int]
    heads: Sequence[int]
    tails: Sequence[int]
    dtypes: Sequence[int]
    raw_lengths: Sequence[int]
    sums: Sequence[int | None]


class _RecordedUpload:
    """Notes where the pieces of an object lie, and copies what is not in the arena."""

    def __init__(self, staged: bool, arena: Arena | None, annex: Annex) -> None:
        self.position = 0
        self.staged = staged
        self.pieces = array("q")
        self.checks: list[object] = []  # of the pieces
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
        self.position += end.view.nbytes  # whoever carries it out makes the index


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
            capabilities: Of the store there.
            arena: The memory of the staged copy.
            annex: Takes what lies elsewhere.
            began: Told the name of each object.
        """
        self._destination = destination
        self._capabilities = capabilities
        self._arena = arena
        self._annex = annex
        self._began = began
        self._opened: list[tuple[OpenObject, _RecordedUpload]] = []

    def open(self, staged: bool) -> OpenObject:
        """Begins an object, as :data:`~cloudckpt.checkpoint.sending.LayOut` has it."""
        ordinal = len(self._opened)
        self._began(self._destination.name(ordinal))
        upload = _RecordedUpload(staged, self._arena, self._annex)
        part_size = self._destination.part_size(self._capabilities, staged=staged)
        capacity = part_size * self._capabilities.max_parts
        made = OpenObject(upload, ordinal, self._capabilities.checksum, capacity)
        self._opened.append((made, upload))
        return made

    def scripts(self) -> list[ObjectScript]:
        """Of all objects, when all have ended."""
        return [_script(made, upload) for made, upload in self._opened]


def _script(made: OpenObject, upload: _RecordedUpload) -> ObjectScript:
    numbers = {id(found): number for number, found in enumerate(made.sums)}
    for row, checks in enumerate(upload.checks):
        if checks is not None:
            upload.pieces[row * _COLUMNS + 3] = numbers[id(checks)]
    return ObjectScript(
        upload.staged,
        upload.pieces,
        made.heads,
        made.tails,
        made.dtypes,
        made.raw_lengths,
        [found if isinstance(found, int) else None for found in made.sums],
    )


def replay(scripts: Sequence[ObjectScript], memory: Sequence[memoryview]) -> LayOut:
    """The layout that writes what was recorded.

    Args:
        scripts: Of the objects.
        memory: The arena, and the annex.
    """

    def lay_out(open_object: Callable[[bool], OpenObject], _: Cancellation) -> None:
        for script in scripts:
            made = open_object(script.staged)
            made.add_all(
                script.heads,
                script.tails,
                script.dtypes,
                script.raw_lengths,
                [
                    BlockChecksums(made.algorithm, block_size_for(length)) if sum_ is None else sum_
                    for sum_, length in zip(script.sums, script.raw_lengths, strict=True)
                ],
                sum(index_growth(length, made.algorithm) for length in script.raw_lengths),
            )
            for piece in _pieces(script, made, memory):
                made.upload.write(piece)
            made.end()

    return lay_out


def _pieces(
    script: ObjectScript, made: OpenObject, memory: Sequence[memoryview]
) -> Iterator[Piece]:
    numbers = iter(script.pieces)
    for where, first, size, item, start in zip(*[numbers] * _COLUMNS, strict=True):
        view = memory[where][first : first + size]
        found = None if item == _NO_ITEM else made.sums[item]
        yield Piece(view, found if isinstance(found, BlockChecksums) else None, start)
