"""Plans the files of a model: names, headers, positions of tensors, and parts. No I/O.

Parts are cut at the borders of shards: the rows of a shard are parts of their own, which its rank
sends from the tensor's memory, or which a store copies from a checkpoint. Shards that are smaller
than the least part, and tensors that are divided in columns, are assembled by one rank, the owner
of the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from cloudckpt.checkpoint.safetensors import INDEX, SINGLE_FILE, SUFFIX, header_bytes
from cloudckpt.config import MIB, whole_number
from cloudckpt.errors import ConfigError, UnsupportedTensorError
from cloudckpt.stores.capabilities import Capabilities
from cloudckpt.transfer.boxes import Box, aligned

__all__ = [
    "Chunk",
    "Extent",
    "FilePlan",
    "Mixed",
    "Range",
    "TensorPlan",
    "cut",
    "least_part",
    "natural",
    "needs_index",
    "plan_files",
    "weight_map",
]

T = TypeVar("T")

_FILE_NAME = re.compile(r"[^/\x00-\x1f]+\.safetensors")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor that a rank has, with its item's number in the rank's plan."""

    rank: int
    item: int
    box: Box

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(length for _, length in self.box)


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A tensor of the model as it will be stored.

    Attributes:
        name: The name of the tensor.
        dtype: The element type in the file.
        shape: The shape of the whole tensor.
        chunks: The boxes of which the tensor consists.
        aliases: Other names of the same tensor.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Sequence[Chunk]
    aliases: Sequence[str] = ()

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FilePlan:
    """A file of the model: its name, header, tensors in order, and size in bytes."""

    name: str
    header: bytes
    tensors: Sequence[TensorPlan]
    size: int


def plan_files(
    tensors: Sequence[TensorPlan],
    max_shard_size: int,
    fqn_to_file: Mapping[str, str | int] | None,
) -> list[FilePlan]:
    """Divides tensors among files, and computes their positions there.

    Args:
        tensors: All tensors, in the order in which they fill the files.
        max_shard_size: Maximum bytes of tensors in a file; a larger tensor gets a file to itself.
        fqn_to_file: The file of each tensor, as a file name or a number from 1, instead of a
            division by ``max_shard_size``.

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
            f"fqn_to_file has no file for {len(missing)} tensors, the first: {missing[:5]}: add "
            "them"
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
            f"fqn_to_file contains {SINGLE_FILE} and other files, but readers take "
            f"{SINGLE_FILE} for the whole model: use names such as model-00001-of-00002{SUFFIX}"
        )
    return [_file(str(name), group) for name, group in by_file.items()]


def _numbered(number: int, count: int) -> str:
    """Returns the name of file ``number`` (from 1) of ``count``, as transformers expects it."""
    return SINGLE_FILE if count == 1 else f"model-{number:05}-of-{count:05}{SUFFIX}"


def _file(name: str, tensors: Sequence[TensorPlan]) -> FilePlan:
    """Plans one file."""
    # larger elements first, so that each tensor is aligned to its element size, for mapping readers
    ordered = sorted(tensors, key=lambda one: -one.dtype.itemsize)
    header = header_bytes(
        [(tensor.name, tensor.dtype, tensor.shape) for tensor in ordered],
        {alias: tensor.name for tensor in ordered for alias in tensor.aliases},
    )
    size = len(header) + sum(tensor.nbytes for tensor in ordered)
    return FilePlan(name, header, ordered, size)


def needs_index(files: Sequence[FilePlan]) -> bool:
    """Returns whether the model needs an index: unless it is one file of the usual name."""
    return [file.name for file in files] != [SINGLE_FILE]


def weight_map(files: Sequence[FilePlan]) -> dict[str, str]:
    """Returns the file name of each tensor name, for the index."""
    found: dict[str, str] = {}
    for file in files:
        for tensor in file.tensors:
            if tensor.name in found:
                raise UnsupportedTensorError(
                    f"{tensor.name} is listed twice: keep one entry", item=tensor.name, uri=INDEX
                )
            found[tensor.name] = file.name
    return found


def natural(name: str) -> list[tuple[bool, int, str]]:
    """Returns a sort key that orders names by the numbers in them: layer 2 before layer 10."""
    parts = re.split(r"(\d+)", name)
    return [
        (part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts if part
    ]


@dataclass(frozen=True, slots=True)
class Extent(Generic[T]):
    """A range of a file whose bytes have one source.

    Attributes:
        source: The source of the bytes.
        nbytes: The number of bytes.
        grain: The range may be cut at multiples of so many bytes.
        is_scattered: Whether the source has the bytes in another order, or in several pieces: then
            all of them must be collected before any can be sent.
    """

    source: T
    nbytes: int
    grain: int = 1
    is_scattered: bool = False


@dataclass(frozen=True, slots=True)
class Range(Generic[T]):
    """Bytes ``start`` to ``stop`` of an extent."""

    extent: Extent[T]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.stop - self.start


Mixed = list[bytes | Range[T]]
"""A sequence of bytes and ranges that is assembled in memory before it is sent."""


def least_part(size: int, limits: Capabilities) -> int:
    """Returns the minimum part size in bytes for a file of ``size`` bytes.

    It follows from the store's minimum, and from the number of parts that an object may have.
    """
    return max(limits.min_part_size, MIB, -(-size // (limits.max_parts - 1)))


def cut(
    header: bytes, extents: Iterable[Extent[T]], *, least: int, most: int
) -> Iterator[Range[T] | Mixed[T]]:
    """Cuts a file into parts: ranges sent from one source, and lists to assemble in memory first.

    Each part has at least ``least`` bytes, except the last.

    Args:
        header: The bytes at the start of the file.
        extents: The ranges after the header, in order.
        least: Minimum bytes of a part.
        most: Maximum bytes of a range; at least twice ``least``.
    """
    mixed: Mixed[T] = [header]
    size = len(header)
    for extent in extents:
        taken = min(aligned(max(least - size, 0), extent.grain), extent.nbytes) if size else 0
        if extent.is_scattered or extent.nbytes - taken < least:
            taken = extent.nbytes
        if taken:
            mixed.append(Range(extent, 0, taken))
            size += taken
        if size >= least:
            yield mixed
            mixed, size = [], 0
        if rest := extent.nbytes - taken:
            count = -(-rest // most)
            step = max(rest // count // extent.grain * extent.grain, extent.grain)
            starts = [taken + number * step for number in range(count)]
            for start, stop in zip(starts, [*starts[1:], extent.nbytes], strict=True):
                yield Range(extent, start, stop)
    if size:
        yield mixed
