"""torch's own classes for safetensors take URIs after ``install``."""

import json

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import hf_storage

import cloudckpt
from cloudckpt.errors import CheckpointCorruptError
from dcp.layouts import LAYOUTS, full_state, spread
from dcp.values import assert_same

safetensors_torch = pytest.importorskip("safetensors.torch")

_NUMBERS = {name: 1 + number % 2 for number, name in enumerate(full_state())}


def _loaded(uri) -> None:
    state = {name: torch.full_like(tensor, 1) for name, tensor in full_state().items()}
    dcp.load(state, storage_reader=hf_storage.HuggingFaceStorageReader(uri, thread_count=2))
    for name, tensor in full_state().items():
        assert_same(state[name], tensor, name)


def test_a_model_is_written_and_read(s3, installed) -> None:
    writer = hf_storage.HuggingFaceStorageWriter(s3.uri, fqn_to_index_mapping=_NUMBERS)
    dcp.save(full_state(), storage_writer=writer)
    assert s3.names() == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    _loaded(s3.uri)


def test_shards_are_put_together(s3, installed) -> None:
    dcp.save(full_state(), storage_writer=hf_storage.HuggingFaceStorageWriter(s3.at("sharded").uri))
    hf_storage.consolidate_safetensors_files(s3.at("sharded").uri, s3.uri, _NUMBERS)
    assert "model-00002-of-00002.safetensors" in s3.names()
    _loaded(s3.uri)


def _save_together(place):
    cloudckpt.install(place.config)
    try:
        dcp.save(
            spread(full_state(), LAYOUTS["2 columns"]),
            storage_writer=hf_storage.HuggingFaceStorageWriter(
                place.uri, save_distributed=True, enable_consolidation=True
            ),
        )
        torch.distributed.checkpoint._consolidate_hf_safetensors.consolidate_safetensors_files_on_every_rank(
            place.uri, place.at("again").uri, _NUMBERS
        )
    finally:
        cloudckpt.uninstall()
    return dist.get_rank()


def test_ranks_write_whole_files(ranks, s3, installed) -> None:
    ranks(2, _save_together, s3)
    _loaded(s3.uri)
    _loaded(s3.at("again").uri)


def test_shards_on_a_disk_are_torchs_own_and_can_be_loaded(ranks, local, installed) -> None:
    ranks(2, _save_by_torch, local)
    assert any(name.startswith("shard-") for name in local.names())
    state = {name: torch.full_like(tensor, 1) for name, tensor in full_state().items()}
    cloudckpt.load(state, checkpoint_id=local.uri, config=local.config)
    for name, tensor in full_state().items():
        assert_same(state[name], tensor, name)


def _save_by_torch(place):
    dcp.save(
        spread(full_state(), LAYOUTS["2 columns"]),
        storage_writer=hf_storage.HuggingFaceStorageWriter(place.path, save_distributed=True),
    )


@pytest.mark.parametrize(
    "rows",
    [[(0, 2), (4, 6)], [(0, 2), (1, 3), (4, 6)], [(0, 3), (2, 6)]],
    ids=["a gap", "an overlap as large as the gap", "an overlap"],
)
def test_shards_that_do_not_make_up_a_tensor_load_nothing(tmp_path, rows) -> None:
    for number, (start, stop) in enumerate(rows):
        described = {"w": {"saved_offsets": [start]}}
        safetensors_torch.save_file(
            {"w": torch.arange(6.0)[start:stop].clone()},
            tmp_path / f"shard-{number:05}-model-00001-of-00001.safetensors",
            {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(described)},
        )
    state = {"w": torch.full((6,), -1.0)}
    with pytest.raises(CheckpointCorruptError, match="w do not make it up"):
        cloudckpt.load(state, checkpoint_id=tmp_path)
    assert torch.equal(state["w"], torch.full((6,), -1.0))
