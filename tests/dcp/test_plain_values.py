"""Values that are no tensors: which load by default, and what a save says of the others."""

import argparse
import contextlib
import dataclasses
import datetime
import io
import logging
import pathlib

import pytest
import torch
import torch.distributed.checkpoint as dcp

import cloudckpt
from cloudckpt.checkpoint import values
from cloudckpt.checkpointer import (
    CheckpointerConfig,
    make_async_checkpointer,
    make_sync_checkpointer,
)
from cloudckpt.errors import UnsupportedValueError, UntrustedPickleError

from .places import Place

numpy = pytest.importorskip("numpy")
PATIENCE = 150.0


@dataclasses.dataclass
class OfTheUser:
    value: int = 7


def state():
    return {
        "array": numpy.arange(6, dtype="i2").reshape(2, 3),
        "scalar": numpy.float64(0.5),
        "when": {"it began": datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc)},
        "path": pathlib.Path("/data/x"),
        "buffer": io.BytesIO(b"content"),
        "in others": (numpy.ones(2), [pathlib.PurePath("a"), {"b": numpy.int8(3)}], frozenset({1})),
        "texts": numpy.array(["a", "bc"]),
        "nothing": b"",
        "tensor": torch.arange(3),
        "random": numpy.random.default_rng(7).bit_generator.state,
        "old random": numpy.random.RandomState(7).get_state(),
    }


def shown(value):
    """All there is to see of a state, as text."""
    if isinstance(value, dict):
        return {key: shown(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [shown(entry) for entry in value]
    if isinstance(value, io.BytesIO):
        return "BytesIO", value.getvalue(), value.tell()
    if isinstance(value, numpy.ndarray):
        return type(value).__name__, value.dtype, value.tolist()
    return type(value).__name__, repr(value)


def everything(place: Place, **options):
    config = CheckpointerConfig(config=place.config, **options)
    with make_sync_checkpointer(config) as checkpointer:
        return checkpointer.load(place.uri)


def save(content, place: Place) -> None:
    cloudckpt.save(content, checkpoint_id=place.uri, config=place.config)


@pytest.fixture
def told(caplog, monkeypatch):
    """What was said of items, by a process that has said nothing before."""
    monkeypatch.setattr(values, "_told", set())
    caplog.set_level(logging.WARNING, logger="cloudckpt")

    def messages():
        return [entry.getMessage() for entry in caplog.records if entry.name == "cloudckpt"]

    return messages


def test_they_come_back_without_trust(place, told):
    save(state(), place)
    assert shown(everything(place)) == shown(state())
    assert told() == []


# ---- what a save says


@pytest.mark.parametrize(
    "how", ["save", "stock", "thread"], ids=["our save", "torch's save", "in the background"]
)
def test_what_will_not_load_is_said_when_it_is_saved(local, told, how):
    content = {
        "options": argparse.Namespace(lr=0.1),
        "model": {"own": [OfTheUser()], "tensor": torch.ones(2)},
        "step": 3,
    }
    if how == "save":
        save(content, local)
    elif how == "stock":
        dcp.save(content, storage_writer=local.writer())
    else:
        with make_async_checkpointer(CheckpointerConfig(config=local.config)) as checkpointer:
            checkpointer.save(local.uri, content)[1].result(PATIENCE)
    first, second = sorted(told())
    assert "model.own (list)" in first
    assert "OfTheUser" in first
    assert "options (Namespace)" in second
    assert "argparse.Namespace" in second
    for message in (first, second):
        assert local.uri in message
        assert "trust_pickle=True" in message
        assert "add_safe_globals" in message
    with pytest.raises(UntrustedPickleError):
        everything(local)
    assert everything(local, trust_pickle=True) == {**content, "model": everything_of(content)}


class everything_of(dict):  # noqa: N801 - it compares as what it is made from
    def __init__(self, content):
        super().__init__(content["model"])

    def __eq__(self, other):
        return self["own"] == other["own"] and torch.equal(self["tensor"], other["tensor"])

    __hash__ = None


class Wrapper(torch.Tensor):
    """A tensor without storage of its own, unknown to torch."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Wrapper(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        inner = [value.inner if isinstance(value, cls) else value for value in args]
        return function(*inner, **(kwargs or {}))

    def __reduce_ex__(self, protocol):
        return Wrapper, (self.inner,)


@pytest.mark.parametrize("value", [OfTheUser(), Wrapper(torch.ones(2))], ids=["value", "tensor"])
def test_what_would_not_load_is_refused_by_name_if_it_is_to_be(local, value):
    for _ in range(2):
        with pytest.raises(UnsupportedValueError) as caught:
            save({"a": {"own": value}, "n": 1}, local.having(unloadable="refuse"))
        assert caught.value.item == "a.own"
    save({"n": 1}, local.having(unloadable="refuse"))


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
