"""Sweeping takes what killed saves have left, and nothing that it is not sure of."""

from __future__ import annotations

import time
import types

import pytest
import torch
import torch.distributed.checkpoint as dcp

import cloudckpt
from cloudckpt import CheckpointURI, Config
from cloudckpt.checkpoint import commit
from cloudckpt.errors import IncompleteSaveError
from cloudckpt.runs.sweeping import find_leftovers, sweep
from cloudckpt.stores.registry import open_store

OLD = "__0_0.0123456789abcdef.distcp"


@pytest.fixture
def run(bucket, s3_config):
    """A run on S3 with a checkpoint; and its options."""
    uri = f"s3://{bucket}/run"
    cloudckpt.save({"w": torch.ones(10)}, checkpoint_id=f"{uri}/step-1", config=s3_config)
    return uri, s3_config


def put(uri: str, config, *names: str) -> None:
    parsed = CheckpointURI.parse(uri)
    store = open_store(parsed, config)
    for name in names:
        data = memoryview(b"left over")
        checksum = store.capabilities.checksum.of(data)
        store.put(parsed.key(name), [data], checksum=checksum)


def test_what_no_checkpoint_names_is_left_over(run) -> None:
    uri, config = run
    put(uri, config, f"step-1/{OLD}", f"step-2/{OLD}", "step-2/.conditions.0123456789abcdef")
    time.sleep(1.1)  # the clock of S3 counts seconds
    found = sweep(uri, older_than=0, config=config)
    assert set(found.objects) == {
        f"{uri}/step-1/{OLD}",
        f"{uri}/step-2/{OLD}",
        f"{uri}/step-2/.conditions.0123456789abcdef",
    }
    assert found.nbytes == 27
    assert find_leftovers(uri, older_than=0, config=config).objects == ()
    cloudckpt.verify(f"{uri}/step-1", config=config)


def test_what_is_young_may_be_of_a_save_under_way(run) -> None:
    uri, config = run
    put(uri, config, f"step-2/{OLD}")
    assert sweep(uri, config=config).objects == ()
    assert find_leftovers(uri, older_than=-10, config=config).objects == (f"{uri}/step-2/{OLD}",)


def test_what_others_have_written_stays(run) -> None:
    uri, config = run
    put(uri, config, "step-2/__0_0.distcp", "step-2/model.bin", "step-2/.conditions", "notes")
    assert find_leftovers(uri, older_than=-10, config=config).objects == ()


def test_beside_metadata_that_can_not_be_read_nothing_is_left_over(run) -> None:
    uri, config = run
    put(uri, config, f"step-2/{OLD}", "step-2/.metadata", f"step-3/{OLD}")
    found = sweep(uri, older_than=-10, config=config)
    assert found.objects == (f"{uri}/step-3/{OLD}",)
    assert found.unread == (f"{uri}/step-2/.metadata",)


def test_open_uploads_are_aborted(run) -> None:
    uri, config = run
    parsed = CheckpointURI.parse(f"{uri}/step-2")
    store = open_store(parsed, config)
    store.create_upload(parsed.key(OLD), 5 * 1024**2)
    assert sweep(uri, older_than=-10, config=config).uploads == (f"{uri}/step-2/{OLD}",)
    assert list(store.list_uploads(parsed.key(""))) == []


def test_a_young_upload_may_be_of_a_save_under_way(tmp_path) -> None:
    parsed = CheckpointURI.parse(tmp_path / "step-2")
    store = open_store(parsed, Config())
    upload = store.create_upload(parsed.key(OLD), 5 * 1024**2)
    assert sweep(tmp_path).uploads == ()
    assert [found.id for found in store.list_uploads(parsed.key(""))] == [upload.id]
    assert sweep(tmp_path, older_than=-10).uploads == (f"{parsed}/{OLD}",)
    assert list(store.list_uploads(parsed.key(""))) == []


def test_a_checkpoint_of_torch_and_one_of_single_ranks_stay(tmp_path) -> None:
    dcp.save({"w": torch.ones(10)}, checkpoint_id=str(tmp_path / "torch"))
    cloudckpt.save({"w": torch.ones(10)}, checkpoint_id=tmp_path / "alone", use_collectives=False)
    before = sorted(tmp_path.rglob("*"))
    assert sweep(tmp_path, older_than=-10).objects == ()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_save_that_has_taken_too_long_does_not_commit(tmp_path, monkeypatch) -> None:
    times = [0.0]
    clock = types.SimpleNamespace(clock_gettime=lambda kind: times[0], CLOCK_MONOTONIC=1)
    monkeypatch.setattr(commit, "time", clock)

    class Slow(cloudckpt.CommitHook):
        def before_commit(self, uri, metadata) -> None:
            times[0] = 13 * 3600.0

    writer = cloudckpt.CloudStorageWriter(tmp_path / "slow", commit_hook=Slow())
    with pytest.raises(IncompleteSaveError, match="12 hours"):
        cloudckpt.save({"w": torch.ones(10)}, storage_writer=writer)
    assert not cloudckpt.exists(tmp_path / "slow")
    assert not list((tmp_path / "slow").rglob("*.distcp"))
