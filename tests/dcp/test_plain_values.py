"""Values that are no tensors: which load by default, and what a save says of the others."""

import argparse
import contextlib
import dataclasses
import logging

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.testing._internal.two_tensor import TwoTensor

import cloudckpt
from cloudckpt.checkpoint import values
from cloudckpt.checkpointer import (
    CheckpointerConfig,
    make_async_checkpointer,
    make_sync_checkpointer,
)
from cloudckpt.errors import UnsupportedValueError, UntrustedPickleError

from .places import Place
from .values import assert_same

numpy = pytest.importorskip("numpy")
PATIENCE = 150.0


@dataclasses.dataclass
class OfTheUser:
    value: int = 7


def everything(place: Place, **options):
    config = CheckpointerConfig(config=place.config, **options)
    with make_sync_checkpointer(config) as checkpointer:
        return checkpointer.load(place.uri)


@pytest.fixture
def told(caplog, monkeypatch):
    """What was said of items, by a process that has said nothing before."""
    monkeypatch.setattr(values, "_checked", set())
    caplog.set_level(logging.WARNING, logger="cloudckpt")

    def messages():
        return [entry.getMessage() for entry in caplog.records if entry.name == "cloudckpt"]

    return messages


def _in_a_thread(place: Place, content) -> None:
    with make_async_checkpointer(CheckpointerConfig(config=place.config)) as checkpointer:
        checkpointer.save(place.uri, content)[1].result(PATIENCE)


@pytest.mark.parametrize(
    "save",
    [
        Place.save,
        lambda place, content: dcp.save(content, storage_writer=place.writer()),
        _in_a_thread,
    ],
    ids=["our save", "torch's save", "in the background"],
)
def test_what_will_not_load_is_said_when_it_is_saved(local, told, save):
    content = {
        "options": argparse.Namespace(lr=0.1),
        "model": {"own": [OfTheUser()], "tensor": torch.ones(2)},
        "step": 3,
    }
    save(local, content)
    first, second = sorted(told())
    assert "model.own" in first
    assert "options" in second
    for message in (first, second):
        assert local.uri in message
    with pytest.raises(UntrustedPickleError):
        everything(local)
    found = everything(local, trust_pickle=True)
    assert_same(found["model"].pop("tensor"), content["model"].pop("tensor"))
    assert found == content


@pytest.mark.parametrize("value", [OfTheUser(), TwoTensor(torch.ones(2), torch.ones(2))], ids=type)
def test_what_would_not_load_is_refused_by_name_if_it_is_to_be(local, value):
    for _ in range(2):
        with pytest.raises(UnsupportedValueError) as caught:
            local.having(unloadable="refuse").save({"a": {"own": value}, "n": 1})
        assert caught.value.item == "a.own"
    local.having(unloadable="refuse").save({"n": 1})


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_manager_refuses_what_would_not_load_until_a_save_has_succeeded(local, asynchronous):
    state = {"own": OfTheUser()}
    options = {"asynchronous": asynchronous, "on_failure": "log_all", "max_failures": 9}
    with cloudckpt.CheckpointManager(local.uri, config=local.config, **options) as manager:
        for step in (1, 2):
            manager.save(step, state)
            with contextlib.suppress(UnsupportedValueError):
                manager.wait_until_finished()
        assert manager.all_steps() == []
        manager.save(3, {"own": 3})
        manager.wait_until_finished()
        manager.save(4, state)
        manager.wait_until_finished()
        assert manager.all_steps() == [3, 4]
