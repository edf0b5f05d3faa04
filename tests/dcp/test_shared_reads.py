"""Ranks that want the same bytes read them from the store once."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import cloudckpt
from cloudckpt.dcp.reader import CloudStorageReader

MIB = 1024**2


def whole() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "weight": torch.rand(1024, 3000, generator=draw),
        "bias": torch.rand(700_001, generator=draw),
        "half": torch.rand(300, 1000, generator=draw).to(torch.bfloat16),
    }


def empty(state):
    return {name: torch.zeros_like(value) for name, value in state.items()}


def load(uri, state, config):
    """The bytes that this rank has read from the store."""
    reader = CloudStorageReader(uri, config=config)
    cloudckpt.load(state, storage_reader=reader)
    assert reader.transferred is not None
    return reader.transferred.bytes


def all_load_the_same(place, shared_reads):
    config = dataclasses.replace(place.config, shared_reads=shared_reads)
    state = whole()
    cloudckpt.save(state, checkpoint_id=place.uri, config=config)
    target = empty(state)
    read = load(place.uri, target, config)
    assert all(torch.equal(target[name], value) for name, value in state.items())
    return read


@pytest.mark.parametrize("shared_reads", ["auto", "host"])
def test_replicated_tensors_leave_the_store_once(ranks, s3, shared_reads):
    unique = sum(value.nbytes for value in whole().values())
    read = ranks(4, all_load_the_same, s3, shared_reads)
    assert unique <= sum(read) <= 1.05 * unique
    assert max(read) <= 0.5 * unique


def test_without_shared_reads_each_rank_reads_all(ranks, s3):
    unique = sum(value.nbytes for value in whole().values())
    assert min(ranks(2, all_load_the_same, s3, "off")) >= unique


def both_ways(place, shared_reads):
    """On a mesh of 2 x 2: sharded one way, replicated the other; and one that is on all alike."""
    config = dataclasses.replace(place.config, shared_reads=shared_reads)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    full = whole()

    def sharded(name, value):
        if name == "bias":
            return value.clone()
        return distribute_tensor(value, mesh, [Replicate(), Shard(0)])

    state = {name: sharded(name, value) for name, value in full.items()}
    cloudckpt.save(state, checkpoint_id=place.uri, config=config)
    target = {name: torch.zeros_like(value) for name, value in state.items()}
    read = load(place.uri, target, config)
    for name, value in target.items():
        found = value if name == "bias" else value.full_tensor()
        assert torch.equal(found, full[name])
    return read


def test_with_hybrid_sharding_each_shard_leaves_the_store_once(ranks, s3):
    unique = sum(value.nbytes for value in whole().values())
    assert unique <= sum(ranks(4, both_ways, s3, "auto")) <= 1.05 * unique


def mixed_options(place):
    config = dataclasses.replace(place.config, shared_reads=["auto", "off"][dist.get_rank()])
    with pytest.raises(cloudckpt.ConfigError, match="shared_reads"):
        cloudckpt.load({}, checkpoint_id=place.uri, config=config)
    return True


def test_ranks_must_agree_on_it(ranks, local):
    assert ranks(2, mixed_options, local) == [True, True]
