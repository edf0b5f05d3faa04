"""The checksums of a checkpoint are those of the store it was written to, wherever it is read."""

import dataclasses
import json

import pytest
import torch

import cloudckpt
from cloudckpt.checksum import ALGORITHMS
from cloudckpt.stores.local import LocalStore


@pytest.fixture(params=list(ALGORITHMS.values()), ids=list(ALGORITHMS))
def written(request, places, monkeypatch):
    """A checkpoint that a store with this algorithm took, as a folder where it lies now."""
    place = places("local")
    state = {"weight": torch.arange(300_000.0), "step": 7}
    wanted = dataclasses.replace(LocalStore.capabilities, checksum=request.param)
    with monkeypatch.context() as there:
        there.setattr(LocalStore, "capabilities", wanted)
        cloudckpt.save(state, checkpoint_id=place.uri)
    return place, request.param.name


def loaded(place):
    state = {"weight": torch.zeros(300_000), "step": 0}
    cloudckpt.load(state, checkpoint_id=place.uri)
    return state


def test_a_checkpoint_names_the_algorithm_and_is_read_by_it(written):
    place, name = written
    (manifest,) = (found for found in place.names() if found.startswith(".manifest."))
    assert json.loads(place.read(manifest))["checksum"] == name
    state = loaded(place)
    assert torch.equal(state["weight"], torch.arange(300_000.0))
    assert state["step"] == 7


def test_damage_is_found_by_either_algorithm(written):
    place, _ = written
    name = max(place.data(), key=lambda name: len(place.read(name)))
    with open(f"{place.path}/{name}", "r+b") as file:
        file.seek(700_001)
        byte = file.read(1)[0]
        file.seek(700_001)
        file.write(bytes([byte ^ 0x10]))
    with pytest.raises(cloudckpt.CheckpointCorruptError, match="checksum, twice") as caught:
        loaded(place)
    assert caught.value.item == "weight"
