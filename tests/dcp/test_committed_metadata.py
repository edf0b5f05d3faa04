"""What a save returns on ranks that have not committed it: it is read by whoever looks into it."""

from __future__ import annotations

import copy
import pickle
import shutil

import pytest
import torch
import torch.distributed as dist

import cloudckpt
from cloudckpt import CloudStorageReader, Config
from cloudckpt.dcp.reader import committed_metadata
from cloudckpt.errors import CheckpointNotFoundError, StoreError
from cloudckpt.uri import CheckpointURI

NOWHERE = CheckpointURI.parse("s3://nobody-asks-for-this/run/step-1")
FIELDS = ("state_dict_metadata", "planner_data", "storage_data")


@pytest.fixture
def unread(monkeypatch):
    """A store that must not be asked."""

    def refuse(self, *args, **kwargs):
        raise StoreError("somebody reads")

    monkeypatch.setattr(CloudStorageReader, "read_metadata", refuse)


def of(attempt: str, uri: CheckpointURI = NOWHERE):
    return committed_metadata(uri, Config(), attempt)


def test_to_print_or_to_compare_it_asks_nobody(unread):
    found = of("0" * 16)
    assert str(NOWHERE) in repr(found)
    assert found == found
    assert found != of("1" * 16)
    for other in (None, {}, {"a": 1}, "text", found.storage_data):
        assert found.state_dict_metadata != other
        assert other != found.state_dict_metadata
    with pytest.raises(StoreError, match="somebody reads"):
        len(found.storage_data)


def test_beside_metadata_that_were_read_it_is_another_and_nobody_is_asked(tmp_path, monkeypatch):
    saved = cloudckpt.save({"w": torch.ones(3)}, checkpoint_id=tmp_path)
    read = CloudStorageReader(tmp_path).read_metadata()
    later = of(read.storage_meta.save_id.rpartition("-")[2], CheckpointURI.parse(tmp_path))
    shutil.rmtree(tmp_path)
    for field in FIELDS:
        for other in (read, saved):
            assert getattr(other, field) != getattr(later, field)
            assert getattr(later, field) != getattr(other, field)


def _looked_at(uri: str) -> list[str]:
    found = cloudckpt.save({"w": torch.ones(3)}, checkpoint_id=uri)
    kept = copy.copy(found)
    entries = list(pickle.loads(pickle.dumps(found)).state_dict_metadata)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(uri)
    dist.barrier()
    again = cloudckpt.save({"w": torch.ones(3)}, checkpoint_id=uri)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(uri)
    dist.barrier()
    assert found == kept
    assert found != again
    repr(found), repr(again)
    if dist.get_rank():
        with pytest.raises(CheckpointNotFoundError):
            again.state_dict_metadata["w"]
    return entries


def test_ranks_print_and_compare_what_they_have_saved_without_the_store(ranks, tmp_path):
    assert ranks(2, _looked_at, str(tmp_path / "step-1")) == [["w"], ["w"]]
