"""Divides the bytes of a model's files among the ranks, and sends them.

A file is cut at the borders of shards into runs of at least the size of a part. The rank that has
most of a run sends it, straight from the memory of its tensors. What other ranks have of the run is
handed to that rank before, in rounds in which all ranks take part in the same order; a tensor whose
shards are not ranges of the file, such as columns, is put together there in memory.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from cloudckpt.checkpoint.torch_private import device_for_collectives
from cloudckpt.config import Config
from cloudckpt.hf.layout import Chunk, FilePlan, TensorPlan, least_part
from cloudckpt.stores.base import ObjectStore, Part, Upload
from cloudckpt.stores.capabilities import Capabilities
from cloudckpt.transfer.boxes import ALIGNMENT, Box, aligned, row_major_strides
from cloudckpt.transfer.connections import transfer_group
from cloudckpt.transfer.memory import bytes_of, is_plain, narrow
from cloudckpt.transfer.parts import PartCutter, PartPlan, Piece, choose_part_size
from cloudckpt.transfer.retry import Retrier
from cloudckpt.transfer.staging import StagingPool
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.upload import ObjectUpload

__all__ = ["FileUpload", "RankWork", "Stretch", "plan_work", "send_work"]

_GRAIN = 8  # bytes: an alignment that suits elements of all types
_PARTS_IN_POOL = 6  # see transfer.parts.choose_part_size

Run = Sequence[bytes | TensorPlan]
"""Consecutive bytes of a file: its header, and tensors or rows of tensors."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive parts of a file, which one rank sends.

    Attributes:
        file: The index of the file.
        first: The number of the first part.
        step: The difference between the numbers of two parts.
        part_size: Bytes of every part but the last.
        runs: What the parts consist of.
    """

    file: int
    first: int
    step: int
    part_size: int
    runs: Sequence[Run]


@dataclass(frozen=True, slots=True)
class Share:
    """A chunk in a file, with the type of its elements there."""

    chunk: Chunk
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.chunk.numel * self.dtype.itemsize

    @property
    def room(self) -> int:
        """Bytes in a round, in which each chunk is aligned."""
        return aligned(self.nbytes, _GRAIN)


@dataclass
class RankWork:
    """What a rank sends, and what it hands to which ranks in each round."""

    stretches: list[Stretch] = field(default_factory=list)
    rounds: list[list[tuple[int, Share]]] = field(default_factory=list)


def plan_work(
    files: Sequence[FilePlan],
    ranks: int,
    config: Config,
    limits: Capabilities,
    *,
    by_position: bool,
) -> tuple[list[int], list[RankWork]]:
    """Plans the part size of each file's upload, and the work of each rank.

    If the store needs equal parts, one rank sends the whole file.

    Args:
        files: The files.
        ranks: The number of ranks.
        config: Options.
        limits: The limits of the store.
        by_position: Whether a part's number determines its offset, as in a local file.
    """
    work = [RankWork() for _ in range(ranks)]
    gathered: list[list[Run]] = [[] for _ in range(ranks)]  # runs with chunks of other ranks
    sizes: list[int] = []
    load: Counter[int] = Counter()
    for index, file in enumerate(files):
        least = least_part(file.size, limits)
        size = _part_size(file, config, limits, least)
        sizes.append(1 if by_position else size)
        runs = list(_runs(file, least))
        first = 1
        for together in [runs] if limits.equal_parts else [[run] for run in runs]:
            nbytes = sum(_nbytes(one) for run in together for one in run)
            part_size = size if limits.equal_parts else -(-nbytes // -(-nbytes // size))
            stretch = Stretch(index, first, part_size if by_position else 1, part_size, together)
            first += nbytes if by_position else -(-nbytes // part_size)
            shares: Counter[int] = Counter()
            for share in itertools.chain.from_iterable(map(_shares, together)):
                shares[share.chunk.rank] += share.nbytes
            sender = max(range(ranks), key=lambda rank: (shares[rank], -load[rank], -rank))
            load[sender] += nbytes
            work[sender].stretches.append(stretch)
            gathered[sender] += [run for run in together if _others(run, sender)]
    for rank, own in enumerate(work):
        own.stretches.sort(key=lambda one: not any(_others(run, rank) for run in one.runs))
        own.rounds += [[] for _ in range(max(map(len, gathered)))]
    for sender, queue in enumerate(gathered):
        for number, run in enumerate(queue):
            for share in _others(run, sender):
                work[share.chunk.rank].rounds[number].append((sender, share))
    return sizes, work


def _part_size(file: FilePlan, config: Config, limits: Capabilities, least: int) -> int:
    """Returns the most bytes of a part; half of it is still enough for a part."""
    size = choose_part_size(
        file.size,
        config.part_size,
        limits,
        connections=config.most_connections,
        copied=config.memory_budget,
    )
    if limits.equal_parts:
        return aligned(max(size, -(-file.size // limits.max_parts)), ALIGNMENT)
    return aligned(max(size, 2 * least), ALIGNMENT)


def _runs(file: FilePlan, least: int) -> Iterator[Run]:
    """Cuts a file at the borders of shards into runs of ``least`` bytes, except the last."""
    run: list[bytes | TensorPlan] = [file.header]
    nbytes = len(file.header)
    for one in (one for tensor in file.tensors for one in _ranges(tensor)):
        if nbytes >= least:
            yield run
            run, nbytes = [], 0
        run.append(one)
        nbytes += one.nbytes
    yield run


def _ranges(tensor: TensorPlan) -> Iterator[TensorPlan]:
    """Yields the rows of each chunk of a tensor, or all of it if chunks are not ranges of bytes."""
    chunks = [chunk for chunk in tensor.chunks if chunk.numel]
    if not all(_is_range(chunk.box, tensor.shape) for chunk in chunks):
        yield dataclasses.replace(tensor, chunks=chunks)
        return
    strides = row_major_strides(tensor.shape)

    def first(chunk: Chunk) -> int:
        return sum(start * stride for (start, _), stride in zip(chunk.box, strides, strict=True))

    for chunk in sorted(chunks, key=first):
        shape = tuple(length for _, length in chunk.box)
        yield dataclasses.replace(tensor, shape=shape, chunks=[chunk])


def _is_range(box: Box, shape: Sequence[int]) -> bool:
    """Returns whether the elements of a box are contiguous in the row-major tensor."""
    axis = 0
    while axis < len(shape) and box[axis][1] == 1:
        axis += 1
    return [length for _, length in box[axis + 1 :]] == list(shape[axis + 1 :])


def _nbytes(one: bytes | TensorPlan) -> int:
    return len(one) if isinstance(one, bytes) else one.nbytes


def _shares(run: Run) -> Iterator[Share]:
    tensors = (one for one in run if isinstance(one, TensorPlan))
    return (Share(chunk, tensor.dtype) for tensor in tensors for chunk in tensor.chunks)


def _others(run: Run, rank: int) -> list[Share]:
    """Returns the chunks of other ranks in a run, ordered by rank."""
    others = (share for share in _shares(run) if share.chunk.rank != rank)
    return sorted(others, key=lambda share: share.chunk.rank)


class FileUpload(ObjectUpload):
    """An upload of a file whose parts any rank may send; :meth:`appear` makes it visible."""

    def __init__(self, *args: Any, upload: Upload | None = None, **options: Any) -> None:
        """
        Args:
            *args: Arguments of :class:`ObjectUpload`.
            upload: The upload, if it was begun before, possibly by another process.
            **options: Options of :class:`ObjectUpload`.
        """
        super().__init__(*args, **options)
        self._upload = upload

    def begin(self) -> None:
        """Begins the upload; the file is not visible before :meth:`appear`."""
        self._upload = self._create()

    @property
    def upload(self) -> Upload:
        """The upload that was begun."""
        assert self._upload is not None
        return self._upload

    def send(self, part: PartPlan) -> None:
        """Sends a part in a thread of the task group."""
        self._group.submit(lambda: self._put_part(part))

    def send_now(self, part: PartPlan) -> None:
        """Sends a part in the calling thread."""
        self._put_part(part)

    def record_part(self, part: Part) -> None:
        """Records a part that the store has copied itself."""
        self._took(part)

    @property
    def sent(self) -> list[Part]:
        """The parts that this process has sent or recorded."""
        return self._sent

    def appear(self, parts: Sequence[Part]) -> None:
        """Creates the object from the parts that all ranks have sent.

        Raises:
            PreconditionFailedError: If the object exists, and must not be replaced.
            StoreError: If the object was not created; if ``is_doubtful``, it still may be.
        """
        self._sent = list(parts)
        self.position = sum(part.size for part in parts)
        self._complete()

    def abandon(self) -> None:
        """Aborts the upload; an existing object at the key stays."""
        self.abort()


def send_work(
    work: RankWork,
    uploads: Sequence[Upload],
    resolve: Callable[[int], torch.Tensor],
    store: ObjectStore,
    config: Config,
    stats: TransferStats,
    group: dist.ProcessGroup | None,
) -> list[list[Part]]:
    """Sends a rank's share of the files; returns, for each file, the parts that it has sent.

    All ranks of ``group`` must call it. A rank that fails still takes part in all rounds.

    Args:
        work: The work of this rank.
        uploads: The uploads of the files.
        resolve: Returns the tensor of an item of this rank's plan.
        store: The store of the files.
        config: Options.
        stats: Counts the bytes sent.
        group: The ranks, or None if this process is alone.

    Raises:
        CloudCheckpointError: If this rank failed to send its share.
    """
    tasks = transfer_group(store, config, "out", name="cloudckpt-save")
    retrier = Retrier(config.retry, tasks.cancellation, on_retry=stats.add_retry)
    largest = max((stretch.part_size for stretch in work.stretches), default=0)
    pool = StagingPool(max(config.memory_budget, _PARTS_IN_POOL * largest), tasks.cancellation)
    files = [
        FileUpload(store, one.key, one.part_size, tasks, retrier, stats, upload=one)
        for one in uploads
    ]
    rounds = _Rounds(work.rounds, resolve, group)

    def produce() -> None:
        try:
            for stretch in work.stretches:
                for part in _parts(stretch, rounds, resolve, pool):
                    files[stretch.file].send(part)
        except Exception as error:  # noqa: BLE001 - the other ranks need this one in their rounds
            rounds.failure = rounds.failure or error
        rounds.finish()

    try:
        tasks.run(produce)
    finally:
        pool.close()
    return [file.sent for file in files]


def _parts(
    stretch: Stretch, rounds: _Rounds, resolve: Callable[[int], torch.Tensor], pool: StagingPool
) -> Iterator[PartPlan]:
    """Yields the parts of a stretch, as soon as this rank has their bytes."""

    def pieces(one: bytes | TensorPlan, received: Mapping[Chunk, torch.Tensor]) -> Iterator[Piece]:
        if isinstance(one, bytes):
            yield Piece(memoryview(one))
            return
        first, *more = one.chunks
        if more:
            whole = torch.empty(one.shape, dtype=one.dtype, device="cpu")
            for chunk in one.chunks:
                box = narrow(whole, chunk.box)
                data = received[chunk] if chunk in received else resolve(chunk.item)
                box.copy_(data.reshape(box.shape))
        elif first in received:
            whole = received[first]
        else:
            tensor = resolve(first.item)
            if tensor.dtype == one.dtype and is_plain(tensor):
                yield Piece(bytes_of(tensor), owner=tensor, item=one.name)
            else:
                yield from pool.pieces(tensor, one.dtype)
            return
        yield Piece(bytes_of(whole).toreadonly(), owner=whole)

    cutter = PartCutter(stretch.part_size)
    numbers = itertools.count(stretch.first, stretch.step)
    for run in stretch.runs:
        received = rounds.received(run)
        for piece in (piece for one in run for piece in pieces(one, received)):
            for part in cutter.push(piece):
                part.number = next(numbers)
                yield part
    if (last := cutter.finish()) is not None:
        last.number = next(numbers)
        yield last


class _Rounds:
    """Hands chunks to the ranks that send them, in rounds in which all ranks take part.

    Attributes:
        failure: The first error of this rank; it does not keep the rank from further rounds.
    """

    def __init__(
        self,
        rounds: Sequence[Sequence[tuple[int, Share]]],
        resolve: Callable[[int], torch.Tensor],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.failure: Exception | None = None
        self._left = deque(rounds)
        self._resolve = resolve
        self._group = group
        self._rank, self._ranks, self._device = 0, 1, "cpu"
        if group is not None:
            self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
            self._device = device_for_collectives(group)

    def received(self, run: Run) -> dict[Chunk, torch.Tensor]:
        """Returns the chunks of a run that other ranks have, after a round if there are any.

        Raises:
            Exception: If this rank has failed.
        """
        others = _others(run, self._rank)
        received = self._exchanged(others) if others else {}
        if self.failure is not None:
            raise self.failure
        return received

    def finish(self) -> None:
        """Takes part in the remaining rounds.

        Raises:
            Exception: If this rank has failed.
        """
        while self._left:
            self._exchanged([])
        if self.failure is not None:
            raise self.failure

    def _exchanged(self, others: Sequence[Share]) -> dict[Chunk, torch.Tensor]:
        """Takes part in a round; returns the given chunks of other ranks."""
        out: list[list[torch.Tensor]] = [[] for _ in range(self._ranks)]
        for to, share in self._left.popleft():
            data = torch.zeros(share.room, dtype=torch.uint8, device=self._device)
            try:
                elements = self._resolve(share.chunk.item).reshape(-1)
                data[: share.nbytes].view(share.dtype).copy_(elements)
            except Exception as error:  # noqa: BLE001 - raised after the round
                self.failure = self.failure or error
            out[to].append(data)
        expected: Counter[int] = Counter()
        for share in others:
            expected[share.chunk.rank] += share.room
        into = torch.empty(expected.total(), dtype=torch.uint8, device=self._device)
        try:
            dist.all_to_all_single(
                into,
                torch.cat([into[:0], *itertools.chain.from_iterable(out)]),
                [expected[rank] for rank in range(self._ranks)],
                [sum(data.nbytes for data in each) for each in out],
                group=self._group,
            )
        except BaseException:
            self._left.clear()  # the group is broken, so no rank waits for this one
            raise
        received = torch.split(into.cpu(), [share.room for share in others])
        return {
            share.chunk: data[: share.nbytes].view(share.dtype)
            for share, data in zip(others, received, strict=True)
        }
