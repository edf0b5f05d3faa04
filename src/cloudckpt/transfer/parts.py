"""The plan of an upload: how a stream of pieces is cut into parts. No I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from cloudckpt.checksum import ChecksumAlgorithm
from cloudckpt.config import MIB
from cloudckpt.stores.capabilities import Capabilities

__all__ = [
    "Checks",
    "Lease",
    "PartCutter",
    "PartPlan",
    "Piece",
    "PieceWriter",
    "choose_part_size",
    "even_share",
]

_PARTS_EACH = 2
_REQUESTS = (16 * MIB, 64 * MIB)  # the bytes of a request: at least and at most

_PARTS_AIMED_AT = 9_000  # below the 10,000 of S3 and GCS, in case the size was underestimated


class Lease(Protocol):
    """Memory on loan; it goes back when every holder has released it."""

    def retain(self) -> None: ...

    def release(self) -> None: ...


class Checks(Protocol):
    """Looks at the bytes of a piece once, as ``checksum.BlockChecksums`` does."""

    def add(self, start: int, view: memoryview, /) -> int:
        """Takes the bytes that begin at ``start``; returns their checksum, which is sent along."""
        ...


@dataclass(slots=True)
class Piece:
    """Some bytes of an object, in memory that is not to be copied.

    Attributes:
        view: The bytes.
        checksums: Where the checksums of an item's raw data are collected, if it is such data.
        start: Where the bytes lie in what is collected there.
        lease: The loan that ``view`` lies in, if it is not the user's memory.
        owner: What keeps ``view`` valid: the tensor whose memory it shows.
        ready: Waits until the bytes are there (a device copies them), if that takes waiting.
        item: The item whose data it is, for messages.
        made: Makes the bytes, when the checksums of all that stands before them are known.
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
        """The first ``count`` bytes, and the rest."""
        if self.lease is not None:
            self.lease.retain()
        first = dataclasses.replace(self, view=self.view[:count])
        rest = dataclasses.replace(self, view=self.view[count:], start=self.start + count)
        return first, rest


class PieceWriter(Protocol):
    """Takes the pieces of one object, as :class:`~cloudckpt.transfer.upload.ObjectUpload` does.

    Attributes:
        position: Bytes written so far.
    """

    position: int

    def write(self, piece: Piece) -> None:
        """Appends a piece."""

    def close(self, end: Piece) -> None:
        """Appends the last one, whose bytes are made when all others have their checksums."""


@dataclass(slots=True)
class PartPlan:
    """A part to be sent: its number from 1, its pieces in order, its bytes."""

    number: int
    pieces: list[Piece] = field(default_factory=list)
    size: int = 0
    sums: list[int] = field(default_factory=list)

    def await_bytes(self) -> None:
        """Returns when all bytes are there."""
        for piece in self.pieces:
            if piece.ready is not None:
                piece.ready()

    def checksum(self, algorithm: ChecksumAlgorithm) -> int:
        """That of the part; collects those of the items in it, which are of the same kind.

        To be asked for once, when all bytes are there; ``sums`` keeps those of the pieces.
        """
        found: list[tuple[int, int]] = []
        for piece in self.pieces:
            if piece.made is not None:
                piece.made()
            if piece.checksums is None:
                found.append((algorithm.of(piece.view), piece.view.nbytes))
            else:
                found.append((piece.checksums.add(piece.start, piece.view), piece.view.nbytes))
        self.sums = [checksum for checksum, _ in found]
        return algorithm.combine(found)

    def changed(self, algorithm: ChecksumAlgorithm) -> Piece | None:
        """A piece whose bytes are others than when their checksum was made, if there is one.

        Only the user's memory is looked at: nobody else can write to what is on loan.
        """
        for piece, checksum in zip(self.pieces, self.sums, strict=True):
            is_users = piece.lease is None and not piece.view.readonly
            if is_users and algorithm.of(piece.view) != checksum:
                return piece
        return None

    def release(self) -> None:
        """Gives back what the pieces have on loan."""
        for piece in self.pieces:
            if piece.lease is not None:
                piece.lease.release()
        self.pieces.clear()
        self.sums.clear()


class PartCutter:
    """Cuts pieces into parts of exactly ``part_size`` bytes; only the last is shorter.

    Equal parts are what Cloudflare R2 demands and what lets a local file be written in any order.
    """

    def __init__(self, part_size: int) -> None:
        self._part_size = part_size
        self._part = PartPlan(1)

    def push(self, piece: Piece) -> list[PartPlan]:
        """Adds a piece; returns the parts that it completes."""
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
        """The last part, if anything is left for it; nothing may be pushed after this."""
        return self._part if self._part.size else None


def even_share(nbytes: int, connections: int, *, each: int = 4) -> int:
    """Bytes of a request when each of ``connections`` gets ``each`` of them: 16 MiB to 64 MiB.

    A request costs about half a millisecond of Python, so it should be large; but each connection
    should get more than one, so that a fast one can take over from a slow one.
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
    """Bytes of a part for an object of about ``nbytes``.

    Args:
        nbytes: The size that is planned for.
        wanted: The user's choice, which wins where the store allows it.
        capabilities: The limits of the store.
        connections: How many parts are sent at a time.
        copied: The memory budget, if parts will hold copies. A part may then take a sixth of it:
            two parts are held back at a time and the pool loses up to half to fragments.
    """
    size = wanted or max(
        nbytes // _PARTS_AIMED_AT,
        even_share(nbytes, connections, each=_PARTS_EACH),
        capabilities.good_part_size,
    )
    if copied is not None:
        size = min(size, copied // 6)
    fitting = -(-nbytes // capabilities.max_parts)
    if copied is None:
        size = max(size, fitting)
    size = -(-size // MIB) * MIB if size > MIB else size
    return min(max(size, capabilities.min_part_size), capabilities.max_part_size)
