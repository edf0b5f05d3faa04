"""Plans the contents of one rank's objects, as plain data, and sends them.

In an object, each item begins at a multiple of 64. Around the bytes of a tensor is an *envelope*,
the bytes that make them a file for ``torch.load``. A plan names an item's bytes by a buffer number
and an offset in that buffer. So a thread of the trainer and the saving process, which maps the same
buffers, carry out a plan by the same code. Nothing here uses torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from cloudckpt.checkpoint.index import MOST_INDEX, index_bytes, index_growth, index_size
from cloudckpt.checkpoint.objects import WrittenObject, data_name
from cloudckpt.checksum import CRC32C, BlockChecksums, ChecksumAlgorithm, block_size_for
from cloudckpt.config import Config
from cloudckpt.errors import TensorChangedError
from cloudckpt.stores.base import ObjectStore
from cloudckpt.stores.capabilities import Capabilities
from cloudckpt.transfer.boxes import ALIGNMENT, aligned
from cloudckpt.transfer.connections import transfer_group
from cloudckpt.transfer.group import TaskGroup
from cloudckpt.transfer.packing import Packer
from cloudckpt.transfer.parts import Piece, choose_part_size
from cloudckpt.transfer.pool import MemoryPool
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.upload import ObjectUpload
from cloudckpt.uri import CheckpointURI

__all__ = [
    "Buffers",
    "Destination",
    "StoredForm",
    "ObjectPlan",
    "Place",
    "ObjectFiller",
    "STATE",
    "Way",
    "send",
    "sending_group",
]


def sending_group(destination: Destination, store: ObjectStore) -> TaskGroup:
    """Returns the thread group that sends the objects of a rank."""
    return transfer_group(store, destination.config, "out")


def send(
    destination: Destination,
    store: ObjectStore,
    plans: Iterable[ObjectPlan],
    buffers: Buffers,
    group: TaskGroup,
    stats: TransferStats,
) -> tuple[WrittenObject, ...]:
    """Sends the items of plans; returns the objects once the store has all of them.

    If it fails, it deletes the objects that it has written, as far as possible.

    Args:
        destination: The checkpoint, the rank, and options.
        store: The destination's store.
        plans: The plans, in order; the next plan is taken only after all bytes of the previous one
            were copied, or passed to an upload.
        buffers: The memory that the plans refer to.
        group: The threads that send requests.
        stats: Counts the bytes sent.

    Raises:
        TensorChangedError: If a tensor was written to while its bytes were sent.
        StoreError: If the store refuses or stays unreachable.
    """
    objects: list[_Object] = []

    def begin(plan: ObjectPlan) -> _Object:
        upload = ObjectUpload(
            store,
            destination.key(plan.object),
            destination.part_size(store.capabilities, staged=plan.way != "direct"),
            group,
            destination.config,
            stats,
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
    """An object that is being sent, with the columns of its index."""

    def __init__(self, number: int, upload: ObjectUpload, buffers: Buffers) -> None:
        self.number = number
        self.upload = upload
        self._buffers = buffers
        self._packer = Packer(upload, buffers.pool)
        self._heads: list[int] = []
        self._tails: list[int] = []
        self._dtypes: list[int] = []
        self._sizes: list[int] = []
        # the checksum of an item's only block, or the checksums of its blocks
        self._sums: list[int | BlockChecksums] = []
        self._index = bytearray()
        self._index_crc: int | None = None

    def add(self, plan: ObjectPlan) -> None:
        """Appends the items of a plan to the object."""
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
            self.upload.align()
            self.upload.write(Piece(memoryview(form.head)))
            for piece in self._buffers.pieces(plan.buffer, start, form.nbytes):
                piece.checksums, piece.item = checksums, name
                self.upload.write(piece)
            self.upload.write(Piece(memoryview(form.tail)))
            self._sums.append(checksums)

    def _pack(self, plan: ObjectPlan) -> None:
        views = self._buffers.views(plan)
        items = ((f.head, view, f.tail) for f, view in zip(plan.forms, views, strict=True))
        # checksums of the copies: a tensor may have changed since the expected ones were computed
        sums = self._packer.pack(items, self.upload.algorithm.of)
        self._sums += sums
        for name, known, found in zip(plan.names, plan.expected, sums, strict=False):
            if known and known[0] != found:
                raise TensorChangedError.of(name)

    def end(self) -> None:
        """Appends the index, as the last bytes of the object."""
        self._packer.flush()
        self.upload.align()
        self._index = bytearray(index_size(self._sizes, self.upload.algorithm))
        self.upload.write(Piece(memoryview(self._index), made=self._make_index))
        self.upload.close()

    def _make_index(self) -> None:
        # the index spans two parts, and the first of them has made it
        if self._index_crc is not None:
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
        """Returns the description of the object for the commit, once the store has it."""
        assert self.upload.checksum is not None  # the object is complete
        return WrittenObject(
            destination.rank,
            self.number,
            destination.attempt,
            self.upload.position,
            self.upload.checksum,
            len(self._index),
            self._index_crc or 0,
        )


Way = Literal["direct", "staged", "packed"]
"""How items get from memory to the store: "direct" sends them from their own memory; "staged"
copies them slice by slice through a pool; "packed" copies small items next to each other. Staged
and packed items share objects.
"""


STATE = 0
"""The number of the buffer that holds the state itself, or its staged copy."""


class StoredForm(NamedTuple):
    """The layout of an item in an object: envelope, size and element type, but not its values.

    Attributes:
        head: The envelope (:mod:`cloudckpt.checkpoint.envelope`) before the item's bytes.
        nbytes: The size of the item in bytes, without the envelope.
        tail: The envelope after the item's bytes.
        dtype: The number of the element type in the index; 0 if it is not a plain tensor.
    """

    head: bytes
    nbytes: int
    tail: bytes
    dtype: int


class Place(NamedTuple):
    """The location of an item: the number of its object, and its offset and length there in bytes.

    The range includes the envelope (:mod:`cloudckpt.checkpoint.envelope`).
    """

    object: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ObjectPlan:
    """Items that follow each other in one object, as columns.

    Attributes:
        object: The number of the object among those of the rank.
        way: How the items are sent.
        buffer: The number of the buffer that holds their bytes.
        starts: The offset of each item in that buffer, in bytes.
        forms: The form of each item.
        names: The names of the items, for messages.
        expected: For each item, the checksums of its blocks; empty if they are not known yet.
    """

    object: int
    way: Way
    buffer: int
    starts: Sequence[int]
    forms: Sequence[StoredForm]
    names: Sequence[str]
    expected: Sequence[Sequence[int]] = ()


class Buffers(Protocol):
    """The memory that plans refer to, by buffer numbers.

    Attributes:
        pool: Memory for copies that are being sent.
    """

    @property
    def pool(self) -> MemoryPool: ...

    def views(self, plan: ObjectPlan) -> Iterable[memoryview]:
        """Yields a view of each item's bytes, which is valid until the next view is taken."""

    def pieces(self, buffer: int, start: int, nbytes: int) -> Iterable[Piece]:
        """Returns an item's ``nbytes`` bytes, at ``start`` in a buffer, as pieces to be sent."""


@dataclass(frozen=True)
class Destination:
    """The checkpoint, rank and options that all objects of one rank in a save have in common.

    Attributes:
        uri: The checkpoint.
        config: Options.
        rank: The rank.
        attempt: The random part of the objects' names.
        expected: The approximate number of bytes that the rank will send.
    """

    uri: CheckpointURI
    config: Config
    rank: int
    attempt: str
    expected: int

    def key(self, number: int) -> str:
        """Returns the key of the rank's object with this number."""
        return self.uri.key(data_name(self.rank, number, self.attempt))

    def part_size(self, capabilities: Capabilities, *, staged: bool) -> int:
        """Returns the part size of an object in bytes.

        Args:
            capabilities: The capabilities of the store.
            staged: Whether the object's bytes are copied through a pool, whose size limits parts.
        """
        return choose_part_size(
            self.expected,
            self.config.part_size,
            capabilities,
            connections=self.config.most_connections,
            copied=self.config.memory_budget if staged else None,
        )


@dataclass(slots=True)
class _Filling:
    """An object to which items are still being assigned.

    Attributes:
        number: The number of the object.
        position: Bytes of the items assigned so far.
        index: Bytes of the index of these items.
        capacity: Maximum bytes of items and index together.
    """

    number: int
    position: int
    index: int
    capacity: int


class ObjectFiller:
    """Assigns items to objects, and begins the next object when one is full.

    Two objects are filled at a time: one with items that are sent from their own memory, and one
    with items that pass through a pool, whose parts must be small enough for it.

    Attributes:
        count: How many objects there are.
    """

    def __init__(self, destination: Destination, capabilities: Capabilities) -> None:
        self.count = 0
        self._algorithm: ChecksumAlgorithm = capabilities.checksum
        self._filling: dict[bool, _Filling] = {}
        self._capacities = {
            staged: destination.part_size(capabilities, staged=staged) * capabilities.max_parts
            for staged in (False, True)
        }

    def next(self, form: StoredForm, way: Way) -> Place:
        """Assigns the next item to an object, and returns its location."""
        staged, growth = way != "direct", index_growth(form.nbytes, self._algorithm)
        length = len(form.head) + form.nbytes + len(form.tail)
        filling = self._filling.get(staged)
        if filling is not None:
            index = filling.index + growth
            needed = filling.position + length + 2 * ALIGNMENT + index
            if needed > filling.capacity or index > MOST_INDEX:
                filling = None
        if filling is None:
            empty = index_size((), self._algorithm)
            filling = _Filling(self.count, 0, empty, self._capacities[staged])
            self._filling[staged] = filling
            self.count += 1
        offset = aligned(filling.position)
        filling.position, filling.index = offset + length, filling.index + growth
        return Place(filling.number, offset, length)
