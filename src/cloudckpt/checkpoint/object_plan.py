"""What the objects of one rank consist of, as data: which bytes of memory, in which order.

An item stands in its object as an envelope around its bytes, at the next multiple of 64. A plan
names these bytes by a buffer and a place in it. So it is carried out in the same way by a thread of
the trainer and by its saving process, which maps the same buffers. Nothing here uses torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from cloudckpt.checkpoint.index import MOST_INDEX, index_growth, index_size
from cloudckpt.checkpoint.objects import data_name
from cloudckpt.checksum import ChecksumAlgorithm
from cloudckpt.config import Config
from cloudckpt.stores.capabilities import Capabilities
from cloudckpt.transfer.boxes import ALIGNMENT, aligned
from cloudckpt.transfer.packing import SlabPool
from cloudckpt.transfer.parts import Piece, choose_part_size
from cloudckpt.uri import CheckpointURI

__all__ = ["STATE", "Buffers", "Destination", "Form", "ObjectPlan", "Place", "Places", "Way"]

Way = Literal["direct", "staged", "packed"]
"""How items get from memory to the store: sent from where they lie; copied slice by slice through
a pool; or, if small, copied next to each other. The latter two share an object."""


STATE = 0
"""The number of the buffer that the state itself lies in, or its staged copy."""


class Form(NamedTuple):
    """What an item is like in an object, whatever its values.

    Attributes:
        head: The envelope before its bytes.
        nbytes: How many bytes it has, without the envelope.
        tail: The envelope after them.
        dtype: The number of its element type in the index; 0 if it is no plain tensor.
    """

    head: bytes
    nbytes: int
    tail: bytes
    dtype: int


class Place(NamedTuple):
    """Where an item was written: the object's number, and the byte range including the envelope."""

    object: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ObjectPlan:
    """Items that follow each other in one object, as columns.

    Attributes:
        object: The number of the object among those of the rank.
        way: How they are sent.
        buffer: The number of the buffer that their bytes lie in.
        starts: Where the bytes of each begin there.
        forms: What each is like.
        names: Their names, for messages.
        expected: The checksums of the blocks of each, if they were computed before; else empty.
    """

    object: int
    way: Way
    buffer: int
    starts: Sequence[int]
    forms: Sequence[Form]
    names: Sequence[str]
    expected: Sequence[Sequence[int]] = ()


class Buffers(Protocol):
    """The memory that plans refer to, by numbers.

    Attributes:
        pool: Memory for copies on their way.
    """

    @property
    def pool(self) -> SlabPool: ...

    def views(self, plan: ObjectPlan) -> Iterable[memoryview]:
        """The bytes of each item, to be copied at once."""

    def pieces(self, buffer: int, start: int, nbytes: int) -> Iterable[Piece]:
        """The bytes of one item, to be sent."""


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

    def key(self, number: int) -> str:
        """The key of an object."""
        return self.uri.key(data_name(self.rank, number, self.attempt))

    def part_size(self, capabilities: Capabilities, *, staged: bool) -> int:
        """The part size of an object in bytes; ``staged``: its bytes pass through a pool."""
        return choose_part_size(
            self.expected,
            self.config.part_size,
            capabilities,
            connections=self.config.most_connections,
            copied=self.config.memory_budget if staged else None,
        )


@dataclass(slots=True)
class _Filling:
    """An object that takes the next items: its number, its bytes, those of its index, and of both
    at most.
    """

    number: int
    position: int
    index: int
    capacity: int


class Places:
    """Assigns items to objects, and begins the next object when one is full.

    Two objects are filled at a time: one with what is sent from where it lies, and one with what
    passes through a pool, whose parts must be small enough for it.

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

    def next(self, form: Form, way: Way) -> Place:
        """The place of the next item."""
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
