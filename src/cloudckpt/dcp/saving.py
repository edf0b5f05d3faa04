"""Assigns the items of a save plan to objects."""

from __future__ import annotations

import io
import pickle
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from cloudckpt.checkpoint.base import VALUE, Base, Digest, Digester, digest_of_bytes, type_prefix
from cloudckpt.checkpoint.columns import matrix_of
from cloudckpt.checkpoint.object_plan import (
    STATE,
    Destination,
    ObjectFiller,
    ObjectPlan,
    Place,
    StoredForm,
    Way,
)
from cloudckpt.checkpoint.objects import WrittenObject
from cloudckpt.checkpoint.pending import Pending
from cloudckpt.checkpoint.record import Extents, Record
from cloudckpt.checkpoint.shard import Memory, check_supported, form_of, travels_as_bytes
from cloudckpt.checkpoint.values import Unloadable
from cloudckpt.checksum import BlockChecksums, ChecksumAlgorithm, block_size_for
from cloudckpt.dcp.copies import Digests
from cloudckpt.errors import ShapeMismatchError, UnsupportedTensorError, UnsupportedValueError
from cloudckpt.stores.capabilities import Capabilities
from cloudckpt.transfer.memory import bytes_of, is_plain, settled
from cloudckpt.transfer.packing import PACKED_BELOW
from cloudckpt.transfer.parts import Piece
from cloudckpt.transfer.staging import StagingPool

__all__ = ["Contents", "SmallTensors", "StateLayout", "digest_of", "expected_size"]

SmallTensors = Sequence[tuple[StoredForm, torch.Tensor] | None]
"""For each item, a small tensor in host memory with its form; None for any other item."""

_Small = tuple[int, int, StoredForm, torch.Tensor]
"""The number of an item, its offset in the state's buffer, its form, and the small tensor."""

_PICKLED = WriteItemType.BYTE_IO
_RUN = 256
"""Maximum small tensors in one object plan."""


def expected_size(items: Sequence[WriteItem]) -> int:
    """Returns about how many bytes items will take in objects; planners may change the data."""
    return sum(map(_size_of, items))


def _size_of(item: WriteItem) -> int:
    if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
        return item.bytes_io_data.nbytes if item.bytes_io_data is not None else 4096
    sizes = item.tensor_data.chunk.sizes
    return sizes.numel() * item.tensor_data.properties.dtype.itemsize + 1536


class Contents:
    """Collects the digests of a rank's items, and looks them up in an earlier checkpoint.

    Args:
        count: How many items the rank has.
        base: The items of the earlier checkpoint; None without one.
    """

    def __init__(self, count: int, base: Base | None) -> None:
        self._base = base
        self._high, self._low = array("q", bytes(8 * count)), array("q", bytes(8 * count))
        # maps the number of an object in the base to its number among the references
        self._numbers: dict[int, int] = {}

    def known(self, item: int, digest: Digest) -> Place | None:
        """Records an item's digest; returns the item's location in the base, or None if not there.

        In a location, the number of the object is -1 for the first of :attr:`references`, -2 for
        the next, and so on.
        """
        self._high[item], self._low[item] = digest
        place = None if self._base is None else self._base.find(digest)
        if place is None:
            return None
        number = self._numbers.setdefault(place.object, len(self._numbers))
        return place._replace(object=-1 - number)

    @property
    def references(self) -> tuple[WrittenObject, ...]:
        """The objects of other checkpoints that hold the items that :meth:`known` has found."""
        return tuple(self._base.objects[number] for number in self._numbers) if self._base else ()

    def extents(self, places: Extents, own: int) -> Extents:
        """Returns the locations of all items, with their digests.

        Args:
            places: The locations: from :meth:`known` for items in the base, else from the layout.
            own: How many objects this rank itself writes; they are numbered first.
        """
        objects = torch.where(places.objects < 0, own - 1 - places.objects, places.objects)
        halves = (torch.frombuffer(half, dtype=torch.int64) for half in (self._high, self._low))
        return Extents(objects, places.offsets, places.lengths, *halves)


def digest_of(
    tensor: torch.Tensor, pool: StagingPool, algorithm: ChecksumAlgorithm | None = None
) -> tuple[Digest, tuple[int, ...]]:
    """Computes the digest and checksums of a strided tensor on any device in one pass.

    Args:
        tensor: The tensor.
        pool: Staging memory for tensors that are not row-major in host memory.
        algorithm: Algorithm of the checksums to compute along with the digest; None for no
            checksums.

    Returns:
        The digest; and the checksums of the blocks, ``()`` without ``algorithm``. The sender
        compares the bytes that it sends with these checksums, as other code may have changed the
        tensor since.
    """
    form, nbytes = type_prefix(tensor.dtype, tensor.shape), tensor.nbytes
    block = block_size_for(nbytes)
    if 0 < nbytes <= block and is_plain(tensor):  # there may be many such tensors
        view = bytes_of(tensor)
        return digest_of_bytes(form, view), () if algorithm is None else (algorithm.of(view),)
    digester = Digester(form)
    checksums = None if algorithm is None else BlockChecksums(algorithm, block)
    for piece in _pieces_of(tensor, pool):
        if piece.ready is not None:
            piece.ready()
        if checksums is None:
            digester.add(piece.view)
        else:
            for first in range(0, piece.view.nbytes, block):  # the second read comes from the cache
                view = piece.view[first : first + block]
                digester.add(view)
                checksums.add(piece.start + first, view)
        if piece.lease is not None:
            piece.lease.release()
    return digester.result(), () if checksums is None else checksums.finish(nbytes)


def _pieces_of(tensor: torch.Tensor, pool: StagingPool) -> Iterable[Piece]:
    if not tensor.numel():
        return ()
    return (Piece(bytes_of(tensor)),) if is_plain(tensor) else pool.pieces(tensor)


class StateLayout:
    """The items of one rank, assigned to objects while they are sent; see ``shard.Layout``."""

    def __init__(
        self,
        items: Sequence[WriteItem],
        planner: SavePlanner,
        destination: Destination,
        capabilities: Capabilities,
        small: SmallTensors = (),
        contents: Contents | None = None,
        digests: Digests | None = None,
    ) -> None:
        """Makes the layout; assigns nothing yet.

        Args:
            items: The items to send.
            planner: Provides the data.
            destination: The checkpoint, the rank, and options.
            capabilities: The capabilities of the destination's store.
            small: The small tensors, which are sent without asking the planner for their data;
                empty if they are unknown.
            contents: Collects the items' digests, and knows which items need not be sent; None if
                the save is not incremental.
            digests: Makes digests by which the ranks compare the items; None if it is not needed.
        """
        self._items, self._planner = items, planner
        self._small: SmallTensors = small or [None] * len(items)
        self._contents, self._digests = contents, digests
        self._algorithm = capabilities.checksum
        self._unloadable = Unloadable(str(destination.uri), destination.config.unloadable)
        self._places = ObjectFiller(destination, capabilities)
        self._written = array("q", bytes(24 * len(items)))  # for each item: object, offset, length

    @property
    def extents(self) -> Extents:
        """The locations of the items, once all are assigned.

        Objects of other checkpoints are numbered after those that are sent.
        """
        if not self._items:
            return Extents.none(digests=self._contents is not None)
        columns = matrix_of(self._written, 3, len(self._items)).unbind(1)
        extents = Extents(*(column.contiguous() for column in columns))
        if self._contents is None:
            return extents
        return self._contents.extents(extents, self._places.count)

    @property
    def references(self) -> tuple[WrittenObject, ...]:
        """The objects of other checkpoints that hold some items, once all are assigned."""
        return () if self._contents is None else self._contents.references

    def pending(self, template: Pending) -> Pending:
        record = Record(extents=self.extents).to_bytes()
        return replace(template, record=record, references=self.references)

    def plans(self, memory: Memory) -> Iterator[ObjectPlan]:
        run: list[_Small] = []
        # pickled items last: their lengths are unknown before, and would shift the offsets of
        # others
        numbers = range(len(self._items))
        for number in sorted(numbers, key=lambda one: self._items[one].type == _PICKLED):
            small = self._in_memory(number, memory)
            if small is not None:
                run.append(small)
            if run and (small is None or len(run) == _RUN):
                yield from self._run(run, memory)
                run = []
            if small is None:
                yield from self._item(number, memory)
        if run:
            yield from self._run(run, memory)
        self._unloadable.check()

    def _in_memory(self, number: int, memory: Memory) -> _Small | None:
        """Returns an item that is a small tensor in the buffer of the state; else None.

        Also returns None if the memory of the tensor was freed: :meth:`_data_of` then raises the
        error.
        """
        known = self._small[number]
        if known is None:
            return None
        form, tensor = known
        try:
            storage, address = tensor.untyped_storage(), tensor.data_ptr()
            end = storage.data_ptr() + storage.nbytes()
        except RuntimeError:
            return None
        if address == 0 or address + form.nbytes > end:
            return None
        start = memory.place_of(address)
        return None if start is None else (number, start, form, tensor)

    def _run(self, run: Sequence[_Small], memory: Memory) -> Iterator[ObjectPlan]:
        """Assigns small tensors to objects, and yields a plan for each of these objects.

        Tensors that an earlier checkpoint has are left out.
        """
        kept = [
            (one, sums)
            for one in run
            if (sums := self._checksums_unless_known(one[0], one[3], memory)) is not None
        ]
        objects = [self._next(number, form, "packed") for (number, _, form, _), _ in kept]
        for made in sorted(set(objects)):
            rows = [one for one, at in zip(kept, objects, strict=True) if at == made]
            yield ObjectPlan(
                made,
                "packed",
                STATE,
                [start for (_, start, _, _), _ in rows],
                [form for (_, _, form, _), _ in rows],
                [self._items[number].index.fqn for (number, _, _, _), _ in rows],
                () if self._contents is None else [sums for _, sums in rows],
            )

    def _next(self, number: int, form: StoredForm, way: Way) -> int:
        """Assigns an item to an object, and records its location; returns the object's number."""
        place = self._places.next(form, way)
        self._note(number, place)
        return place.object

    def _note(self, number: int, place: Place) -> None:
        self._written[3 * number : 3 * number + 3] = array("q", place)

    def _checksums_unless_known(
        self, number: int, data: torch.Tensor | bytes, memory: Memory
    ) -> tuple[int, ...] | None:
        """Returns the checksums that an item's bytes must have when they are sent.

        If the earlier checkpoint has the item, records the item's location there, and returns None.
        Returns ``()`` if the save is not incremental, or no other code can change the bytes.
        """
        if self._contents is None:
            return ()
        if isinstance(data, bytes):
            digest, sums = digest_of_bytes(VALUE, data), tuple[int, ...]()
        else:
            checksum = None if memory.is_private else self._algorithm
            digest, sums = digest_of(data, memory.pool, checksum)
        known = self._contents.known(number, digest)
        if known is None:
            return sums
        self._note(number, known)
        return None

    def _item(self, number: int, memory: Memory) -> Iterator[ObjectPlan]:
        """Yields the plan of one item; nothing if an earlier checkpoint has it."""
        item = self._items[number]
        data, form = self._data_of(item)
        sums = self._checksums_unless_known(number, data, memory)
        if sums is None:
            return
        way: Way = "packed" if form.nbytes < PACKED_BELOW else "direct"
        if isinstance(data, bytes):
            buffer = memory.put(memoryview(data), data)
        elif is_plain(data) or not data.numel():
            buffer = memory.put(bytes_of(data), data)
        else:
            way = "staged"
            buffer = memory.put_strided(data)
        made = self._next(number, form, way)
        yield ObjectPlan(made, way, buffer[0], [buffer[1]], [form], [item.index.fqn], [sums])

    def _data_of(self, item: WriteItem) -> tuple[torch.Tensor | bytes, StoredForm]:
        """Returns the data of an item, and how it is stored.

        The data is a plain tensor of any strides and device, or bytes.

        Raises:
            ShapeMismatchError: If a tensor has another shape than planned.
            UnsupportedTensorError: If the tensor can't be stored, or the planner returned bytes in
                place of a tensor, a tensor in place of bytes, or neither.
            UnsupportedValueError: If a value can't be pickled.
        """
        planner, fqn = self._planner, item.index.fqn
        data, is_bytes = self._resolved(item), item.type == WriteItemType.BYTE_IO
        if self._digests is not None:
            self._digests.add(item, data)
        if not isinstance(data, io.BytesIO if is_bytes else torch.Tensor):
            raise UnsupportedTensorError(
                f"{fqn} is planned as {'bytes' if is_bytes else 'a tensor'}, but the planner's "
                f"resolve_data returned a {type(data).__name__}: make it return "
                f"{'an io.BytesIO' if is_bytes else 'a torch.Tensor'}",
                uri=self._unloadable.uri,
                item=fqn,
            )
        if isinstance(data, io.BytesIO):
            content = data.getvalue()  # shared with the stream, no copy
            if isinstance(planner, DefaultSavePlanner):
                self._unloadable.look(content, fqn, _kind(planner, item))
            return content, _form_of_bytes(content)
        tensor: torch.Tensor = settled(data).detach()
        check_supported(tensor, fqn)
        # another element type than planned is accepted: every reader converts it, and torch's
        # cached plans ignore types
        if item.tensor_data is not None and tensor.shape != item.tensor_data.chunk.sizes:
            raise ShapeMismatchError(
                f"{fqn} is planned with shape {tuple(item.tensor_data.chunk.sizes)}: make the "
                f"planner's resolve_data return that shape, not {tuple(tensor.shape)}",
                uri=self._unloadable.uri,
                item=fqn,
            )
        is_opaque = travels_as_bytes(tensor)
        form = None if is_opaque else form_of(tensor.dtype, tuple(tensor.shape))
        if form is None:
            buffer = io.BytesIO()
            torch.save(tensor if is_opaque else tensor.contiguous(), buffer)
            content = buffer.getvalue()
            self._unloadable.look(content, fqn, type(tensor))
            return content, _form_of_bytes(content)
        return tensor if type(tensor) is torch.Tensor else tensor.as_subclass(torch.Tensor), form

    def _resolved(self, item: WriteItem) -> Any:
        """Returns the data of an item from the planner.

        Raises:
            UnsupportedValueError: If a value can't be pickled.
        """
        planner, fqn = self._planner, item.index.fqn
        try:
            return planner.resolve_data(item)
        except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as exc:
            if item.type != WriteItemType.BYTE_IO or not isinstance(planner, DefaultSavePlanner):
                raise
            raise UnsupportedValueError(
                f"{fqn} (of type {_kind(planner, item).__name__}) can't be pickled: save the "
                "values it can be made from (numbers, strings, tensors, dicts and lists of "
                "them), or leave it out of the state dict",
                uri=self._unloadable.uri,
                item=fqn,
                cause=exc,
            ) from exc


def _form_of_bytes(data: bytes) -> StoredForm:
    return StoredForm(b"", len(data), b"", 0)


def _kind(planner: DefaultSavePlanner, item: WriteItem) -> type:
    """Returns the class of a value that is not a tensor; ``object`` if it is unknown."""
    try:
        return type(planner.lookup_object(item.index))
    except Exception:  # noqa: BLE001 - of a planner that makes its values in resolve_data
        return object
