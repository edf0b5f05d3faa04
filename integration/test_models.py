"""Models in safetensors files on each cloud: parts of several ranks, which the package reads."""

import json

import pytest
import torch
from safetensors.torch import load

import cloudckpt
import cloudckpt.hf
from clouds import PART_SIZE
from dcp.layouts import LAYOUTS, check_local_parts, full_state, spread
from dcp.values import assert_same, numbered

_INDEX = "model.safetensors.index.json"


def _whole() -> dict[str, torch.Tensor]:
    """More than fits into one part of a file."""
    return full_state() | {"in parts": numbered(3 * PART_SIZE // (4 * 2048) + 1, 2048)}


def _save(layout, place):
    state = spread(_whole(), LAYOUTS[layout])
    cloudckpt.hf.save(state, place.uri, max_shard_size=2 * PART_SIZE, config=place.config)


def _load(layout, place):
    state = spread(full_state(), LAYOUTS[layout], blank=True)
    cloudckpt.hf.load(state, place.uri, config=place.config)
    check_local_parts(state, LAYOUTS[layout])


def _read(place) -> dict[str, torch.Tensor]:
    def file(name: str) -> bytes:
        return bytes(cloudckpt.files.load_file(f"{place.uri}/{name}", config=place.config))

    names = json.loads(file(_INDEX))["weight_map"]
    files = {name: load(file(name)) for name in set(names.values())}
    return {name: files[of][name] for name, of in names.items()}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("2 rows", "4 columns"), ("2 columns", "2 rows"), ("2x2 blocks", "3 rows")],
)
def test_parts_of_several_ranks_make_files_that_the_package_reads(
    cloud, place, ranks, saved: str, loaded: str
) -> None:
    ranks(LAYOUTS[saved].world, _save, saved, place)
    assert cloud.uploads(place) == []
    found = _read(place)
    assert found.keys() == _whole().keys()
    for name, tensor in _whole().items():
        assert_same(found[name], tensor, name)
    ranks(LAYOUTS[loaded].world, _load, loaded, place)


def test_a_model_replaces_another(cloud, place, ranks) -> None:
    ranks(2, _save, "2 rows", place)
    for state in ({"w": numbered(7)}, {"w": numbered(9, 2), "v": numbered(2)}):
        cloudckpt.hf.save(state, place.uri, max_shard_size=72, config=place.config)
        found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        cloudckpt.hf.load(found, place.uri, config=place.config)
        assert_same(found, state)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", _INDEX]
    assert sorted(cloud.names(place)) == names
    assert cloud.uploads(place) == []
