"""A copy is made and committed as a save is: all of it is there and right, or nothing is seen."""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import cloudckpt
from cloudckpt import Config, RetryPolicy, errors
from cloudckpt.checkpoint.notes import Notes
from cloudckpt.checkpoint.objects import CLAIM
from cloudckpt.checksum import CRC64NVME
from cloudckpt.config import MIB
from cloudckpt.runs.copying import Copied, copy
from cloudckpt.stores import registry
from support.faulty_store import FaultyStore
from support.memory_store import MemoryStore

CONFIG = Config(connections=4, part_size=5 * MIB, retry=RetryPolicy(attempts=3, base=0.0, cap=0.0))
NOTES = Notes(step=7, metrics={"loss": 0.5}, user={"by": "Ä"})


def a_state(value: float = 1.0) -> dict[str, Any]:
    return {
        "model": {
            "large": torch.arange(3_500_000.0) * value,  # 14 MB: three parts
            "bias": torch.full((7,), value, dtype=torch.bfloat16),
            "empty": torch.empty(0, 5),
        },
        "lists": [{}, (1, None)],
        3: "a key that is a number",
        "step": 7,
    }


class Cloud:
    """Memory stores that fail when they are told to, by the names of their buckets."""

    def __init__(self) -> None:
        self.stores: dict[str, FaultyStore] = {}

    def store(self, name: str, *, copies: bool = False, **capabilities: Any) -> FaultyStore:
        """A new store; ``copies``: whether it copies from others by itself."""
        inner = MemoryStore(f"{name}-{uuid.uuid4().hex}")
        inner.capabilities = dataclasses.replace(inner.capabilities, **capabilities)
        inner.root = f"memory://{name}"
        made = self.stores[name] = FaultyStore(inner)
        if not copies:
            made.copies_from = lambda source: False
        return made

    def keys(self, name: str) -> list[str]:
        return [info.key for info in self.stores[name].inner.list("")]


def once_before(store: MemoryStore, verb: str, act: Callable[[], object], part: str = "") -> None:
    """Has something happen before the first request of a kind, for a key with a text in it."""
    usual, done = getattr(store, verb), []

    def call(key, *rest, **others):
        if part in str(key) and not done:
            done.append(key)
            act()
        return usual(key, *rest, **others)

    setattr(store, verb, call)


@pytest.fixture
def cloud(monkeypatch) -> Cloud:
    made = Cloud()
    openers = {**registry._OPENERS, "memory": lambda: lambda uri, config: made.stores[uri.bucket]}
    monkeypatch.setattr(registry, "_OPENERS", openers)
    monkeypatch.setattr(registry, "_places", {})
    made.store("here")
    made.store("there")
    return made


def save(uri: object, value: float = 1.0, config: Config = CONFIG, **kwargs: Any) -> None:
    writer = cloudckpt.CloudStorageWriter(uri, config=config, notes=NOTES)
    cloudckpt.save(a_state(value), storage_writer=writer, **kwargs)


def assert_same(uri: object, value: float = 1.0, config: Config = CONFIG) -> None:
    reader = cloudckpt.CloudStorageReader(uri, config=config)
    blank = {"model.large": torch.zeros(3_500_000), "step": None}
    dcp.load(blank, storage_reader=reader)
    assert torch.equal(blank["model.large"], a_state(value)["model"]["large"])
    assert blank["step"] == 7
    assert cloudckpt.verify(uri, config=config).nbytes > 14_000_000


@pytest.mark.parametrize("way", ["disk to S3", "S3 to disk", "S3 to S3"])
def test_a_copy_has_the_same_bytes_names_and_notes(way, tmp_path, bucket, s3_config) -> None:
    places = {"disk": str(tmp_path / "run"), "S3": f"s3://{bucket}/run"}
    source, target = (f"{places[end]}/{i}" for i, end in enumerate(way.split(" to ")))
    save(source, config=s3_config)
    seen: list[tuple[int, int]] = []
    told = lambda done, total: seen.append((done, total))  # noqa: E731
    copied = copy(source, target, config=s3_config, progress=told)
    assert copied == Copied(
        checkpoints=1, objects=2, nbytes=copied.nbytes, by_store=copied.by_store
    )
    assert copied.by_store == (copied.nbytes if way == "S3 to S3" else 0)
    assert max(seen) == (copied.nbytes, copied.nbytes)
    assert_same(target, config=s3_config)
    ours, theirs = (cloudckpt.inspect(uri, config=s3_config) for uri in (source, target))
    assert dataclasses.replace(ours, uri="") == dataclasses.replace(theirs, uri="")
    assert theirs.notes == NOTES


@pytest.mark.parametrize("way", ["to", "from"])
def test_a_store_with_checksums_of_another_kind_keeps_those_of_the_source(cloud, way) -> None:
    cloud.store("here" if way == "from" else "there", checksum=CRC64NVME, verifies=True)
    save("memory://here/a")
    copy("memory://here/a", "memory://there/b", config=CONFIG)
    reader = cloudckpt.CloudStorageReader("memory://there/b", config=CONFIG)
    reader.read_metadata()
    assert reader.commit.checksum.name == ("crc64nvme" if way == "from" else "crc32c")
    assert_same("memory://there/b")


def test_checkpoints_of_torch_are_copied_as_they_are(cloud, tmp_path) -> None:
    dcp.save(a_state(), checkpoint_id=str(tmp_path / "of torch"))
    metadata = pickle.loads((tmp_path / "of torch" / ".metadata").read_bytes())
    metadata.mcore_data = {"as": "Megatron's"}
    (tmp_path / "of torch" / ".metadata").write_bytes(pickle.dumps(metadata))
    copy(tmp_path / "of torch", "memory://there/b", config=CONFIG)
    assert [key for key in cloud.keys("there") if key.endswith(".json")] == []
    assert not cloudckpt.verify("memory://there/b", config=CONFIG).has_checksums
    copy("memory://there/b", tmp_path / "back", config=CONFIG)
    blank = {"model": {"large": torch.zeros(3_500_000)}}
    dcp.load(blank, checkpoint_id=str(tmp_path / "back"))
    assert torch.equal(blank["model"]["large"], a_state()["model"]["large"])
    assert dcp.FileSystemReader(tmp_path / "back").read_metadata().mcore_data


def test_of_a_checkpoint_of_torch_what_the_store_says_of_its_bytes_is_compared(cloud, tmp_path):
    """Such a checkpoint has no checksums of its own."""
    dcp.save(a_state(), checkpoint_id=str(tmp_path / "of torch"))
    copy(tmp_path / "of torch", "memory://here/a", config=CONFIG)
    [data] = (tmp_path / "of torch").glob("*.distcp")
    os.truncate(data, data.stat().st_size - 1)
    with pytest.raises(errors.CheckpointCorruptError, match="was truncated"):
        copy(tmp_path / "of torch", "memory://there/b", config=CONFIG)
    store = cloud.stores["here"].inner
    usual = store.head
    store.head = lambda key: dataclasses.replace(usual(key), checksum=1)
    with pytest.raises(errors.CheckpointCorruptError, match="does not match its checksum"):
        copy("memory://here/a", "memory://there/b", config=CONFIG)
    assert cloud.keys("there") == []


def test_bytes_that_are_damaged_on_the_way_are_fetched_again(cloud) -> None:
    save("memory://here/a")
    source = cloud.stores["here"].inner
    usual, damaged = source.get_range, []

    def get_range(key, start, into, **others):
        info = usual(key, start, into, **others)
        if into[0].nbytes > MIB and not damaged:
            damaged.append(key)
            into[0][1000] ^= 1
        return info

    source.get_range = get_range
    assert copy("memory://here/a", "memory://there/b", config=CONFIG).objects == 2
    assert damaged
    assert_same("memory://there/b")
    assert len(cloud.keys("there")) == 3


def test_passing_failures_on_both_sides_pass(cloud) -> None:
    save("memory://here/a")
    here, there = cloud.stores["here"], cloud.stores["there"]
    here.fail("get_range", errors.ConnectionLostError, calls=[1, 3], when="during", moved=1000)
    there.fail("put_part", errors.ConnectionLostError, calls=[1, 2], when="after")
    there.fail("complete_upload", errors.ConnectionLostError, calls=[1], when="after")
    copy("memory://here/a", "memory://there/b", config=CONFIG)
    assert there.failed["put_part"] == 2
    assert_same("memory://there/b")


def test_of_a_commit_that_nobody_knows_of_nothing_is_deleted(cloud) -> None:
    save("memory://here/a")
    commits = lambda key: key.endswith(".metadata")  # noqa: E731
    cloud.stores["there"].fail("put", errors.ConnectionLostError, where=commits)
    with pytest.raises(errors.CommitUnknownError):
        copy("memory://here/a", "memory://there/b", config=CONFIG)
    assert len(cloud.keys("there")) == 2


def test_a_surprise_behind_the_commit_of_a_copy_undoes_nothing(cloud) -> None:
    incremental = dataclasses.replace(CONFIG, incremental=True)
    for uri, value in (("memory://here/a", 2.0), ("memory://there/b", 1.0)):
        save(uri, value, config=incremental)
    marks = lambda key: ".cloudckpt-keep." in key  # noqa: E731
    cloud.stores["there"].fail("list", OSError, where=marks)
    copy("memory://here/a", "memory://there/b", overwrite=True, config=CONFIG)
    assert cloud.stores["there"].failed["list"] == 1
    assert_same("memory://there/b", 2.0)


def test_a_save_to_the_same_place_meanwhile_is_a_conflict(cloud) -> None:
    save("memory://here/a", 1.0)
    target = cloud.stores["there"].inner
    once_before(target, "complete_upload", lambda: save("memory://there/b", 2.0))
    with pytest.raises(errors.CheckpointConflictError):
        copy("memory://here/a", "memory://there/b", config=CONFIG)
    assert_same("memory://there/b", 2.0)
    assert len(cloud.keys("there")) == 3


def test_a_source_that_is_replaced_meanwhile_is_copied_anew(cloud) -> None:
    save("memory://here/a", 1.0)
    source = cloud.stores["here"].inner
    once_before(source, "get_range", lambda: save("memory://here/a", 2.0), "__0_0")
    copy("memory://here/a", "memory://there/b", config=CONFIG)
    assert_same("memory://there/b", 2.0)
    assert len(cloud.keys("there")) == 3


@pytest.fixture
def within(cloud) -> Cloud:
    """Stores of which the one copies from the other by itself."""
    cloud.store("there", copies=True)
    return cloud


def test_within_a_cloud_no_bytes_pass_here(within) -> None:
    save("memory://here/a")
    within.stores["here"].calls.clear()
    seen: list[tuple[int, int]] = []
    copied = copy(
        "memory://here/a",
        "memory://there/b",
        config=CONFIG,
        progress=lambda *now: seen.append(now),
    )
    assert copied.by_store == copied.nbytes == seen[-1][0]
    assert within.stores["there"].calls["put"] == 1  # the metadata
    assert_same("memory://there/b")


@pytest.mark.parametrize(
    "error",
    [
        errors.AccessDeniedError,
        errors.InvalidRequestError,
        errors.ObjectNotFoundError,
        errors.PreconditionFailedError,
    ],
)
def test_what_a_store_refuses_to_copy_by_itself_is_streamed(within, error) -> None:
    save("memory://here/a")
    within.stores["there"].fail("copy", error)
    copied = copy("memory://here/a", "memory://there/b", config=CONFIG)
    assert copied.by_store == 0
    assert_same("memory://there/b")
    assert len(within.keys("there")) == 3


def test_what_is_no_place_for_a_copy_is_refused(cloud) -> None:
    save("memory://here/a")
    with pytest.raises(errors.ConfigError, match="the same"):
        copy("memory://here/a", "memory://here/a", config=CONFIG)
    with pytest.raises(errors.InvalidURIError):
        copy("memory://here/a", "s4://there/b", config=CONFIG)
    with pytest.raises(errors.CheckpointNotFoundError, match="neither here"):
        copy("memory://here/nothing", "memory://there/b", config=CONFIG)
    with pytest.raises(errors.CheckpointNotFoundError, match="epoch"):
        copy("memory://here", "memory://there", step_name="epoch-{step}", config=CONFIG)
    assert cloud.keys("there") == []


@pytest.fixture
def run(tmp_path) -> Path:
    """A run of four steps, of which the second is torn, and what else may lie in such a folder."""
    for step in range(1, 5):
        state = {"w": torch.full((500,), float(step))}
        cloudckpt.save(state, checkpoint_id=tmp_path / "run" / f"step-{step}")
    cloudckpt.save({"w": torch.zeros(500)}, checkpoint_id=tmp_path / "run" / "the best #1, ü?")
    (tmp_path / "run" / "step-2" / ".metadata").unlink()
    (tmp_path / "run" / "logs").mkdir()
    (tmp_path / "run" / "logs" / "events").write_text("mine")
    return tmp_path / "run"


def copied_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_checkpoint_is_copied_beneath_a_run_and_no_run_to_a_checkpoint(tmp_path, slash) -> None:
    for place in ("a/step-1", "a/step-2", "b/step-1"):
        cloudckpt.save({"n": 1}, checkpoint_id=tmp_path / place)
    target = f"{tmp_path / 'b'}{slash}"
    (tmp_path / "claimed").mkdir()
    (tmp_path / "claimed" / CLAIM).write_text("{}")  # of a job that saves its first step
    for folder in (target, tmp_path / "claimed"):
        assert copy(tmp_path / "a" / "step-2", folder).checkpoints == 1
        assert cloudckpt.exists(f"{folder}/step-2")
    assert not cloudckpt.exists(target)
    with pytest.raises(errors.CheckpointExistsError):
        copy(tmp_path / "a" / "step-2", target, overwrite=False)
    with pytest.raises(errors.ConfigError, match="the same"):
        copy(tmp_path / "a" / "step-2", tmp_path / "a")
    assert copy(tmp_path / "b", tmp_path / "c").checkpoints == 2
    with pytest.raises(errors.CheckpointExistsError, match="so a run can't be copied to it"):
        copy(tmp_path / "a", tmp_path / "b" / "step-1")
    assert not cloudckpt.exists(tmp_path / "b" / "step-1" / "step-1")


def test_steps_at_the_target_that_refer_to_others_are_recognised_until_those_are_gone(tmp_path):
    state = {"frozen": torch.ones(500), "trained": torch.zeros(500)}
    for step in range(1, 3):
        state["trained"] += 1
        uri = tmp_path / "run" / f"step-{step}"
        cloudckpt.save(state, checkpoint_id=uri, config=Config(incremental=True))
    assert cloudckpt.inspect(tmp_path / "run" / "step-2").shared
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert copy(tmp_path / "run", tmp_path / "copy") == Copied(already_there=2)
    for data in (tmp_path / "copy" / "step-1").glob("*.distcp"):
        data.unlink()
    copied = copy(tmp_path / "run", tmp_path / "copy", overwrite=True)
    assert (copied.checkpoints, copied.already_there) == (2, 0)
    assert cloudckpt.verify(tmp_path / "copy" / "step-2").items == 2


@pytest.mark.parametrize("when", ["before its turn", "while it is copied"])
def test_a_checkpoint_of_a_run_that_is_deleted_meanwhile_is_left_out(cloud, caplog, when) -> None:
    for step in range(1, 4):
        state = {"w": torch.full((500,), float(step))}
        cloudckpt.save(state, checkpoint_id=f"memory://here/run/step-{step}", config=CONFIG)
    once_before(
        cloud.stores["here"].inner,
        "get_range",
        lambda: cloudckpt.delete("memory://here/run/step-2", config=CONFIG),
        "step-1/__" if when == "before its turn" else "step-2/__",
    )
    copied = copy("memory://here/run", "memory://there/run", config=CONFIG)
    assert (copied.checkpoints, copied.already_there) == (2, 0)
    assert {key.split("/")[1] for key in cloud.keys("there")} == {"step-1", "step-3"}
    assert "deleted before it was copied: memory://here/run/step-2" in caplog.text


def _copy(source: str, target: str) -> int:
    """What this rank has copied of it."""
    done = [0]
    copy(
        source,
        target,
        process_group=dist.group.WORLD,
        progress=lambda moved, total: done.append(moved),
    )
    return max(done)


def test_ranks_divide_the_checkpoints_of_a_run(ranks, run, tmp_path) -> None:
    nbytes = ranks(2, _copy, str(run), str(tmp_path / "b"))
    assert all(nbytes)
    assert copied_names(tmp_path / "b") == ["step-1", "step-3", "step-4", "the best #1, ü?"]
    assert cloudckpt.verify(tmp_path / "b" / "step-4").items == 1
    alone = ranks(2, _copy, str(run / "step-4"), str(tmp_path / "one"))
    assert alone[0] > alone[1] == 0
    assert cloudckpt.verify(tmp_path / "one").items == 1


def test_what_fails_on_one_rank_is_told_to_all(ranks, run, tmp_path) -> None:
    for path in (run / "step-3").glob("__0_*.distcp"):
        path.unlink()
    raised = ranks.errors(2, _copy, str(run), str(tmp_path / "b"))
    assert [type(error) for error in raised] == [errors.CheckpointCorruptError] * 2
    assert "that were not copied: 1; " in str(raised[0])
    assert copied_names(tmp_path / "b") == ["step-1", "step-4", "the best #1, ü?"]


FAILING = [
    *(
        (verb, errors.AccessDeniedError, False)
        for verb in ("create_upload", "complete_upload", "put")
    ),
    ("put_part", KeyboardInterrupt, False),
    ("copy", KeyboardInterrupt, True),
    ("copy", errors.CredentialsError, True),
]


@pytest.mark.parametrize(("verb", "error", "by_store"), FAILING)
def test_a_copy_that_fails_leaves_nothing(cloud, verb, error, by_store) -> None:
    save("memory://here/a")
    cloud.store("there", copies=by_store)
    cloud.stores["there"].fail(verb, error, calls=[2] if verb in ("put_part", "copy") else None)
    with pytest.raises(error):
        copy("memory://here/a", "memory://there/b", config=CONFIG)
    assert cloud.keys("there") == []
    assert list(cloud.stores["there"].inner.list_uploads("")) == []


@pytest.mark.parametrize("by_store", [False, True])
def test_a_damaged_object_is_named_and_nothing_of_it_is_at_the_target(cloud, by_store) -> None:
    cloud.store("there", copies=by_store)
    save("memory://here/a")
    store = cloud.stores["here"].inner
    data = max(store.list(""), key=lambda info: info.size).key
    content, _ = store.get(data)
    for tenth in (3, 7):
        content[tenth * len(content) // 10] ^= 1
    store.put(data, [memoryview(content)], checksum=0)
    with pytest.raises(errors.CheckpointCorruptError, match=r"at memory://here/a/\S+\.distcp"):
        copy("memory://here/a", "memory://there/b", config=CONFIG)
    assert cloud.keys("there") == []


@pytest.mark.parametrize("there", ["nothing", "the same", "another", "damaged"])
def test_a_copy_of_a_run_goes_on_and_replaces_what_differs_unless_that_is_off(
    run, tmp_path, there
) -> None:
    target = tmp_path / "copy" / "step-3"
    if there != "nothing":
        copy(run / ("step-1" if there == "another" else "step-3"), target)
    if there == "damaged":
        os.truncate(target / ".metadata", 100)
    if there in ("another", "damaged"):
        with pytest.raises(errors.CheckpointExistsError):
            copy(run, tmp_path / "copy", overwrite=False)
    else:
        copied = copy(run, tmp_path / "copy", overwrite=False)
        assert (copied.checkpoints, copied.already_there) == (
            (4, 0) if there == "nothing" else (3, 1)
        )
    copy(run, tmp_path / "copy")
    assert copied_names(tmp_path / "copy") == ["step-1", "step-3", "step-4", "the best #1, ü?"]
    state = {"w": torch.zeros(500)}
    cloudckpt.load(state, checkpoint_id=target)
    assert state["w"].unique().item() == 3.0
