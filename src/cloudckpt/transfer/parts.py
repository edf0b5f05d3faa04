"""Plans an upload: cuts a stream of pieces into parts. No I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from cloudckpt.checksum import ChecksumAlgorithm
from cloudckpt.config import MIB
from cloudckpt.stores.capabilities import Capabilities
from cloudckpt.transfer.pool import Lease

__all__ = [
    "Checks",
    "PartCutter",
    "PartPlan",
    "Piece",
    "choose_part_size",
    "even_share",
]

_PARTS_EACH = 2
_REQUESTS = (16 * MIB, 64 * MIB)  # the fewest and the most bytes of a request

# below the limit of 10,000 of S3 and GCS, in case the size was underestimated
_PARTS_AIMED_AT = 9_000


class Checks(Protocol):
    """Collects checksums of an item's bytes, as ``checksum.BlockChecksums`` does."""

    def add(self, start: int, view: memoryview, /) -> int:
        """Takes the bytes that begin at `start`; returns their checksum, which is sent along."""
        ...


@dataclass(slots=True)
class Piece:
    """Some bytes of an object, which are sent from their memory without a copy.

    Attributes:
        view: The bytes.
        checksums: The collector of the checksums of an item's raw data; None for other bytes.
        start: The offset of the bytes in that item's raw data.
        lease: The lent memory that contains ``view``; None if no pool has lent it.
        owner: What keeps the memory of ``view`` alive, such as a tensor; None if ``view`` does.
        ready: Waits for the bytes, or fetches them; None if they are there.
        item: The name of the item that the bytes belong to, for messages; None if there is none.
        made: Fills in the bytes, once the checksums of all bytes before them are known; None if
            they are there.
    """

    view: memoryview
    checksums: Checks | None = None
    start: int = 0
    lease: Lease | None = None
    owner: object = None
    ready: Callable[[], None] | None = None
    item: str | None = None
    made: Callable[[], None] | None = None

    def split(self, count: int) -> tuple[Piece, Piece]:
        """Splits the piece; returns its first `count` bytes, and the rest."""
        if self.lease is not None:
            self.lease.retain()
        first = dataclasses.replace(self, view=self.view[:count])
        rest = dataclasses.replace(self, view=self.view[count:], start=self.start + count)
        return first, rest


@dataclass(slots=True)
class PartPlan:
    """A part to be sent: its number (from 1), pieces, size in bytes, and the pieces' checksums."""

    number: int
    pieces: list[Piece] = field(default_factory=list)
    size: int = 0
    sums: list[int] = field(default_factory=list)

    def await_bytes(self) -> None:
        """Waits until the bytes of all pieces are there."""
        for piece in self.pieces:
            if piece.ready is not None:
                piece.ready()

    def checksum(self, algorithm: ChecksumAlgorithm) -> int:
        """Returns the part's checksum, and passes the items' bytes to their collectors.

        Call it once, after `await_bytes`; it keeps the checksums of the pieces in ``sums``.
        """
        sums: list[tuple[int, int]] = []
        for piece in self.pieces:
            if piece.made is not None:
                piece.made()
            if piece.checksums is None:
                sums.append((algorithm.of(piece.view), piece.view.nbytes))
            else:
                sums.append((piece.checksums.add(piece.start, piece.view), piece.view.nbytes))
        self.sums = [checksum for checksum, _ in sums]
        return algorithm.combine(sums)

    def changed(self, algorithm: ChecksumAlgorithm) -> Piece | None:
        """Returns a piece whose bytes changed since their checksum was computed, or None.

        Memory that is lent by a pool or read-only is not checked: no other code writes to it.
        """
        for piece, checksum in zip(self.pieces, self.sums, strict=True):
            is_users = piece.lease is None and not piece.view.readonly
            if is_users and algorithm.of(piece.view) != checksum:
                return piece
        return None

    def release(self) -> None:
        """Releases the leases of all pieces, and drops the pieces."""
        for piece in self.pieces:
            if piece.lease is not None:
                piece.lease.release()
        self.pieces.clear()
        self.sums.clear()


class PartCutter:
    """Cuts pieces into parts of exactly `part_size` bytes; only the last may be shorter.

    Cloudflare R2 demands equal parts, and they allow writing a local file in any order.
    """

    def __init__(self, part_size: int) -> None:
        self._part_size = part_size
        self._part = PartPlan(1)

    def push(self, piece: Piece) -> list[PartPlan]:
        """Adds a piece; returns the parts that are complete now."""
        done: list[PartPlan] = []
        rest = piece
        while rest.view.nbytes:
            room = self._part_size - self._part.size
            if rest.view.nbytes <= room:
                taken, left = rest, None
            else:
                taken, left = rest.split(room)
            self._part.pieces.append(taken)
            self._part.size += taken.view.nbytes
            if self._part.size == self._part_size:
                done.append(self._part)
                self._part = PartPlan(self._part.number + 1)
            if left is None:
                break
            rest = left
        return done

    def finish(self) -> PartPlan | None:
        """Returns the last part, or None if it is empty; nothing may be pushed afterwards."""
        return self._part if self._part.size else None


def even_share(nbytes: int, connections: int, *, each: int = 4) -> int:
    """Returns a request size with which each connection sends `each` requests; 16 to 64 MiB.

    A request costs about half a millisecond of Python, so requests are large; but a connection
    should send several, so that a fast connection can take over work from a slow one.
    """
    share = nbytes // (connections * each)
    least, most = _REQUESTS
    return min(max(share // MIB * MIB, least), most)


def choose_part_size(
    nbytes: int,
    wanted: int | None,
    capabilities: Capabilities,
    *,
    connections: int,
    copied: int | None = None,
) -> int:
    """Returns the part size in bytes for an object of about `nbytes` bytes.

    Args:
        nbytes: The expected size.
        wanted: The user's choice in bytes, which is kept, rounded up to whole MiB, if the store
            and ``copied`` allow it; None or 0 for an automatic one.
        capabilities: The limits of the store.
        connections: The number of parts sent at a time.
        copied: The memory budget in bytes, if parts hold copies; None if not. A part then takes at
            most a sixth of it, or the store's minimum if that is more: two parts are held back at a
            time, and fragmentation wastes up to half of the pool.
    """
    size = wanted or max(
        nbytes // _PARTS_AIMED_AT,
        even_share(nbytes, connections, each=_PARTS_EACH),
    )
    if copied is not None:
        size = min(size, copied // 6)
    fitting = -(-nbytes // capabilities.max_parts)
    if copied is None:
        size = max(size, fitting)
    size = -(-size // MIB) * MIB if size > MIB else size
    return min(max(size, capabilities.min_part_size), capabilities.max_part_size)
