"""Divides the bytes of a model's files among the ranks, and sends them.

A file is cut at the borders of shards into runs of at least the size of a part. A rank that has one
of the largest shards of a run sends it, straight from the memory of its tensors. What other ranks
have of the run they hand over before, in rounds of all ranks; a tensor whose shards are not ranges
of the file, such as columns, is put together in memory. A store that needs parts of one size gets
each file from one rank, to which the others hand all that they have.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from cloudckpt.checkpoint.torch_private import device_for_collectives
from cloudckpt.config import MIB, Config
from cloudckpt.hf.safetensors import Chunk, FilePlan, TensorPlan
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

__all__ = ["FileUpload", "RankWork", "least_part", "plan_work", "send_work"]

_GRAIN = 8  # bytes: an alignment that suits elements of all types
_PARTS_IN_POOL = 6  # see transfer.parts.choose_part_size


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive bytes of a file, which one rank sends.

    Attributes:
        file: The index of the file.
        first: The number of the first part.
        part_size: Bytes of every part but the last.
        content: The header of the file, and tensors or rows of tensors.
        ends: Whether its last part ends with it; else that part goes on with the next run.
    """

    file: int
    first: int
    part_size: int
    content: Sequence[bytes | TensorPlan]
    ends: bool

    @property
    def chunks(self) -> list[Chunk]:
        """The chunks in it, ordered by rank."""
        tensors = (one for one in self.content if isinstance(one, TensorPlan))
        chunks = (chunk for tensor in tensors for chunk in tensor.chunks)
        return sorted(chunks, key=lambda chunk: chunk.rank)

    def of_others(self, rank: int) -> list[Chunk]:
        """Returns the chunks that other ranks have."""
        return [chunk for chunk in self.chunks if chunk.rank != rank]


@dataclass
class Round:
    """What a rank does in a round: the run that it sends then, and what it gives to which ranks."""

    run: Run | None
    gives: list[tuple[int, Chunk]] = field(default_factory=list)


@dataclass
class RankWork:
    """What a rank sends: in rounds with the other ranks, and afterwards by itself."""

    rounds: list[Round] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)


def least_part(size: int, limits: Capabilities) -> int:
    """Returns the minimum part size in bytes for a file of ``size`` bytes.

    It follows from the store's minimum, and from the number of parts that an object may have.
    """
    return max(limits.min_part_size, MIB, -(-size // (limits.max_parts - 1)))


def plan_work(
    files: Sequence[FilePlan],
    ranks: int,
    config: Config,
    limits: Capabilities,
    *,
    by_position: bool,
) -> tuple[list[int], list[RankWork]]:
    """Plans the part size of each file's upload, and the work of each rank.

    Args:
        files: The files.
        ranks: The number of ranks.
        config: Options.
        limits: The limits of the store.
        by_position: Whether a part's number determines its offset, as in a local file.
    """
    work = [RankWork() for _ in range(ranks)]
    gathered: list[list[Run]] = [[] for _ in range(ranks)]
    sizes: list[int] = []
    load: Counter[int] = Counter()
    for index, file in enumerate(files):
        least = least_part(file.size, limits)
        size = _part_size(file, config, limits, least)
        sizes.append(1 if by_position else size)
        first, contents = 1, [*_cut(file, least)]
        for content in contents:
            nbytes = sum(map(_nbytes, content))
            even = size if limits.equal_parts else -(-nbytes // -(-nbytes // size))
            ends = not limits.equal_parts or content is contents[-1]
            run = Run(index, first, even, content, ends)
            sender = index % ranks
            if not limits.equal_parts:
                first += nbytes if by_position else -(-nbytes // even)
                half = max((chunk.nbytes for chunk in run.chunks), default=0) / 2
                large = [chunk.rank for chunk in run.chunks if chunk.nbytes >= half]
                sender = min(large, key=lambda rank: load[rank], default=sender)
            load[sender] += nbytes
            alone = not limits.equal_parts and not run.of_others(sender)
            (work[sender].runs if alone else gathered[sender]).append(run)
    for runs in itertools.zip_longest(*gathered):
        rounds = [Round(run) for run in runs]
        for sender, run in enumerate(runs):
            for chunk in run.of_others(sender) if run is not None else ():
                rounds[chunk.rank].gives.append((sender, chunk))
        for own, one in zip(work, rounds, strict=True):
            own.rounds.append(one)
    return sizes, work


def _part_size(file: FilePlan, config: Config, limits: Capabilities, least: int) -> int:
    """Returns the maximum size of a part in bytes; half of it is still enough for a part."""
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


def _cut(file: FilePlan, least: int) -> Iterator[list[bytes | TensorPlan]]:
    """Cuts a file at the borders of shards into runs of ``least`` bytes, except the last."""
    content: list[bytes | TensorPlan] = [file.header]
    nbytes = len(file.header)
    for one in (one for tensor in file.tensors for one in _ranges(tensor)):
        if nbytes >= least:
            yield content
            content, nbytes = [], 0
        content.append(one)
        nbytes += one.nbytes
    yield content


def _ranges(tensor: TensorPlan) -> Iterator[TensorPlan]:
    """Yields the rows of each chunk of a tensor, or all of it if chunks are not ranges of bytes."""
    chunks = [chunk for chunk in tensor.chunks if chunk.nbytes]
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

    All ranks of ``group`` must call it. If one of them fails, the others return early: the save
    fails with the error of that rank, which the ranks exchange afterwards.

    Args:
        work: The work of this rank.
        uploads: The uploads of the files.
        resolve: Returns the tensor of an item of this rank's plan.
        store: The store of the files.
        config: Options.
        stats: Counts the bytes sent.
        group: The ranks, or None if this process is alone.

    Raises:
        Exception: If this rank failed to send its share, or to hand over what others send.
    """
    tasks = transfer_group(store, config, "out", name="cloudckpt-save")
    retrier = Retrier(config.retry, tasks.cancellation, on_retry=stats.add_retry)
    runs = [*work.runs, *(one.run for one in work.rounds if one.run is not None)]
    largest = max((run.part_size for run in runs), default=0)
    pool = StagingPool(max(config.memory_budget, _PARTS_IN_POOL * largest), tasks.cancellation)
    files = [
        FileUpload(store, one.key, one.part_size, tasks, retrier, stats, upload=one)
        for one in uploads
    ]
    rounds = _Rounds(len(work.rounds), resolve, group)
    cutters: dict[int, PartCutter] = {}  # of files whose last part goes on

    def whole(one: TensorPlan, received: Mapping[Chunk, torch.Tensor]) -> torch.Tensor:
        found = [received[c] if c in received else resolve(c.item) for c in one.chunks]
        if len(found) == 1:
            return found[0]
        tensor = torch.empty(one.shape, dtype=one.dtype, device="cpu")
        for chunk, data in zip(one.chunks, found, strict=True):
            box = narrow(tensor, chunk.box)
            box.copy_(data.reshape(box.shape))
        return tensor

    def pieces(one: bytes | TensorPlan, received: Mapping[Chunk, torch.Tensor]) -> Iterator[Piece]:
        if isinstance(one, bytes):
            yield Piece(memoryview(one))
            return
        tensor = whole(one, received)
        if tensor.dtype == one.dtype and is_plain(tensor):
            yield Piece(bytes_of(tensor), owner=tensor, item=one.name)
        else:
            yield from pool.pieces(tensor, one.dtype)

    def send(run: Run, received: Mapping[Chunk, torch.Tensor]) -> None:
        file, cutter = files[run.file], cutters.pop(run.file, None) or PartCutter(run.part_size)
        step = run.part_size if file.upload.part_size == 1 else 1  # see Upload.part_size

        def put(part: PartPlan) -> None:
            part.number = run.first + (part.number - 1) * step
            file.send(part)

        for piece in (piece for one in run.content for piece in pieces(one, received)):
            for part in cutter.push(piece):
                put(part)
        if not run.ends:
            cutters[run.file] = cutter
        elif (last := cutter.finish()) is not None:
            put(last)

    def produce() -> None:
        try:
            for one in work.rounds:
                received = rounds.take_part(one)
                if received is None:
                    return
                if one.run is not None:
                    send(one.run, received)
            for run in work.runs:
                send(run, {})
        except Exception:
            rounds.leave()
            raise

    try:
        tasks.run(produce)
    finally:
        pool.close()
    return [file.sent for file in files]


class _Rounds:
    """Hands chunks to the ranks that send them, in rounds of all ranks.

    Before each round the ranks tell each other whether they are ready, with all memory that they
    need. If one is not, no rank takes part in any further round.
    """

    def __init__(
        self, count: int, resolve: Callable[[int], torch.Tensor], group: dist.ProcessGroup | None
    ) -> None:
        self._left = 0 if group is None else count  # rounds in which others wait for this rank
        self._resolve = resolve
        self._group = group
        if group is not None:
            self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
            self._device = device_for_collectives(group)
            self._failed = torch.zeros(1, dtype=torch.int32, device=self._device)

    def take_part(self, one: Round) -> dict[Chunk, torch.Tensor] | None:
        """Returns what other ranks have of this rank's run; None if another rank has failed."""
        if self._group is None:
            return {}
        out: list[list[torch.Tensor]] = [[] for _ in range(self._ranks)]
        for to, chunk in one.gives:
            data = torch.zeros(_room(chunk), dtype=torch.uint8, device=self._device)
            elements = self._resolve(chunk.item).reshape(-1)
            data[: chunk.nbytes].view(chunk.dtype).copy_(elements)
            out[to].append(data)
        others = [] if one.run is None else one.run.of_others(self._rank)
        expected: Counter[int] = Counter()
        for chunk in others:
            expected[chunk.rank] += _room(chunk)
        into = torch.empty(expected.total(), dtype=torch.uint8, device=self._device)
        given = torch.cat([into[:0], *itertools.chain.from_iterable(out)])
        left, self._left = self._left - 1, 0  # no rank waits for one whose collective has failed
        if not self._are_ready(True):
            return None
        dist.all_to_all_single(
            into,
            given,
            [expected[rank] for rank in range(self._ranks)],
            [sum(data.nbytes for data in each) for each in out],
            group=self._group,
        )
        self._left = left
        received = torch.split(into.cpu(), [_room(chunk) for chunk in others])
        return {
            chunk: data[: chunk.nbytes].view(chunk.dtype)
            for chunk, data in zip(others, received, strict=True)
        }

    def leave(self) -> None:
        """Tells the other ranks, if they wait for this one, that it has failed."""
        if self._left:
            self._are_ready(False)

    def _are_ready(self, ready: bool) -> bool:
        self._failed.fill_(not ready)
        dist.all_reduce(self._failed, dist.ReduceOp.MAX, group=self._group)
        return not self._failed.item()


def _room(chunk: Chunk) -> int:
    """Returns the bytes of a chunk in a round, in which each is aligned."""
    return aligned(chunk.nbytes, _GRAIN)
