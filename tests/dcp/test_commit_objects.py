"""Reading metadata takes few requests, and one rank's reading serves others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

import cloudckpt
from cloudckpt.checkpoint import committed
from cloudckpt.errors import CheckpointCorruptError, UnsupportedValueError
from cloudckpt.stores.registry import open_store
from cloudckpt.uri import CheckpointURI

from .places import Place
from .values import assert_same, blank_like, numbered

STATE = {"w": numbered(300, 100), "none": torch.zeros(0, 4), "scalar": torch.tensor(2.0), "n": [1]}


@pytest.fixture
def saved(local) -> Place:
    cloudckpt.save(STATE, checkpoint_id=local.uri)
    return local


@pytest.fixture
def requests(saved, monkeypatch) -> list[tuple[str, str]]:
    """Those that are sent for objects of the checkpoint."""
    store, sent = open_store(CheckpointURI.parse(saved.uri), saved.config), []

    def noting(verb, usual, key, *args, **kwargs):
        sent.append((verb, key.rpartition("/")[2]))
        return usual(key, *args, **kwargs)

    for verb in ("head", "get", "get_range"):
        monkeypatch.setattr(store, verb, partial(noting, verb, getattr(store, verb)), raising=False)
    return sent


def test_metadata_take_two_requests(saved, requests):
    saved.reader().read_metadata()
    assert requests == [("head", ".metadata"), ("get_range", ".metadata")]


@pytest.mark.parametrize(("tail", "count"), [(10_000, 2), (100, 3)], ids=["in it", "longer"])
def test_of_large_metadata_only_the_end_is_read(saved, requests, monkeypatch, tail, count):
    """A body that is longer than what is read at first takes one more request."""
    cloudckpt.save(
        {f"t{number}": numbered(3, first=number) for number in range(500)}, checkpoint_id=saved.uri
    )
    requests.clear()
    monkeypatch.setattr(committed, "_TAIL", tail)
    reader = saved.reader()
    metadata = reader.read_metadata()
    assert len(metadata.state_dict_metadata) == 500
    assert len(requests) == count
    assert len(reader.packed()) < len(saved.read(".metadata")) / 2


def test_a_planner_that_adds_fields_to_the_metadata_is_refused(saved):
    class Own(DefaultSavePlanner):
        def create_global_plan(self, all_plans):
            plans, metadata = super().create_global_plan(all_plans)
            metadata.mcore_data = {"kept": [1, 2]}
            return plans, metadata

    with pytest.raises(UnsupportedValueError, match="the planner's metadata") as caught:
        cloudckpt.save(STATE, checkpoint_id=saved.uri, planner=Own())
    assert caught.value.uri == saved.uri
    assert cloudckpt.verify(saved.uri).has_checksums  # what was there before


def changed(place: Place, change: Callable[[bytes], bytes]) -> None:
    with open(f"{place.path}/.metadata", "r+b") as file:
        data = change(file.read())
        file.seek(0)
        file.truncate()
        file.write(data)


@pytest.mark.parametrize("at", [-1, -2, -12, -20])
def test_a_damaged_end_does_not_make_metadata_those_of_another_writer(saved, at):
    """They would be read without checksums, and without the notes."""
    changed(saved, lambda data: data[: len(data) + at] + b"\xee" + data[len(data) + at + 1 :])
    with pytest.raises(CheckpointCorruptError):
        cloudckpt.load(blank_like(STATE), checkpoint_id=saved.uri)


@pytest.mark.parametrize("cut", [1, 20, 56, 100])
def test_metadata_that_are_cut_off_behind_torchs_part_are_damaged(saved, cut):
    changed(saved, lambda data: data[:-cut])
    with pytest.raises(CheckpointCorruptError):
        cloudckpt.load(blank_like(STATE), checkpoint_id=saved.uri)


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


def test_metadata_that_a_user_has_changed_lead_to_the_same_bytes(saved):
    """As libraries do that rename entries before they load."""
    reader = saved.reader()
    metadata = reader.read_metadata()
    places = dict(metadata.storage_data)
    changed = dataclasses.replace(metadata, storage_data=places)
    reader.set_up_storage_reader(changed, True)
    (found,) = reader.places_in(changed).wholes([MetadataIndex("w", (0, 0))])
    assert found.nbytes == places[MetadataIndex("w", (0, 0))].length


def test_a_verification_finds_damage_in_what_only_other_readers_read(saved, monkeypatch):
    cloudckpt.save(
        {f"t{number}": numbered(3, first=number) for number in range(500)}, checkpoint_id=saved.uri
    )
    monkeypatch.setattr(committed, "_TAIL", 10_000)
    with open(f"{saved.path}/.metadata", "r+b") as file:
        file.seek(12_345)
        byte = file.read(1)[0]
        file.seek(12_345)
        file.write(bytes([byte ^ 1]))
    loaded = {"t7": torch.zeros(3)}
    cloudckpt.load(loaded, checkpoint_id=saved.uri)
    assert_same(loaded["t7"], numbered(3, first=7))
    with pytest.raises(CheckpointCorruptError, match="readers other than cloudckpt") as caught:
        cloudckpt.verify(saved.uri)
    assert caught.value.uri.endswith("/.metadata")
