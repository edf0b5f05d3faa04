"""Sweeping takes what killed saves have left, and nothing that it is not sure of."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
import types
import uuid

import pytest
import torch
import torch.distributed.checkpoint as dcp

import cloudckpt
from cloudckpt import Config, RetryPolicy
from cloudckpt.checkpoint import baseline
from cloudckpt.errors import AccessDeniedError, ConnectionLostError, IncompleteSaveError
from cloudckpt.runs.sweeping import find_leftovers, sweep
from cloudckpt.stores import registry
from cloudckpt.stores.registry import open_store
from cloudckpt.uri import CheckpointURI
from support.faulty_store import FaultyStore
from support.memory_store import MemoryStore

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
    parsed = CheckpointURI.parse(f"{uri}/step-2")
    store = open_store(parsed, config)
    assert sweep(uri, config=config).objects == ()  # moto does not know how old an upload is
    store.create_upload(parsed.key(OLD), 5 * 1024**2)
    found = sweep(uri, older_than=-10, config=config)
    assert found.objects == found.uploads == (f"{uri}/step-2/{OLD}",)
    assert list(store.list_uploads(parsed.key(""))) == []


def test_a_file_is_as_young_as_its_place_whatever_time_a_copy_has_kept(tmp_path) -> None:
    """As ``cp -a`` copies a checkpoint: first the data, later what names them."""
    cloudckpt.save({"w": torch.ones(10)}, checkpoint_id=tmp_path / "run" / "step-1")
    [data] = (tmp_path / "run" / "step-1").glob("*.distcp")
    os.utime(data, (0, 0))
    (tmp_path / "copy" / "step-1").mkdir(parents=True)
    shutil.copy2(data, tmp_path / "copy" / "step-1")
    assert sweep(tmp_path / "copy").objects == ()
    assert sweep(tmp_path / "copy", older_than=0).objects != ()


def test_what_others_have_written_stays(run) -> None:
    uri, config = run
    put(uri, config, "step-2/__0_0.distcp", "step-2/model.bin", "step-2/.conditions", "notes")
    assert find_leftovers(uri, older_than=-10, config=config).objects == ()


def test_beside_metadata_that_can_not_be_read_nothing_is_left_over(run) -> None:
    uri, config = run
    put(uri, config, f"step-2/{OLD}", "step-2/.metadata", f"step-3/{OLD}")
    put(uri, config, f"step-2/{OLD.replace('__0', '__2')}")  # a folder is looked at once
    found = sweep(uri, older_than=-10, config=config)
    assert found.objects == (f"{uri}/step-3/{OLD}",)
    assert found.unread == (f"{uri}/step-2/.metadata",)


@pytest.mark.parametrize("held", ["upload", "object"])
def test_what_can_not_be_deleted_is_told_and_the_rest_is_gone(monkeypatch, held) -> None:
    root = uuid.uuid4().hex
    store = FaultyStore(MemoryStore(root))
    monkeypatch.setattr(registry, "_OPENERS", {"memory": lambda: lambda uri, config: store})
    uri = f"memory://{root}/run"
    put(uri, Config(), f"step-1/{OLD}", f"step-2/{OLD}")
    for step in (1, 2):
        store.create_upload(f"run/step-{step}/{OLD}", 5 * 1024**2)
    store.fail(
        "abort_upload" if held == "upload" else "delete",
        AccessDeniedError,
        where=lambda key: key == f"run/step-1/{OLD}",
    )
    with pytest.raises(AccessDeniedError) as failed:
        sweep(uri, older_than=-10)
    objects, uploads = [info.key for info in store.list("run/")], [*store.list_uploads("run/")]
    left = [f"run/step-1/{OLD}"]
    assert objects == (left if held == "object" else [])
    assert [upload.key for upload in uploads] == (left if held == "upload" else [])
    assert f"could not be deleted: {len(objects)} objects, {len(uploads)} uploads" in str(
        failed.value
    )


@pytest.mark.parametrize("age", [-10, 0])
def test_uploads_of_others_go_on(run, age) -> None:
    """Of another program, and of torch's own writers by other libraries; whatever their age."""
    uri, config = run
    parsed = CheckpointURI.parse(uri)
    store = open_store(parsed, config)
    names = ["model.safetensors", "step-2/.metadata", "step-2/__0_0.distcp", f"{OLD}.gz", "backup"]
    for name in names:
        store.create_upload(parsed.key(name), 5 * 1024**2)
    time.sleep(1.1)  # the clock of S3 counts seconds
    assert sweep(uri, older_than=age, config=config).uploads == ()
    assert len(list(store.list_uploads(parsed.key("")))) == len(names)


def test_what_is_begun_under_our_own_names_on_a_disk_is_ours_whatever_its_key(tmp_path) -> None:
    parsed = CheckpointURI.parse(tmp_path / "tokenizer.json")
    store = open_store(parsed, Config())
    store.create_upload(parsed.prefix, 5 * 1024**2)
    assert sweep(tmp_path, older_than=-10).uploads == (str(parsed),)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def killed(monkeypatch) -> FaultyStore:
    """A store that nothing is known of, whose clients are killed before they delete anything."""
    made = FaultyStore(MemoryStore(uuid.uuid4().hex))
    made.capabilities = dataclasses.replace(made.capabilities, conditional_writes=None)
    monkeypatch.setattr(registry, "_OPENERS", {"memory": lambda: lambda uri, config: made})
    monkeypatch.setattr(registry, "_places", {})
    made.fail("delete", ConnectionLostError, probability=1.0)
    return made


def _tried_by_a_model(uri: str) -> None:
    cloudckpt.hf.save({"w": torch.ones(3)}, uri, config=IMPATIENT)


def _tried_by_a_file(uri: str) -> None:
    cloudckpt.files.save_file(f"{uri}/tokenizer.json", b"text", if_absent=True, config=IMPATIENT)


def _tried_by_a_save(uri: str) -> None:
    cloudckpt.save({"w": torch.ones(3)}, checkpoint_id=uri, config=IMPATIENT)


IMPATIENT = Config(retry=RetryPolicy(attempts=1, base=0.0, cap=0.0))


@pytest.mark.parametrize("tried", [_tried_by_a_file, _tried_by_a_model, _tried_by_a_save])
def test_trials_of_processes_that_were_killed_are_left_over(killed, tried) -> None:
    tried("memory://run/step-1")
    killed.heal()
    trials = [info.key for info in killed.list("") if "conditions" in info.key]
    assert len(trials) == 1
    assert find_leftovers("memory://run").objects == ()
    assert sweep("memory://run", older_than=-10).objects == (killed.uri(trials[0]),)


def test_checkpoints_of_torch_stay_also_those_of_single_ranks(tmp_path) -> None:
    dcp.save({"w": torch.ones(10)}, checkpoint_id=str(tmp_path / "torch"))
    alone = str(tmp_path / "alone")
    dcp.save({"w": torch.ones(10)}, checkpoint_id=alone, use_collectives=False)
    before = sorted(tmp_path.rglob("*"))
    assert sweep(tmp_path, older_than=-10).objects == ()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_save_that_has_taken_too_long_does_not_commit(tmp_path, monkeypatch) -> None:
    times = [0.0]
    clock = types.SimpleNamespace(clock_gettime=lambda kind: times[0], CLOCK_MONOTONIC=1)
    monkeypatch.setattr(baseline, "time", clock)

    class Slow(cloudckpt.checkpointer.CommitHook):
        def before_commit(self, uri, metadata) -> None:
            times[0] = 13 * 3600.0

    writer = cloudckpt.CloudStorageWriter(tmp_path / "slow", commit_hook=Slow())
    with pytest.raises(IncompleteSaveError, match="12 hours"):
        cloudckpt.save({"w": torch.ones(10)}, storage_writer=writer)
    assert not cloudckpt.exists(tmp_path / "slow")
    assert not list((tmp_path / "slow").rglob("*.distcp"))


def test_what_was_found_is_deleted_and_nothing_that_is_new_or_no_longer_left_over(run) -> None:
    uri, config = run
    other = OLD.replace("0123", "4567")
    put(uri, config, f"step-2/{OLD}", f"step-3/{OLD}")
    parsed = CheckpointURI.parse(uri)
    store = open_store(parsed, config)
    store.create_upload(parsed.key(f"step-2/{OLD}"), 5 * 1024**2)
    asked = find_leftovers(uri, older_than=-10, config=config)
    put(uri, config, f"step-2/{other}")  # left over since
    store.create_upload(parsed.key(f"step-2/{other}"), 5 * 1024**2)
    put(uri, config, "step-3/.metadata")  # nobody knows what this names
    done = sweep(uri, older_than=-10, only=asked, config=config)
    assert (done.objects, done.uploads) == ((f"{uri}/step-2/{OLD}",), (f"{uri}/step-2/{OLD}",))
    assert done.unread == (f"{uri}/step-3/.metadata",)
    left = {info.key for info in store.list(parsed.key("step-"))} - {"run/step-1/.metadata"}
    assert {parsed.key(f"step-2/{other}"), parsed.key(f"step-3/{OLD}")} < left
    assert [one.key for one in store.list_uploads("")] == [parsed.key(f"step-2/{other}")]


def test_a_young_upload_may_be_of_a_save_under_way(tmp_path) -> None:
    parsed = CheckpointURI.parse(tmp_path / "step-2")
    store = open_store(parsed, Config())
    upload = store.create_upload(parsed.key(OLD), 5 * 1024**2)
    assert sweep(tmp_path).uploads == ()
    assert [found.id for found in store.list_uploads(parsed.key(""))] == [upload.id]
    assert sweep(tmp_path, older_than=-10).uploads == (f"{parsed}/{OLD}",)
    assert list(store.list_uploads(parsed.key(""))) == []
