"""Whether there is a checkpoint, and what it consists of: few requests, and no wrong answer."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp

import cloudckpt
from cloudckpt.checkpoint import committed
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ServerError,
)
from cloudckpt.stores.registry import open_store
from cloudckpt.uri import CheckpointURI
from support.faulty_store import FaultyStore

from .places import Place
from .values import assert_same, blank_like, numbered

STATE = {"w": numbered(300, 100), "none": torch.zeros(0, 4), "scalar": torch.tensor(2.0), "n": [1]}


@pytest.fixture
def saved(local) -> Place:
    cloudckpt.save(STATE, checkpoint_id=local.uri)
    return local


@pytest.fixture
def faulty(local, monkeypatch) -> FaultyStore:
    """Counts what is asked of the store of the place, and can be told to fail."""
    store = FaultyStore(open_store(CheckpointURI.parse(local.uri), local.config))
    for module in ("api", "dcp.reader"):
        monkeypatch.setattr(f"cloudckpt.{module}.open_store", lambda *_: store)
    return store


# ---- whether there is one


def test_asking_whether_there_is_one_logs_nothing_and_takes_one_request(s3, caplog):
    store = open_store(CheckpointURI.parse(s3.uri), s3.config)
    requests, inner = [], store.exchange
    store.exchange = lambda method, url, *args, **kw: (
        requests.append((method, url)) or inner(method, url, *args, **kw)
    )
    try:
        with caplog.at_level(logging.DEBUG, "cloudckpt"):
            assert not cloudckpt.exists(s3.uri, config=s3.config)
        assert [r for r in caplog.records if r.levelno >= logging.INFO] == []
        assert len(requests) == 1
        s3.save(STATE)
        requests.clear()
        assert cloudckpt.exists(s3.uri, config=s3.config)
        assert len(requests) == 1
    finally:
        del store.exchange


@pytest.mark.parametrize("error", [AccessDeniedError, ServerError])
def test_a_store_that_does_not_answer_says_nothing_of_a_checkpoint(error, local, faulty):
    faulty.fail("get_range", error, calls=range(1, 20))
    with pytest.raises(error):
        cloudckpt.exists(local.uri, config=local.config)


def test_the_last_checkpoints_beneath_a_run_are_named(local):
    for step in (5, 200, 1000, 30, 7, 9):
        local.at(f"step-{step}").save(STATE)
    with pytest.raises(CheckpointNotFoundError) as caught:
        local.load(STATE)
    assert caught.value.uri == local.uri
    named = [step for step in (5, 200, 1000, 30, 7, 9) if f"/step-{step}" in str(caught.value)]
    assert named == [200, 1000, 30, 9]


def test_a_listing_that_is_refused_is_no_matter(local, faulty):
    local.at("step-1").save(STATE)
    faulty.fail("list", AccessDeniedError)
    with pytest.raises(CheckpointNotFoundError):
        local.load(STATE)


# ---- what it consists of


def test_metadata_take_two_requests(saved, faulty):
    saved.reader().read_metadata()
    assert faulty.calls == Counter(head=1, get_range=1)


@pytest.mark.parametrize(("tail", "count"), [(10_000, 2), (100, 3)], ids=["in it", "longer"])
def test_of_large_metadata_only_the_end_is_read(local, faulty, monkeypatch, tail, count):
    """A body that is longer than what is read at first takes one more request.

    A verification finds damage in what only other readers read.
    """
    local.save({f"t{number}": numbered(3, first=number) for number in range(500)})
    changed(local, lambda data: data[:12_345] + bytes([data[12_345] ^ 1]) + data[12_346:])
    faulty.calls.clear()
    monkeypatch.setattr(committed, "_TAIL", tail)
    reader = local.reader()
    assert len(reader.read_metadata().state_dict_metadata) == 500
    assert faulty.calls.total() == count
    assert len(reader.packed()) < len(local.read(".metadata")) / 2
    local.load(loaded := {"t7": torch.zeros(3)})
    assert_same(loaded["t7"], numbered(3, first=7))
    with pytest.raises(CheckpointCorruptError, match="readers other than cloudckpt") as caught:
        cloudckpt.verify(local.uri)
    assert caught.value.uri.endswith("/.metadata")


def changed(place: Place, change: Callable[[bytes], bytes]) -> None:
    with open(f"{place.path}/.metadata", "r+b") as file:
        data = change(file.read())
        file.seek(0)
        file.truncate()
        file.write(data)


@pytest.mark.parametrize("tail", [100, 1 << 20])
def test_metadata_of_a_newer_version_are_replaced(saved, monkeypatch, tail):
    changed(saved, lambda data: data[:-1] + b"\2")
    monkeypatch.setattr(committed, "_TAIL", tail)
    with pytest.raises(CheckpointCorruptError, match="newer"):
        cloudckpt.load(blank_like(STATE), checkpoint_id=saved.uri)
    cloudckpt.save(STATE, checkpoint_id=saved.uri)
    loaded = blank_like(STATE)
    cloudckpt.load(loaded, checkpoint_id=saved.uri)
    assert_same(loaded, STATE)


class _Renaming(cloudckpt.CloudStorageReader):
    def read_metadata(self, *args, **kwargs):
        metadata = super().read_metadata(*args, **kwargs)
        entries, places = metadata.state_dict_metadata.items(), metadata.storage_data.items()
        metadata.state_dict_metadata = {f"my.{name}": entry for name, entry in entries}
        metadata.storage_data = {replace(at, fqn=f"my.{at.fqn}"): place for at, place in places}
        metadata.planner_data = None
        return metadata


@pytest.mark.parametrize("save", [cloudckpt.save, dcp.save])
def test_entries_that_a_reader_renames_lead_to_the_same_bytes(local, save):
    """As libraries do that rename entries before they load."""
    save(STATE, checkpoint_id=local.path)
    loaded = {"my.w": torch.zeros_like(STATE["w"])}
    dcp.load(loaded, storage_reader=_Renaming(local.uri, config=local.config))
    assert_same(loaded["my.w"], STATE["w"])


class _Misled(cloudckpt.CloudStorageReader):
    def read_metadata(self, *args, **kwargs):
        super().read_metadata(*args, **kwargs)
        return cloudckpt.CloudStorageReader(f"{self.uri}/other").read_metadata()


def test_the_metadata_of_another_checkpoint_do_not_load_this_one(saved):
    cloudckpt.save(STATE, checkpoint_id=saved.at("other").uri)
    loaded = {"w": torch.zeros_like(STATE["w"])}
    with pytest.raises(CheckpointCorruptError, match="is gone"):
        cloudckpt.load(loaded, storage_reader=_Misled(saved.uri))
    assert not loaded["w"].any()
