"""Sends the objects of one rank: the laid-out items, and the index at the end of each object.

The layout (``shard``) decides what the items look like and which object they go into. This side
takes pieces of memory, whatever their content, and does not use torch: a saving process does the
same as a thread of the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cloudckpt.checkpoint.index import MOST_INDEX, index_bytes, index_growth, index_size
from cloudckpt.checkpoint.objects import WrittenObject, data_name
from cloudckpt.checkpoint.pending import Pending
from cloudckpt.checksum import CRC32C, BlockChecksums, ChecksumAlgorithm
from cloudckpt.config import Config
from cloudckpt.stores.base import ObjectStore
from cloudckpt.stores.capabilities import Capabilities
from cloudckpt.transfer.boxes import ALIGNMENT, padding
from cloudckpt.transfer.connections import transfer_group
from cloudckpt.transfer.group import Cancellation
from cloudckpt.transfer.packing import Packer, Packing, SlabPool
from cloudckpt.transfer.parts import Piece, PieceWriter, choose_part_size
from cloudckpt.transfer.retry import Retrier
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.upload import ObjectUpload, creates_only
from cloudckpt.uri import CheckpointURI

__all__ = ["Destination", "LayOut", "OpenObject", "Sender", "send_here"]

_ZEROS = bytes(ALIGNMENT)


class OpenObject:
    """An object under construction.

    Attributes:
        upload: Its upload.
        packing: Makes the packer of small items.
        ordinal: Its number among the objects of this rank.
        algorithm: The algorithm of its checksums.
        heads: By item, bytes of the envelope before the payload.
        tails: By item, bytes of the envelope after the payload.
        dtypes: By item, the number of its element type in the index; 0 if it is not a plain tensor.
        raw_lengths: By item, bytes of the payload.
        sums: By item, the checksums of its blocks, or that of its only block, if known; a
            placeholder where another process computes them.
        index_size: Bytes of the index of all items.
        index: The index, made once the checksums of all items are known.
        index_crc: CRC32C of the index.
    """

    def __init__(
        self,
        upload: PieceWriter,
        ordinal: int,
        algorithm: ChecksumAlgorithm,
        capacity: int,
        packing: Callable[[PieceWriter, SlabPool], Packing] = Packer,
    ) -> None:
        """``capacity``: its maximum size in bytes, including the index."""
        self.upload = upload
        self.packing = packing
        self.ordinal = ordinal
        self.algorithm = algorithm
        self.heads: list[int] = []
        self.tails: list[int] = []
        self.dtypes: list[int] = []
        self.raw_lengths: list[int] = []
        self.sums: list[object] = []
        self.index_size = index_size((), algorithm)
        self.index = bytearray()
        self.index_crc: int | None = None
        self._capacity = capacity

    def has_room(self, position: int, length: int, growth: int | None = None) -> bool:
        """Whether ``length`` bytes fit after ``position``, with the index after them.

        Args:
            position: Offset in the object.
            length: Bytes of one item, or of several.
            growth: By how many bytes they lengthen the index, if several.
        """
        if growth is None:
            growth = index_growth(length, self.algorithm)
        index = self.index_size + growth
        return position + length + 2 * ALIGNMENT + index <= self._capacity and index <= MOST_INDEX

    def add(
        self,
        head: int,
        tail: int,
        dtype: int,
        raw_length: int,
        checksums: object,
    ) -> None:
        """Records an item that was written to it."""
        self.heads.append(head)
        self.tails.append(tail)
        self.dtypes.append(dtype)
        self.raw_lengths.append(raw_length)
        self.sums.append(checksums)
        self.index_size += index_growth(raw_length, self.algorithm)

    def add_all(
        self,
        heads: Sequence[int],
        tails: Sequence[int],
        dtypes: Sequence[int],
        raw_lengths: Sequence[int],
        sums: Sequence[object],
        growth: int,
    ) -> None:
        """Records items by columns; ``growth``: by how many bytes they lengthen the index."""
        self.heads += heads
        self.tails += tails
        self.dtypes += dtypes
        self.raw_lengths += raw_lengths
        self.sums += sums
        self.index_size += growth

    def end(self) -> None:
        """Ends the object: no item follows, and the index is written after the last one."""
        if gap := padding(self.upload.position):
            self.upload.write(Piece(memoryview(_ZEROS)[:gap]))
        self.index = bytearray(self.index_size)
        self.upload.close(Piece(memoryview(self.index), made=self._make_index))

    def _make_index(self) -> None:
        if self.index_crc is not None:  # it is in two parts, and the first has had it made
            return
        sums: list[int] = []
        for raw_length, found in zip(self.raw_lengths, self.sums, strict=True):
            if isinstance(found, BlockChecksums):
                sums += found.finish(raw_length)
            elif raw_length:
                assert isinstance(found, int)
                sums.append(found)
        self.index[:] = index_bytes(
            self.heads, self.tails, self.dtypes, self.raw_lengths, sums, self.algorithm
        )
        self.index_crc = CRC32C.of(self.index)


@dataclass(frozen=True)
class Destination:
    """Where the objects of a rank go, and how.

    Attributes:
        uri: The checkpoint.
        config: The options.
        rank: The rank.
        attempt: The random part of the names.
        expected: About how many bytes will be sent.
    """

    uri: CheckpointURI
    config: Config
    rank: int
    attempt: str
    expected: int

    def name(self, ordinal: int) -> str:
        """The name of an object beneath the checkpoint."""
        return data_name(self.rank, ordinal, self.attempt)

    def part_size(self, capabilities: Capabilities, *, staged: bool) -> int:
        """The part size of an object in bytes; ``staged``: its bytes pass through a pool."""
        return choose_part_size(
            self.expected,
            self.config.part_size,
            capabilities,
            connections=self.config.most_connections,
            copied=self.config.memory_budget if staged else None,
        )


LayOut = Callable[[Callable[[bool], OpenObject], Cancellation], None]
"""Writes a rank's items to objects that its first argument opens, and ends these.

The first argument takes whether the object's bytes pass through a pool. The second argument is set
when sending has failed."""


class Sender(Protocol):
    """Carries out a layout."""

    def __call__(
        self,
        destination: Destination,
        store: ObjectStore,
        lay_out: LayOut,
        stats: TransferStats,
        began: Callable[[str], None],
        leave: Callable[[], Pending | None],
    ) -> tuple[WrittenObject, ...]:
        """Sends what ``lay_out`` writes; returns the objects when the store has all of them.

        If it raises, it has deleted them again as far as possible.

        Args:
            destination: Where to send them.
            store: The destination's store.
            lay_out: Called once.
            stats: Counts what is sent.
            began: Receives the name of each object before it is begun.
            leave: Makes what to record in the store if this trainer ends before the commit; for a
                process that outlives it, once the layout has ended.
        """


def send_here(
    destination: Destination,
    store: ObjectStore,
    lay_out: LayOut,
    stats: TransferStats,
    began: Callable[[str], None] = lambda name: None,
    leave: Callable[[], Pending | None] = lambda: None,
) -> tuple[WrittenObject, ...]:
    """Sends with threads of this process while the layout continues; see :class:`Sender`."""
    config, capabilities = destination.config, store.capabilities
    opened: list[tuple[OpenObject, ObjectUpload]] = []
    group = transfer_group(store, config, "out", name="cloudckpt-save")
    retrier = Retrier(config.retry, group.cancellation, on_retry=stats.add_retry)

    def open_object(staged: bool) -> OpenObject:
        ordinal = len(opened)
        name = destination.name(ordinal)
        began(name)
        upload = ObjectUpload(
            store,
            destination.uri.key(name),
            part_size := destination.part_size(capabilities, staged=staged),
            group,
            retrier,
            stats,
            create_only=creates_only(store, config),
        )
        capacity = part_size * capabilities.max_parts
        made = OpenObject(upload, ordinal, capabilities.checksum, capacity)
        opened.append((made, upload))
        return made

    try:
        group.run(lambda: lay_out(open_object, group.cancellation))
    except BaseException:
        for _, upload in opened:
            upload.abandon()
        raise
    return tuple(
        WrittenObject(
            destination.rank,
            made.ordinal,
            destination.attempt,
            upload.position,
            upload.checksum,
            len(made.index),
            made.index_crc or 0,
        )
        for made, upload in opened
    )
