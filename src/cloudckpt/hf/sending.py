"""Divides the bytes of a model's files among the ranks, and sends them.

A file is cut at the borders of shards into extents. Each of them but the last has at least the
bytes that the store demands of a part. One of the ranks with the largest shards of an extent
uploads the extent, so that most bytes are sent straight from tensor memory. Before that, the other
ranks send their shards of the extent to that rank, in rounds in which all ranks take part. A tensor
whose shards are not ranges of the file, such as columns, is put together in memory. If the store
needs parts of equal size, one rank uploads the whole file.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cloudckpt.checkpoint.torch_private import device_for_collectives
from cloudckpt.config import MIB, Config
from cloudckpt.hf.safetensors import Chunk, FilePlan, TensorPlan
from cloudckpt.stores.base import CopySource, ObjectStore, Part, Upload
from cloudckpt.stores.capabilities import Capabilities
from cloudckpt.transfer.boxes import ALIGNMENT, Box, aligned, row_major_strides
from cloudckpt.transfer.connections import transfer_group
from cloudckpt.transfer.memory import bytes_of, is_plain, narrow
from cloudckpt.transfer.parts import PartPlan, Piece, choose_part_size
from cloudckpt.transfer.staging import StagingPool
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.upload import NamedUpload

__all__ = ["FileUpload", "RankWork", "least_part", "plan_work", "send_work"]

_GRAIN = 8  # bytes: an alignment that suits elements of all types
_PARTS_IN_POOL = 6  # see transfer.parts.choose_part_size


@dataclass(frozen=True, slots=True)
class Extent:
    """Consecutive bytes of a file that one rank sends.

    Attributes:
        file: The index of the file.
        sender: The rank that sends it.
        first: The number of the extent's first part (in a local file, its offset plus 1); unused if
            the extent continues a part of the extent before it.
        part_size: Bytes of every part but the last.
        content: The contents in order: the header of the file, and tensors or parts of tensors.
        ends: Whether the extent's end is also the end of its last part; otherwise the next extent
            continues that part.
    """

    file: int
    sender: int
    first: int
    part_size: int
    content: Sequence[bytes | TensorPlan]
    ends: bool

    @property
    def handed_over(self) -> list[Chunk]:
        """The chunks that other ranks hand to the sender, ordered by rank."""
        chunks = [chunk for chunk in _chunks(self.content) if chunk.rank != self.sender]
        return sorted(chunks, key=lambda chunk: chunk.rank)


class Round(NamedTuple):
    """The work of a rank in one round of all ranks.

    Attributes:
        extent: The extent that the rank sends in this round; None if it sends none.
        gives: Pairs of another rank and a chunk that this rank hands to that rank.
    """

    extent: Extent | None
    gives: list[tuple[int, Chunk]]


class RankWork(NamedTuple):
    """The work of a rank.

    Attributes:
        rounds: Its work in each round, in which all ranks take part.
        extents: The extents that the rank sends by itself after the rounds.
    """

    rounds: list[Round]
    extents: list[Extent]


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

    Returns:
        The part size of each file's upload in bytes (1 with ``by_position``), and each rank's work.
    """
    work = [RankWork([], []) for _ in range(ranks)]
    together: list[list[Extent]] = [[] for _ in range(ranks)]
    sizes: list[int] = []
    load = [0] * ranks
    for index, file in enumerate(files):
        least = least_part(file.size, limits)
        size = choose_part_size(
            file.size,
            config.part_size,
            limits,
            connections=config.most_connections,
            copied=config.memory_budget,
        )
        # half of a part is still enough for one, where an extent is divided evenly
        size = aligned(max(size, least if limits.equal_parts else 2 * least), ALIGNMENT)
        sizes.append(1 if by_position else size)
        first, contents = 1, [*_cut(file, least)]
        for content in contents:
            nbytes = sum(map(_nbytes, content))
            if limits.equal_parts:
                extent = Extent(index, index % ranks, 1, size, content, content is contents[-1])
            else:
                even = -(-nbytes // -(-nbytes // size))
                extent = Extent(index, _sender(content, load), first, even, content, True)
                first += nbytes if by_position else -(-nbytes // even)
            load[extent.sender] += nbytes
            alone = ranks == 1 or not (limits.equal_parts or extent.handed_over)
            (work[extent.sender].extents if alone else together[extent.sender]).append(extent)
    for extents in itertools.zip_longest(*together):
        for own, one in zip(work, extents, strict=True):
            own.rounds.append(Round(one, []))
        for extent in (extent for extent in extents if extent is not None):
            for chunk in extent.handed_over:
                work[chunk.rank].rounds[-1].gives.append((extent.sender, chunk))
    return sizes, work


def _sender(content: Sequence[bytes | TensorPlan], load: Sequence[int]) -> int:
    """Returns the rank that is to send an extent.

    Of the ranks that have a chunk at least half as large as the largest chunk, it is the rank with
    the fewest bytes to send so far (``load``). For an extent without chunks, all ranks qualify.
    """
    chunks = _chunks(content)
    half = max((chunk.nbytes for chunk in chunks), default=0) / 2
    large = [chunk.rank for chunk in chunks if chunk.nbytes >= half]
    return min(large or range(len(load)), key=load.__getitem__)


def _cut(file: FilePlan, least: int) -> Iterator[list[bytes | TensorPlan]]:
    """Yields the contents of a file's extents; the file is cut at the borders of shards.

    Each extent has at least ``least`` bytes, except the last.
    """
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
    """Yields a plan for each chunk of a tensor that has elements, in the order of the file.

    If a chunk is not contiguous in the tensor, this yields one plan, for the whole tensor.
    """
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
    """Returns whether the elements of a box are contiguous in a row-major tensor of this shape."""
    axis = 0
    while axis < len(shape) and box[axis][1] == 1:
        axis += 1
    return [length for _, length in box[axis + 1 :]] == list(shape[axis + 1 :])


def _nbytes(one: bytes | TensorPlan) -> int:
    return len(one) if isinstance(one, bytes) else one.nbytes


def _chunks(content: Sequence[bytes | TensorPlan]) -> list[Chunk]:
    return [chunk for one in content if isinstance(one, TensorPlan) for chunk in one.chunks]


class FileUpload(NamedUpload):
    """An upload of a file whose parts any rank may send; :meth:`appear` makes it visible."""

    def __init__(
        self, *args: Any, upload: Upload | None = None, first: int = 1, **options: Any
    ) -> None:
        """Makes an upload, which continues ``upload`` if that is given; sends no request.

        Args:
            *args: Arguments of :class:`~cloudckpt.transfer.upload.NamedUpload`.
            upload: The upload, if it was begun before, possibly by another process.
            first: The number of the first part that :meth:`write` makes.
            **options: Options of :class:`~cloudckpt.transfer.upload.NamedUpload`.
        """
        super().__init__(*args, **options)
        self._upload = upload
        self._number = first

    def begin(self) -> Upload:
        """Begins the upload; the file is not visible before :meth:`appear`."""
        self._upload = upload = self._create()
        return upload

    def _send(self, part: PartPlan) -> None:
        assert self._upload is not None
        part.number = self._number
        self._number += self._part_size if self._upload.part_size == 1 else 1  # see Upload
        super()._send(part)

    def finish(self) -> None:
        """Sends the rest of the written pieces as the last part, if any are left."""
        if (last := self._cutter.finish()) is not None:
            self._send(last)

    def put(self, part: PartPlan) -> None:
        """Sends a part in the calling thread."""
        self._put_part(part)

    def copy(self, source: CopySource, number: int, start: int, stop: int) -> Part:
        """Has the store copy bytes of another object as a part; returns the part.

        Args:
            source: The object to copy from.
            number: The number of the part.
            start: The first byte to copy.
            stop: The end of the bytes to copy; this byte is not copied.
        """
        upload = self._upload
        assert upload is not None
        part = self._retrier.call(
            lambda: self._store.copy_part(source, upload, number, start, stop)
        )
        self._took(part)
        return part

    @property
    def sent(self) -> list[Part]:
        """The parts that this process has sent or had copied."""
        return self._sent

    def appear(self, parts: Sequence[Part], if_version: str | None) -> None:
        """Creates the object from the parts that all ranks have sent.

        Args:
            parts: The parts.
            if_version: The version to replace; "" if the key must not exist, None for any.

        Raises:
            PreconditionFailedError: If the key has another version.
            StoreError: If the object was not created; if ``is_doubtful``, it still may be.
        """
        self._sent, self._condition = list(parts), if_version
        self.position = sum(part.size for part in parts)
        self._complete()


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

    All ranks of ``group`` must call it. If one of them fails, the others return before their next
    round, without all parts and without an error: the caller has the ranks exchange their errors.

    Args:
        work: The work of this rank.
        uploads: The uploads of the files.
        resolve: Returns the tensor of an item of this rank's plan, given the item's index.
        store: The store of the files.
        config: Options.
        stats: Counts the bytes sent.
        group: The ranks, or None if this process is alone.

    Raises:
        BaseException: The failure of this rank to send its share, or to hand over chunks that other
            ranks send.
    """
    tasks = transfer_group(store, config, "out")
    extents = [*work.extents, *(one.extent for one in work.rounds if one.extent is not None)]
    largest = max((extent.part_size for extent in extents), default=0)
    pool = StagingPool(max(config.memory_budget, _PARTS_IN_POOL * largest), tasks.cancellation)
    rounds = _Rounds(len(work.rounds), resolve, group)
    files: list[list[FileUpload]] = [[] for _ in uploads]
    unfinished: dict[int, FileUpload] = {}  # files whose last part is not full yet

    def whole(one: TensorPlan, received: Mapping[Chunk, torch.Tensor]) -> torch.Tensor:
        found = [received[c] if c in received else resolve(c.item) for c in one.chunks]
        if len(found) == 1:
            return found[0]
        tensor = torch.empty(one.shape, dtype=one.dtype, device="cpu")
        for chunk, data in zip(one.chunks, found, strict=True):
            box = narrow(tensor, chunk.box)
            box.copy_(data.reshape(box.shape))
        return tensor

    def pieces(one: bytes | TensorPlan, received: Mapping[Chunk, torch.Tensor]) -> Iterable[Piece]:
        if isinstance(one, bytes):
            return [Piece(memoryview(one))]
        tensor = whole(one, received)
        if tensor.dtype == one.dtype and is_plain(tensor):
            return [Piece(bytes_of(tensor), owner=tensor, item=one.name)]
        return pool.pieces(tensor, one.dtype)

    def send(extent: Extent, received: Mapping[Chunk, torch.Tensor]) -> None:
        file, upload = unfinished.pop(extent.file, None), uploads[extent.file]
        if file is None:
            file = FileUpload(
                store,
                upload.key,
                extent.part_size,
                tasks,
                config,
                stats,
                upload=upload,
                first=extent.first,
            )
            files[extent.file].append(file)
        for piece in itertools.chain.from_iterable(pieces(one, received) for one in extent.content):
            file.write(piece)
        if extent.ends:
            file.finish()
        else:
            unfinished[extent.file] = file

    def produce() -> None:
        try:
            for one in work.rounds:
                received = rounds.exchange(one)
                if received is None:
                    return
                if one.extent is not None:
                    send(one.extent, received)
            for extent in work.extents:
                send(extent, {})
        except BaseException:  # an interrupt, too: others would wait until the group's time limit
            rounds.report_failure()
            raise

    try:
        tasks.run(produce)
    finally:
        pool.close()
    return [[part for file in made for part in file.sent] for made in files]


class _Rounds:
    """Hands chunks to the ranks that send them, in rounds of all ranks.

    Before each round, each rank allocates its memory and reports whether it is ready. If one is
    not, no rank takes part in any further round.
    """

    def __init__(
        self, count: int, resolve: Callable[[int], torch.Tensor], group: dist.ProcessGroup | None
    ) -> None:
        self._left = count  # rounds in which others wait for this rank
        self._resolve = resolve
        self._group = group
        self._device = device_for_collectives(group) if count else "cpu"
        # made before the memory may run out
        self._failed = torch.zeros(1, dtype=torch.int32, device=self._device)

    def exchange(self, one: Round) -> dict[Chunk, torch.Tensor] | None:
        """Exchanges chunks; returns the received ones, or None if another rank has failed."""
        ranks = dist.get_world_size(self._group)
        gives = sorted(one.gives, key=lambda give: give[0])
        chunks = [] if one.extent is None else one.extent.handed_over
        takes = [(chunk.rank, chunk) for chunk in chunks]
        out, expected = _split_sizes(gives, ranks), _split_sizes(takes, ranks)
        given = torch.zeros(sum(out), dtype=torch.uint8, device=self._device)
        at = 0
        for _, chunk in gives:
            elements = self._resolve(chunk.item).reshape(-1)
            given[at : at + chunk.nbytes].view(chunk.dtype).copy_(elements)
            at += _padded_size(chunk)
        into = torch.empty(sum(expected), dtype=torch.uint8, device=self._device)
        left, self._left = self._left - 1, 0  # no rank waits for one whose collective has failed
        if not self._are_ready(True):
            return None
        dist.all_to_all_single(into, given, expected, out, group=self._group)
        self._left = left
        received = torch.split(into.cpu(), [_padded_size(chunk) for _, chunk in takes])
        return {
            chunk: data[: chunk.nbytes].view(chunk.dtype)
            for (_, chunk), data in zip(takes, received, strict=True)
        }

    def report_failure(self) -> None:
        """Tells the other ranks that this rank has failed, if a later round would wait for it."""
        if self._left:
            self._are_ready(False)

    def _are_ready(self, ready: bool) -> bool:
        self._failed.fill_(not ready)
        dist.all_reduce(self._failed, dist.ReduceOp.MAX, group=self._group)
        return not self._failed.item()


def _split_sizes(chunks: Iterable[tuple[int, Chunk]], ranks: int) -> list[int]:
    """Returns how many bytes are exchanged with each of ``ranks`` ranks, by rank.

    ``chunks`` has each chunk with the rank that it goes to or comes from.
    """
    found = [0] * ranks
    for rank, chunk in chunks:
        found[rank] += _padded_size(chunk)
    return found


def _padded_size(chunk: Chunk) -> int:
    """Returns the bytes that a chunk takes in an exchange, in which each chunk is aligned."""
    return aligned(chunk.nbytes, _GRAIN)
