"""Deletion makes a checkpoint invisible before it takes its data, and touches nothing else."""

from __future__ import annotations

import threading
import uuid

import pytest
import torch

import cloudckpt
from cloudckpt import Config, RetryPolicy
from cloudckpt.errors import CheckpointReplacedError
from cloudckpt.runs.deleting import delete
from cloudckpt.stores import local, registry
from cloudckpt.uri import CheckpointURI
from support.faulty_store import FaultyStore
from support.memory_store import MemoryStore

CONFIG = Config(retry=RetryPolicy(attempts=3, base=0.0, cap=0.0))


class Watched(MemoryStore):
    """Calls a function before each deletion."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.deleted: list[str] = []
        self.before = lambda key: None

    def delete(self, key, *, if_version=None):
        self.before(key)
        super().delete(key, if_version=if_version)
        self.deleted.append(key)

    @property
    def has_lost_its_commit(self) -> bool:
        return self.deleted == ["run/step-7/.metadata"]


@pytest.fixture
def store(monkeypatch) -> Watched:
    made = Watched(uuid.uuid4().hex)
    monkeypatch.setattr(registry, "_OPENERS", {"memory": lambda: lambda uri, config: made})
    return made


def save(store: Watched, step: int, value: float = 1.0) -> CheckpointURI:
    uri = CheckpointURI.parse(f"{store.root}/run/step-{step}")
    state = {"w": torch.full((50,), value), "n": step}
    cloudckpt.save(state, checkpoint_id=uri, config=CONFIG)
    store.deleted.clear()
    return uri


def value(uri: CheckpointURI) -> float:
    found = {"w": torch.zeros(50), "n": 0}
    cloudckpt.load(found, checkpoint_id=uri, config=CONFIG)
    [one] = found["w"].unique().tolist()
    return one


def keys(store: Watched, below: str = "") -> list[str]:
    return [info.key for info in store.list(below)]


def test_nothing_of_a_deleted_checkpoint_is_left_and_its_neighbours_are(store) -> None:
    uri, other = save(store, 7), save(store, 70)
    neighbours = keys(store, "run/step-70/")
    delete(uri, config=CONFIG)
    assert keys(store) == neighbours
    assert store.deleted[0] == "run/step-7/.metadata"
    assert cloudckpt.exists(other, config=CONFIG)
    assert not cloudckpt.exists(uri, config=CONFIG)


def test_a_save_that_commits_meanwhile_stays_whole(store) -> None:
    uri = save(store, 7)

    def race(key: str) -> None:
        store.before = lambda key: None
        save(store, 7, value=2.0)

    store.before = race
    with pytest.raises(CheckpointReplacedError):
        delete(uri, config=CONFIG)
    assert value(uri) == 2.0


def test_a_commit_that_is_sent_once_more_meanwhile_goes_too(store) -> None:
    """As by a save whose commit was carried out, and which has not heard of it."""
    uri = save(store, 7)
    commit, _ = store.get(uri.key(".metadata"))

    def send_again(key: str) -> None:
        if store.has_lost_its_commit:
            store.put(uri.key(".metadata"), [memoryview(commit)], checksum=0, if_version="")

    store.before = send_again
    delete(uri, config=CONFIG)
    assert keys(store) == []


def test_another_save_that_comes_behind_the_commit_object_stays(store) -> None:
    uri, other = save(store, 7), save(store, 8, value=2.0)

    def save_here(key: str) -> None:
        if store.has_lost_its_commit:
            for info in store.list(other.key("")):
                name = info.key.removeprefix(other.key(""))
                store.put(uri.key(name), [memoryview(store.get(info.key)[0])], checksum=0)

    store.before = save_here
    delete(uri, config=CONFIG)
    assert value(uri) == 2.0


def test_on_a_disk_its_folder_goes_too_unless_other_files_are_in_it(tmp_path) -> None:
    for step in (1, 2):
        cloudckpt.save({"n": step}, checkpoint_id=tmp_path / f"step-{step}")
    (tmp_path / "step-2" / "config.json").write_text("{}")
    for step in (1, 2):
        delete(tmp_path / f"step-{step}")
    assert [path.name for path in tmp_path.rglob("*")] == ["step-2", "config.json"]


def test_a_folder_that_is_deleted_while_something_is_written_to_it_is_made_again(
    tmp_path, monkeypatch
) -> None:
    make_folder, gone = local.make_folder, []

    def made(folder) -> None:
        make_folder(folder)
        if not gone:
            gone.append(folder)
            folder.rmdir()

    monkeypatch.setattr(local, "make_folder", made)
    cloudckpt.save({"n": 2}, checkpoint_id=tmp_path / "step-1")
    assert gone == [tmp_path / "step-1"]
    assert cloudckpt.exists(tmp_path / "step-1")


class Rounds(FaultyStore):
    """Answers requests that wait at the same time together, and counts how often it does."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.count = self._waiting = 0
        self._changed = threading.Condition()

    def _struck(self, verb, key):
        with self._changed:
            mine, self._waiting = self.count, self._waiting + 1
            if self._waiting > 1:  # the first one answers all
                self._changed.wait_for(lambda: self.count > mine)
            else:
                known = 0
                while self._waiting > known:
                    known = self._waiting
                    self._changed.wait(0.3)
                self.count, self._waiting = self.count + 1, 0
                self._changed.notify_all()
        return super()._struck(verb, key)


def test_the_deletion_of_a_base_waits_as_often_however_many_steps_refer_to_it(
    store, monkeypatch
) -> None:
    config = Config(retry=CONFIG.retry, incremental=True, connections=64)
    state = {"same": torch.arange(500.0), "other": torch.zeros(20)}
    for step in range(41):
        state["other"] += 1
        uri = f"{store.root}/run/step-{step}"
        cloudckpt.save(state, checkpoint_id=uri, config=config)
    rounds = Rounds(store)
    monkeypatch.setattr(registry, "_OPENERS", {"memory": lambda: lambda uri, config: rounds})
    registry._places.clear()
    delete(f"{store.root}/run/step-0", config=config)
    assert len([key for key in keys(store) if "step-0" in key and key.endswith("distcp")]) == 1
    assert rounds.count <= 12  # nine, and some that a busy machine answers apart
