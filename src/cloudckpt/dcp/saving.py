"""One ``write_data``: lays out the items of a save plan in objects and sends them."""

from __future__ import annotations

import io
import pickle
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from cloudckpt.checkpoint.base import VALUE, digest_of_bytes, kind_of
from cloudckpt.checkpoint.objects import WrittenObject
from cloudckpt.checkpoint.pending import Pending
from cloudckpt.checkpoint.record import Extents
from cloudckpt.checkpoint.sending import Destination, OpenObject, Sender, send_here
from cloudckpt.checkpoint.shard import (
    Place,
    ShardWriter,
    SmallForm,
    check_supported,
    travels_as_bytes,
)
from cloudckpt.checkpoint.values import forewarn
from cloudckpt.checksum import ChecksumAlgorithm
from cloudckpt.dcp.incremental import Contents, digest_of
from cloudckpt.errors import ShapeMismatchError, UnsupportedTensorError, UnsupportedValueError
from cloudckpt.stores.base import ObjectStore
from cloudckpt.transfer.group import Cancellation
from cloudckpt.transfer.memory import bytes_of, settled
from cloudckpt.transfer.staging import StagingPool
from cloudckpt.transfer.stats import TransferStats

__all__ = ["Leave", "CachedLayout", "expected_size", "send"]

Leave = Callable[[Extents, tuple[WrittenObject, ...]], Pending | None]

_PICKLED = WriteItemType.BYTE_IO
_RUN = 256
"""How many small tensors one call writes."""


@dataclass(frozen=True)
class CachedLayout:
    """What is known of items from an earlier save, with the tensors of this save.

    Attributes:
        expected: About how many bytes they will take.
        forms: By item, its form in an object; None unless it is a small tensor in host memory.
        tensors: By item, that tensor.
    """

    expected: int
    forms: Sequence[SmallForm | None]
    tensors: Sequence[torch.Tensor | None]


def _has_its_memory(form: SmallForm, tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is there; if not, the slower path reports what is wrong."""
    try:
        storage, address = tensor.untyped_storage(), tensor.data_ptr()
        return address != 0 and address + form.size <= storage.data_ptr() + storage.nbytes()
    except RuntimeError:
        return False


def expected_size(items: Sequence[WriteItem]) -> int:
    """About how many bytes items will take; planners may still change the data."""
    return sum(map(_size_of, items))


def _size_of(item: WriteItem) -> int:
    if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
        return item.bytes_io_data.nbytes if item.bytes_io_data is not None else 4096
    sizes = item.tensor_data.chunk.sizes
    return sizes.numel() * item.tensor_data.properties.dtype.itemsize + 1536


def send(
    items: Sequence[WriteItem],
    planner: SavePlanner,
    destination: Destination,
    store: ObjectStore,
    stats: TransferStats,
    *,
    began: Callable[[str], None],
    sender: Sender,
    cached: CachedLayout | None = None,
    leave: Leave = lambda extents, references: None,
    contents: Contents | None = None,
) -> tuple[tuple[WrittenObject, ...], Extents]:
    """Sends the items of one rank; returns when the store has all of them.

    Args:
        items: What to send.
        planner: Provides the data.
        destination: Where to send them.
        store: The destination's store.
        stats: Counts what is sent.
        began: Receives the name of each object before it is begun.
        sender: Sends the objects that are laid out here.
        cached: What an earlier save has learnt about the items.
        leave: Makes what to record in the store if this trainer ends; takes the locations of the
            items and the objects of other checkpoints that hold some of them.
        contents: Takes the items' digests, and knows which items need not be sent.

    Returns:
        The objects, and the locations of the items in them, in the order of ``items``. Objects of
        other checkpoints follow those that were sent.
    """
    if not items and sender is send_here:
        return (), Extents.none(digests=contents is not None)
    opened = 0
    places = [array("q", bytes(8 * len(items))) for _ in range(3)]

    def lay_out(open_object: Callable[[bool], OpenObject], cancellation: Cancellation) -> None:
        def counted(staged: bool) -> OpenObject:
            nonlocal opened
            opened += 1
            return open_object(staged)

        pool = StagingPool(destination.config.memory_budget, cancellation)
        shard = ShardWriter(
            counted,
            pool,
            checksum=store.capabilities.checksum,
        )
        try:
            objects, offsets, lengths = places
            # another process computes them, from memory that nothing writes to
            checksum = store.capabilities.checksum if sender is send_here else None
            refuses = destination.config.unloadable == "refuse"
            uri = str(destination.uri)
            writing = _Writing(planner, shard, pool, uri, contents, checksum, refuses=refuses)
            for number, place in writing.all_of(items, cached):
                objects[number], offsets[number], lengths[number] = place
            shard.close()
        finally:
            pool.close()

    def extents() -> Extents:
        if not items:
            return Extents.none(digests=contents is not None)
        found = Extents(*(torch.frombuffer(c, dtype=torch.int64) for c in places))
        return found if contents is None else contents.extents(found, opened)

    def references() -> tuple[WrittenObject, ...]:
        return () if contents is None else contents.references

    def left() -> Pending | None:
        return leave(extents(), references())

    objects = sender(destination, store, lay_out, stats, began, left)
    return (*objects, *references()), extents()


class _Writing:
    """Writes the items of a plan one by one."""

    def __init__(
        self,
        planner: SavePlanner,
        shard: ShardWriter,
        pool: StagingPool,
        uri: str,
        contents: Contents | None,
        checksum: ChecksumAlgorithm | None,
        *,
        refuses: bool,
    ) -> None:
        """``checksum``: computed along with the digests of items that are not packed, if any;
        ``refuses``: whether values that will not load without ``trust_pickle`` are refused.
        """
        self._refuses = refuses
        self._planner, self._shard, self._pool, self._uri = planner, shard, pool, uri
        self._contents = contents
        self._checksum = checksum

    def all_of(
        self, items: Sequence[WriteItem], cached: CachedLayout | None
    ) -> Iterator[tuple[int, Place]]:
        """Writes items; yields each item's number and where it was written, or already is."""
        forms: Sequence[SmallForm | None] = [None] * len(items)
        tensors: Sequence[torch.Tensor | None] = [None] * len(items)
        if cached is not None:
            forms, tensors = cached.forms, cached.tensors
        run: list[tuple[int, SmallForm, torch.Tensor]] = []

        def written_run() -> Iterator[tuple[int, Place]]:
            small = [form for _, form, _ in run], [tensor for _, _, tensor in run]
            copied = None if self._contents is None else noted
            written = self._shard.add_small(*small, copied)
            yield from zip([number for number, _, _ in run], written, strict=True)
            run.clear()

        def noted(place: int, copy: memoryview) -> None:
            number, _, tensor = run[place]
            self._note(number, tensor, copy)

        # pickled items come last: their length is unknown beforehand, and so nothing else shifts
        for number in sorted(range(len(items)), key=lambda n: items[n].type == _PICKLED):
            form, tensor = forms[number], tensors[number]
            if form is not None and tensor is not None and _has_its_memory(form, tensor):
                if self._contents is not None:
                    kind = kind_of(tensor.dtype, tensor.shape)
                    digest = digest_of_bytes(kind, bytes_of(tensor))
                    if (known := self._contents.known(number, digest)) is not None:
                        yield number, known
                        continue
                run.append((number, form, tensor))
                if len(run) == _RUN:
                    yield from written_run()
                continue
            if run:
                yield from written_run()
            yield number, self._write(number, items[number])
        if run:
            yield from written_run()

    def _write(self, number: int, item: WriteItem) -> Place:
        planner, fqn = self._planner, item.index.fqn
        data, is_bytes = self._resolved(item), item.type == WriteItemType.BYTE_IO
        if not isinstance(data, io.BytesIO if is_bytes else torch.Tensor):
            raise UnsupportedTensorError(
                f"{fqn} is planned as {'bytes' if is_bytes else 'a tensor'}, and resolve_data of "
                f"the planner has returned a {type(data).__name__}",
                item=fqn,
            )
        if isinstance(data, io.BytesIO):
            content = data.getvalue()  # shared with the stream, no copy
            if isinstance(planner, DefaultSavePlanner):
                forewarn(content, fqn, _kind(planner, item), self._uri, refuses=self._refuses)
            return self._write_bytes(number, content)
        tensor = settled(data).detach()
        check_supported(tensor, fqn)
        # another element type than planned is fine: every reader converts it, and torch's cached
        # plans ignore types
        if item.tensor_data is not None and tensor.shape != item.tensor_data.chunk.sizes:
            raise ShapeMismatchError(
                f"{fqn} is planned with shape {tuple(item.tensor_data.chunk.sizes)}, and "
                f"resolve_data of the planner has returned one of shape {tuple(tensor.shape)}",
                item=fqn,
            )
        if travels_as_bytes(tensor):
            buffer = io.BytesIO()
            torch.save(tensor, buffer)
            forewarn(buffer.getvalue(), fqn, type(tensor), self._uri, refuses=self._refuses)
            return self._write_bytes(number, buffer.getvalue())
        if type(tensor) is not torch.Tensor:
            tensor = tensor.as_subclass(torch.Tensor)
        if self._contents is None:
            return self._shard.add_tensor(tensor, fqn)
        digest, checksums = digest_of(tensor, self._pool, self._checksum)
        if (known := self._contents.known(number, digest)) is not None:
            return known
        return self._shard.add_tensor(
            tensor, fqn, expected=checksums, copied=partial(self._note, number, tensor)
        )

    def _resolved(self, item: WriteItem) -> Any:
        """The data of an item, from the planner."""
        planner, fqn = self._planner, item.index.fqn
        try:
            return planner.resolve_data(item)
        except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as exc:
            if item.type != WriteItemType.BYTE_IO or not isinstance(planner, DefaultSavePlanner):
                raise
            raise UnsupportedValueError(
                f"{fqn} (of type {_kind(planner, item).__name__}) can't be pickled: save what it "
                "can be made of again (numbers, strings, tensors, dicts and lists of them), or "
                "leave it out of the state dict",
                uri=self._uri,
                item=fqn,
                cause=exc,
            ) from exc

    def _write_bytes(self, number: int, content: bytes) -> Place:
        if self._contents is not None:
            digest = digest_of_bytes(VALUE, content)
            if (known := self._contents.known(number, digest)) is not None:
                return known
        return self._shard.add_bytes(content)

    def _note(self, number: int, tensor: torch.Tensor, copy: memoryview) -> None:
        """Records the digest of the copy that is sent: the tensor may have changed meanwhile."""
        assert self._contents is not None
        digest = digest_of_bytes(kind_of(tensor.dtype, tensor.shape), copy)
        self._contents.note(number, digest)


def _kind(planner: DefaultSavePlanner, item: WriteItem) -> type:
    """The class of a value that is not a tensor."""
    try:
        return type(planner.lookup_object(item.index))
    except Exception:  # noqa: BLE001 - of a planner that makes its values in resolve_data
        return object
