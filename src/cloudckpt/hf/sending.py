"""Divides the parts of a model among the ranks, and sends them.

Parts are sent from tensor memory by the rank that has them, or assembled by the owner of the file.
The other ranks send their pieces of assembled parts to the owner in rounds, in which all ranks take
part in the same order. In a round an owner assembles one piece: some small tensors, or one large
tensor.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from cloudckpt.checkpoint.torch_private import device_for_collectives
from cloudckpt.config import Config
from cloudckpt.hf.layout import Chunk, Extent, FilePlan, Mixed, Range, TensorPlan, cut, least_part
from cloudckpt.stores.base import ObjectStore, Part, Upload
from cloudckpt.stores.capabilities import Capabilities
from cloudckpt.transfer.boxes import ALIGNMENT, Box, aligned, row_major_strides
from cloudckpt.transfer.connections import transfer_group
from cloudckpt.transfer.memory import bytes_of, is_plain, narrow
from cloudckpt.transfer.parts import PartPlan, Piece, choose_part_size
from cloudckpt.transfer.retry import Retrier
from cloudckpt.transfer.staging import StagingPool
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.upload import ObjectUpload

__all__ = ["Content", "Elements", "FileUpload", "RankWork", "Round", "plan_work", "send_work"]

_GRAIN = 8  # bytes: an alignment that suits elements of all types
_PARTS_IN_POOL = 6  # see transfer.parts.choose_part_size


@dataclass(frozen=True, slots=True)
class Elements:
    """A range of a chunk's elements in row-major order, and the type in which they are stored."""

    chunk: Chunk
    start: int
    stop: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return (self.stop - self.start) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Content:
    """Bytes of a file that one rank sends: from one range of tensor memory, or assembled.

    Attributes:
        file: The index of the file.
        parts: The parts in which the bytes are sent: numbers, and sizes in bytes.
        of: The range of a tensor; or the ranges and bytes to assemble.
    """

    file: int
    parts: Sequence[tuple[int, int]]
    of: Range[TensorPlan] | Mixed[TensorPlan]

    def elements(self) -> Iterator[Elements]:
        """Yields the tensor elements of which the bytes consist, in order."""
        for one in self.of if isinstance(self.of, list) else [self.of]:
            if not isinstance(one, bytes):
                yield from _elements(one)


def _elements(one: Range[TensorPlan]) -> Iterator[Elements]:
    """Yields the elements of a range; a scattered extent is never cut, so all of its chunks."""
    source = one.extent.source
    if one.extent.is_scattered:
        yield from (Elements(chunk, 0, chunk.numel, source.dtype) for chunk in source.chunks)
    else:
        size = source.dtype.itemsize
        yield Elements(source.chunks[0], one.start // size, one.stop // size, source.dtype)


@dataclass
class Round:
    """A rank's work in a round: elements to send to owners, and the content it then assembles."""

    gifts: list[tuple[int, Elements]] = field(default_factory=list)
    made: Content | None = None


@dataclass(frozen=True)
class RankWork:
    """A rank's work: rounds, equally many on all ranks, and contents from its own memory alone."""

    rounds: Sequence[Round]
    own: Sequence[Content]


def plan_work(
    files: Sequence[FilePlan],
    ranks: int,
    config: Config,
    limits: Capabilities,
    *,
    by_position: bool,
) -> tuple[list[int], list[RankWork]]:
    """Plans the part size of each file's upload, and the work of each rank.

    If the store needs equal parts, the owner of a file assembles the whole file.

    Args:
        files: The files.
        ranks: The number of ranks.
        config: Options.
        limits: The limits of the store.
        by_position: Whether a part's number determines its offset, as in a local file.
    """
    own: list[list[Content]] = [[] for _ in range(ranks)]
    queues: list[list[Content]] = [[] for _ in range(ranks)]  # contents with other ranks' bytes
    owned: Counter[int] = Counter()
    sizes: list[int] = []
    for index, file in enumerate(files):
        shares: Counter[int] = Counter()
        for tensor in file.tensors:
            for chunk in tensor.chunks:
                shares[chunk.rank] += chunk.numel * tensor.dtype.itemsize
        owner = max(range(ranks), key=lambda rank: (shares[rank], -owned[rank], -rank))
        owned[owner] += file.size
        size, contents = _cut(file, config, limits)
        sizes.append(1 if by_position else size)
        count = position = 0
        for content in contents:
            parts = []
            for length in _lengths(content, size, limits.equal_parts):
                count += 1
                parts.append((position + 1 if by_position else count, length))
                position += length
            made = Content(index, parts, content)
            holders = {one.chunk.rank for one in made.elements()}
            sender = holders.pop() if isinstance(content, Range) else owner
            (own if holders <= {sender} else queues)[sender].append(made)
    rounds = [[Round() for _ in range(ranks)] for _ in range(max(map(len, queues)))]
    for owner, queue in enumerate(queues):
        for each, made in zip(rounds, queue, strict=False):
            each[owner].made = made
            for elements in made.elements():
                if elements.chunk.rank != owner:
                    each[elements.chunk.rank].gifts.append((owner, elements))
    return sizes, [RankWork([each[rank] for each in rounds], own[rank]) for rank in range(ranks)]


def _cut(
    file: FilePlan, config: Config, limits: Capabilities
) -> tuple[int, Iterator[Range[TensorPlan] | Mixed[TensorPlan]]]:
    """Returns the part size of a file, and the ranges and assembled pieces that it is cut into."""
    size = choose_part_size(
        file.size,
        config.part_size,
        limits,
        connections=config.most_connections,
        copied=config.memory_budget,
    )
    extents = [one for tensor in file.tensors for one in _extents(tensor)]
    if limits.equal_parts:
        size = aligned(max(size, -(-file.size // limits.max_parts)), ALIGNMENT)
        return size, iter([[file.header, *(Range(one, 0, one.nbytes) for one in extents)]])
    least = least_part(file.size, limits)
    size = aligned(max(size, 2 * least), ALIGNMENT)
    return size, cut(file.header, extents, least=least, most=size)


def _lengths(
    content: Range[TensorPlan] | Mixed[TensorPlan], size: int, are_equal: bool
) -> list[int]:
    """Returns the sizes in bytes of a content's parts; only a file's last part may be small."""
    if isinstance(content, Range):
        return [content.nbytes]
    nbytes = sum(len(one) if isinstance(one, bytes) else one.nbytes for one in content)
    count = max(-(-nbytes // size) if are_equal else nbytes // size, 1)
    return [size] * (count - 1) + [nbytes - size * (count - 1)]


def _extents(tensor: TensorPlan) -> Iterator[Extent[TensorPlan]]:
    """Yields one extent per chunk of a tensor, or one of the whole if chunks are not ranges."""
    chunks = [chunk for chunk in tensor.chunks if chunk.numel]
    itemsize = tensor.dtype.itemsize
    if not all(_is_range(chunk.box, tensor.shape) for chunk in chunks):
        whole = dataclasses.replace(tensor, chunks=chunks)
        yield Extent(whole, tensor.nbytes, itemsize, is_scattered=True)
        return
    strides = row_major_strides(tensor.shape)

    def first(chunk: Chunk) -> int:
        return sum(start * stride for (start, _), stride in zip(chunk.box, strides, strict=True))

    for chunk in sorted(chunks, key=first):
        shape = tuple(length for _, length in chunk.box)
        held = dataclasses.replace(tensor, shape=shape, chunks=[chunk])
        yield Extent(held, held.nbytes, itemsize)


def _is_range(box: Box, shape: Sequence[int]) -> bool:
    """Returns whether the elements of a box are contiguous in the row-major tensor."""
    axis = 0
    while axis < len(shape) and box[axis][1] == 1:
        axis += 1
    return [length for _, length in box[axis + 1 :]] == list(shape[axis + 1 :])


class FileUpload(ObjectUpload):
    """An upload of a file whose parts any rank may send; :meth:`appear` makes it visible."""

    def attach(self, upload: Upload) -> None:
        """Uses an upload that was begun before, possibly by another process."""
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
    largest = max((one.of.nbytes for one in work.own if isinstance(one.of, Range)), default=0)
    pool = StagingPool(max(config.memory_budget, _PARTS_IN_POOL * largest), tasks.cancellation)
    files = [
        FileUpload(store, upload.key, upload.part_size, tasks, retrier, stats) for upload in uploads
    ]
    for file, upload in zip(files, uploads, strict=True):
        file.attach(upload)
    sender = _Sender(files, resolve, pool)

    def produce() -> None:
        failure: Exception | None = None
        for each in work.rounds:
            assert group is not None
            out, refused = sender.handed_out(each, dist.get_world_size(group))
            failure = failure or refused
            received = _exchanged(out, each, group)
            if failure is None and each.made is not None:
                try:
                    sender.send(each.made, received)
                except Exception as error:  # noqa: BLE001 - the other ranks need this one in rounds
                    failure = error
        if failure is not None:
            raise failure
        for content in work.own:
            sender.send(content, {})

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

    def _own(self, elements: Elements) -> torch.Tensor:
        """Returns elements of this rank's tensors, in row-major order."""
        item = elements.chunk.item
        if self._last is None or self._last[0] != item:
            self._last = None  # frees the previous copy before the next one is made
            self._last = item, self._resolve(item).reshape(-1)
        return self._last[1][elements.start : elements.stop]

    def send(self, content: Content, received: Mapping[int, torch.Tensor]) -> None:
        """Sends a content, from this rank's elements and from received bytes, given by rank."""
        if isinstance(content.of, list):
            whole = self._assembled(content, content.of, received)
            pieces = [Piece(bytes_of(whole).toreadonly(), owner=whole)]
        else:
            (elements,) = content.elements()
            source, tensor = content.of.extent.source, self._own(elements)
            if tensor.dtype == source.dtype and is_plain(tensor):
                pieces = [Piece(bytes_of(tensor), owner=tensor, item=source.name)]
            else:
                pieces = [*self._pool.pieces(tensor, source.dtype)]
        for number, nbytes in content.parts:
            if len(content.parts) > 1:  # only assembled content has several parts
                piece, rest = pieces[0].split(nbytes)
                self._files[content.file].send(PartPlan(number, [piece], nbytes))
                pieces = [rest]
            else:
                self._files[content.file].send(PartPlan(number, pieces, nbytes))

    def handed_out(self, each: Round, ranks: int) -> tuple[list[torch.Tensor], Exception | None]:
        """Returns the bytes that this rank sends to each rank in a round, and its error or None."""
        out = [
            torch.zeros(size, dtype=torch.uint8, device="cpu") for size in _sizes(each.gifts, ranks)
        ]
        at = [0] * ranks
        try:
            for to, elements in each.gifts:
                room = out[to][at[to] : at[to] + elements.nbytes]
                room.view(elements.dtype).copy_(self._own(elements))
                at[to] += aligned(elements.nbytes, _GRAIN)
        except Exception as error:  # noqa: BLE001 - raised when all rounds are over
            return out, error
        return out, None

    def _assembled(
        self, content: Content, mixed: Mixed[TensorPlan], received: Mapping[int, torch.Tensor]
    ) -> torch.Tensor:
        nbytes = sum(size for _, size in content.parts)
        whole = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        used = dict.fromkeys(received, 0)

        def taken(elements: Elements) -> torch.Tensor:
            rank = elements.chunk.rank
            if rank not in received:
                return self._own(elements)
            start = used[rank]
            used[rank] += aligned(elements.nbytes, _GRAIN)
            return received[rank][start : start + elements.nbytes].view(elements.dtype)

        at = 0
        for one in mixed:
            if isinstance(one, bytes):
                room = whole[at : at + len(one)]
                room.copy_(torch.frombuffer(bytearray(one), dtype=torch.uint8))
                at += len(one)
                continue
            source = one.extent.source
            room = whole[at : at + one.nbytes].view(source.dtype)
            for elements in _elements(one):
                if one.extent.is_scattered:
                    box = narrow(room.view(source.shape), elements.chunk.box)
                    box.copy_(taken(elements).view(box.shape))
                else:
                    room.copy_(taken(elements))
            at += one.nbytes
        return whole


def _sizes(gifts: Sequence[tuple[int, Elements]], ranks: int) -> list[int]:
    """Returns the number of bytes exchanged with each rank."""
    sizes = [0] * ranks
    for rank, elements in gifts:
        sizes[rank] += aligned(elements.nbytes, _GRAIN)
    return sizes


def _exchanged(
    out: Sequence[torch.Tensor], each: Round, group: dist.ProcessGroup
) -> dict[int, torch.Tensor]:
    """Exchanges bytes with all ranks; returns the bytes that this rank has received, by rank."""
    rank, device = dist.get_rank(group), torch.device(device_for_collectives(group))
    needed = [] if each.made is None else each.made.elements()
    others = [(one.chunk.rank, one) for one in needed if one.chunk.rank != rank]
    expected = _sizes(others, len(out))
    into = torch.empty(sum(expected), dtype=torch.uint8, device=device)
    handed = [data.numel() for data in out]
    dist.all_to_all_single(into, torch.cat([*out]).to(device), expected, handed, group=group)
    parts = torch.split(into.cpu(), expected)
    return {at: data for at, data in enumerate(parts) if data.numel()}
