"""Packs many small items into few large pieces.

An item of a few kilobytes costs more to send in a call of its own than to copy. Small items are
therefore copied next to each other into slabs of the staging pool, and sent a slab at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from cloudckpt.transfer.parts import Piece
from cloudckpt.transfer.staging import Slab, StagingPool
from cloudckpt.transfer.upload import ObjectUpload

__all__ = ["PACKED_BELOW", "Packer"]

PACKED_BELOW = 64 * 1024
"""Bytes from which on an item is sent from where it lies."""

_ALIGNMENT = 64
_ZEROS = bytes(_ALIGNMENT)


class Packer:
    """Appends small items to an object; whoever writes to the object otherwise must flush first."""

    def __init__(self, upload: ObjectUpload, pool: StagingPool) -> None:
        self._upload = upload
        self._pool = pool
        self._slab: Slab | None = None
        self._start = 0
        self._stop = 0

    @property
    def position(self) -> int:
        """Bytes of the object so far, those not flushed included."""
        return self._upload.position + self._stop - self._start

    def append(self, buffers: Sequence[bytes | memoryview], nbytes: int) -> tuple[int, memoryview]:
        """Copies ``buffers``, ``nbytes`` in total, to the next multiple of 64 of the object.

        Returns:
            That position, and the copy, which is there until the next call.
        """
        slab, place = self._pool.reserve(nbytes)
        if slab is self._slab and place == self._stop:
            slab.release()  # one hold is enough for the growing piece
        else:
            self.flush()
            if padding := -self._upload.position % _ALIGNMENT:
                self._upload.write(Piece(memoryview(_ZEROS)[:padding]))
            self._slab, self._start, self._stop = slab, place, place
        position = self.position
        view, start = slab.view, place
        for buffer in buffers:
            end = place + len(buffer)
            view[place:end] = buffer
            place = end
        padding = -place % _ALIGNMENT
        view[place : place + padding] = _ZEROS[:padding]
        self._stop = place + padding
        return position, view[start : start + nbytes]

    def flush(self) -> None:
        """Writes what was packed to the object."""
        if self._slab is not None:
            piece = Piece(self._slab.view[self._start : self._stop], lease=self._slab)
            self._slab, self._start, self._stop = None, 0, 0
            if piece.view.nbytes:
                self._upload.write(piece)
            elif piece.lease is not None:
                piece.lease.release()
