"""How few requests a resharded load could do with, told from the checkpoint's own metadata."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

PART_SIZE = 16 * 1024 * 1024
"""Bytes that one request may ask for."""


@dataclass(frozen=True)
class Region:
    """A rectangle of a two-dimensional tensor: first row and column, and how many of each."""

    row: int
    column: int
    rows: int
    columns: int

    def common(self, other: Region) -> Region:
        """Returns what both cover; with no rows or columns where they do not meet."""
        row, column = max(self.row, other.row), max(self.column, other.column)
        return Region(
            row,
            column,
            max(0, min(self.row + self.rows, other.row + other.rows) - row),
            max(0, min(self.column + self.columns, other.column + other.columns) - column),
        )


def shard(shape: tuple[int, int], dim: int, rank: int, world_size: int) -> Region:
    """Returns the part of an evenly sharded tensor that `rank` holds.

    Raises:
        ValueError: If the dimension does not divide evenly.
    """
    if shape[dim] % world_size:
        raise ValueError(f"{shape} cannot be cut evenly into {world_size} along {dim}")
    step = shape[dim] // world_size
    if dim == 0:
        return Region(rank * step, 0, step, shape[1])
    return Region(0, rank * step, shape[0], step)


@dataclass(frozen=True)
class _Need:
    """What a rank needs of one saved chunk, at the chunk's place in its object."""

    place: int
    """Which entry of its object it is, counted from the object's start."""
    data: int
    """Bytes in one contiguous run, or in each of `runs`."""
    runs: int
    from_start: bool
    to_end: bool


def ideal_requests(metadata: Any, dim: int, world_size: int, itemsize: int = 4) -> int:
    """Returns the ideal number of data requests to load on `world_size` ranks, sharded along `dim`.

    For each rank: every saved chunk that the rank needs a part of gives one contiguous run of
    bytes (whole rows of the chunk), or one run a row (columns of it). Runs of neighbouring entries
    of the same object are merged when the first is needed to its end and the second from its
    start, as the few bytes of framing between them cost less than a request. A run of `n` data
    bytes then takes ``ceil(n / 16 MiB)`` requests, and the ideal is the sum over runs and ranks.

    Args:
        metadata: The checkpoint's `torch.distributed.checkpoint.metadata.Metadata`, with tensors
            of two dimensions.
        dim: The dimension the loading ranks shard along.
        world_size: The loading ranks.
        itemsize: Bytes of an element.
    """
    return sum(
        _requests(needs)
        for rank in range(world_size)
        for needs in _needs_by_object(metadata, dim, rank, world_size, itemsize).values()
    )


def _needs_by_object(
    metadata: Any, dim: int, rank: int, world_size: int, itemsize: int
) -> dict[str, list[_Need]]:
    needs: dict[str, list[_Need]] = defaultdict(list)
    places = _places(metadata)
    for index, stored in metadata.storage_data.items():
        tensor = metadata.state_dict_metadata[index.fqn]
        chunk = _chunk(tensor, index)
        common = chunk.common(shard(tuple(tensor.size), dim, rank, world_size))
        if not common.rows or not common.columns:
            continue
        whole_rows = common.columns == chunk.columns
        needs[stored.relative_path].append(
            _Need(
                place=places[stored.relative_path, stored.offset],
                data=common.columns * itemsize * (common.rows if whole_rows else 1),
                runs=1 if whole_rows else common.rows,
                from_start=whole_rows and common.row == chunk.row,
                to_end=whole_rows and common.row + common.rows == chunk.row + chunk.rows,
            )
        )
    return needs


def _places(metadata: Any) -> dict[tuple[str, int], int]:
    offsets: dict[str, list[int]] = defaultdict(list)
    for stored in metadata.storage_data.values():
        offsets[stored.relative_path].append(stored.offset)
    return {
        (path, offset): place
        for path, found in offsets.items()
        for place, offset in enumerate(sorted(found))
    }


def _chunk(tensor: Any, index: Any) -> Region:
    for chunk in tensor.chunks:
        if tuple(chunk.offsets) == tuple(index.offset or (0, 0)):
            return Region(*chunk.offsets, *chunk.sizes)
    raise KeyError(index)


def _requests(needs: list[_Need]) -> int:
    return sum(
        count * math.ceil(run / PART_SIZE)
        for run, count in _merged(sorted(needs, key=lambda need: need.place))
    )


def _merged(needs: list[_Need]) -> Iterator[tuple[int, int]]:
    """Yields each merged run's data bytes, with how many such runs there are."""
    data, previous = 0, None
    for need in needs:
        joins = (
            previous is not None
            and previous.to_end
            and need.from_start
            and previous.place + 1 == need.place
        )
        if data and not joins:
            yield data, 1
            data = 0
        if need.runs > 1:
            yield need.data, need.runs
        else:
            data += need.data
        previous = need
    if data:
        yield data, 1
