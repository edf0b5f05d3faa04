"""Which checkpoints a run has, found by few requests."""

from __future__ import annotations

import time
import uuid

import pytest
import torch

import cloudckpt
from cloudckpt import Config, RetryPolicy
from cloudckpt.errors import ConfigError
from cloudckpt.runs.catalog import latest, list_checkpoints
from cloudckpt.runs.copying import copy
from cloudckpt.stores import registry
from cloudckpt.stores.base import once
from support.memory_store import MemoryStore

CONFIG = Config(retry=RetryPolicy(attempts=3, base=0.0, cap=0.0))


class Counting(MemoryStore):
    """Counts requests as a store would answer them: listings a thousand at a time."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name
        self.requests: list[str] = []

    def list(self, prefix, retry=once):
        return self._paged("list", [*super().list(prefix)])

    def list_level(self, prefix, retry=once):
        found = [*MemoryStore(self.name).list_level(prefix)]  # which itself lists all beneath
        return self._paged("folders" if prefix == "run/" else "level", found)

    def _paged(self, kind, found):
        for start in range(0, max(len(found), 1), 1000):
            self.requests.append(kind)
            yield from found[start : start + 1000]

    def get_range(self, *args, **kwargs):
        self.requests.append("get")
        return super().get_range(*args, **kwargs)


@pytest.fixture
def store(monkeypatch) -> Counting:
    made = Counting(uuid.uuid4().hex)
    monkeypatch.setattr(registry, "_OPENERS", {"memory": lambda: lambda uri, config: made})
    return made


def put(store: MemoryStore, *keys: str, size: int = 3) -> None:
    for key in keys:  # which end as torch's metadata do
        store.put(key, [memoryview((b"x" * size)[:-2] + b"b.")], checksum=0)


def commit(store: MemoryStore, *steps: int) -> None:
    for step in steps:
        put(store, f"run/step-{step}/__0_0.0123456789abcdef.distcp", f"run/step-{step}/.metadata")


def test_checkpoints_are_listed_by_step_and_torn_ones_are_told_apart(store) -> None:
    commit(store, 10, 9, 100)
    put(store, "run/step-11/__3_1.0123456789abcdef.distcp", size=50)
    put(store, "run/final/.metadata", "run/logs/events", "run/file", "runner/step-1/.metadata")
    found = list_checkpoints(f"{store.root}/run", config=CONFIG)
    assert [
        (one.uri.rpartition("/")[2], one.step, one.is_committed, one.nbytes) for one in found
    ] == [
        ("step-9", 9, True, 6),
        ("step-10", 10, True, 6),
        ("step-11", 11, False, 50),
        ("step-100", 100, True, 6),
        ("final", None, True, 3),
    ]
    for one in found:
        assert one.modified is not None
        assert abs(one.modified - time.time()) < 600


def test_of_a_thousand_steps_few_requests_list_all_and_four_find_the_latest(store) -> None:
    commit(store, *range(1001))
    store.requests.clear()
    assert latest(f"{store.root}/run", config=CONFIG) == f"{store.root}/run/step-1000"
    assert len(store.requests) <= 4
    store.requests.clear()
    assert len(list_checkpoints(f"{store.root}/run", config=CONFIG)) == 1001
    assert store.requests.count("folders") == 2
    assert store.requests.count("level") == 1001
    assert len(store.requests) == 1003 + 1001  # and the notes of each step


@pytest.mark.parametrize("name", ["{:04}.bin", "~{:04}", "deep/er/{:04}", "{:04}/deep"])
def test_folders_of_strangers_are_not_listed_through(store, name) -> None:
    commit(store, 1, 2)
    put(store, *(f"run/theirs/{name.format(number)}" for number in range(5000)))
    put(store, *(f"run/step-2/{name.format(number)}" for number in range(5000)))
    store.requests.clear()
    found = list_checkpoints(f"{store.root}/run", config=CONFIG)
    assert [(one.step, one.nbytes) for one in found] == [(1, 6), (2, 6)]
    # the run; each of its three folders; where there are more names than fit, what is ours
    # by name; the claim, and the notes of both steps
    assert len(store.requests) <= 1 + 3 + 2 * 2 + 1 + 2 * 2


def test_a_copy_of_a_run_does_not_list_strangers_through(store) -> None:
    source, target = f"{store.root}/run", f"{store.root}/copy"
    cloudckpt.save({"w": torch.ones(3)}, checkpoint_id=f"{store.root}/run/step-1", config=CONFIG)
    copy(source, target, config=CONFIG)
    store.requests.clear()
    assert copy(source, target, config=CONFIG).already_there == 1
    before = len(store.requests)
    put(store, *(f"run/theirs/deep/{number:04}" for number in range(5000)))
    for folder in ("run/step-1", "copy/step-1"):
        put(store, *(f"{folder}/deep/{number:04}" for number in range(5000)))
    store.requests.clear()
    assert copy(source, target, config=CONFIG).already_there == 1
    assert len(store.requests) == before + 1  # a look at the folder of strangers


def test_a_checkpoint_of_many_ranks_is_listed_whole(store) -> None:
    put(store, *(f"run/step-1/__{rank}_0.0123456789abcdef.distcp" for rank in range(2500)))
    put(store, "run/step-1/.metadata", *(f"run/step-1/-{number}" for number in range(1200)))
    [found] = list_checkpoints(f"{store.root}/run", config=CONFIG)
    assert (found.is_committed, found.nbytes) == (True, 3 * 2501)


def test_other_names_of_steps_are_found_by_their_pattern(store, caplog) -> None:
    put(store, "run/epoch=3-step=7/.metadata", "run/epoch=3-step=12/.metadata")
    where = f"{store.root}/run"
    found = latest(where, step_name="epoch=3-step={step}", config=CONFIG)
    assert found == f"{where}/epoch=3-step=12"
    assert latest(where, config=CONFIG) is None
    assert "'step-{step}'" in caplog.text
    with pytest.raises(ConfigError):
        latest(where, step_name="epoch", config=CONFIG)
