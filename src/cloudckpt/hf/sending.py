"""One rank's work on a model: it hands bytes to the ranks that send them, and sends its parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from cloudckpt.checkpoint.torch_private import device_for_collectives
from cloudckpt.config import Config
from cloudckpt.errors import TransferCancelledError
from cloudckpt.hf.layout import Gift, PartPlanOfRanks, RankWork, Round, Run, nbytes_of, pool_budget
from cloudckpt.stores.base import ObjectStore, Part, Upload
from cloudckpt.transfer.boxes import aligned
from cloudckpt.transfer.connections import transfer_group
from cloudckpt.transfer.memory import bytes_of, host_buffer, is_plain, narrow
from cloudckpt.transfer.packing import PACKED_BELOW
from cloudckpt.transfer.parts import PartPlan, Piece
from cloudckpt.transfer.retry import Retrier
from cloudckpt.transfer.staging import StagingPool
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.upload import ObjectUpload

__all__ = ["FileUpload", "send_work"]


_GRAIN = 8  # bytes: an alignment that suits elements of all types
_STATUS = 8  # bytes after what a rank hands to another: the first is 1 if it has failed


class FileUpload(ObjectUpload):
    """A file whose parts any rank may send, and that appears only on :meth:`appear`."""

    def adopt(self, upload: Upload) -> None:
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

    def took(self, part: Part) -> None:
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
    pool = StagingPool(pool_budget(config.memory_budget), tasks.cancellation)
    files = [
        FileUpload(store, upload.key, upload.part_size, tasks, retrier, stats) for upload in uploads
    ]
    for file, upload in zip(files, uploads, strict=True):
        file.adopt(upload)
    sender = _Sender(files, resolve, pool)

    def produce() -> None:
        failure: Exception | None = None
        if work.rounds:
            assert group is not None
            exchange = _Exchange(group, work.rounds)
        for each in work.rounds:
            received, failure, is_over = exchange.hold(each, sender.give, failure)
            if failure is not None:
                raise failure
            if is_over:
                raise TransferCancelledError("another rank has failed")
            if each.part is not None:
                try:
                    sender.send(each.part, received)
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
        sender.forget()
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
        self._tensors: dict[int, torch.Tensor] = {}

    def forget(self) -> None:
        """Releases the tensors."""
        self._tensors.clear()

    def _tensor(self, item: int) -> torch.Tensor:
        if item not in self._tensors:
            self._tensors[item] = self._resolve(item)
        return self._tensors[item]

    def give(self, gift: Gift, into: torch.Tensor) -> None:
        """Copies what another rank gets into ``into``, which has the same number of bytes."""
        source = narrow(self._tensor(gift.item), gift.source)
        into.view(gift.dtype).view(source.shape).copy_(source)

    def send(self, part: PartPlanOfRanks, received: Mapping[int, torch.Tensor]) -> None:
        """Assembles a part and sends it; ``received`` has the other ranks' bytes, in order."""
        plan = PartPlan(part.number)
        at = dict.fromkeys(received, 0)
        for piece in self._pieces(part, received, at):
            plan.pieces.append(piece)
            plan.size += piece.view.nbytes
        self._files[part.file].send(plan)

    def _pieces(
        self, part: PartPlanOfRanks, received: Mapping[int, torch.Tensor], at: dict[int, int]
    ) -> Iterator[Piece]:
        waiting: list[Run] = []  # to be assembled in one slab
        filled = 0
        for run in part.runs:
            own = self._as_it_lies(run, received, at)
            if own is None:
                assert isinstance(run, Run)
                if filled + run.nbytes > self._pool.slab_bytes:
                    yield self._together(waiting, filled, received, at)
                    waiting, filled = [], 0
                waiting.append(run)
                filled += run.nbytes
                continue
            if waiting:
                yield self._together(waiting, filled, received, at)
                waiting, filled = [], 0
            yield from own
        if waiting:
            yield self._together(waiting, filled, received, at)

    def _as_it_lies(
        self, run: bytes | Run, received: Mapping[int, torch.Tensor], at: dict[int, int]
    ) -> Iterator[Piece] | None:
        """The pieces of a run that need not be assembled with others."""
        if isinstance(run, bytes):
            return iter((Piece(memoryview(run)),))
        if len(run.pieces) > 1 or run.nbytes < PACKED_BELOW:
            return None
        if run.pieces[0].rank in received:
            if run.nbytes <= self._pool.slab_bytes:
                return None
            return self._given_whole(run, received, at)
        tensor = narrow(self._tensor(run.pieces[0].item), run.pieces[0].source)
        if tensor.dtype == run.dtype and is_plain(tensor):
            return iter((Piece(bytes_of(tensor), owner=tensor, item=run.name),))
        if run.nbytes <= self._pool.slab_bytes:
            return None
        return self._pool.pieces(tensor, run.dtype)

    def _given_whole(
        self, run: Run, received: Mapping[int, torch.Tensor], at: dict[int, int]
    ) -> Iterator[Piece]:
        """A run that another rank gave, and that is too large for one slab."""
        rank = run.pieces[0].rank
        start, most = at[rank], self._pool.slab_bytes
        at[rank] += aligned(run.nbytes, _GRAIN)
        for first in range(start, start + run.nbytes, most):
            count = min(most, start + run.nbytes - first)
            slab, place = self._pool.reserve(count)
            slab.memory[place : place + count].copy_(received[rank][first : first + count])
            yield Piece(slab.view[place : place + count], lease=slab)

    def _together(
        self,
        runs: Sequence[Run],
        nbytes: int,
        received: Mapping[int, torch.Tensor],
        at: dict[int, int],
    ) -> Piece:
        slab, place = self._pool.reserve(nbytes)
        position = place
        for run in runs:
            room = slab.memory[position : position + run.nbytes].view(run.dtype).view(run.shape)
            for piece in run.pieces:
                if piece.rank in received:
                    count = nbytes_of(piece.place, run.dtype)
                    start = at[piece.rank]
                    at[piece.rank] += aligned(count, _GRAIN)
                    data = received[piece.rank][start : start + count].view(run.dtype)
                    source = data.view([size for _, size in piece.place])
                else:
                    source = narrow(self._tensor(piece.item), piece.source)
                narrow(room, piece.place).copy_(source)
            position += run.nbytes
        return Piece(slab.view[place : place + nbytes], lease=slab)


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
            handed[gift.to] += aligned(nbytes_of(gift.source, gift.dtype), _GRAIN)
        for run in work.part.runs if work.part is not None else ():
            if isinstance(run, Run):
                for piece in run.pieces:
                    if piece.rank != self._rank:
                        expected[piece.rank] += aligned(nbytes_of(piece.place, run.dtype), _GRAIN)
        return handed, expected

    def hold(
        self,
        work: Round,
        give: Callable[[Gift, torch.Tensor], None],
        failure: Exception | None,
    ) -> tuple[dict[int, torch.Tensor], Exception | None, bool]:
        """Carries out one round.

        Args:
            work: What this rank does in it.
            give: Copies what another rank gets.
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
                    count = nbytes_of(gift.source, gift.dtype)
                    give(gift, self._out[at[gift.to] : at[gift.to] + count])
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
