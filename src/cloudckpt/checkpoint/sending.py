"""Sends the objects of one rank by a plan, each with an index at its end.

A thread of the trainer and its saving process do the same, so that nothing here uses torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from cloudckpt.checkpoint.index import index_bytes, index_size
from cloudckpt.checkpoint.object_plan import Buffers, Destination, ObjectPlan
from cloudckpt.checkpoint.objects import WrittenObject
from cloudckpt.checksum import CRC32C, BlockChecksums, block_size_for
from cloudckpt.errors import TensorChangedError
from cloudckpt.stores.base import ObjectStore
from cloudckpt.transfer.boxes import ALIGNMENT, padding
from cloudckpt.transfer.connections import transfer_group
from cloudckpt.transfer.group import TaskGroup
from cloudckpt.transfer.packing import Packer
from cloudckpt.transfer.parts import Piece
from cloudckpt.transfer.retry import Retrier
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.upload import ObjectUpload, creates_only

__all__ = ["send", "sending_group"]

_ZEROS = bytes(ALIGNMENT)


def sending_group(destination: Destination, store: ObjectStore) -> TaskGroup:
    """The threads that send the objects of a rank."""
    return transfer_group(store, destination.config, "out", name="cloudckpt-save")


def send(
    destination: Destination,
    store: ObjectStore,
    plans: Iterable[ObjectPlan],
    buffers: Buffers,
    group: TaskGroup,
    stats: TransferStats,
) -> tuple[WrittenObject, ...]:
    """Carries out plans; returns the objects when the store has all of them.

    If it raises, it has deleted them again as far as possible.

    Args:
        destination: Where to send them.
        store: The destination's store.
        plans: What to send; each is asked for when the one before was taken.
        buffers: The memory that they refer to.
        group: Where the requests run.
        stats: Counts what is sent.
    """
    objects: list[_Object] = []
    retrier = Retrier(destination.config.retry, group.cancellation, on_retry=stats.add_retry)

    def begin(plan: ObjectPlan) -> _Object:
        upload = ObjectUpload(
            store,
            destination.key(plan.object),
            destination.part_size(store.capabilities, staged=plan.way != "direct"),
            group,
            retrier,
            stats,
            create_only=creates_only(store, destination.config),
        )
        objects.append(begun := _Object(plan.object, upload, buffers))
        return begun

    def carry_out() -> None:
        current: dict[bool, _Object] = {}
        try:
            for plan in plans:
                staged = plan.way != "direct"
                made = current.get(staged)
                if made is None or made.number != plan.object:
                    if made is not None:
                        made.end()
                    made = current[staged] = begin(plan)
                made.add(plan)
            for made in current.values():
                made.end()
        finally:
            buffers.pool.close()

    try:
        group.run(carry_out)
    except BaseException:
        for made in objects:
            made.upload.abandon()
        raise
    objects.sort(key=lambda made: made.number)
    return tuple(made.written(destination) for made in objects)


class _Object:
    """An object on its way, and what its index will say."""

    def __init__(self, number: int, upload: ObjectUpload, buffers: Buffers) -> None:
        self.number = number
        self.upload = upload
        self._buffers = buffers
        self._packer = Packer(upload, buffers.pool)
        self._heads: list[int] = []
        self._tails: list[int] = []
        self._dtypes: list[int] = []
        self._sizes: list[int] = []
        self._sums: list[int | BlockChecksums] = []  # of an item's only block, or of its blocks
        self._index = bytearray()
        self._index_crc: int | None = None

    def add(self, plan: ObjectPlan) -> None:
        """Writes the items of a plan."""
        self._heads += [len(form.head) for form in plan.forms]
        self._tails += [len(form.tail) for form in plan.forms]
        self._dtypes += [form.dtype for form in plan.forms]
        self._sizes += [form.nbytes for form in plan.forms]
        if plan.way == "packed":
            self._pack(plan)
            return
        self._packer.flush()
        expected = plan.expected or [()] * len(plan.forms)
        items = zip(plan.starts, plan.forms, plan.names, expected, strict=True)
        for start, form, name, known in items:
            checksums = BlockChecksums(
                self.upload.algorithm,
                block_size_for(form.nbytes),
                known,
                reuse=plan.way == "direct",
                item=name,
            )
            self._align()
            self.upload.write(Piece(memoryview(form.head)))
            for piece in self._buffers.pieces(plan.buffer, start, form.nbytes):
                piece.checksums, piece.item = checksums, name
                self.upload.write(piece)
            self.upload.write(Piece(memoryview(form.tail)))
            self._sums.append(checksums)

    def _pack(self, plan: ObjectPlan) -> None:
        views = self._buffers.views(plan)
        items = ((f.head, view, f.tail) for f, view in zip(plan.forms, views, strict=True))
        # of the copies: a tensor may have changed since
        sums = self._packer.pack(items, self.upload.algorithm.of)
        self._sums += sums
        for name, known, found in zip(plan.names, plan.expected, sums, strict=False):
            if known and known[0] != found:
                raise TensorChangedError.of(name)

    def _align(self) -> None:
        if gap := padding(self.upload.position):
            self.upload.write(Piece(memoryview(_ZEROS)[:gap]))

    def end(self) -> None:
        """Writes the index after the last item."""
        self._packer.flush()
        self._align()
        self._index = bytearray(index_size(self._sizes, self.upload.algorithm))
        self.upload.close(Piece(memoryview(self._index), made=self._make_index))

    def _make_index(self) -> None:
        if self._index_crc is not None:  # it is in two parts, and the first has had it made
            return
        sums: list[int] = []
        for size, found in zip(self._sizes, self._sums, strict=True):
            if isinstance(found, BlockChecksums):
                sums += found.finish(size)
            elif size:
                sums.append(found)
        self._index[:] = index_bytes(
            self._heads, self._tails, self._dtypes, self._sizes, sums, self.upload.algorithm
        )
        self._index_crc = CRC32C.of(self._index)

    def written(self, destination: Destination) -> WrittenObject:
        """What the store has, once it has it."""
        return WrittenObject(
            destination.rank,
            self.number,
            destination.attempt,
            self.upload.position,
            self.upload.checksum,
            len(self._index),
            self._index_crc or 0,
        )
