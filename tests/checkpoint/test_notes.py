"""What is noted with a checkpoint stands at the end of its commit object."""

from __future__ import annotations

import contextlib
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata

from cloudckpt import Config
from cloudckpt.checkpoint.notes import Notes, metrics_of, read_notes
from cloudckpt.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    ConfigError,
)
from cloudckpt.stores.registry import open_store
from cloudckpt.transfer.retry import Retrier
from cloudckpt.uri import CheckpointURI
from support.commit_objects import framed
from support.memory_store import MemoryStore

RETRIER = Retrier(Config().retry)
METADATA = Metadata({})
NOTES = Notes(step=7, metrics={"loss": 0.5}, user={"commit": "ü", "args": [1, {"lr": None}]})


@pytest.fixture
def uri(request) -> CheckpointURI:
    return CheckpointURI.parse(f"memory://{request.node.name}/run/step-7")


def put(uri: CheckpointURI, data: bytes) -> MemoryStore:
    store = open_store(uri, Config())
    store.put(uri.key(".metadata"), [memoryview(data)], checksum=0)
    return store


_texts = st.text(st.characters(codec="utf-8"), max_size=9)
_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**18), 10**18) | _texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=8,
)


@given(
    step=st.none() | st.integers(0, 10**18),
    metrics=st.dictionaries(_texts, st.floats(allow_nan=False)),
    user=st.dictionaries(_texts, _values, max_size=4),
)
def test_notes_come_back_as_they_were(step, metrics, user) -> None:
    notes = Notes(step=step, metrics=metrics, user=user)
    assert Notes.from_json(notes.to_json(), "") == notes


def test_a_metric_that_is_not_a_number_comes_back_as_one_that_is_not() -> None:
    notes = Notes.from_json(Notes(metrics={"loss": math.nan}).to_json(), "")
    assert math.isnan(notes.metrics["loss"])


@pytest.mark.parametrize(
    ("data", "notes"),
    [
        (framed(METADATA, NOTES.to_json()), NOTES),
        (framed(METADATA), Notes()),
        (pickle.dumps(METADATA), Notes()),
        (pickle.dumps(METADATA, protocol=2), Notes()),
    ],
    ids=["noted", "without notes", "of torch", "of an older torch"],
)
def test_notes_are_read_from_the_end_of_the_commit_object(uri, data, notes) -> None:
    assert read_notes(put(uri, data), uri, RETRIER) == notes


def test_the_most_notes_are_read_and_more_are_refused(uri) -> None:
    frame = len(Notes(user={"text": ""}).to_json())
    most = Notes(user={"text": "x" * (64 * 1024 - frame)})
    store = put(uri, framed(METADATA, most.to_json()))
    assert read_notes(store, uri, RETRIER) == most
    with pytest.raises(ConfigError, match="65,537 bytes"):
        Notes(user={"text": "x" * (64 * 1024 - frame + 1)}).to_json()


@pytest.mark.parametrize("size", [0, 5, -1, -20, -60])
def test_what_is_cut_off_is_damaged_and_not_another_programs(uri, size) -> None:
    store = put(uri, framed(METADATA, NOTES.to_json())[:size])
    with pytest.raises(CheckpointCorruptError):
        read_notes(store, uri, RETRIER)


def test_without_a_checkpoint_there_are_no_notes(uri) -> None:
    with pytest.raises(CheckpointNotFoundError):
        read_notes(open_store(uri, Config()), uri, RETRIER)


@pytest.mark.parametrize("other", [Notes(step=8), Notes(), None], ids=["others", "none", "always"])
def test_the_notes_of_a_checkpoint_that_is_replaced_meanwhile_are_the_new_ones(
    uri, other, monkeypatch
) -> None:
    store = put(uri, framed(METADATA, NOTES.to_json()))
    head, looks = type(store).head, list[str]()

    def then_replaced(self, key):
        info = head(self, key)
        if not looks or other is None:
            looks.append(key)
            put(uri, framed(METADATA, (other or Notes(step=len(looks))).to_json()))
        return info

    monkeypatch.setattr(type(store), "head", then_replaced)
    if other is not None:
        assert read_notes(store, uri, RETRIER) == other
        return
    with pytest.raises(CheckpointReplacedError):
        read_notes(store, uri, RETRIER)


def test_a_damaged_byte_never_changes_notes_unnoticed(uri) -> None:
    for at in range(1, 80):
        data = bytearray(framed(METADATA, NOTES.to_json()))
        data[-at] ^= 0x10
        with contextlib.suppress(CheckpointCorruptError):
            assert read_notes(put(uri, bytes(data)), uri, RETRIER) == NOTES


@pytest.mark.parametrize(
    "user",
    [{1: 2}, {"a": {1: 2}}, {"a": object()}, {"a": math.nan}, {"a": (1, 2)}, {"a": torch.ones(2)}],
    ids=["number", "inner number", "object", "nan", "tuple", "tensor"],
)
def test_what_would_come_back_otherwise_is_refused(user) -> None:
    with pytest.raises(ConfigError, match="notes"):
        Notes(user=user).to_json()


@pytest.mark.parametrize(
    "data", [b"[]", b"7", b"{", b'{"step": "7"}', b'{"metrics": {"a": []}}', b'{"user": 1}',
             b'{"metrics": {"a": "one"}}', b'{"metrics": 1}', b"\xff", b"[" * 100_000,
             b'{"metrics": {"a": 1%s}}' % (b"0" * 400)],
)  # fmt: skip
def test_notes_that_make_no_sense_are_told(data) -> None:
    with pytest.raises(CheckpointCorruptError, match="notes"):
        Notes.from_json(data, "s3://bucket/run")


def test_scalars_of_torch_and_numpy_are_metrics() -> None:
    given = {"loss": torch.tensor(0.5), "steps": np.int64(3), "acc": 1}
    assert metrics_of(given) == {"loss": 0.5, "steps": 3.0, "acc": 1.0}
    assert metrics_of(None) == {}


@pytest.mark.parametrize("metrics", [{"a": "1"}, {"a": None}, {1: 1.0}, {"a": torch.ones(2)}])
def test_other_values_are_no_metrics(metrics) -> None:
    with pytest.raises(ConfigError, match="is not a number"):
        metrics_of(metrics)
