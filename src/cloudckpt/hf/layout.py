"""Plans the files of a model: their names, their headers, and their tensors in order. No I/O."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cloudckpt.checkpoint.safetensors import SINGLE_FILE, SUFFIX, header_bytes
from cloudckpt.config import MIB, whole_number
from cloudckpt.errors import ConfigError, InvalidURIError
from cloudckpt.stores.capabilities import Capabilities
from cloudckpt.transfer.boxes import Box
from cloudckpt.uri import CheckpointURI, URILike

__all__ = [
    "Chunk",
    "FilePlan",
    "TensorPlan",
    "bytes_of_size",
    "least_part",
    "model_location",
    "natural",
    "needs_index",
    "plan_files",
    "weight_map",
]

_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)


def bytes_of_size(size: int | str) -> int:
    """Converts a size such as ``"5GB"`` to bytes; GB are 10**9, as in transformers, GiB 2**30.

    Raises:
        ConfigError: If ``size`` is not a valid size.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match is None:
            raise ConfigError(
                f"max_shard_size={size!r}: write a number of bytes, or a text such as 5GB or 4GiB"
            )
        number, unit, binary = match.groups()
        power = " KMGT".index(unit.upper() or " ")
        size = int(float(number) * (1024 if binary else 1000) ** power)
    found = whole_number(size)
    if found is None or found < 1:
        raise ConfigError(f"max_shard_size={size!r}: write at least 1 byte")
    return found


def model_location(uri: URILike) -> CheckpointURI:
    """Parses the location of a model to be written.

    Raises:
        InvalidURIError: If ``uri`` is not a valid location, or that of a single file.
    """
    found = CheckpointURI.parse(uri)
    if found.prefix.endswith(SUFFIX):
        raise InvalidURIError(
            f"{found} is the name of a file, but a model is saved to a folder, with one or "
            "several files: give the folder"
        )
    return found


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
    tensors: Sequence[TensorPlan], max_shard_size: int, fqn_to_file: Mapping[str, int] | None
) -> list[FilePlan]:
    """Divides tensors among files, and computes their positions there.

    Args:
        tensors: All tensors, in the order in which they fill the files.
        max_shard_size: Maximum bytes of tensors in a file; a larger tensor gets a file to itself.
        fqn_to_file: The number of each tensor's file, from 1, instead of a division by
            ``max_shard_size``.

    Raises:
        ConfigError: If ``fqn_to_file`` leaves out a tensor, or has something else than numbers.
        UnsupportedTensorError: If safetensors files can't hold a tensor.
    """
    by_number: dict[int, list[TensorPlan]] = {}
    number = filled = 0
    for tensor in tensors:
        if fqn_to_file is not None:
            number = _number(fqn_to_file.get(tensor.name), tensor.name)
        elif not number or filled + tensor.nbytes > max_shard_size:
            number, filled = number + 1, 0
        filled += tensor.nbytes
        by_number.setdefault(number, []).append(tensor)
    numbers = [_number(given, name) for name, given in (fqn_to_file or {}).items()]
    count = max([*numbers, *by_number], default=1)
    named = {_numbered(number, count): group for number, group in sorted(by_number.items())}
    return [_file(name, group) for name, group in (named or {SINGLE_FILE: []}).items()]


def _number(given: object, name: str) -> int:
    number = whole_number(given)
    if number is None or number < 1:
        raise ConfigError(
            f"fqn_to_file has {given!r} for {name}: give the number of its file, from 1"
        )
    return number


def _numbered(number: int, count: int) -> str:
    """Returns the name of file ``number`` (from 1) of ``count``, as transformers expects it."""
    return SINGLE_FILE if count == 1 else f"model-{number:05}-of-{count:05}{SUFFIX}"


def _file(name: str, tensors: Sequence[TensorPlan]) -> FilePlan:
    """Plans one file."""
    # larger elements first, so that each tensor is aligned to its elements, for readers that map
    # the file; then small tensors first, so that few parts consist of several
    ordered = sorted(tensors, key=lambda one: (-one.dtype.itemsize, one.nbytes))
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
    return {tensor.name: file.name for file in files for tensor in file.tensors}


def natural(name: str) -> list[tuple[bool, int, str]]:
    """Returns a sort key that orders names by the numbers in them: layer 2 before layer 10."""
    parts = re.split(r"(\d+)", name)
    return [
        (part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts if part
    ]


def least_part(size: int, limits: Capabilities) -> int:
    """Returns the minimum part size in bytes for a file of ``size`` bytes.

    It follows from the store's minimum, and from the number of parts that an object may have.
    """
    return max(limits.min_part_size, MIB, -(-size // (limits.max_parts - 1)))
