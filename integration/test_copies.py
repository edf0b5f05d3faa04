"""Checkpoints are copied to each cloud, within it and back, byte by byte the same."""

from __future__ import annotations

import torch

import cloudckpt
from clouds import PART_SIZE

LARGE = 5 * PART_SIZE + 1000  # bytes that go in several parts


def test_a_copy_to_a_cloud_within_it_and_back_is_the_same(place, tmp_path):
    state = {
        "large": torch.arange(LARGE, dtype=torch.int32).to(torch.uint8),
        "small": torch.ones(7),
        "step": 7,
    }
    cloudckpt.save(state, checkpoint_id=tmp_path / "a")
    ways = [
        (tmp_path / "a", place.at("b").uri),
        (place.at("b").uri, place.at("c").uri),
        (place.at("c").uri, tmp_path / "d"),
    ]
    copied = [cloudckpt.copy(*way, config=place.config) for way in ways]
    nbytes = copied[0].nbytes
    assert [one.nbytes for one in copied] == [nbytes] * 3
    assert [one.by_store for one in copied] == [0, nbytes, 0]
    for uri in (place.at("b").uri, place.at("c").uri):
        found = cloudckpt.verify(uri, config=place.config)
        assert (found.items, found.has_checksums) == (3, True)
    first, last = (
        sorted(path.read_bytes() for path in (tmp_path / name).glob("*.distcp")) for name in "ad"
    )
    assert first == last
