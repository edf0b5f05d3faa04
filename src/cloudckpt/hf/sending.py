"""One rank's work on a model: it hands bytes to the ranks that send them, and sends its parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from cloudckpt.checkpoint.torch_private import device_for_collectives
from cloudckpt.config import Config
from cloudckpt.errors import TransferCancelledError
from cloudckpt.hf.parts import (
    Elements,
    FilePart,
    Held,
    Range,
    RankWork,
    Round,
    elements_needed,
)
from cloudckpt.stores.base import ObjectStore, Part, Upload
from cloudckpt.transfer.boxes import aligned
from cloudckpt.transfer.connections import transfer_group
from cloudckpt.transfer.memory import bytes_of, host_buffer, is_plain, narrow
from cloudckpt.transfer.parts import PartPlan, Piece
from cloudckpt.transfer.retry import Retrier
from cloudckpt.transfer.staging import StagingPool
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.upload import ObjectUpload

__all__ = ["FileUpload", "send_work"]

_GRAIN = 8  # bytes: an alignment that suits elements of all types
_STATUS = 8  # bytes after what a rank hands to another: the first is 1 if it has failed
_PARTS_IN_POOL = 6  # see transfer.parts.choose_part_size


class FileUpload(ObjectUpload):
    """A file whose parts any rank may send, and that appears only on :meth:`appear`."""

    def attach(self, upload: Upload) -> None:
        """Continues an upload that another process may have begun."""
        self._upload = upload

    def begin(self) -> None:
        """Begins the upload; nothing is visible."""
        self._upload = self._create()

    @property
    def upload(self) -> Upload:
        """The upload that was begun."""
        assert self._upload is not None
        return self._upload

    def send(self, part: PartPlan) -> None:
        """Sends a part, on a thread of the group."""
        self._group.submit(lambda: self._put_part(part))

    def send_now(self, part: PartPlan) -> None:
        """Sends a part, on the calling thread."""
        self._put_part(part)

    def record_part(self, part: Part) -> None:
        """Records a part that the store has made itself."""
        self._took(part)

    @property
    def sent(self) -> list[Part]:
        """The parts sent from here."""
        return self._sent

    def appear(self, parts: Sequence[Part]) -> None:
        """Creates the object from the parts that all ranks have sent.

        Raises:
            PreconditionFailedError: If it exists, and must not be replaced.
            StoreError: If it did not appear; ``is_doubtful`` says whether it yet may.
        """
        self._sent = list(parts)
        self.position = sum(part.size for part in parts)
        self._complete()

    def abandon(self) -> None:
        """Aborts the upload; what is at the key stays."""
        if self._upload is not None:
            self._abort(self._upload)
        if self._may_have_twin:
            self._abort_twins()


def send_work(
    work: RankWork,
    uploads: Sequence[Upload],
    resolve: Callable[[int], torch.Tensor],
    store: ObjectStore,
    config: Config,
    stats: TransferStats,
    group: dist.ProcessGroup | None,
) -> list[list[Part]]:
    """Does a rank's work; returns, for each file, the parts that it has sent.

    All ranks of ``group`` call it together. If one fails, all stop after the round.

    Args:
        work: What to do.
        uploads: The uploads of the files.
        resolve: Returns the tensor of an item of this rank's plan.
        store: The store of the files.
        config: Options.
        stats: Counts what is sent.
        group: The ranks, or None if this process is alone.

    Raises:
        CloudCheckpointError: The reason why this rank failed.
        TransferCancelledError: If only other ranks failed.
    """
    tasks = transfer_group(store, config, "out", name="cloudckpt-save")
    retrier = Retrier(config.retry, tasks.cancellation, on_retry=stats.add_retry)
    budget = max(config.memory_budget, _PARTS_IN_POOL * work.largest)
    pool = StagingPool(budget, tasks.cancellation)
    files = [
        FileUpload(store, upload.key, upload.part_size, tasks, retrier, stats) for upload in uploads
    ]
    for file, upload in zip(files, uploads, strict=True):
        file.attach(upload)
    sender = _Sender(files, resolve, pool)

    def produce() -> None:
        failure: Exception | None = None
        if work.rounds:
            assert group is not None
            exchange = _Exchange(group, work.rounds)
        for each in work.rounds:
            received, failure, is_over = exchange.hold(each, sender.copy_to, failure)
            if failure is not None:
                raise failure
            if is_over:
                raise TransferCancelledError("another rank has failed")
            try:
                for part in each.parts:
                    sender.send(part, received)
            except Exception as error:  # noqa: BLE001 - told to the others in the next round
                failure = error
        if failure is not None:
            raise failure
        for part in work.own:
            sender.send(part, {})

    try:
        tasks.run(produce)
    finally:
        pool.close()
    return [file.sent for file in files]


class _Sender:
    """Makes parts from tensor memory, and sends them."""

    def __init__(
        self,
        files: Sequence[FileUpload],
        resolve: Callable[[int], torch.Tensor],
        pool: StagingPool,
    ) -> None:
        self._files = files
        self._resolve = resolve
        self._pool = pool
        self._last: tuple[int, torch.Tensor] | None = None  # a strided tensor is copied once
        self._whole = torch.empty(0, device="cpu")  # what was collected of a scattered extent

    def _flat(self, item: int) -> torch.Tensor:
        """The elements of an item, in row-major order."""
        if self._last is None or self._last[0] != item:
            self._last = None  # before the next is copied
            self._last = item, self._resolve(item).reshape(-1)
        return self._last[1]

    def copy_to(self, elements: Elements, into: torch.Tensor) -> None:
        """Copies what another rank gets into ``into``, which has the same number of bytes."""
        source = self._flat(elements.chunk.item)[elements.start : elements.stop]
        into.view(elements.dtype).copy_(source)

    def send(self, part: FilePart, received: Mapping[int, torch.Tensor]) -> None:
        """Assembles a part and sends it; ``received`` has the other ranks' bytes, in order."""
        content = part.content
        if isinstance(content, Range):
            pieces = self._as_it_lies(content)
        else:
            needed = self._needed(content, received)
            pieces = self._packed(self._elements(content, needed), part.nbytes)
        plan = PartPlan(part.number)
        for piece in pieces:
            plan.pieces.append(piece)
            plan.size += piece.view.nbytes
        self._files[part.file].send(plan)

    def _as_it_lies(self, one: Range[Held]) -> Iterator[Piece]:
        held = one.extent.source
        (elements,) = elements_needed(one)
        tensor = self._flat(elements.chunk.item)[elements.start : elements.stop]
        if tensor.dtype == held.dtype and is_plain(tensor):
            return iter((Piece(bytes_of(tensor), owner=tensor, item=held.name),))
        return self._pool.pieces(tensor, held.dtype)

    def _needed(
        self, content: Sequence[bytes | Range[Held]], received: Mapping[int, torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        """What is needed, in that order: own elements, and bytes that others have handed over."""
        at = dict.fromkeys(received, 0)
        for one in elements_needed(list(content)):
            rank = one.chunk.rank
            if rank in received:
                yield received[rank][at[rank] : at[rank] + one.nbytes].view(one.dtype)
                at[rank] += aligned(one.nbytes, _GRAIN)
            else:
                yield self._flat(one.chunk.item)[one.start : one.stop]

    def _elements(
        self, content: Sequence[bytes | Range[Held]], needed: Iterator[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.dtype]]:
        """The elements of a part, in order, and the types that they are stored as."""
        for one in content:
            if isinstance(one, bytes):
                yield torch.frombuffer(bytearray(one), dtype=torch.uint8), torch.uint8
                continue
            held = one.extent.source
            if not one.extent.is_scattered:
                yield next(needed), held.dtype
                continue
            if one.start == 0:
                whole = torch.empty(held.shape, dtype=held.dtype, device="cpu")
                for chunk in held.chunks:
                    room = narrow(whole, chunk.box)
                    room.copy_(next(needed).view(room.shape))
                self._whole = whole.reshape(-1)
            size = held.dtype.itemsize
            yield self._whole[one.start // size : one.stop // size], held.dtype
            if one.stop == one.extent.nbytes:
                self._whole = torch.empty(0, device="cpu")

    def _packed(
        self, elements: Iterator[tuple[torch.Tensor, torch.dtype]], nbytes: int
    ) -> Iterator[Piece]:
        """Copies ``nbytes`` bytes of elements next to each other, and converts them."""
        room = filled = 0
        for tensor, dtype in elements:
            while tensor.numel():
                if not room:
                    room, filled = min(nbytes, self._pool.slab_bytes), 0
                    slab, start = self._pool.reserve(room)
                count = min(tensor.numel(), (room - filled) // dtype.itemsize)
                stop = filled + count * dtype.itemsize
                slab.memory[start + filled : start + stop].view(dtype).copy_(tensor[:count])
                tensor, filled = tensor[count:], stop
                if filled == room:
                    yield Piece(slab.view[start : start + room], lease=slab)
                    nbytes, room = nbytes - room, 0


class _Exchange:
    """The bytes that ranks hand to each other, round after round, in two pieces of memory.

    All ranks take part in each round, also those that have failed: all stop after it.
    """

    def __init__(self, group: dist.ProcessGroup, rounds: Sequence[Round]) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        device = torch.device(device_for_collectives(group))
        sizes = [self._sizes(each) for each in rounds]
        self._out, self._in = (
            host_buffer(most, pinned=False) if device.type == "cpu" else _on(device, most)
            for most in (max(sum(of) for of in both) for both in zip(*sizes, strict=True))
        )

    def _sizes(self, work: Round) -> tuple[list[int], list[int]]:
        """The bytes that this rank hands to each rank, and that it gets from each."""
        size = dist.get_world_size(self._group)
        handed, expected = [_STATUS] * size, [_STATUS] * size
        for gift in work.gifts:
            handed[gift.to] += aligned(gift.elements.nbytes, _GRAIN)
        for one in (one for part in work.parts for one in elements_needed(part.content)):
            if one.chunk.rank != self._rank:
                expected[one.chunk.rank] += aligned(one.nbytes, _GRAIN)
        return handed, expected

    def hold(
        self,
        work: Round,
        copy_to: Callable[[Elements, torch.Tensor], None],
        failure: Exception | None,
    ) -> tuple[dict[int, torch.Tensor], Exception | None, bool]:
        """Carries out one round.

        Args:
            work: What this rank does in it.
            copy_to: Copies what another rank gets.
            failure: Why this rank failed earlier, if it did.

        Returns:
            What this rank received, by rank, valid until the next round; why it failed, if it
            did; and whether any rank has failed.
        """
        handed, expected = self._sizes(work)
        ends = list(itertools.accumulate(handed))
        if failure is None:
            try:
                at = [end - count for end, count in zip(ends, handed, strict=True)]
                for gift in work.gifts:
                    count = gift.elements.nbytes
                    copy_to(gift.elements, self._out[at[gift.to] : at[gift.to] + count])
                    at[gift.to] += aligned(count, _GRAIN)
            except Exception as error:  # noqa: BLE001 - raised when the others have been told
                failure = error
        for end in ends:
            self._out[end - _STATUS] = int(failure is not None)
        out, into = self._out[: ends[-1]], self._in[: sum(expected)]
        dist.all_to_all_single(into, out, expected, handed, group=self._group)
        parts = torch.split(into.cpu(), expected)
        received = {
            rank: data[:-_STATUS] for rank, data in enumerate(parts) if data.numel() > _STATUS
        }
        return received, failure, any(bool(data[-_STATUS]) for data in parts)


def _on(device: torch.device, nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)
