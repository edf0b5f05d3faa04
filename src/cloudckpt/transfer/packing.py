"""Copies small items next to each other into lent memory, as sending each would cost more.

The saving process packs as well, so this module must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cloudckpt.transfer.boxes import ALIGNMENT
from cloudckpt.transfer.parts import Piece
from cloudckpt.transfer.pool import Lease, MemoryPool
from cloudckpt.transfer.upload import ObjectUpload

__all__ = ["PACKED_BELOW", "Packer"]

PACKED_BELOW = 64 * 1024
"""Items of fewer bytes are packed; larger ones are sent separately."""

_ZEROS = bytes(ALIGNMENT)


class Packer:
    """Copies items into shared blocks, and writes full blocks to an upload.

    Call `flush` before anything else is written to the upload, and before it is closed.
    """

    def __init__(self, upload: ObjectUpload, pool: MemoryPool) -> None:
        self._upload = upload
        self._pool = pool
        self._slab: Lease | None = None
        self._start = 0
        self._stop = 0

    def pack(
        self, items: Iterable[tuple[bytes, memoryview, bytes]], checksum: Callable[..., int]
    ) -> list[int]:
        """Appends copies of items, each at the next multiple of 64 of the object.

        Args:
            items: For each item the bytes before it, its own bytes, and those after it.
            checksum: Returns the checksum of a buffer.

        Returns:
            The checksums of the items' own bytes, as copied.

        Raises:
            StoreError: As :meth:`ObjectUpload.write`.
            TransferCancelledError: As :meth:`ObjectUpload.write`, or while this waited for memory.
        """
        checksums: list[int] = []
        limit = self._pool.slab_bytes
        slab, view = None, memoryview(b"")
        for head, content, tail in items:
            place, length = self._stop, len(head) + len(content) + len(tail)
            if slab is None or place + length > limit:
                place = self._room(length)
                slab = self._slab
                assert slab is not None
                view = slab.view
            first, stop = place + len(head), place + length
            end = stop - len(tail)
            view[place:first] = head
            view[first:end] = content
            view[end:stop] = tail
            if gap := -stop % ALIGNMENT:
                view[stop : stop + gap] = _ZEROS[:gap]
            slab.used = self._stop = stop + gap
            checksums.append(checksum(view[first:end]))
        return checksums

    def _room(self, nbytes: int) -> int:
        """Reserves room for the next bytes; returns their offset in the shared block."""
        slab, place = self._pool.reserve(nbytes)
        if slab is self._slab and place == self._stop:
            slab.release()  # the growing piece needs only one lease
        else:
            self.flush()
            self._upload.align()
            self._slab, self._start, self._stop = slab, place, place
        return place

    def flush(self) -> None:
        if self._slab is not None:
            slab, view = self._slab, self._slab.view[self._start : self._stop]
            self._slab, self._start, self._stop = None, 0, 0
            if view.nbytes:
                self._upload.write(Piece(view, lease=slab))
            else:
                slab.release()
