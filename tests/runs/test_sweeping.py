"""Sweeping takes what killed saves have left, and nothing that it is not sure of."""

from __future__ import annotations

import dataclasses
import os
import shutil
import types

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
OTHER = OLD.replace("0123", "4567")
STATE = {"w": torch.ones(10)}


def put(run: str, *names: str, config: Config | None = None) -> None:
    parsed = CheckpointURI.parse(run)
    store = open_store(parsed, config or Config())
    for name in names:
        data = memoryview(b"left over")
        checksum = store.capabilities.checksum.of(data)
        store.put(parsed.key(name), [data], checksum=checksum)


def begin(run: str, *names: str, config: Config | None = None) -> None:
    """Begins uploads."""
    parsed = CheckpointURI.parse(run)
    for name in names:
        open_store(parsed, config or Config()).create_upload(parsed.key(name), 5 * 1024**2)


def uploads(run: str, config: Config | None = None) -> list[str]:
    parsed = CheckpointURI.parse(run)
    found = open_store(parsed, config or Config()).list_uploads(parsed.key(""))
    return [one.key.removeprefix(parsed.key("")) for one in found]


@pytest.mark.parametrize("where", ["memory", "S3"])
def test_what_no_checkpoint_names_is_left_over_once_it_is_old(
    where, run, bucket, s3_config
) -> None:
    config, uri = (None, run) if where == "memory" else (s3_config, f"s3://{bucket}/run")
    cloudckpt.save(STATE, checkpoint_id=f"{uri}/step-1", config=config)
    left = [f"step-1/{OLD}", f"step-2/{OLD}", "step-2/.conditions.0123456789abcdef"]
    put(uri, *left, config=config)
    # it may be of a save under way; moto does not know how old an upload is
    assert sweep(uri, config=config).objects == ()
    begin(uri, f"step-2/{OLD}", config=config)
    found = sweep(uri, older_than=-10, config=config)
    assert {*found.objects} == {f"{uri}/{name}" for name in left}
    assert (found.uploads, found.nbytes) == ((f"{uri}/step-2/{OLD}",), 27)
    assert uploads(uri, config) == []
    assert find_leftovers(uri, older_than=-10, config=config).objects == ()
    cloudckpt.verify(f"{uri}/step-1", config=config)


def test_a_young_upload_may_be_of_a_save_under_way(tmp_path) -> None:
    begin(str(tmp_path), f"step-2/{OLD}")
    assert sweep(tmp_path).uploads == ()
    assert uploads(str(tmp_path)) == [f"step-2/{OLD}"]
    assert sweep(tmp_path, older_than=-10).uploads == (f"{tmp_path.as_uri()}/step-2/{OLD}",)
    assert uploads(str(tmp_path)) == []


def test_a_file_is_as_young_as_its_place_whatever_time_a_copy_has_kept(tmp_path) -> None:
    """As ``cp -a`` copies a checkpoint: first the data, later what names them."""
    cloudckpt.save(STATE, checkpoint_id=tmp_path / "run" / "step-1")
    [data] = (tmp_path / "run" / "step-1").glob("*.distcp")
    os.utime(data, (0, 0))
    (tmp_path / "copy" / "step-1").mkdir(parents=True)
    shutil.copy2(data, tmp_path / "copy" / "step-1")
    assert sweep(tmp_path / "copy").objects == ()
    assert sweep(tmp_path / "copy", older_than=0).objects != ()


def test_what_others_have_written_or_begun_stays_whatever_its_age(run) -> None:
    """Of another program, and of torch's own writers by other libraries."""
    names = ["step-2/__0_0.distcp", "step-2/model.bin", "step-2/.conditions", "notes", f"{OLD}.gz"]
    put(run, *names)
    begun = [*names, "model.safetensors", "step-2/.metadata"]
    begin(run, *begun)
    found = sweep(run, older_than=-10)
    assert (found.objects, found.uploads) == ((), ())
    assert {*uploads(run)} == {*begun}


def test_beside_metadata_that_can_not_be_read_nothing_is_left_over(run) -> None:
    put(run, f"step-2/{OLD}", "step-2/.metadata", f"step-3/{OLD}", f"step-2/{OTHER}")
    found = sweep(run, older_than=-10)
    assert found.objects == (f"{run}/step-3/{OLD}",)
    assert found.unread == (f"{run}/step-2/.metadata",)


@pytest.fixture
def faulty(run, monkeypatch) -> FaultyStore:
    """The store of the run, which fails when it is told to; of conditions nothing is known."""
    made = FaultyStore(MemoryStore(CheckpointURI.parse(run).bucket))
    made.capabilities = dataclasses.replace(made.capabilities, conditional_writes=None)
    monkeypatch.setattr(registry, "_OPENERS", {"memory": lambda: lambda uri, config: made})
    monkeypatch.setattr(registry, "_places", {})
    return made


@pytest.mark.parametrize("verb", ["abort_upload", "delete"])
def test_what_can_not_be_deleted_is_told_and_the_rest_is_gone(run, faulty, verb) -> None:
    names = [f"step-1/{OLD}", f"step-2/{OLD}"]
    put(run, *names)
    begin(run, *names)
    faulty.fail(verb, AccessDeniedError, where=lambda key: key.endswith(names[0]))
    with pytest.raises(AccessDeniedError) as failed:
        sweep(run, older_than=-10)
    objects, begun = [info.key for info in faulty.list("run/")], uploads(run)
    assert objects == ([f"run/{names[0]}"] if verb == "delete" else [])
    assert begun == (names[:1] if verb == "abort_upload" else [])
    told = f"could not be deleted: objects {len(objects)}, uploads {len(begun)}"
    assert told in str(failed.value)


def test_what_is_begun_under_our_own_names_on_a_disk_is_ours_whatever_its_key(tmp_path) -> None:
    parsed = CheckpointURI.parse(tmp_path / "tokenizer.json")
    open_store(parsed, Config()).create_upload(parsed.prefix, 5 * 1024**2)
    assert sweep(tmp_path, older_than=-10).uploads == (str(parsed),)
    assert list(tmp_path.iterdir()) == []


IMPATIENT = Config(retry=RetryPolicy(attempts=1, base=0.0, cap=0.0))
TRIED = {
    "a file": lambda uri: cloudckpt.files.save_file(
        f"{uri}/tokenizer.json", b"text", if_absent=True, config=IMPATIENT
    ),
    "a model": lambda uri: cloudckpt.hf.save(STATE, uri, config=IMPATIENT),
    "a save": lambda uri: cloudckpt.save(STATE, checkpoint_id=uri, config=IMPATIENT),
}


@pytest.mark.parametrize("tried", TRIED)
def test_trials_of_processes_that_were_killed_are_left_over(run, faulty, tried) -> None:
    faulty.fail("delete", ConnectionLostError, probability=1.0)
    TRIED[tried](f"{run}/step-1")
    faulty.heal()
    [trial] = [info.key for info in faulty.list("") if "conditions" in info.key]
    assert find_leftovers(run).objects == ()
    assert sweep(run, older_than=-10).objects == (faulty.uri(trial),)


def test_checkpoints_of_torch_stay_also_those_of_single_ranks(tmp_path) -> None:
    dcp.save(STATE, checkpoint_id=str(tmp_path / "torch"))
    dcp.save(STATE, checkpoint_id=str(tmp_path / "alone"), use_collectives=False)
    before = sorted(tmp_path.rglob("*"))
    assert sweep(tmp_path, older_than=-10).objects == ()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_save_that_has_taken_too_long_does_not_commit(run, monkeypatch) -> None:
    times = [0.0]
    clock = types.SimpleNamespace(clock_gettime=lambda kind: times[0], CLOCK_MONOTONIC=1)
    monkeypatch.setattr(baseline, "time", clock)

    class Slow(cloudckpt.checkpointer.CommitHook):
        def before_commit(self, uri, metadata) -> None:
            times[0] = 13 * 3600.0

    writer = cloudckpt.CloudStorageWriter(f"{run}/step-1", commit_hook=Slow())
    with pytest.raises(IncompleteSaveError, match="12 hours"):
        cloudckpt.save(STATE, storage_writer=writer)
    assert find_leftovers(run, older_than=-10).objects == ()
    assert not cloudckpt.exists(f"{run}/step-1")


def test_what_was_found_is_deleted_and_nothing_that_is_new_or_no_longer_left_over(run) -> None:
    put(run, f"step-2/{OLD}", f"step-3/{OLD}")
    begin(run, f"step-2/{OLD}")
    asked = find_leftovers(run, older_than=-10)
    put(run, f"step-2/{OTHER}")  # left over since
    begin(run, f"step-2/{OTHER}")
    put(run, "step-3/.metadata")  # nobody knows what this names
    done = sweep(run, older_than=-10, only=asked)
    assert (done.objects, done.uploads) == ((f"{run}/step-2/{OLD}",), (f"{run}/step-2/{OLD}",))
    assert done.unread == (f"{run}/step-3/.metadata",)
    store = open_store(CheckpointURI.parse(run), Config())
    left = {info.key for info in store.list("")}
    assert left == {f"run/step-2/{OTHER}", f"run/step-3/{OLD}", "run/step-3/.metadata"}
    assert uploads(run) == [f"step-2/{OTHER}"]
