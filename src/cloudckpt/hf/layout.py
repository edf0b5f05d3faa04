"""The plan of a model in safetensors files: what lies where, and which rank sends it. No I/O.

The tensors of a file lie one after another, in row-major order, while ranks hold boxes of them:
rows, columns, or anything that a device mesh cuts. A file is sent in parts of equal size, each by
one rank, its owner: the rank that holds most of its bytes. Other ranks hand their bytes of a part
to the owner, in rounds. In a round each rank assembles at most one part and gives away about as
many bytes as a part has, so that the memory in use does not depend on the model.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from cloudckpt.checkpoint.safetensors import INDEX, SINGLE_FILE, SUFFIX, header_bytes
from cloudckpt.config import Config, whole_number
from cloudckpt.errors import ConfigError, UnsupportedTensorError
from cloudckpt.stores.base import Capabilities
from cloudckpt.transfer.boxes import ALIGNMENT, Box, aligned, row_major_slices
from cloudckpt.transfer.packing import PACKED_BELOW, slab_of
from cloudckpt.transfer.parts import choose_part_size

__all__ = [
    "Chunk",
    "FilePlan",
    "Gift",
    "PartPlanOfRanks",
    "PieceOfRun",
    "RankWork",
    "Round",
    "Run",
    "TensorPlan",
    "boxes_between",
    "divide",
    "natural",
    "nbytes_of",
    "needs_index",
    "plan_files",
    "plan_work",
    "pool_budget",
    "runs_of_part",
    "slab_bytes",
    "weight_map",
]

_FILE_NAME = re.compile(r"[^/\x00-\x1f]+\.safetensors")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor that a rank holds, which is the item of that number in its plan."""

    rank: int
    item: int
    box: Box


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A tensor of the model, as it will be stored, and the boxes that make it up.

    Attributes:
        name: Its name.
        dtype: Its type in the file.
        shape: Its shape.
        chunks: The boxes.
        is_ordered: Whether both the first rows of the boxes and their last ones ascend.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Sequence[Chunk]
    is_ordered: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FilePlan:
    """A file: its name, its header, and its tensors in order with the first byte of each."""

    name: str
    header: bytes
    tensors: Sequence[TensorPlan]
    starts: Sequence[int]
    size: int


@dataclass(frozen=True, slots=True)
class PieceOfRun:
    """A part of a run that lies in one chunk.

    Attributes:
        rank: The rank that has it.
        item: The number of the item in that rank's plan.
        source: The box within that item.
        place: The position in the run.
    """

    rank: int
    item: int
    source: Box
    place: Box


@dataclass(frozen=True, slots=True)
class Run:
    """Elements that follow one another in a file: a box of a tensor, and its pieces."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Sequence[PieceOfRun]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class PartPlanOfRanks:
    """A part of a file: its number from 1, and in order its bytes, or where they are."""

    file: int
    number: int
    runs: Sequence[bytes | Run]


@dataclass(frozen=True, slots=True)
class Gift:
    """Bytes that a rank hands to the owner of a part."""

    to: int
    item: int
    source: Box
    dtype: torch.dtype


@dataclass
class Round:
    """A rank's work in a round: the part that it assembles, and what it hands to others."""

    part: PartPlanOfRanks | None = None
    gifts: list[Gift] = field(default_factory=list)


@dataclass(frozen=True)
class RankWork:
    """A rank's work: rounds, the same number on all ranks, and parts that are only its own."""

    rounds: Sequence[Round]
    own: Sequence[PartPlanOfRanks]


def plan_files(
    tensors: Sequence[TensorPlan],
    max_shard_size: int,
    fqn_to_file: Mapping[str, str | int] | None,
) -> list[FilePlan]:
    """Decides which file each tensor goes into, and where.

    Args:
        tensors: All of them, in the order in which they fill the files.
        max_shard_size: Maximum bytes of tensors in a file; a larger tensor gets a file to itself.
        fqn_to_file: Instead, the file of each tensor: its name, or its number from 1.

    Raises:
        ConfigError: If ``fqn_to_file`` leaves out a tensor, or has file names that are invalid or
            that readers would not find together.
        UnsupportedTensorError: If safetensors files can't hold a tensor.
    """
    if fqn_to_file is None:
        groups, filled = [[]], 0  # type: list[list[TensorPlan]], int
        for tensor in tensors:
            if groups[-1] and filled + tensor.nbytes > max_shard_size:
                groups.append([])
                filled = 0
            groups[-1].append(tensor)
            filled += tensor.nbytes
        return [
            _file(_numbered(number, len(groups)), group) for number, group in enumerate(groups, 1)
        ]
    missing = [tensor.name for tensor in tensors if tensor.name not in fqn_to_file]
    if missing:
        raise ConfigError(
            f"fqn_to_file names no file for {len(missing)} tensors, the first: {missing[:5]}"
        )
    by_file: dict[str | int, list[TensorPlan]] = {}
    for tensor in tensors:
        key = fqn_to_file[tensor.name]
        by_file.setdefault(whole_number(key) or key, []).append(tensor)
    if all(type(key) is int and key > 0 for key in by_file):
        count = max((whole_number(key) or 1 for key in fqn_to_file.values()), default=1)
        named = {_numbered(int(key), count): group for key, group in sorted(by_file.items())}
        return [_file(name, group) for name, group in named.items()]
    for key in by_file:
        if not isinstance(key, str) or not _FILE_NAME.fullmatch(key):
            raise ConfigError(
                f"fqn_to_file has {key!r}: write names such as model-00001-of-00002{SUFFIX} for "
                "all tensors, or numbers from 1 for all"
            )
    if len(by_file) > 1 and SINGLE_FILE in by_file:
        raise ConfigError(
            f"fqn_to_file names {SINGLE_FILE} beside other files: readers take it for the whole "
            f"model, so write other names, such as model-00001-of-00002{SUFFIX}"
        )
    return [_file(str(name), group) for name, group in by_file.items()]


def _numbered(number: int, count: int) -> str:
    return SINGLE_FILE if count == 1 else f"model-{number:05}-of-{count:05}{SUFFIX}"


def _file(name: str, tensors: Sequence[TensorPlan]) -> FilePlan:
    # larger elements first: each then lies at a multiple of its size, for readers that map it
    ordered = [_ordered(one) for one in sorted(tensors, key=lambda one: -one.dtype.itemsize)]
    header = header_bytes([(tensor.name, tensor.dtype, tensor.shape) for tensor in ordered])
    starts, at = [], len(header)
    for tensor in ordered:
        starts.append(at)
        at += tensor.nbytes
    return FilePlan(name, header, ordered, starts, at)


def _ordered(tensor: TensorPlan) -> TensorPlan:
    """The same tensor, with its boxes sorted by rows, so that they can be searched."""
    if not tensor.shape:
        return tensor
    chunks = sorted(tensor.chunks, key=lambda chunk: (_first_row(chunk), _behind_rows(chunk)))
    ends = [_behind_rows(chunk) for chunk in chunks]
    is_ordered = all(end <= after for end, after in itertools.pairwise(ends))
    return dataclasses.replace(tensor, chunks=chunks, is_ordered=is_ordered)


def _first_row(chunk: Chunk) -> int:
    return chunk.box[0][0]


def _behind_rows(chunk: Chunk) -> int:
    return sum(chunk.box[0])


def needs_index(files: Sequence[FilePlan]) -> bool:
    """Whether readers need an index to find the tensors."""
    return [file.name for file in files] != [SINGLE_FILE]


def weight_map(files: Sequence[FilePlan]) -> dict[str, str]:
    """The file of each tensor, for the index."""
    found: dict[str, str] = {}
    for file in files:
        for tensor in file.tensors:
            if tensor.name in found:
                raise UnsupportedTensorError(
                    f"{tensor.name} is there twice", item=tensor.name, uri=INDEX
                )
            found[tensor.name] = file.name
    return found


def boxes_between(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that make up elements ``start`` to ``stop`` of a row-major tensor, in order."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    rest = tuple(shape[1:])
    inner = math.prod(rest)
    full = tuple((0, size) for size in rest)
    (first, begin), (last, end) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        for box in boxes_between(rest, begin, end):
            yield ((first, 1), *box)
        return
    if begin:
        for box in boxes_between(rest, begin, inner):
            yield ((first, 1), *box)
        first += 1
    if last > first:
        yield ((first, last - first), *full)
    if end:
        for box in boxes_between(rest, 0, end):
            yield ((last, 1), *box)


def runs_of_part(file: FilePlan, start: int, stop: int, limit: int) -> Iterator[bytes | Run]:
    """The content of bytes ``start`` to ``stop`` of a file, in order.

    Content that several chunks make up together comes in runs of at most ``limit`` bytes.
    """
    header = len(file.header)
    if start < header:
        yield file.header[start : min(stop, header)]
    number = max(bisect_right(file.starts, start) - 1, 0)
    while number < len(file.tensors) and file.starts[number] < stop:
        tensor, at = file.tensors[number], file.starts[number]
        itemsize = tensor.dtype.itemsize
        first = max(start - at, 0) // itemsize
        last = min(stop - at, tensor.nbytes) // itemsize
        for box in boxes_between(tensor.shape, first, last):
            yield from _runs(tensor, box, limit)
        number += 1


def _runs(tensor: TensorPlan, box: Box, limit: int) -> Iterator[Run]:
    shape = tuple(length for _, length in box)
    pieces = list(_pieces(tensor, box))
    run = Run(tensor.name, tensor.dtype, shape, pieces)
    if len(pieces) == 1 or run.nbytes <= limit:
        yield run
        return
    for part in row_major_slices(shape, tensor.dtype.itemsize, limit):
        inner = tuple(
            (start + at, length) for (start, _), (at, length) in zip(box, part.box, strict=True)
        )
        sizes = tuple(length for _, length in inner)
        yield Run(tensor.name, tensor.dtype, sizes, list(_pieces(tensor, inner)))


def _pieces(tensor: TensorPlan, box: Box) -> Iterator[PieceOfRun]:
    chunks = tensor.chunks
    if tensor.is_ordered:
        row, count = box[0]
        first = bisect_right(chunks, row, key=_behind_rows)
        chunks = chunks[first : bisect_left(chunks, row + count, lo=first, key=_first_row)]
    for chunk in chunks:
        source, place = [], []
        for (start, length), (at, size) in zip(box, chunk.box, strict=True):
            begin, end = max(start, at), min(start + length, at + size)
            if begin >= end:
                break
            source.append((begin - at, end - begin))
            place.append((begin - start, end - begin))
        else:
            yield PieceOfRun(chunk.rank, chunk.item, tuple(source), tuple(place))


def divide(
    files: Sequence[FilePlan],
    part_sizes: Sequence[int],
    ranks: int,
    limit: int,
    most: int | None = None,
) -> list[RankWork]:
    """Decides which rank sends which parts of the files, and what the others hand to it.

    Args:
        files: The files.
        part_sizes: The part size of each file, in bytes.
        ranks: The number of ranks.
        limit: Maximum bytes that are assembled at a time.
        most: Maximum bytes that a rank hands over in a round; by default those of a part.
    """
    own: list[list[PartPlanOfRanks]] = [[] for _ in range(ranks)]
    rounds: list[list[Round]] = []
    given: list[Counter[int]] = []  # bytes that a rank hands to others, by rounds
    free: list[int] = [0] * ranks  # the first round in which a rank has no part yet
    owned: Counter[int] = Counter()
    for number_of_file, (file, size) in enumerate(zip(files, part_sizes, strict=True)):
        for number, start in enumerate(range(0, file.size, size), 1):
            runs = list(runs_of_part(file, start, min(start + size, file.size), limit))
            part = PartPlanOfRanks(number_of_file, number, runs)
            shares = _shares(runs)
            owner = max(shares, key=lambda rank: (shares[rank], -owned[rank], -rank), default=0)
            if not shares:  # a part of a header alone
                owner = min(range(ranks), key=lambda rank: owned[rank])
            owned[owner] += size
            if len(shares) <= 1:
                own[owner].append(part)
                continue
            del shares[owner]
            at, bound = free[owner], most or size
            while at < len(rounds) and (
                rounds[at][owner].part is not None
                or any(
                    given[at][rank] and given[at][rank] + n > bound for rank, n in shares.items()
                )
            ):
                at += 1
            if at == len(rounds):
                rounds.append([Round() for _ in range(ranks)])
                given.append(Counter())
            while free[owner] < len(rounds) and (
                free[owner] == at or rounds[free[owner]][owner].part is not None
            ):
                free[owner] += 1
            given[at].update(shares)
            rounds[at][owner].part = part
            for run in part.runs:
                if isinstance(run, Run):
                    for piece in run.pieces:
                        if piece.rank != owner:
                            gift = Gift(owner, piece.item, piece.source, run.dtype)
                            rounds[at][piece.rank].gifts.append(gift)
    return [RankWork([each[rank] for each in rounds], own[rank]) for rank in range(ranks)]


def plan_work(
    files: Sequence[FilePlan], config: Config, limits: Capabilities, is_plain: Sequence[bool]
) -> tuple[list[int], list[RankWork]]:
    """The part size of each file, and the work of each rank.

    Parts are as large as they would be in a checkpoint, if little of each is copied or handed over;
    otherwise they are so small that several copies fit into the memory budget.

    Args:
        files: The files.
        config: Options.
        limits: The limits of the store.
        is_plain: For each rank, whether its tensors lie in memory as they do in the files.
    """
    ranks, most = len(is_plain), part_of_budget(config.memory_budget)
    slab = slab_bytes(config.memory_budget)
    for limit in (limits.max_part_size, 2 * most, most):
        sizes = [_part_size(file.size, limit, config, limits) for file in files]
        if all(
            copied <= most
            for file, size in zip(files, sizes, strict=True)
            for copied in _copied(file, size, slab, is_plain)
        ):
            break
    return sizes, divide(files, sizes, ranks, slab, most)


def part_of_budget(budget: int) -> int:
    """Maximum copied bytes in a part: two such parts are held back, and two exchanged."""
    return budget // 6


def pool_budget(budget: int) -> int:
    """The rest of the budget, in which parts are assembled."""
    return budget - 2 * part_of_budget(budget)


def slab_bytes(budget: int) -> int:
    """Maximum bytes that are assembled at a time."""
    return slab_of(pool_budget(budget))


def _part_size(size: int, limit: int, config: Config, limits: Capabilities) -> int:
    found = choose_part_size(size, config.part_size, limits, connections=config.most_connections)
    least = max(-(-size // limits.max_parts), limits.min_part_size)
    return aligned(max(min(found, limit), least), ALIGNMENT)  # so that no element is cut


def _copied(file: FilePlan, size: int, slab: int, is_plain: Sequence[bool]) -> Iterator[int]:
    """The bytes that are copied, or handed over, for each part of a file."""
    for start in range(0, file.size, size):
        runs = [
            run
            for run in runs_of_part(file, start, min(start + size, file.size), slab)
            if isinstance(run, Run)
        ]
        shares = _shares(runs)
        owner = max(shares, key=lambda rank: shares[rank], default=0)
        yield sum(run.nbytes for run in runs if not (is_plain[owner] and _lies_at(run, owner)))


def _lies_at(run: Run, rank: int) -> bool:
    """Whether a run is sent from tensor memory of that rank, provided that the memory is plain."""
    return len(run.pieces) == 1 and run.pieces[0].rank == rank and run.nbytes >= PACKED_BELOW


def nbytes_of(box: Box, dtype: torch.dtype) -> int:
    """Bytes of a box of elements."""
    return math.prod(length for _, length in box) * dtype.itemsize


def _shares(runs: Iterable[bytes | Run]) -> Counter[int]:
    """The bytes of a part that each rank has."""
    shares: Counter[int] = Counter()
    for run in runs:
        if isinstance(run, Run):
            for piece in run.pieces:
                shares[piece.rank] += nbytes_of(piece.place, run.dtype)
    return shares


def natural(name: str) -> list[tuple[bool, int, str]]:
    """A sort key that orders names by the numbers in them: layer 2 before layer 10."""
    parts = re.split(r"(\d+)", name)
    return [
        (part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts if part
    ]
