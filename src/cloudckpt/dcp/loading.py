"""Carries out a load plan: fetches bytes, shares reads, passes items to the planner."""

from __future__ import annotations

import io
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from cloudckpt.checkpoint.archives import StoredTensor
from cloudckpt.checkpoint.places import ItemPlace, Places
from cloudckpt.checkpoint.shard import travels_as_bytes
from cloudckpt.checkpoint.torch_private import (
    ExtensionRegistry,
    StreamTransformExtension,
    device_for_collectives,
)
from cloudckpt.checkpoint.values import load_item, load_tensor
from cloudckpt.config import Config
from cloudckpt.dcp.failures import break_off
from cloudckpt.dcp.load_plan import CloudLoadPlanner
from cloudckpt.dcp.shared_memory import SharedMemory, in_memory
from cloudckpt.errors import (
    CheckpointCorruptError,
    CloudCheckpointError,
    ProcessGroupError,
    ShapeMismatchError,
    TransferCancelledError,
    UnsupportedTensorError,
)
from cloudckpt.gc_pause import paused_gc
from cloudckpt.stores.base import ObjectStore
from cloudckpt.transfer.boxes import Box, plan_boxes, row_major_slices, row_major_strides
from cloudckpt.transfer.download import MERGE_GAP, Download, download, segments_for
from cloudckpt.transfer.landing import BytesSink, Segment, StoredBytes, TensorSink, Wanted
from cloudckpt.transfer.memory import narrow, settled, shows_its_memory, why_not_filled
from cloudckpt.transfer.parts import even_share
from cloudckpt.transfer.sharing import Ring, RingAllgather, digests, plan_shares, shared_requests
from cloudckpt.transfer.stats import TransferStats

__all__ = [
    "Load",
    "Offer",
    "SharedReads",
]


Offer = tuple[str, torch.Tensor]
"""A rank's report of its reads: the name of its host, and the :func:`digests` of the reads.

The name is empty if ranks of different hosts share reads, too.
"""


class SharedReads:
    """The reads that ranks of a group have in common, and the exchange of their bytes.

    All ranks must agree on which requests are shared and how they are split. So the meeting before
    the load compares the option ``shared_reads``; and reads whose requests depend on other options
    (``verify``, ``connections``) are shared only if these requests are the same. ``memory_budget``
    may differ: it limits how many requests a rank fetches in advance.

    Args:
        group: The ranks.
        config: The options.
        segments: The reads that this rank wants.
        offers: The results of :meth:`offer` of all ranks, by rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        config: Config,
        segments: Sequence[Segment],
        offers: Sequence[Offer],
    ) -> None:
        self._group = group
        self._config = config
        self._segments = segments
        self._offers = offers
        self._is_over = False  # whether no other rank waits for this one

    @staticmethod
    def offer(segments: Sequence[Segment], shared_reads: str) -> Offer:
        """Returns this rank's report of its reads; ``shared_reads`` is the option of that name."""
        return socket.gethostname() if shared_reads == "host" else "", digests(segments)

    def carry_out(self, download: Download) -> list[Segment]:
        """Fetches and exchanges shared reads; a collective call, to be made within ``download``.

        Returns:
            The segments that this rank has to fetch on its own.

        Raises:
            TransferCancelledError: If this or another rank has failed.
            ProcessGroupError: If a rank ended or a connection to it broke.
        """
        segments, offers = self._segments, self._offers
        names = [host for host, _ in offers]
        hosts = [names.index(host) for host in names]
        alone = set(range(len(segments)))
        failure: Exception | None = None
        rank = dist.get_rank(self._group)
        for share in plan_shares([of for _, of in offers], rank, hosts):
            requests = shared_requests(
                [segments[number] for number in share.segments],
                len(share.ranks),
            )
            if requests is None:
                continue
            alone.difference_update(share.segments)
            ring = _GroupRing(self._group, share.ranks, rank)
            try:
                RingAllgather(download, ring, requests, self._config.memory_budget).run()
            except (RuntimeError, TransferCancelledError) as error:
                failure = failure or _named(error)
                download.fail(failure)  # ranks of further shares must learn of it
        self._is_over = True
        if failure is not None:
            raise failure
        return [segments[number] for number in sorted(alone)]

    def leave(self) -> None:
        """Closes the group's connections if this rank has failed while others may wait for it."""
        if not self._is_over:
            break_off(self._group)


def _named(error: Exception) -> CloudCheckpointError:
    """Returns an error of cloudckpt unchanged; for any other, a ProcessGroupError caused by it."""
    if isinstance(error, CloudCheckpointError):
        return error
    made = ProcessGroupError(
        "the ranks lost each other while they shared reads: find out which rank ended first and "
        "why, and start all of them again",
        cause=error,
    )
    made.__cause__ = error
    return made


class _GroupRing(Ring):
    """A ring of ranks of a process group, each of which sends tensors to the next."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], rank: int) -> None:
        self.size = len(ranks)
        self.position = ranks.index(rank)
        self._group = group
        self._before = ranks[self.position - 1]
        self._next = ranks[(self.position + 1) % self.size]
        self._device = torch.device(device_for_collectives(group))

    def exchange(
        self, out: torch.Tensor | None, into: torch.Tensor | None
    ) -> tuple[RuntimeError | None, RuntimeError | None]:
        if self._device.type != "cpu":
            return self._exchange_through_device(out, into)
        receive, lost = self._begun(dist.irecv, into, group_src=self._before)
        send, unsent = self._begun(dist.isend, out, group_dst=self._next)
        return unsent or _waited(send), lost or _waited(receive)

    def _begun(
        self, operation: Callable[..., dist.Work | None], tensor: torch.Tensor | None, **peer: int
    ) -> tuple[dist.Work | None, RuntimeError | None]:
        if tensor is None:
            return None, None
        try:
            return operation(tensor, group=self._group, **peer), None
        except RuntimeError as error:
            return None, error

    def _exchange_through_device(
        self, out: torch.Tensor | None, into: torch.Tensor | None
    ) -> tuple[RuntimeError | None, RuntimeError | None]:
        """Does the same as :meth:`exchange`, with copies on the accelerator.

        It is used if the group's backend, such as NCCL, can't send host memory.
        """
        ops = []
        landing = None if into is None else torch.empty_like(into, device=self._device)
        if landing is not None:
            ops.append(dist.P2POp(dist.irecv, landing, None, self._group, 0, self._before))
        if out is not None:
            sent = out.to(self._device)
            ops.append(dist.P2POp(dist.isend, sent, None, self._group, 0, self._next))
        try:
            for work in dist.batch_isend_irecv(ops) if ops else ():
                work.wait()
            if into is not None and landing is not None:
                into.copy_(landing)
        except RuntimeError as error:
            return error, error
        return None, None


def _waited(work: dist.Work | None) -> RuntimeError | None:
    """Waits for an operation; returns the error if it failed, or None."""
    try:
        if work is not None:
            work.wait()
    except RuntimeError as error:
        return error
    return None


@dataclass(eq=False, slots=True)
class _Delivery:
    """The ranges to read for an item, and the tensors into whose memory it is loaded.

    Attributes:
        owner: The entry of the state dict, or the chunk of its tensor, that the item belongs to.
        wanted: The ranges to read.
        memory: The tensors whose memory is filled; empty if the item is not a tensor.
        put: Called once the ranges have arrived; None if nothing is left to do then.
    """

    owner: MetadataIndex
    wanted: list[Wanted]
    memory: Sequence[torch.Tensor] = ()
    put: Callable[[], None] | None = None


@dataclass(eq=False)
class Load:
    """Fetches the items of a plan into the planner's tensors.

    Attributes:
        store: The store of the checkpoint.
        config: The options.
        planner: Provides the tensors.
        stats: Counts received bytes.
        places: Locates the items.
        uri: The checkpoint.
        trust_pickle: Whether the checkpoint's pickles may run arbitrary code.
        guarded: Returns a context manager around reads, which raises CheckpointReplacedError if the
            checkpoint was replaced.
    """

    store: ObjectStore
    config: Config
    planner: LoadPlanner
    stats: TransferStats
    places: Places
    uri: str
    trust_pickle: bool
    guarded: Callable[[], AbstractContextManager[None]]

    def __post_init__(self) -> None:
        self._contents: dict[Any, Any] = {}  # which stored values are read into which memory
        self.close()

    def prepare(self, plan: LoadPlan) -> None:
        """Locates the items and assigns their bytes to the planner's tensors.

        Raises:
            CheckpointCorruptError: If an item has no location, or does not fit its metadata.
            ShapeMismatchError: If the planner's tensor does not have the planned shape.
            UnsupportedTensorError: If the planner's tensor can't be filled.
            CheckpointReplacedError: If another save replaced the checkpoint meanwhile.
            StoreError: If the store refuses or stays unreachable.
        """
        indices = [item.storage_index for item in plan.items]
        with self.guarded():
            places = self.places.find(indices, self.store, self.config, self.stats)
        with paused_gc():
            for item, place in zip(plan.items, places, strict=True):
                if item.type == LoadItemType.BYTE_IO:
                    self._want_bytes(item, place)
                elif place.tensor is not None:
                    self._want_tensor(item, place.tensor)
                else:
                    self._want_pickled_tensor(item, place)
        # read in the same round, one tensor would seem damaged where another is received
        self._shared = SharedMemory([(one.owner, one.memory) for one in self._deliveries])

    def segments(self) -> list[Segment]:
        """Returns the reads that ranks may fetch for each other: those of the first round.

        See :attr:`SharedMemory.rounds`.
        """
        return segments_for(self._wanted(0), self.config)

    def run(self, shared: SharedReads | None = None) -> None:
        """Fetches all items, verifies them as the options say, and passes them to the planner.

        Args:
            shared: The reads that ranks share, made from the :meth:`segments` of each; this is then
                a collective call. None to fetch all items on this rank alone.

        Raises:
            KeyCollisionError: If tensors that share memory have different values in the checkpoint.
            CloudCheckpointError: The other errors of :meth:`CloudStorageReader.read_data` and, if
                reads are shared, of :meth:`SharedReads.carry_out`.
        """
        rounds = self._shared.rounds
        last = max(rounds.values(), default=0)
        for current in range(last + 1):
            with self.guarded():
                wanted = self._wanted(current)
                download(self.store, wanted, self.config, self.stats, shared=shared)
            shared = None
            for number, one in enumerate(self._deliveries):
                if rounds.get(number, 0) == current:
                    if one.put is not None:
                        one.put()
                    if current < last:  # nothing is read into the memory of the last ones
                        self._shared.note(number)
        self._shared.check(self.uri)
        for finish in self._afterwards:
            finish()

    def close(self) -> None:
        """Drops the references to tensors, which would otherwise live until garbage collection."""
        self._deliveries: list[_Delivery] = []  # in the order of the plan
        self._afterwards: list[Callable[[], None]] = []
        self._shared = SharedMemory(())

    def _wanted(self, current: int) -> list[Wanted]:
        """Returns the ranges to read in a round of :attr:`SharedMemory.rounds`."""
        rounds, deliveries = self._shared.rounds, enumerate(self._deliveries)
        of_round = (one for number, one in deliveries if rounds.get(number, 0) == current)
        return [want for one in of_round for want in one.wanted]

    def _is_in_memory(self, item: ReadItem, stored: StoredTensor, target: torch.Tensor) -> bool:
        """Whether an earlier item already reads the same stored bytes into the same memory.

        Tied weights that were saved under each of their names are therefore read once. Stored bytes
        are the same if their location or their checksums are.
        """
        source = stored.elements
        memory = (target.device, target.data_ptr(), target.dtype, target.shape, target.stride())
        region = (stored.dtype, stored.shape, item.storage_offsets, item.lengths)
        content = (*region, source.blocks or (source.key, source.offset))
        signs = target.is_conj(), target.is_neg()
        known = self._contents.setdefault((memory, signs), content)
        return known is not content and known == content

    def _want_tensor(self, item: ReadItem, stored: StoredTensor) -> None:
        target = settled(self.planner.resolve_tensor(item)).detach()
        self._check_shape(item, target, stored.shape)
        opaque = travels_as_bytes(target)
        if not opaque:
            self._check_memory(item, target)
        self._afterwards.append(lambda: self.planner.commit_tensor(item, target))
        if not opaque and self._is_in_memory(item, stored, target):
            return
        wanted: list[Wanted] = []
        self._deliveries.append(_Delivery(item.dest_index, wanted, in_memory(target)))
        source, dtype, config = stored.elements, stored.dtype, self.config
        limit = even_share(0, config.most_connections)
        for read in plan_boxes(
            stored.shape,
            item.storage_offsets,
            item.lengths,
            dtype.itemsize,
            limit=limit,
            merge_gap=MERGE_GAP,
        ):
            part = narrow(target, read.box)
            if not read.contiguous:
                sink = TensorSink(part, dtype, stored.shape)
                row = _row_bytes(read.box, stored)
                wanted.append(Wanted(source, read.start, read.stop, sink, False, row))
                continue
            if not opaque and part.is_contiguous() and shows_its_memory(part):
                sink = TensorSink(part, dtype)
                wanted.append(Wanted(source, read.start, read.stop, sink, True))
                continue
            for rows in row_major_slices(part.shape, dtype.itemsize, limit):
                sink = TensorSink(narrow(part, rows.box), dtype, direct=False)
                start, stop = read.start + rows.start, read.start + rows.stop
                wanted.append(Wanted(source, start, stop, sink, False))

    def _want_bytes(self, item: ReadItem, place: ItemPlace) -> None:
        _, sink = self._want_all(item, place.whole)

        def finish() -> None:
            data = _untransformed(place, sink.data)
            planner, name = self.planner, place.whole.item
            if not self.trust_pickle and isinstance(planner, DefaultLoadPlanner):
                if type(planner).load_bytes is CloudLoadPlanner.load_bytes:
                    assert isinstance(planner, CloudLoadPlanner)
                    where = planner.map_location
                    planner.put(item, load_item(data, name, self.uri, map_location=where))
                    return
                # this planner, or its base class, unpickles without restrictions: check the pickle
                # first
                load_item(data, name, self.uri)
            planner.load_bytes(item, io.BytesIO(data))

        self._afterwards.append(finish)

    def _want_pickled_tensor(self, item: ReadItem, place: ItemPlace) -> None:
        delivery, sink = self._want_all(item, place.whole)
        target = settled(self.planner.resolve_tensor(item)).detach()
        delivery.memory = in_memory(target)
        self._afterwards.append(lambda: self.planner.commit_tensor(item, target))

        def put() -> None:
            data = _untransformed(place, sink.data)
            tensor = load_tensor(data, place.whole.item, self.uri, trust=self.trust_pickle)
            self._check_shape(item, target, tuple(tensor.shape))
            box = tuple(zip(item.storage_offsets, item.lengths, strict=True))
            target.copy_(narrow(tensor, box))

        delivery.put = put

    def _want_all(self, item: ReadItem, source: StoredBytes) -> tuple[_Delivery, BytesSink]:
        sink = BytesSink(source.nbytes)
        wanted = Wanted(source, 0, source.nbytes, sink, True)
        self._deliveries.append(_Delivery(item.dest_index, [wanted]))
        return self._deliveries[-1], sink

    def _check_memory(self, item: ReadItem, target: torch.Tensor) -> None:
        name, planner = item.dest_index.fqn, self.planner
        why = why_not_filled(target)
        if not why and 0 in target.stride() and isinstance(planner, DefaultLoadPlanner):
            # a single row of an expanded tensor does not show that the other rows share its memory
            why = why_not_filled(planner.lookup_tensor(item.dest_index))
        if why:
            message = f"{name} can't be loaded into the tensor of the state dict: {why}"
            raise UnsupportedTensorError(message, uri=self.uri, item=name)

    def _check_shape(self, item: ReadItem, target: torch.Tensor, stored: tuple[int, ...]) -> None:
        fqn, wanted = item.storage_index.fqn, tuple(item.lengths)
        if tuple(target.shape) != wanted:
            raise ShapeMismatchError(
                f"the planner loads {wanted} elements of {fqn} into a tensor of shape "
                f"{tuple(target.shape)}: make resolve_tensor return a tensor of shape {wanted}",
                uri=self.uri,
                item=fqn,
            )
        fits = len(stored) == len(wanted) and all(
            offset + length <= size
            for offset, length, size in zip(item.storage_offsets, wanted, stored, strict=True)
        )
        if not fits:
            raise CheckpointCorruptError(
                f"the planner asks for {wanted} elements of {fqn} at offsets "
                f"{tuple(item.storage_offsets)}, but the saved part has the shape {stored}: unless "
                "a custom planner is wrong, the metadata is damaged; load an older checkpoint",
                uri=self.uri,
                item=fqn,
            )


def _row_bytes(box: Box, stored: StoredTensor) -> int:
    """Returns the distance in bytes between two rows of a box in the stored tensor.

    The rows follow one another along the first dimension in which the box is longer than 1. See
    :attr:`Wanted.row`.
    """
    axis = next(axis for axis, (_, length) in enumerate(box) if length > 1)
    return row_major_strides(stored.shape)[axis] * stored.dtype.itemsize


def _untransformed(
    place: ItemPlace, data: bytearray | memoryview
) -> bytes | bytearray | memoryview:
    """Returns the item's bytes as they were before torch's writer transformed (compressed) them."""
    if not place.transforms:
        return data
    stream: Any = io.BytesIO(data)
    for extension in ExtensionRegistry().from_descriptor_list(place.transforms):
        if isinstance(extension, StreamTransformExtension):
            stream = extension.transform_from(stream)
    return cast(bytes, stream.read(-1))
