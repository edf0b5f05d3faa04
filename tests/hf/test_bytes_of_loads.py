"""A model that several ranks load is read once from the store, however it is sharded."""

import pytest
import torch

import cloudckpt.hf
from cloudckpt.stores import registry
from dcp.layouts import LAYOUTS, spread
from dcp.values import assert_same, numbered
from support.faulty_store import FaultyStore


class Counting(FaultyStore):
    """Counts the bytes that are read."""

    received = 0

    def get_range(self, key, start, into, **options):
        self.received += sum(view.nbytes for view in into)
        return super().get_range(key, start, into, **options)


def _full() -> dict[str, torch.Tensor]:
    return {
        "up": numbered(2048, 1024),
        "down": numbered(1024, 2048, dtype=torch.bfloat16),
        "odd": numbered(1531, 1201),
        "norm": numbered(1024),
    }


def _load(place, layout) -> int:
    """The bytes that this rank has read."""
    opened = registry._OPENERS
    stores = []

    def make(uri, config):
        stores.append(Counting(opened["file"]()(uri, config)))
        return stores[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_OPENERS", {"file": lambda: make})
        patch.setattr(registry, "_places", {})
        state = spread(_full(), LAYOUTS[layout], blank=True)
        cloudckpt.hf.load(state, place.uri, config=place.config)
        expected = spread(_full(), LAYOUTS[layout])
        for name, tensor in state.items():
            assert_same(tensor.to_local(), expected[name].to_local(), name)
    return sum(store.received for store in stores)


@pytest.mark.parametrize(
    "layout", ["2 rows", "4 rows", "2 columns", "4 columns", "4 replicas", "2x2 blocks",
               "2 replicas of 2 rows", "2 columns, replicated"]
)  # fmt: skip
def test_each_byte_is_read_once_by_all_ranks_together(ranks, local, layout: str) -> None:
    full = _full()
    cloudckpt.hf.save(full, local.uri, max_shard_size="8MB", config=local.config)
    read = sum(ranks(LAYOUTS[layout].world, _load, local, layout))
    total = sum(tensor.nbytes for tensor in full.values())
    headers = 3 * 128 * 1024
    assert read <= 1.05 * total + headers
