"""A load asks for the bytes that it needs, hardly for any other, and ranks together for each once.

What becomes of a rank that fails or dies while it shares: see tests/transfer/test_sharing.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import cloudckpt
from cloudckpt.stores.base import nbytes
from cloudckpt.stores.registry import open_store
from cloudckpt.uri import CheckpointURI

from .layouts import LAYOUTS, spread
from .places import Place
from .values import assert_same, numbered

KIB, MIB = 1024, 1024 * 1024

Asked = tuple[str, int, int]
"""Object, first byte, and the byte behind the last one."""


@contextmanager
def asked_of(place: Place) -> Iterator[list[Asked]]:
    """The ranges of shard objects that are asked for meanwhile, in this process.

    But for their indexes, which stand at their ends.
    """
    store = open_store(CheckpointURI.parse(place.uri), place.config)
    get_range, asked = store.get_range, []

    def counting(key, start, into, **options):
        if key.endswith(".distcp") and start + nbytes(into) < store.head(key).size:
            asked.append((key.rpartition("/")[2], start, start + nbytes(into)))
        return get_range(key, start, into, **options)

    store.get_range = counting
    try:
        yield asked
    finally:
        del store.get_range


def _bytes(asked: list[Asked]) -> int:
    return sum(stop - start for _, start, stop in asked)


def _loading(state: dict, place: Place) -> list[Asked]:
    """What a load asks for; its reader counts that, and the index of each object."""
    with asked_of(place) as asked:
        cloudckpt.load(state, storage_reader=(reader := place.reader()))
    assert _bytes(asked) < reader.transferred.nbytes < _bytes(asked) + 16 * KIB
    return asked


SHAPES = {
    "large": (4096, 1024),
    "odd rows": (1283, 1021),
    **{f"of 8 MiB {number}": (2048, 1024) for number in range(6)},
}


def _state(*names: str) -> dict[str, torch.Tensor]:
    return {name: numbered(*SHAPES[name], first=index) for index, name in enumerate(names)}


def _save_spread(layout: str, names: list[str], place: Place) -> None:
    place.save(spread(_state(*names), LAYOUTS[layout]))


def _load_spread(layout: str, names: list[str], place: Place) -> tuple[int, list[Asked]]:
    """Bytes that this rank needs, and what it asked for."""
    state = spread(_state(*names), LAYOUTS[layout], blank=True)
    asked = _loading(state, place)
    expected = spread(_state(*names), LAYOUTS[layout])
    for name, tensor in state.items():
        assert_same(tensor.to_local(), expected[name].to_local(), name)
    return sum(tensor.to_local().nbytes for tensor in state.values()), asked


@pytest.mark.parametrize(("before", "after"), [("2 rows", "3 rows"), ("one rank", "2 rows")])
def test_resharding_rows_reads_hardly_more_than_is_needed(before, after, local, ranks):
    ranks(LAYOUTS[before].world, _save_spread, before, [*SHAPES], local)
    found = ranks(LAYOUTS[after].world, _load_spread, after, [*SHAPES], local)
    needed = sum(count for count, _ in found)
    assert needed <= sum(_bytes(asked) for _, asked in found) <= 1.05 * needed
    for count, asked in found:
        assert _bytes(asked) <= 1.1 * count


def test_columns_of_short_rows_are_read_with_their_rows_but_once(local, ranks):
    ranks(1, _save_spread, "one rank", ["large"], local)
    for count, asked in ranks(2, _load_spread, "2 columns", ["large"], local):
        assert _bytes(asked) <= 2.02 * count
        assert len(asked) <= 4


def test_what_is_not_asked_for_is_not_read(local):
    state = {f"t{number}": numbered(512, 1024, first=number) for number in range(8)}
    local.save({**state, "big": numbered(2048, 1024), "values": list(range(9999))})
    loaded = {"t3": torch.zeros(512, 1024)}
    asked = _loading(loaded, local)
    assert_same(loaded["t3"], state["t3"])
    assert _bytes(asked) == 512 * 1024 * 4


def test_a_large_tensor_is_asked_for_in_pieces_of_the_request_size(s3, request_size):
    request_size(2 * MIB)
    s3.save({"t": numbered(4096, 1024)})
    loaded = {"t": torch.zeros(4096, 1024)}
    asked = _loading(loaded, s3)
    assert_same(loaded["t"], numbered(4096, 1024))
    assert len(asked) == 8
    assert max(stop - start for _, start, stop in asked) == 2 * MIB


# ---- what several ranks want


def _all_load_the_same(place: Place) -> int:
    """The bytes that this rank has read from the store."""
    state, reader = _state("large", "odd rows"), place.reader()
    place.save(state)
    loaded = {name: torch.zeros_like(value) for name, value in state.items()}
    cloudckpt.load(loaded, storage_reader=reader)
    assert_same(loaded, state)
    return reader.transferred.nbytes


@pytest.mark.parametrize("shared_reads", ["auto", "host"])
def test_replicated_tensors_leave_the_store_once(ranks, s3, shared_reads):
    unique = sum(value.nbytes for value in _state("large", "odd rows").values())
    read = ranks(3, _all_load_the_same, s3.having(shared_reads=shared_reads))
    assert unique <= sum(read) <= 1.05 * unique
    assert max(read) <= 0.6 * unique


def _share_on_one(place: Place) -> None:
    with pytest.raises(cloudckpt.errors.ConfigError, match="shared_reads"):
        place.having(shared_reads=["auto", "off"][dist.get_rank()]).load({})


def test_ranks_must_agree_on_sharing(ranks, local):
    ranks(2, _share_on_one, local)


class OwnPlanner(DefaultLoadPlanner):
    """A planner of a user's own."""


def _with_own_planner_on(rank: int, place: Place) -> None:
    place.save({"a": numbered(3)})
    place.load(
        loaded := {"a": torch.zeros(3)}, planner=OwnPlanner() if dist.get_rank() == rank else None
    )
    assert_same(loaded["a"], numbered(3))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_planner_of_ones_own_may_be_on_one_rank_only(ranks, local, rank):
    ranks(2, _with_own_planner_on, rank, local)
