# ruff: noqa: D103 - a test's name is its docstring
"""The ideal count of requests, on checkpoints small enough to count by hand."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from benchmarks.geometry import PART_SIZE, ideal_requests, shard

MIB = 1024 * 1024
GAP = 700


def saved(shapes: dict[str, tuple[int, int]], dim: int, ranks: int) -> SimpleNamespace:
    """Lays each rank's shards out in one object, with framing between them."""
    tensors = {
        name: SimpleNamespace(
            size=shape,
            chunks=[
                SimpleNamespace(offsets=(part.row, part.column), sizes=(part.rows, part.columns))
                for part in (shard(shape, dim, rank, ranks) for rank in range(ranks))
            ],
        )
        for name, shape in shapes.items()
    }
    storage = {}
    for rank in range(ranks):
        offset = 0
        for name, tensor in tensors.items():
            chunk = tensor.chunks[rank]
            length = chunk.sizes[0] * chunk.sizes[1] * 4 + GAP
            key = SimpleNamespace(fqn=name, offset=chunk.offsets)
            storage[rank, name] = (
                key,
                SimpleNamespace(relative_path=f"{rank}.distcp", offset=offset, length=length),
            )
            offset += length + GAP
    return SimpleNamespace(state_dict_metadata=tensors, storage_data=_Pairs(storage.values()))


class _Pairs:
    """A mapping by unhashable keys, as far as it is read here."""

    def __init__(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        self._pairs = list(pairs)

    def items(self) -> list[tuple[Any, Any]]:
        return self._pairs

    def values(self) -> list[Any]:
        return [value for _, value in self._pairs]


def test_whole_neighbours_make_one_run() -> None:
    metadata = saved({"a": (1024, 1024), "b": (1024, 1024), "c": (1024, 1024)}, 0, 4)
    # Each of 2 ranks needs all of 2 objects of 3 MiB.
    assert ideal_requests(metadata, 0, 2) == 4


def test_a_long_run_takes_a_request_for_each_part() -> None:
    metadata = saved({"a": (16 * 1024, 1024)}, 0, 1)
    assert 64 * MIB == 4 * PART_SIZE
    assert ideal_requests(metadata, 0, 1) == 4
    assert ideal_requests(metadata, 0, 2) == 4


def test_halves_of_neighbours_stay_apart() -> None:
    metadata = saved({"a": (1024, 1024), "b": (1024, 1024)}, 0, 1)
    # The first half of `a` and of `b`, then the second halves: never touching.
    assert ideal_requests(metadata, 0, 2) == 4


def test_columns_of_a_chunk_are_one_run_a_row() -> None:
    metadata = saved({"a": (100, 64)}, 1, 1)
    assert ideal_requests(metadata, 1, 2) == 200
