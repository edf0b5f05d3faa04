"""The checksums of a checkpoint are those of the store it was written to, wherever it is read."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

import cloudckpt
from cloudckpt.checksum import ALGORITHMS
from cloudckpt.errors import TensorChangedError
from cloudckpt.stores.local import LocalStore
from cloudckpt.stores.registry import open_store
from cloudckpt.uri import CheckpointURI

from .places import Place


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


def test_damage_is_found_by_either_algorithm(written):
    place, _ = written
    name = max(place.data(), key=lambda name: len(place.read(name)))
    with open(f"{place.path}/{name}", "r+b") as file:
        file.seek(700_001)
        byte = file.read(1)[0]
        file.seek(700_001)
        file.write(bytes([byte ^ 0x10]))
    with pytest.raises(cloudckpt.errors.CheckpointCorruptError, match="checksum, twice") as caught:
        loaded(place)
    assert caught.value.item == "weight"


def _change_while_saving(place: Place) -> None:
    """On the last rank, the large tensor changes when the first bytes of it are on their way."""
    rank, world = dist.get_rank(), dist.get_world_size()
    state = {f"large {rank}": torch.zeros(400_000), f"small {rank}": torch.zeros(10)}
    store = open_store(CheckpointURI.parse(place.uri), place.config)
    put = store.put

    def put_and_change(key, *arguments, **options):
        info = put(key, *arguments, **options)
        if f"/__{rank}_" in key:
            state[f"large {rank}"][-1] += 1
        return info

    if rank == world - 1:
        store.put = put_and_change
    try:
        place.save(state)
    finally:
        store.__dict__.pop("put", None)


def test_a_tensor_that_changes_while_it_is_saved_is_named_on_all_ranks(place, ranks):
    told = ranks.errors(2, _change_while_saving, place)
    assert [type(error) for error in told] == [TensorChangedError] * 2
    assert {error.item for error in told} == {"large 1"}
    assert place.names() == []
    assert place.unfinished() == []
