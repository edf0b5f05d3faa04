"""Checkpoints of one process, from the front door to the bucket: saved, replaced, refused."""

import collections

import pytest
import torch
import torch.distributed.checkpoint as dcp

import cloudckpt
from cloudckpt.errors import CheckpointConflictError, CheckpointExistsError
from clouds import PART_SIZE
from dcp.values import assert_same, blank_like, numbered

LARGE = 3 * PART_SIZE + 1000  # bytes that go in four parts

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
]


def save(state, place):
    cloudckpt.save(state, checkpoint_id=place.uri, config=place.config)


def load(state, place):
    cloudckpt.load(state, checkpoint_id=place.uri, config=place.config)
    return state


def of_step(step):
    """A state of which one object goes in parts, and whose every element is the step."""
    return {
        "weights": torch.full((LARGE,), step, dtype=torch.uint8),
        "bias": torch.full((1000,), float(step)),
        "step": step,
    }


def step_at(place):
    """The one step that all of a checkpoint is of."""
    state = load(of_step(0), place)
    found = {*state["weights"].unique().tolist(), *state["bias"].unique().tolist(), state["step"]}
    assert len(found) == 1, f"a mix of steps: {found}"
    return found.pop()


def test_tensors_of_every_kind_come_back(place):
    state = {str(dtype): numbered(11, 7).to(dtype) for dtype in DTYPES}
    state |= {
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
        "strided": numbered(60, 40).T,
        "every fourth": numbered(4000)[::4],
        "large": numbered(2 * LARGE // 8, dtype=torch.int64),
    }
    save(state, place)
    assert_same(load(blank_like(state), place), state)


def test_what_is_no_tensor_comes_back(place):
    state = {
        "step": 7,
        "rate": 1e-4,
        "name": "größe/重み",
        "nothing": None,
        "list": [1, [2.0, "three"], {"four": torch.arange(4)}],
        "nested": {"a": {"b": (1, 2)}, "ordered": collections.OrderedDict(x=1, y=2)},
        "bytes": b"\x00\xff" * 1000,
    }
    save(state, place)
    assert_same(load(blank_like(state), place), state)


def test_keys_are_taken_as_they_are(place):
    odd = place.at("größe with spaces/50%+1 = &;,'(重み)")
    save(of_step(1), odd)
    assert step_at(odd) == 1


def test_a_checkpoint_is_replaced_and_nothing_of_the_old_one_stays(cloud, place):
    save(of_step(1), place)
    old = cloud.names(place)
    save(of_step(2), place)
    new = cloud.names(place)
    assert step_at(place) == 2
    assert set(old) & set(new) == {".metadata"}
    assert len(new) == len(old)
    assert cloud.uploads(place) == []


def test_neighbours_are_left_alone(cloud, place):
    for name in ("step-1", "step-10", "step-1/below"):
        save(of_step(1), place.at(name))
    before = cloud.names(place.at("step-10"))
    save(of_step(2), place.at("step-1"))
    assert step_at(place.at("step-1")) == 2
    assert step_at(place.at("step-10")) == step_at(place.at("step-1/below")) == 1
    assert cloud.names(place.at("step-10")) == before


def test_what_must_not_be_overwritten_stays(cloud, place):
    save(of_step(1), place)
    before = cloud.names(place)
    with pytest.raises(CheckpointExistsError):
        save(of_step(2), place.having(overwrite=False))
    assert step_at(place) == 1
    assert cloud.names(place) == before
    assert cloud.uploads(place) == []


@pytest.mark.parametrize("there", [False, True], ids=["new", "replaced"])
def test_of_two_writers_the_second_to_commit_is_told(cloud, store, place, there, monkeypatch):
    if there:
        save(of_step(1), place)
    put = store.put

    def overtaken(key, *arguments, **options):
        """Lets another writer commit just before this one does."""
        if key.endswith("/.metadata"):
            monkeypatch.setattr(store, "put", put)
            save(of_step(2), place)
        return put(key, *arguments, **options)

    monkeypatch.setattr(store, "put", overtaken)
    with pytest.raises(CheckpointConflictError):
        save(of_step(3), place)
    assert store.put is put, "the other writer never came"
    assert step_at(place) == 2
    assert len(cloud.names(place)) == 3  # those of the winner
    assert cloud.uploads(place) == []


def test_stock_torch_takes_the_uri_once_installed(cloud, place):
    cloudckpt.install()
    try:
        dcp.save(of_step(5), checkpoint_id=place.uri)
        state = of_step(0)
        dcp.load(state, checkpoint_id=place.uri)
        assert_same(state, of_step(5))
        dcp.async_save(of_step(6), checkpoint_id=place.uri).result(150)
    finally:
        cloudckpt.uninstall()
    assert step_at(place) == 6
    assert cloudckpt.inspect(place.uri, config=place.config).has_checksums
